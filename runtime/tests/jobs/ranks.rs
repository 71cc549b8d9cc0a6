//! Rank processes train as one rank, survive kills, and end with their launcher.

use crate::support::{Project, Run, command_line, ranks_of};
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Difference of a loss from that of one rank, due to another order of sums.
const LOSS_TOLERANCE: f64 = 2e-5;
/// Longer than any wait of these tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
const FOUR: [&str; 4] = ["--dp_shard_size", "2", "--tensor_parallel_size", "2"];

fn losses(p: &Project, out: &str) -> Vec<f64> {
    p.metrics(out).into_iter().map(|(_, loss, _)| f64::from_bits(loss)).collect()
}

#[track_caller]
fn agree(a: &[f64], b: &[f64]) {
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= LOSS_TOLERANCE;
    assert!(a.len() == b.len() && a.iter().zip(b).all(near), "{a:?}\n{b:?}");
}

/// A running `phalanx train` and its output.
struct Watched {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Watched {
    fn start(p: &Project, overrides: &[&str]) -> Watched {
        Watched::of(p.command(&[&["train", "job.yaml"], overrides].concat()))
    }

    fn of(mut command: Command) -> Watched {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Watched { child, lines }
    }

    /// Reads the output up to a line with this start.
    #[track_caller]
    fn until(&mut self, start: &str) {
        let found = self.lines.by_ref().map(|line| line.unwrap()).any(|line| line.starts_with(start));
        assert!(found, "no line starts with `{start}`");
    }

    /// Process ids of its ranks, by rank.
    fn ranks(&self) -> Vec<u32> {
        ranks_of(self.child.id())
    }

    fn end(mut self) -> Run {
        let rest: Vec<String> = self.lines.by_ref().map(|line| line.unwrap()).collect();
        let mut run = Run::of(self.child.wait_with_output().unwrap());
        run.stdout = rest.join("\n");
        run
    }
}

#[allow(unsafe_code)] // the standard library sends no signals
fn signal(pid: u32, signal: i32) {
    // SAFETY: sends a signal; no memory is involved.
    let sent = unsafe { libc::kill(pid as i32, signal) };
    assert_eq!(sent, 0, "process {pid} exists");
}

/// Whether all ranks ended within [`PATIENCE`]; the command line of a zombie is empty.
fn all_ended(ranks: &[u32]) -> bool {
    let deadline = Instant::now() + PATIENCE;
    let lives = |pid: &u32| command_line(*pid).contains("rank --worker");
    while ranks.iter().any(lives) && Instant::now() < deadline {
        std::thread::yield_now();
    }
    !ranks.iter().any(lives)
}

#[test]
fn four_rank_processes_give_the_losses_of_one_rank() {
    let p = Project::new();
    p.train(&["--max_steps", "3", "--output_dir", "one", "--gradient_accumulation_steps", "4"]).succeeds();

    let run = p.train(&[&["--max_steps", "3"], &FOUR[..]].concat()).succeeds();

    agree(&losses(&p, "out"), &losses(&p, "one"));
    assert!(run.stdout.contains("4 ranks (pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 2)"), "{}", run.stdout);
    let metrics = std::fs::read_to_string(p.path("out/metrics.jsonl")).unwrap();
    assert!(metrics.lines().all(|line| line.contains("\"collective_pct\":")), "{metrics}");
    assert_eq!(run.stderr, "");
    assert_eq!(p.model_bytes("out").len(), p.model_bytes("one").len());
}

/// The bits of the weights do not depend on failures and meshes.
const EXACT: [&str; 4] = ["--reproducible", "true", "--microbatches_per_step", "4"];

#[test]
fn killed_ranks_are_replaced_and_the_weights_equal_an_undisturbed_run() {
    let p = Project::new();
    // Enough steps that the run does not end before the kills, even if a busy machine delays this test.
    let once = ["--gradient_accumulation_steps", "1", "--max_steps", "300"];
    let job = [&once[..], &EXACT[..], &FOUR[..]].concat();
    p.train(&[&job[..], &["--output_dir", "straight"]].concat()).succeeds();

    let mut run = Watched::start(&p, &job);
    for step in [5, 15, 25] {
        run.until(&format!("step {step:5}"));
        let ranks = run.ranks();
        // The successor of an earlier victim may not exist yet.
        signal(ranks[step % ranks.len()], libc::SIGKILL);
    }
    let run = run.end();

    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
    assert_eq!(p.metrics("out").len(), 300, "every step is reported once");
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    let incidents = events.lines().filter(|line| line.contains("\"why\":\"Died\"")).count();
    assert!((1..=3).contains(&incidents), "a kill during a recovery joins its incident: {events}");
    // Copies that differ would end in the same weights, from the first step on.
    assert!(!events.contains("\"n_repeated\""), "a step was repeated: {events}");
}

#[test]
fn killed_single_rank_resumes_from_its_last_checkpoint_and_the_weights_equal_an_undisturbed_run() {
    let p = Project::new();
    let once = ["--gradient_accumulation_steps", "1", "--max_steps", "300", "--save_steps", "20"];
    let job = [&once[..], &EXACT[..]].concat();
    p.train(&[&job[..], &["--output_dir", "straight"]].concat()).succeeds();

    let mut run = Watched::start(&p, &job);
    run.until("step    50");
    let ranks = run.ranks();
    assert_eq!(ranks.len(), 1, "the rank is a separate process");
    signal(ranks[0], libc::SIGKILL);
    let run = run.end();

    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
    assert_eq!(p.metrics("out").len(), 300, "every step is reported once");
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    let events: Vec<serde_json::Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let died = events.iter().filter(|event| event["why"] == "Died");
    let begins: Vec<u64> = died.map(|incident| incident["first_step"].as_u64().unwrap()).collect();
    assert!(matches!(begins[..], [first] if first > 20 && first % 20 == 1), "no resumption after a save: {begins:?}");
}

#[test]
fn stopped_rank_is_named_with_the_collective_that_it_has_not_entered() {
    let p = Project::new();
    let job = ["--dp_replicate_size", "2", "--gradient_accumulation_steps", "1", "--max_steps", "300"];
    // A rank counts as lost after half the detection time, and its peer tells what it waits for at a heartbeat before that.
    let slow = ["--elastic.detection_time", "8.0"];
    let mut command = p.command(&[&["train", "job.yaml"], &job[..], &slow].concat());
    command.env("PHALANX_LOG", "info");

    let mut run = Watched::of(command);
    run.until("step    10");
    signal(run.ranks()[1], libc::SIGSTOP);
    let run = run.end();

    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let line = run.stdout.lines().find(|line| line.contains("rank 1 has not entered")).unwrap_or_default();
    let names_it = line.contains("on dp_replicate") || line.contains("the vote #");
    assert!(line.contains("node 0 slot 0") && names_it, "{}", run.stdout);
}

/// Milliseconds between two failures. A recovery takes some tens of milliseconds, on a busy machine some hundred, so the second
/// failure falls into each of its phases.
const BETWEEN: [u64; 12] = [0, 1, 2, 4, 7, 10, 15, 20, 30, 45, 70, 120];
/// Least number of second failures within a recovery.
const DOUBLED_MIN: usize = 3;

#[test]
fn second_failure_at_any_moment_of_a_recovery_leaves_the_weights_unchanged() {
    let p = Project::new();
    let once = ["--gradient_accumulation_steps", "1", "--max_steps", "1000", "--save_steps", "none"];
    // Steps take a few milliseconds, so that the job does not end before enough failures.
    let slow = ["--model.hidden_size", "128", "--learning_rate", "1e-3", "--dp_replicate_size", "3"];
    let job = [&once[..], &EXACT[..], &slow[..]].concat();
    p.train(&[&job[..], &["--output_dir", "straight"]].concat()).succeeds();

    let mut run = Watched::start(&p, &job);
    // Each interval once, then again until enough second failures fell into a recovery.
    for (i, ms) in BETWEEN.into_iter().cycle().take(30).enumerate() {
        if i >= BETWEEN.len() && doubled(&p) >= DOUBLED_MIN {
            break;
        }
        run.until(&format!("step {:5}", 5 + 30 * i));
        let since = Instant::now();
        let mut ranks = run.ranks();
        // Wait for the successors of earlier victims.
        while ranks.len() < 3 && since.elapsed() < Duration::from_millis(500) {
            std::thread::yield_now();
            ranks = run.ranks();
        }
        // One rank must survive with the state.
        if ranks.len() < 3 {
            continue;
        }
        signal(ranks[i % 3], libc::SIGKILL);
        std::thread::sleep(Duration::from_millis(ms));
        // A second rank, or the replacement of the first.
        let next = if i % 2 == 0 {
            Some(ranks[(i + 1) % 3])
        } else {
            run.ranks().into_iter().find(|pid| !ranks.contains(pid))
        };
        if let Some(pid) = next {
            signal(pid, libc::SIGKILL);
        }
    }
    let run = run.end();

    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
    assert_eq!(p.metrics("out").len(), 1000, "every step is reported once");
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    let events: Vec<serde_json::Value> = events.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let incidents = events.iter().filter(|event| event["event"] == "incident");
    let begins: Vec<u64> = incidents.map(|incident| incident["first_step"].as_u64().unwrap()).collect();
    assert!(begins.len() > 3 && begins.is_sorted(), "no committed step is repeated: {begins:?}");
    let from_memory = begins.iter().skip(1).all(|first| *first > 1);
    assert!(from_memory, "one rank always has the state, so the job never restarts: {begins:?}");
    assert!(doubled(&p) >= DOUBLED_MIN, "no second failure fell into a recovery: {events:?}");
}

/// Number of incidents with a second failure.
fn doubled(p: &Project) -> usize {
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap_or_default();
    let events = events.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    events.filter(|event| event["also"].as_array().is_some_and(|also| !also.is_empty())).count()
}

#[test]
fn run_with_any_number_of_ranks_answers_its_operator_and_is_saved_when_stopped() {
    for (mesh, n_ranks) in [(&FOUR[..], 4), (&[][..], 1)] {
        answers_and_stops(mesh, n_ranks);
    }
}

fn answers_and_stops(mesh: &[&str], n_ranks: usize) {
    let p = Project::new();
    let mut run = Watched::start(&p, &[&["--max_steps", "1000000"], mesh].concat());
    run.until("step     1");

    let status = p.run(&["status", "job.yaml", "--json"]).succeeds();
    let status: serde_json::Value = serde_json::from_str(&status.stdout).unwrap();
    let ranks = status["nodes"][0]["ranks"].as_array().unwrap();
    p.run(&["resize", "job.yaml", "--dp_shard_size", "0"]).refuses(&["dp_shard"]);
    p.run(&["resize", "job.yaml", "--dp_replicate_size", "5"]).refuses(&["rank processes", "all on this machine"]);
    p.run(&["drain", "job.yaml", "0"]).refuses(&["one machine"]);
    p.run(&["stop", "job.yaml"]).succeeds();
    let run = run.end();

    assert_eq!(ranks.len(), n_ranks, "{status}");
    assert!(ranks.iter().all(|rank| rank["pid"].as_u64() > Some(1)), "{status}");
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    let steps = p.metrics("out").len();
    assert!(run.stdout.contains(&format!("stopped after step {steps}; resume with:")), "{}", run.stdout);
    let ended = p.run(&["status", "job.yaml"]).succeeds().stdout;
    let json: serde_json::Value =
        serde_json::from_str(&p.run(&["status", "job.yaml", "--json"]).succeeds().stdout).unwrap();
    assert!(ended.contains("the job ended") && ended.contains("it was stopped at"), "{ended}");
    assert!(ended.lines().all(|line| line.chars().count() <= 80), "{ended}");
    assert_eq!((&json["running"], &json["ending"], &json["step"]), (&false.into(), &"finished".into(), &steps.into()));
    p.run(&["save", "job.yaml"]).refuses(&["the job ended"]);
}

#[test]
fn ranks_do_not_survive_their_launcher() {
    let p = Project::new();
    let mut run = Watched::start(&p, &[&["--max_steps", "1000000"], &FOUR[..]].concat());
    run.until("step     1");
    let ranks = run.ranks();
    assert_eq!(ranks.len(), 4, "every rank is a process");

    signal(run.child.id(), libc::SIGKILL);
    run.end();

    assert!(all_ended(&ranks));
}

#[test]
fn interrupted_run_saves_and_resumes_on_another_mesh() {
    let p = Project::new();
    // Steps are long enough to interrupt the run.
    let job = ["--model.hidden_size", "192", "--model.num_hidden_layers", "6", "--learning_rate", "1e-3"];
    p.train(&[&job[..], &["--output_dir", "straight", "--gradient_accumulation_steps", "4"]].concat()).succeeds();
    let mut run = Watched::start(&p, &[&job[..], &FOUR[..]].concat());
    run.until("step     3");
    signal(run.child.id(), libc::SIGINT);
    let run = run.end();
    let stopped_at = p.metrics("out").len();

    let two = ["--dp_replicate_size", "2", "--resume_from_checkpoint", "auto"];
    let resumed = p.train(&[&job[..], &two[..]].concat()).succeeds();

    assert_eq!(run.code, Some(0), "{}", run.stderr);
    assert!(run.stdout.contains(&format!("stopped after step {stopped_at}; resume with:")), "{}", run.stdout);
    assert!(resumed.stdout.contains(&format!("resuming at step {stopped_at} ")), "{}", resumed.stdout);
    agree(&losses(&p, "out"), &losses(&p, "straight"));
}

#[test]
fn run_fails_with_the_error_of_its_failed_rank() {
    let p = Project::new();

    let diverged = ["--learning_rate", "1e30", "--max_grad_norm", "none", "--warmup_steps", "0"];
    p.train(&[&diverged[..], &FOUR[..]].concat()).refuses(&["step ", "not finite", "model."]);

    let missing = ["--resume_from_checkpoint", "out/nowhere"];
    p.train(&[&missing[..], &FOUR[..]].concat()).refuses(&["out/nowhere"]);
}

#[test]
fn mesh_that_does_not_fit_is_refused_before_ranks_start() {
    let p = Project::new();

    p.train(&["--tensor_parallel_size", "3"]).refuses(&["4 attention heads", "tensor_parallel_size 3", "1, 2, 4"]);
    p.train(&["--pipeline_parallel_size", "3"]).refuses(&["2 blocks", "pipeline_parallel_size 3", "at most 2"]);
    p.train(&["--context_parallel_size", "3"]).refuses(&["32 tokens", "context_parallel_size 3", "30 would fit"]);
    p.train(&["--dp_shard_size", "2", "--nproc_per_node", "3"]).refuses(&["dp_shard 2", "2 ranks", "3"]);
    p.train(&["--dp_replicate_size", "65"]).refuses(&["dp_replicate 65", "65 ranks", "at most 64"]);

    assert!(!p.path("out").exists(), "nothing was written");
}
