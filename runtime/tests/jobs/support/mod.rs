//! A small job in a temporary folder, and the `phalanx` binary that runs it.
#![allow(missing_docs)] // read by tests only

pub mod job;
pub mod s3;
pub mod server;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A folder with a text, the YAML file of a tiny byte-level Llama, and the output of its runs.
pub struct Project {
    pub dir: tempfile::TempDir,
}

/// The job of every test; tests override single keys.
pub const YAML: &str = "\
model:
  model_type: llama
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  max_position_embeddings: 64
tokenizer: bytes
datasets:
  - path: DIR/text.txt
    type: completion
sequence_len: 32
micro_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 20
learning_rate: 1e-2
warmup_steps: 2
weight_decay: 0.1
logging_steps: 1
save_steps: 5
output_dir: DIR/out
";

impl Project {
    pub fn new() -> Project {
        let dir = tempfile::tempdir().unwrap();
        let text: String = (0..400).map(|i| format!("The {i}th hoplite holds the line. ")).collect();
        std::fs::write(dir.path().join("text.txt"), text).unwrap();
        let project = Project { dir };
        project.write("job.yaml", YAML);
        project
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file of the project; `DIR` in it stands for the folder.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        let text = text.replace("DIR", &self.dir.path().display().to_string());
        std::fs::write(&path, text).unwrap();
        path
    }

    /// `phalanx train job.yaml` with overrides.
    pub fn train(&self, overrides: &[&str]) -> Run {
        self.run(&[&["train", "job.yaml"], overrides].concat())
    }

    pub fn run(&self, args: &[&str]) -> Run {
        Run::of(self.command(args).output().unwrap())
    }

    pub fn command(&self, args: &[&str]) -> Command {
        self.command_in(None, args)
    }

    /// A command in this network namespace, or in the namespace of the test.
    pub fn command_in(&self, place: Option<&str>, args: &[&str]) -> Command {
        let program = env!("CARGO_BIN_EXE_phalanx");
        let mut command = Command::new(if place.is_some() { "ip" } else { program });
        if let Some(place) = place {
            command.args(["netns", "exec", place, program]);
        }
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        hears(libc::SIGINT, &mut command);
        // These tests may run in a batch job, where a stopped run has another exit code.
        ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"].iter().for_each(|name| _ = command.env_remove(name));
        command
    }

    /// Metrics lines of a run, as `(step, loss bits, grad_norm bits)`.
    pub fn metrics(&self, out: &str) -> Vec<(u64, u64, u64)> {
        let text = std::fs::read_to_string(self.path(out).join("metrics.jsonl")).unwrap();
        // The last line of a running job may be incomplete.
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let lines = whole.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines
            .filter(|l| l.get("loss").is_some())
            .map(|l| {
                // JSON has no number for a gradient norm that overflowed.
                let bits = |key: &str| l[key].as_f64().unwrap_or(f64::INFINITY).to_bits();
                (l["step"].as_u64().unwrap(), bits("loss"), bits("grad_norm"))
            })
            .collect()
    }

    /// The weights of the exported model, bit for bit.
    pub fn model_bytes(&self, out: &str) -> Vec<u8> {
        std::fs::read(self.path(out).join("model/model.safetensors")).unwrap()
    }

    pub fn checkpoints(&self, out: &str) -> Vec<PathBuf> {
        let Ok(dir) = std::fs::read_dir(self.path(out).join("checkpoints")) else { return Vec::new() };
        let mut paths: Vec<PathBuf> = dir.map(|e| e.unwrap().path()).collect();
        paths.sort();
        paths
    }
}

/// Undoes what `nohup`, or a shell that runs the tests in its background, did for this signal.
#[allow(unsafe_code)] // the standard library does not change how signals are handled
pub fn hears(signal: i32, command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt;

    // SAFETY: `signal` may be called between fork and exec; no handler is involved.
    unsafe {
        command.pre_exec(move || {
            libc::signal(signal, libc::SIG_DFL);
            Ok(())
        })
    }
}

/// Exit code and output of a command.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    pub fn of(output: Output) -> Run {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Run { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    #[track_caller]
    pub fn succeeds(self) -> Run {
        assert_eq!(self.code, Some(0), "{}\n{}", self.stdout, self.stderr);
        self
    }

    /// Exit code 2 and exactly one line on standard error, which contains all of `parts`.
    #[track_caller]
    pub fn refuses(self, parts: &[&str]) -> Run {
        assert_eq!(self.code, Some(2), "{}\n{}", self.stdout, self.stderr);
        assert_eq!(self.stderr.trim_end().lines().count(), 1, "one sentence: {}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "`{part}` in: {}", self.stderr);
        }
        self
    }
}

/// The rank processes of a launcher, by slot.
pub fn ranks_of(launcher: u32) -> Vec<u32> {
    let parent = format!("PPid:\t{launcher}\n");
    let is_child =
        |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default().contains(&parent);
    let pids = std::fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok());
    let mut ranks: Vec<(String, u32)> = pids.filter(is_child).map(|pid| (command_line(pid), pid)).collect();
    ranks.retain(|(command, _)| command.contains("rank --worker"));
    ranks.sort();
    ranks.into_iter().map(|(_, pid)| pid).collect()
}

/// The command line of a process; empty once the process has ended.
pub fn command_line(pid: u32) -> String {
    String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).replace('\0', " ")
}

/// Changes one byte of a file.
pub fn flip(path: &Path, at: impl Fn(usize) -> usize) {
    let mut bytes = std::fs::read(path).unwrap();
    let i = at(bytes.len());
    bytes[i] ^= 0x10;
    std::fs::write(path, bytes).unwrap();
}
