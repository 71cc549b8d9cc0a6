//! Overhead of elasticity while nothing fails: `cargo bench -p phalanx --bench elasticity -- TURNS`.
//!
//! Trains the same job on the same mesh (`dp_replicate_size: 2`, two ranks of one thread each) twice at the same time: on
//! threads of one process, without coordinator, supervisor, votes and heartbeats, and on elastic rank processes. Shadows are
//! enabled, but a replica needs none. Only one of the two jobs runs: they are stopped and continued in turns of 0.8 s, because the
//! speed of a shared machine drifts within seconds. Prints the ratio of the times per completed step with its 95 % interval
//! (bootstrap over pairs of turns). Not a criterion benchmark, since only alternating runs are comparable on a noisy machine.

use phalanx::{Control, Job, JobError, Runtime, rank_process};
use phalanx_strategies::rng::CounterRng;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

const TURN: Duration = Duration::from_millis(800);
/// Steps at the start of a run, which touch their memory for the first time.
const N_WARM_UP: usize = 10;
const N_DRAWS: usize = 2000;

fn main() -> anyhow::Result<()> {
    let program = rank_process();
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["bare", dir] => Ok(job(Path::new(dir), "bare")?.run_with(&Control::default(), |_| {}).map(drop)?),
        ["elastic", dir] => tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
            Runtime::new(program)?.start(job(Path::new(dir), "elastic")?).await?.wait().await?;
            Ok(())
        }),
        // `cargo bench` of the whole workspace passes no arguments.
        [] => compare(4),
        [turns] => compare(turns.parse()?),
        _ => anyhow::bail!("expected a number of turns"),
    }
}

fn compare(n_turns: usize) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let text: String = (0..6000u64).map(|i| format!("The {}th hoplite holds the line. ", i * i % 977)).collect();
    std::fs::write(dir.path().join("text.txt"), text)?;
    let mut runs = [Run::start(dir.path(), "bare")?, Run::start(dir.path(), "elastic")?];
    let mut turns: Vec<[usize; 2]> = Vec::new();
    for turn in 0..n_turns {
        let mut n_steps = [0; 2];
        // The order alternates too.
        for i in [turn % 2, 1 - turn % 2] {
            n_steps[i] = runs[i].turn()?;
        }
        turns.push(n_steps);
    }
    let drawn = |draw: u64, i: u64| turns[(CounterRng::new(draw).bits(i) % n_turns as u64) as usize];
    let mut draws: Vec<f64> =
        (0..N_DRAWS as u64).map(|draw| ratio((0..n_turns as u64).map(|i| drawn(draw, i)))).collect();
    draws.sort_unstable_by(f64::total_cmp);
    let [bare, elastic] = [0, 1].map(|i| turns.iter().map(|turn| turn[i]).sum::<usize>());
    println!(
        "{bare} steps bare, {elastic} steps elastic; time per step, elastic/bare: {:.4}, 95 % interval {:.4} to {:.4}, {n_turns} pairs of turns",
        ratio(turns.iter().copied()),
        draws[N_DRAWS / 40],
        draws[N_DRAWS - 1 - N_DRAWS / 40],
    );
    Ok(())
}

/// Time per step of the second run, in that of the first: the turns are equally long.
fn ratio(turns: impl Iterator<Item = [usize; 2]>) -> f64 {
    let [bare, elastic] = turns.fold([0, 0], |sum, turn| [sum[0] + turn[0], sum[1] + turn[1]]);
    bare as f64 / elastic as f64
}

/// A job that trains only during its turns.
struct Run {
    process: Child,
    metrics: PathBuf,
}

impl Run {
    fn start(dir: &Path, kind: &str) -> anyhow::Result<Run> {
        let mut command = Command::new(std::env::current_exe()?);
        let process = command.args([kind.as_ref(), dir.as_os_str()]).spawn()?;
        let mut run = Run { process, metrics: dir.join(kind).join("metrics.jsonl") };
        while run.n_steps() < N_WARM_UP {
            run.check()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        run.signal("STOP")?;
        Ok(run)
    }

    /// The number of steps of one turn.
    fn turn(&mut self) -> anyhow::Result<usize> {
        let before = self.n_steps();
        self.signal("CONT")?;
        std::thread::sleep(TURN);
        self.signal("STOP")?;
        self.check()?;
        Ok(self.n_steps() - before)
    }

    fn check(&mut self) -> anyhow::Result<()> {
        match self.process.try_wait()? {
            Some(status) => anyhow::bail!("a run has ended: {status}"),
            None => Ok(()),
        }
    }

    fn n_steps(&self) -> usize {
        std::fs::read(&self.metrics).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count())
    }

    /// Signals the process and its rank processes, which have process groups of their own.
    fn signal(&self, name: &str) -> std::io::Result<()> {
        let process = self.process.id().to_string();
        let children = Command::new("pgrep").args(["-P", &process]).output()?.stdout;
        let children = String::from_utf8_lossy(&children);
        let pids = children.split_whitespace().chain([process.as_str()]);
        Command::new("kill").args(["-s", name]).args(pids).status().map(drop)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.signal("KILL");
        let _ = self.process.wait();
    }
}

fn job(dir: &Path, name: &str) -> Result<Job, JobError> {
    let keys = [
        ("model.model_type", "llama"),
        ("model.vocab_size", "512"),
        ("model.hidden_size", "256"),
        ("model.intermediate_size", "704"),
        ("model.num_hidden_layers", "4"),
        ("model.num_attention_heads", "8"),
        ("model.num_key_value_heads", "8"),
        ("model.max_position_embeddings", "128"),
        ("tokenizer", "bytes"),
        ("datasets.0.type", "completion"),
        ("sequence_len", "128"),
        ("micro_batch_size", "1"),
        ("microbatches_per_step", "2"),
        ("max_steps", "1000000"),
        ("logging_steps", "1"),
        ("learning_rate", "1e-4"),
        ("dp_replicate_size", "2"),
        ("threads", "1"),
        ("bf16", "false"),
        ("save_steps", "none"),
        ("resume_from_checkpoint", "none"),
        // Longer than a turn of the other job.
        ("elastic.detection_time", "60"),
    ];
    let job = keys.into_iter().fold(Job::builder(), |job, (key, value)| job.set(key, value));
    job.set("datasets.0.path", dir.join("text.txt").display()).set("output_dir", dir.join(name).display()).build()
}
