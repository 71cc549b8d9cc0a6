//! Ranks are replaced although the file of the program has gone, and a job whose ranks cannot be replaced continues with those
//! that live.

use crate::support::job::{signal, until};
use crate::support::{Project, Run, ranks_of};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const TWO: [&str; 8] = [
    "--dp_replicate_size",
    "2",
    "--gradient_accumulation_steps",
    "1",
    "--microbatches_per_step",
    "4",
    "--save_steps",
    "none",
];

/// A running `phalanx train job.yaml` of this program.
struct Training<'a> {
    p: &'a Project,
    child: Child,
    log: std::thread::JoinHandle<String>,
}

impl<'a> Training<'a> {
    fn start(p: &'a Project, program: &Path, overrides: &[&str]) -> Training<'a> {
        let mut command = Command::new(program);
        command.args(["train", "job.yaml"]).args(overrides).current_dir(p.dir.path());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let errors = BufReader::new(child.stderr.take().unwrap());
        let log = std::thread::spawn(move || errors.lines().map_while(Result::ok).collect::<Vec<_>>().join("\n"));
        Training { p, child, log }
    }

    fn n_steps(&self) -> usize {
        let text = std::fs::read_to_string(self.p.path("out/metrics.jsonl")).unwrap_or_default();
        text.lines().count()
    }

    /// Waits for further steps of a job that is running.
    #[track_caller]
    fn until_more_steps(&mut self, n: usize) {
        let before = self.n_steps();
        until("further steps", || {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the job has ended: {status}");
            }
            (self.n_steps() >= before + n).then_some(())
        });
    }

    fn kill_rank(&self, slot: usize) {
        signal(ranks_of(self.child.id())[slot], libc::SIGKILL);
    }

    /// Stops the job; its exit code and the error of the job.
    fn stop(self) -> Run {
        // SIGINT would be ignored, as it is by programs that a script starts in the background.
        signal(self.child.id(), libc::SIGTERM);
        self.end()
    }

    fn end(mut self) -> Run {
        let status = until("the end", || self.child.try_wait().unwrap());
        Run { code: status.code(), stdout: String::new(), stderr: self.log.join().unwrap() }
    }
}

/// The program in the folder of the project, where an upgrade can replace it.
fn installed(p: &Project) -> std::path::PathBuf {
    let path = p.path("phalanx");
    std::fs::copy(env!("CARGO_BIN_EXE_phalanx"), &path).unwrap();
    path
}

#[test]
fn ranks_are_replaced_after_the_program_was_upgraded_or_removed() {
    let p = Project::new();
    let program = installed(&p);
    let mut training = Training::start(&p, &program, &[&TWO[..], &["--max_steps", "1000000"]].concat());
    training.until_more_steps(5);

    p.write("new", "#!/bin/sh\nexit 3\n");
    std::fs::rename(p.path("new"), &program).unwrap();
    training.kill_rank(0);
    training.until_more_steps(5);
    std::fs::remove_file(&program).unwrap();
    training.kill_rank(1);
    training.until_more_steps(5);
    let n_ranks = ranks_of(training.child.id()).len();
    let run = training.stop();

    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(n_ranks, 2, "both ranks were replaced");
}

#[test]
fn job_continues_with_its_replica_while_a_replacement_cannot_start_and_grows_once_it_can() {
    let p = Project::new();
    let patience = ["--max_steps", "1000000", "--elastic.replace_patience", "0.5"];
    let job = [&TWO[..], &patience[..]].concat();
    let mut training = Training::start(&p, Path::new(env!("CARGO_BIN_EXE_phalanx")), &job);
    training.until_more_steps(5);

    // Without its data, no process can start.
    std::fs::rename(p.path("text.txt"), p.path("moved.txt")).unwrap();
    training.kill_rank(0);
    training.until_more_steps(20);
    std::fs::rename(p.path("moved.txt"), p.path("text.txt")).unwrap();
    let n_ranks = || {
        let status = p.run(&["status", "job.yaml", "--json"]).succeeds();
        let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
        status["mesh"]["dp_replicate"].as_u64()
    };
    until("a world of two ranks", || (n_ranks() == Some(2)).then_some(()));
    training.until_more_steps(5);
    let run = training.stop();

    assert_eq!(run.code, Some(0), "{}", run.stderr);
}

#[test]
fn survivor_saves_its_state_before_a_job_that_cannot_continue_fails() {
    let p = Project::new();
    let both = ["--max_steps", "1000000", "--elastic.dp_replicate_min", "2", "--elastic.detection_time", "0.5"];
    let mut training = Training::start(&p, Path::new(env!("CARGO_BIN_EXE_phalanx")), &[&TWO[..], &both[..]].concat());
    training.until_more_steps(5);
    assert_eq!(p.checkpoints("out").len(), 0);

    std::fs::remove_file(p.path("text.txt")).unwrap();
    training.kill_rank(0);
    let run = training.end();

    let steps = p.metrics("out").len();
    let saved = p.checkpoints("out");
    assert_ne!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stderr.contains("text.txt"), "{}", run.stderr);
    assert_eq!(saved.len(), 1, "{}", run.stderr);
    let commit = std::fs::read_to_string(saved[0].join("COMMIT")).unwrap();
    // The metrics of the last step may have been lost with the world that committed it.
    let step = commit.split(' ').find_map(|field| field.strip_prefix("step=")).unwrap().parse::<usize>().unwrap();
    assert!(step >= steps && step <= steps + 1, "saved step {step}, {steps} reported");
}
