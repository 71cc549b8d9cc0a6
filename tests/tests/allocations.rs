//! Processes count their allocations: warm steps make none. A comparison of copies of the state, once in some hundred steps, does
//! allocate; these jobs make no comparison.

use anyhow::{Context, Result, bail, ensure};
use phalanx_needs::{Need, skip};
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const PROBE: &str = env!("CARGO_BIN_EXE_allocation_probe");
/// Longer than any wait of these tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// Skips the test where the gemm crate computes products.
fn is_skipped() -> bool {
    let skips = phalanx::devices::host().engine(false) == "gemm crate";
    if skips {
        let why = "without AVX2 the gemm crate computes products, and it allocates workspaces";
        skip(Need::Avx2, why);
    }
    skips
}

#[test]
fn steps_allocate_nothing_in_any_precision_on_any_number_of_threads() -> Result<()> {
    if is_skipped() {
        return Ok(());
    }
    for threads in ["1", "2"] {
        for precision in ["f32", "bf16"] {
            let output = Command::new(PROBE).args([precision, threads]).output()?;
            let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            ensure!(output.status.success(), "{precision} on {threads}: {err}");
            ensure!(out.trim() == "0", "{precision} on {threads}: {} allocations, the first in {err}", out.trim());
        }
    }
    Ok(())
}

/// A job that runs until it is killed, and its processes.
struct Job {
    dir: tempfile::TempDir,
    processes: Vec<Child>,
}

impl Drop for Job {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

const N_RANKS: usize = 2;
/// Steps that create threads, queues and pools.
const N_WARM_UP: usize = 100;
/// Steps per counting window, and number of windows.
const N_STEPS: usize = 100;
const N_WINDOWS: usize = 4;
/// Allowed allocations of a rank's connections per window: queues grow when more announcements of a peer wait than before.
const GROWTH_MAX: u64 = 10;

impl Job {
    fn new(keys: &str) -> Result<Job> {
        let dir = tempfile::tempdir()?;
        let text: String = (0..4000).map(|i| format!("The {i}th hoplite holds the line. ")).collect();
        fs::write(dir.path().join("text.txt"), text)?;
        let job = format!(
            "\
model:
  model_type: llama
  hidden_size: 64
  intermediate_size: 128
  num_hidden_layers: 4
  num_attention_heads: 4
  max_position_embeddings: 64
tokenizer: bytes
datasets:
  - path: text.txt
    type: completion
sequence_len: 64
micro_batch_size: 2
microbatches_per_step: 4
max_steps: 1000000
learning_rate: 1e-4
save_steps: none
threads: 1
elastic: {{spare_ranks: 0, verify_steps: 1000000}}
output_dir: out
{keys}"
        );
        fs::write(dir.path().join("job.yaml"), job)?;
        Ok(Job { dir, processes: Vec::new() })
    }

    fn spawn(&mut self, args: &[&str]) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.path("log"))?;
        let mut command = Command::new(PROBE);
        command.args(args).current_dir(self.dir.path()).env("PHALANX_PROBE_DIR", self.dir.path());
        self.processes.push(command.stdout(log.try_clone()?).stderr(log).spawn()?);
        Ok(())
    }

    /// Two ranks on one machine, over shared memory.
    fn on_one_machine(mut self) -> Result<Job> {
        self.spawn(&["train", "job.yaml"])?;
        Ok(self)
    }

    /// One rank on each of two nodes, over TCP.
    fn on_two_nodes(mut self) -> Result<Job> {
        self.spawn(&["coordinator", "--listen", "127.0.0.1:0", "job.yaml"])?;
        let join = self.until("a join string", |job| {
            let log = job.log();
            let (_, join) = log.split_once("--join ")?;
            join.split_once('\n').map(|(join, _)| join.trim().to_owned())
        })?;
        for node in ["node0", "node1"] {
            self.spawn(&["node", "--join", &join, "--dir", node, "--ranks", "1"])?;
        }
        Ok(self)
    }

    fn path(&self, name: impl AsRef<Path>) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn until<T>(&mut self, what: &str, poll: impl Fn(&Job) -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = poll(self) {
                return Ok(found);
            }
            let log = self.log();
            for process in &mut self.processes {
                ensure!(process.try_wait()?.is_none(), "the job ended before {what}: {log}");
            }
            ensure!(Instant::now() < deadline, "timeout while waiting for {what}: {log}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn n_steps(&self) -> usize {
        fs::read_to_string(self.path("out/metrics.jsonl")).unwrap_or_default().lines().count()
    }

    /// Contents of the rank processes' files with this extension.
    fn files_of_ranks(&self, what: &str) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path()).into_iter().flatten().flatten().map(|entry| entry.path());
        let of_ranks = entries.filter(|path| path.extension().is_some_and(|extension| extension == what));
        of_ranks.map(|path| fs::read_to_string(path).unwrap_or_default()).collect()
    }

    /// Counts the allocations of each rank's device thread and connection threads during at least [`N_STEPS`] steps.
    fn count(&mut self, window: usize) -> Result<Vec<[u64; 2]>> {
        File::create(self.path(format!("begin-{window}")))?;
        let (watches, counts) = (format!("watches-{window}"), format!("count-{window}"));
        self.until("a watched rank", |job| (job.files_of_ranks(&watches).len() == N_RANKS).then_some(()))?;
        let first = self.n_steps();
        self.until("a step", |job| (job.n_steps() >= first + N_STEPS).then_some(()))?;
        File::create(self.path(format!("end-{window}")))?;
        let counts = self.until("a count", |job| {
            let counts = job.files_of_ranks(&counts);
            (counts.len() == N_RANKS).then_some(counts)
        })?;
        let of_rank = |text: &String| {
            let (device, connections) = text.split_once(' ').context("a count file has two numbers")?;
            Ok([device.parse()?, connections.parse()?])
        };
        counts.iter().map(of_rank).collect()
    }

    /// Fails if steps still allocate in the last window. Pools grow when a rank gets further ahead of another than before, so
    /// a job may take a while to warm up.
    fn allocates_nothing(mut self, what: &str) -> Result<()> {
        self.until("a step", |job| (job.n_steps() >= N_WARM_UP).then_some(()))?;
        let mut all = Vec::new();
        for window in 0..N_WINDOWS {
            let counts = self.count(window)?;
            println!("{what}: {counts:?} allocations in {N_STEPS} steps");
            let is_warm = |[device, connections]: &[u64; 2]| *device == 0 && *connections <= GROWTH_MAX;
            if counts.iter().all(is_warm) {
                return Ok(());
            }
            all.push(counts);
        }
        bail!(
            "{what}: {all:?} allocations in {N_STEPS} steps each, the first in\n{}",
            self.files_of_ranks("trace").concat()
        )
    }
}

#[test]
fn steps_of_two_rank_processes_of_one_machine_allocate_nothing_on_any_axis() -> Result<()> {
    if is_skipped() {
        return Ok(());
    }
    let axes = [
        "dp_shard_size",
        "dp_replicate_size",
        "tensor_parallel_size",
        "context_parallel_size",
        "pipeline_parallel_size",
    ];
    for axis in axes {
        Job::new(&format!("{axis}: 2\n"))?.on_one_machine()?.allocates_nothing(axis)?;
    }
    Job::new("dp_shard_size: 2\nreproducible: true\n")?.on_one_machine()?.allocates_nothing("reproducible")
}

#[test]
fn steps_of_two_nodes_allocate_nothing_over_tcp() -> Result<()> {
    if is_skipped() {
        return Ok(());
    }
    for keys in ["dp_shard_size: 2\n", "dp_shard_size: 2\nreproducible: true\n"] {
        Job::new(keys)?.on_two_nodes()?.allocates_nothing(keys)?;
    }
    Ok(())
}
