//! `phalanx demo`: two nodes of two ranks each train a small model on this machine. The demo kills a rank, then a whole
//! node; the loss continues to fall, and the final weights equal those of one undisturbed rank.

use crate::config::JobConfig;
use crate::console::Console;
use crate::error::JobError;
use phalanx_storage::hf::digest::weights_digest;
use serde_json::Value;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(super) const HELP: &str = "The demo needs no files, no network except loopback, and about half a minute.
It runs these commands:
  phalanx coordinator job.yaml
  phalanx node --join <string> --ranks 2      (twice)
  kill -9 <a rank>; kill -9 <a node>; phalanx node --join <string> --ranks 2";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Number of steps to train.
    #[arg(long, default_value_t = 120)]
    steps: usize,
    /// Keep all files in this folder; the default is a temporary folder, removed at the end.
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Longer than any part of the demo takes.
const PATIENCE: Duration = Duration::from_secs(300);

const JOB: &str = "\
model: {model_type: llama, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 4, num_attention_heads: 8}
tokenizer: bytes
datasets: [{path: text.txt, type: completion}]
sequence_len: 128
micro_batch_size: 2
microbatches_per_step: 8
learning_rate: 2e-3
warmup_steps: 5
max_grad_norm: 1.0
bf16: false
threads: 1
save_steps: none
reproducible: true
resume_from_checkpoint: none
";

pub(super) fn run(args: &Args, console: &Console) -> Result<(), JobError> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| JobError::Io { action, path, source }
    };
    // A folder of this user alone, of a name that others cannot foresee.
    let temporary = match args.dir {
        Some(_) => None,
        None => Some(
            tempfile::Builder::new().prefix("phalanx-demo-").tempdir().map_err(io("create", &std::env::temp_dir()))?,
        ),
    };
    let dir = match (&temporary, &args.dir) {
        (Some(temporary), _) => temporary.path().to_owned(),
        (None, dir) => dir.clone().unwrap_or_default(),
    };
    std::fs::create_dir_all(&dir).map_err(io("create", &dir))?;
    std::fs::write(dir.join("text.txt"), text()).map_err(io("write", &dir))?;
    let yaml = format!("{JOB}max_steps: {}\n", args.steps);
    // Checks every key of the file.
    JobConfig::from_yaml_str(&yaml, &[])?;
    std::fs::write(dir.join("job.yaml"), yaml).map_err(io("write", &dir))?;
    let demo = Demo { program: std::env::current_exe().map_err(io("find", &dir))?, dir: dir.clone(), console };
    demo.run(args.steps)
}

/// The program and the folder of the demo.
struct Demo<'a> {
    program: PathBuf,
    dir: PathBuf,
    console: &'a Console,
}

/// A process of the demo, killed when dropped.
struct DemoProcess(Child);

impl Drop for DemoProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Demo<'_> {
    fn run(&self, n_steps: usize) -> Result<(), JobError> {
        self.console.say("1. Train one undisturbed rank, for its weights.");
        let mut alone = self.start("alone", &["train", "job.yaml", "--output_dir", "alone"])?;
        self.wait_for(&mut alone, "the run of one rank")?;
        self.console.say(
            "2. Train two nodes of two ranks each (dp_shard 4: no rank has a replica, so shadows hold second copies).",
        );
        let job = ["coordinator", "job.yaml", "--output_dir", "out", "--dp_shard_size", "4"];
        let mut coordinator = self.start("coordinator", &job)?;
        let join = self.until("the join string", || {
            let log = std::fs::read_to_string(self.dir.join("coordinator.log")).ok()?;
            log.lines().find_map(|line| Some(line.split_once("--join ")?.1.to_owned()))
        })?;
        let node = |i: usize| {
            let folder = format!("node{i}");
            self.start(&folder, &["node", "--join", &join, "--ranks", "2", "--dir", &folder])
        };
        let mut nodes = [node(0)?, node(1)?];
        self.until_step(n_steps / 4)?;
        let rank = ranks_of(nodes[0].0.id()).into_iter().next();
        let rank = rank.ok_or_else(|| JobError::JobFailed("node 0 has no rank to kill".into()))?;
        let mut marks = vec![(self.n_steps(), 'r')];
        self.console.say(format_args!("   step {}: kill -9 {rank}, a rank of the first node", self.n_steps()));
        kill(rank);
        self.until_step(n_steps / 2)?;
        self.console.say(format_args!(
            "   step {}: kill -9 {}, the second node with its ranks",
            self.n_steps(),
            nodes[1].0.id()
        ));
        marks.push((self.n_steps(), 'n'));
        let _ = nodes[1].0.kill();
        let _ = nodes[1].0.wait();
        self.console.say("   a new node joins in its place");
        nodes[1] = node(1)?;
        self.wait_for(&mut coordinator, "the job")?;
        self.show(&marks)
    }

    fn show(&self, marks: &[(usize, char)]) -> Result<(), JobError> {
        self.console.say("\nloss by step (r: a rank died, n: a node died):");
        self.console.say(plot(&self.losses("out"), marks));
        for event in self.events().iter().filter(|event| event["event"] == "incident") {
            let ms = |phase: &str| event["phases_ms"][phase].as_f64().unwrap_or(f64::NAN);
            let phases = ["detect", "agree", "abort", "regroup", "heal", "resume"];
            let phases: Vec<String> = phases.iter().map(|phase| format!("{phase} {:.0}", ms(phase))).collect();
            let (cause, total) =
                (event["cause"].as_str().unwrap_or("?"), event["total_ms"].as_f64().unwrap_or(f64::NAN));
            self.console.say(format_args!("{cause}: {} = {total:.0} ms", phases.join(" · ")));
        }
        let digest = |out: &str| weights_digest(&self.dir.join(out).join("model"));
        let (alone, out) = (digest("alone")?, digest("out")?);
        self.console.say(format_args!("\nweights of one rank, undisturbed        {alone}"));
        self.console.say(format_args!("weights of four ranks, after both kills {out}"));
        if alone != out {
            return Err(JobError::JobFailed("the weights differ".into()));
        }
        self.console.say("bit-identical");
        Ok(())
    }

    fn start(&self, name: &str, args: &[&str]) -> Result<DemoProcess, JobError> {
        let path = self.dir.join(format!("{name}.log"));
        let io = |source| JobError::Io { action: "write", path: path.clone(), source };
        let log = File::options().append(true).create(true).open(&path).map_err(io)?;
        let mut command = Command::new(&self.program);
        command.args(args).current_dir(&self.dir).stdin(Stdio::null());
        command.stdout(log.try_clone().map_err(io)?).stderr(log);
        let child = command.spawn();
        child.map(DemoProcess).map_err(|source| JobError::Io { action: "start", path: self.program.clone(), source })
    }

    fn wait_for(&self, process: &mut DemoProcess, what: &str) -> Result<(), JobError> {
        let ended = self.until(what, || process.0.try_wait().ok().flatten())?;
        if ended.success() { Ok(()) } else { Err(JobError::JobFailed(format!("{what} ended with {ended}"))) }
    }

    fn until<T>(&self, what: &str, mut poll: impl FnMut() -> Option<T>) -> Result<T, JobError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = poll() {
                return Ok(found);
            }
            if Instant::now() >= deadline {
                return Err(JobError::JobFailed(format!("timed out waiting for {what}")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn until_step(&self, n: usize) -> Result<(), JobError> {
        self.until(&format!("step {n}"), || (self.n_steps() >= n).then_some(()))
    }

    fn n_steps(&self) -> usize {
        self.losses("out").len()
    }

    fn losses(&self, out: &str) -> Vec<f64> {
        let text = std::fs::read_to_string(self.dir.join(out).join("metrics.jsonl")).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter_map(|line| line["loss"].as_f64()).collect()
    }

    fn events(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.dir.join("out/events.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

/// Text with patterns that a small model can learn.
fn text() -> String {
    let who = ["The hoplite", "Her brother", "An old captain", "The boy from Argos", "Nobody"];
    let does = ["holds the line", "steps up", "lifts a shield", "falls and rises", "counts the spears"];
    let when = ["at dawn", "before the storm", "when the horn sounds", "in the dust", "without a word"];
    let sentence = |i: usize| {
        let pick = |words: &[&'static str], k: usize| words[(i * k + i / 7) % words.len()];
        format!("{} {} {}. ", pick(&who, 3), pick(&does, 7), pick(&when, 11))
    };
    (0..6000).map(sentence).collect()
}

/// The rank processes of a node.
fn ranks_of(node: u32) -> Vec<u32> {
    let parent = format!("PPid:\t{node}\n");
    let is_child =
        |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|s| s.contains(&parent));
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_child).collect()
}

fn kill(pid: u32) {
    let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
}

/// A text plot of the losses, with a letter above each marked step.
fn plot(losses: &[f64], marks: &[(usize, char)]) -> String {
    const WIDTH: usize = 72;
    const HEIGHT: usize = 10;
    let (low, high) = losses.iter().fold((f64::MAX, f64::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
    let column = |step: usize| (step * WIDTH / losses.len().max(1)).min(WIDTH - 1);
    let row = |x: f64| ((high - x) / (high - low).max(1e-9) * (HEIGHT - 1) as f64).round() as usize;
    let mut cells = vec![vec![' '; WIDTH]; HEIGHT];
    for (i, loss) in losses.iter().enumerate() {
        cells[row(*loss).min(HEIGHT - 1)][column(i)] = '•';
    }
    let mut top = vec![' '; WIDTH];
    marks.iter().for_each(|(step, letter)| top[column(*step)] = *letter);
    let mut text = format!("{:7}  {}\n", "", top.iter().collect::<String>().trim_end());
    for (i, cells) in cells.iter().enumerate() {
        let label = if i == 0 {
            format!("{high:7.3}")
        } else if i == HEIGHT - 1 {
            format!("{low:7.3}")
        } else {
            " ".repeat(7)
        };
        let _ = writeln!(text, "{label} │{}", cells.iter().collect::<String>().trim_end());
    }
    let _ = write!(text, "{:7} └{}", "", "─".repeat(WIDTH));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_shows_a_falling_curve_and_its_marks() {
        let losses: Vec<f64> = (0..100).map(|i| 5.0 - f64::from(i) * 0.04).collect();

        let text = plot(&losses, &[(50, 'n')]);

        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].trim() == "n" && lines[1].starts_with("  5.000 │•"), "{text}");
        assert!(lines[10].starts_with("  1.040 │") && lines[10].ends_with('•'), "{text}");
    }
}
