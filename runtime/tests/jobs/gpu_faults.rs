//! Faults of GPU ranks, planted in the software GPU of one rank while the job trains: the rank is replaced or its world is formed
//! again, in time, and the weights and metrics are those of an undisturbed run.

use crate::support::job::{signal, until};
use crate::support::{Project, Run, ranks_of};
use phalanx_softgpu::Installation;
use serde_json::Value;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The detection time of these jobs. Hangs are detected after half of it; on a machine of two cores that also runs other tests, the
/// successor may take as long to start.
const DETECTION: Duration = Duration::from_secs(4);
/// From a fault to resumed training: the detection time and half a second.
const RECOVERY_MAX: Duration = Duration::from_millis(4500);

/// How the ranks of a job exchange tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Collectives {
    /// Both ranks on one GPU: copies in host memory.
    Staged,
    /// Each rank on a GPU of its own.
    Nccl,
}

const BOTH: [Collectives; 2] = [Collectives::Staged, Collectives::Nccl];

/// A job of two ranks on the software GPU.
struct Job {
    p: Project,
    child: Child,
}

/// Metrics and weights of a run.
type Outcome = (Vec<(u64, u64, u64)>, Vec<u8>);

fn command(p: &Project, n_steps: u64, collectives: Collectives) -> Command {
    let gpu = Installation::new().expect("the software GPU is built with the tests");
    let (n_steps, detection_time) = (n_steps.to_string(), DETECTION.as_secs_f64().to_string());
    let mut command = p.command(&[
        "train",
        "job.yaml",
        "--device",
        "cuda",
        "--dp_replicate_size",
        "2",
        "--max_steps",
        &n_steps,
        "--save_steps",
        "none",
        "--elastic.detection_time",
        &detection_time,
        // A step of the software GPU takes time for each token.
        "--sequence_len",
        "16",
    ]);
    std::fs::create_dir_all(p.path("control")).unwrap();
    let n_gpus = if collectives == Collectives::Nccl { "2" } else { "1" };
    command.env("PHALANX_CUDA_LIBS", gpu.dir()).env("XDG_CACHE_HOME", p.path("cache"));
    command.env("SOFTGPU_CONTROL", p.path("control")).env("SOFTGPU_DEVICES", n_gpus);
    // The tests of `tests/gpu` find accesses of the host, also where the processor makes that slow.
    command.env("SOFTGPU_GUARD", "fast");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The outcome of a run without faults: sums of two ranks do not depend on how they are exchanged.
fn undisturbed() -> &'static Outcome {
    static OUTCOME: OnceLock<Outcome> = OnceLock::new();
    OUTCOME.get_or_init(|| {
        let p = Project::new();
        Run::of(command(&p, N_STEPS, Collectives::Staged).output().expect("the binary is built")).succeeds();
        (p.metrics("out"), p.model_bytes("out"))
    })
}

const N_STEPS: u64 = 40;

impl Job {
    fn start(n_steps: u64, collectives: Collectives) -> Job {
        Job::start_with(n_steps, collectives, &[])
    }

    /// Starts a job with further keys.
    fn start_with(n_steps: u64, collectives: Collectives, keys: &[&str]) -> Job {
        let p = Project::new();
        let child = command(&p, n_steps, collectives).args(keys).spawn();
        Job { p, child: child.expect("the binary is built") }
    }

    fn n_steps(&self) -> usize {
        let text = std::fs::read_to_string(self.p.path("out/metrics.jsonl")).unwrap_or_default();
        text.lines().filter(|line| line.contains("\"loss\"")).count()
    }

    fn until_step(&self, step: usize) {
        until("a step", || (self.n_steps() >= step).then_some(()));
    }

    /// The process of the rank in a slot, while both run.
    fn rank(&self, slot: usize) -> u32 {
        until("two ranks", || Some(ranks_of(self.child.id())).filter(|ranks| ranks.len() == 2))[slot]
    }

    /// Changes settings of a process's software GPU, before its next kernel, allocation or collective; of the next process
    /// to start, if `name` is `next`.
    fn plant(&self, name: &str, settings: &str) {
        let unfinished = self.p.path("unfinished");
        std::fs::write(&unfinished, settings).unwrap();
        std::fs::rename(unfinished, self.p.path("control").join(name)).unwrap();
    }

    /// Plants a fault in the rank of a slot. Returns the file that tells when the rank took it.
    fn plant_in(&self, slot: usize, settings: &str) -> PathBuf {
        let pid = self.rank(slot);
        self.plant(&pid.to_string(), settings);
        let taken = self.p.path("control").join(format!("taken-{pid}"));
        until("the fault", || taken.exists().then_some(()));
        taken
    }

    /// Waits until the software GPU of a process has come to a point, such as `capture` or `connect`.
    fn until_reached(&self, what: &str, pid: u32) {
        let sign = self.p.path("control").join(format!("{what}-{pid}"));
        until(what, || sign.exists().then_some(()));
    }

    /// Waits for the end of the job, whose metrics and weights are those of an undisturbed run. Returns its output and its
    /// incidents.
    fn ends_undisturbed(self) -> (Run, Vec<Incident>) {
        let (run, incidents, p) = self.ends();
        assert_eq!(p.metrics("out"), undisturbed().0, "{}", run.stdout);
        assert!(p.model_bytes("out") == undisturbed().1, "the weights differ");
        (run, incidents)
    }

    fn ends(self) -> (Run, Vec<Incident>, Project) {
        let run = Run::of(self.child.wait_with_output().unwrap()).succeeds();
        let text = std::fs::read_to_string(self.p.path("out/events.jsonl")).unwrap();
        let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let incidents = events.filter(|event| event["event"] == "incident" && event["why"] != "Started");
        (run, incidents.map(Incident).collect(), self.p)
    }
}

/// When a process took a planted fault.
fn time_of(taken: &Path) -> Duration {
    let changed = std::fs::symlink_metadata(taken).unwrap();
    Duration::new(changed.ctime() as u64, changed.ctime_nsec() as u32)
}

/// An incident, as in `events.jsonl`.
#[derive(Debug)]
struct Incident(Value);

impl Incident {
    /// Time from the fault until training resumed.
    fn recovery_time(&self, fault: Duration) -> Duration {
        Duration::from_millis(self.0["unix_ms"].as_u64().unwrap()).saturating_sub(fault)
    }

    /// Asserts that training resumed in time after the fault.
    #[track_caller]
    fn is_recovered_in_time(&self, fault: Duration) {
        let took = self.recovery_time(fault);
        eprintln!("recovered after {took:?}: {}", self.0);
        assert!(took <= RECOVERY_MAX, "{took:?}: {}", self.0);
    }
}

#[test]
fn hung_gpu_is_replaced_within_the_detection_time() {
    for collectives in BOTH {
        let job = Job::start(N_STEPS, collectives);
        job.until_step(10);

        let fault = time_of(&job.plant_in(1, "SOFTGPU_HANG=1"));
        let (run, incidents) = job.ends_undisturbed();

        assert!(run.stdout.contains("it hangs; this process ends"), "{}", run.stdout);
        assert_eq!(incidents.len(), 1, "{collectives:?}: {incidents:?}");
        incidents[0].is_recovered_in_time(fault);
    }
}

#[test]
fn killed_rank_is_replaced_within_the_default_detection_time_and_half_a_second() {
    const DEFAULT: Duration = Duration::from_secs(1);
    let job = Job::start_with(N_STEPS, Collectives::Staged, &["--elastic.detection_time", "1"]);

    let faults = [8, 16, 24, 32].map(|step| {
        job.until_step(step);
        let victim = job.rank(1);
        let fault = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        signal(victim, libc::SIGKILL);
        until("a successor", || Some(job.rank(1)).filter(|pid| *pid != victim));
        fault
    });
    let (_, incidents) = job.ends_undisturbed();

    assert_eq!(incidents.len(), faults.len(), "{incidents:?}");
    let took = incidents.iter().zip(faults).map(|(incident, fault)| incident.recovery_time(fault));
    // Other tests may run on the same cores: the fastest of four is that of a machine of its own.
    let fastest = took.min().unwrap();
    assert!(fastest <= DEFAULT + Duration::from_millis(500), "{fastest:?}: {incidents:?}");
}

#[test]
fn gpu_with_a_sticky_error_is_replaced() {
    for (collectives, code) in BOTH.into_iter().zip([700, 719]) {
        let job = Job::start(N_STEPS, collectives);
        job.until_step(10);

        let fault = time_of(&job.plant_in(0, &format!("SOFTGPU_FAULT=5:{code}")));
        let (run, incidents) = job.ends_undisturbed();

        assert!(run.stdout.contains(&format!("({code})")), "{}", run.stdout);
        assert_eq!(incidents.len(), 1, "{collectives:?}: {incidents:?}");
        incidents[0].is_recovered_in_time(fault);
    }
}

#[test]
fn successor_waits_for_the_memory_of_its_predecessor() {
    for collectives in BOTH {
        let job = Job::start(N_STEPS, collectives);
        job.until_step(10);

        // Its arena does not fit at first.
        job.plant("next", "SOFTGPU_ALLOC_FAIL=1");
        let victim = job.rank(1);
        let fault = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        signal(victim, libc::SIGKILL);
        let control = job.p.path("control");
        until("a successor", || (!control.join("next").exists()).then_some(()));
        let (_, incidents) = job.ends_undisturbed();

        assert_eq!(incidents.len(), 1, "{collectives:?}: {incidents:?}");
        let also = incidents[0].0["detail"].as_str().unwrap_or_default();
        assert!(!also.contains("cannot allocate"), "{collectives:?}: the successor gave up: {also}");
        incidents[0].is_recovered_in_time(fault);
    }
}

/// Ranks capture the commands of their second step. The software GPU holds them there until the victim is dead.
#[test]
fn peer_that_dies_under_capture_is_replaced_in_time() {
    for collectives in BOTH {
        // The captures of a job may be over before they are held; then another job is tried.
        let held = (0..5).find_map(|_| Job::held_in_capture(collectives));
        let (job, victim) = held.expect("one of five jobs is held");

        let fault = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        signal(victim, libc::SIGKILL);
        until("its end", || (!is_running(victim)).then_some(()));
        let n_steps = job.n_steps();
        std::fs::remove_file(job.p.path(HOLD)).unwrap();
        let (_, incidents) = job.ends_undisturbed();

        assert_eq!(n_steps, 1, "{collectives:?}: no rank can have finished the step of the captures");
        assert_eq!(incidents.len(), 1, "{collectives:?}: {incidents:?}");
        incidents[0].is_recovered_in_time(fault);
    }
}

/// As long as this file exists, every capture waits.
const HOLD: &str = "control/hold-capture";

impl Job {
    /// A job that is held in the captures of its second step, and the process of its second rank there; `None` if it came to its
    /// next step before.
    fn held_in_capture(collectives: Collectives) -> Option<(Job, u32)> {
        let p = Project::new();
        let child = command(&p, N_STEPS, collectives).env("SOFTGPU_CAPTURE_US", "300000").spawn();
        let job = Job { p, child: child.expect("the binary is built") };
        job.until_step(1);
        let (hold, victim) = (job.p.path(HOLD), job.rank(1));
        std::fs::write(&hold, "").unwrap();
        let changed = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        let sign = job.p.path("control").join(format!("capture-{victim}"));

        let is_held = until("a capture", || match changed(&sign) >= changed(&hold) {
            true => Some(true),
            false => (job.n_steps() > 1).then_some(false),
        });

        if !is_held {
            let _ = std::fs::remove_file(hold);
            job.ends();
            return None;
        }
        Some((job, victim))
    }
}

/// Whether a process runs; one that has died may not have been waited for yet.
fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

#[test]
fn failure_of_nccl_ends_the_world_and_no_process() {
    let job = Job::start(N_STEPS, Collectives::Nccl);
    job.until_step(10);
    let ranks = [0, 1].map(|slot| job.rank(slot));

    let fault = time_of(&job.plant_in(1, "SOFTGPU_NCCL_FAULT=1"));
    until("a later step", || (job.n_steps() > 30).then_some(()));
    assert_eq!([0, 1].map(|slot| job.rank(slot)), ranks, "a process was replaced");
    let (_, incidents) = job.ends_undisturbed();

    assert_eq!(incidents.len(), 1, "{incidents:?}");
    incidents[0].is_recovered_in_time(fault);
}

#[test]
fn world_is_formed_again_after_nccl_had_too_little_memory_for_it() {
    // The first allocation fails while the rank connects to its peers, the second one with the first collective after that.
    for allocation in ["1", "2"] {
        let job = Job::start(N_STEPS, Collectives::Nccl);
        job.until_step(10);
        let (survivor, victim) = (job.rank(0), job.rank(1));

        job.plant_in(0, &format!("SOFTGPU_NCCL_ALLOC_FAIL={allocation}"));
        signal(victim, libc::SIGKILL);
        until("a later step", || (job.n_steps() > 30).then_some(()));
        assert_eq!(job.rank(0), survivor, "a process was replaced");
        let (_, incidents) = job.ends_undisturbed();

        let text = format!("{incidents:?}");
        assert!(!incidents.is_empty() && incidents.len() <= 2, "{text}");
        assert!(text.contains("out of memory"), "allocation {allocation}: {text}");
    }
}

#[test]
fn rank_whose_nccl_does_not_connect_is_replaced() {
    let job = Job::start(N_STEPS, Collectives::Nccl);
    job.until_step(10);
    let (stuck, victim) = (job.rank(0), job.rank(1));

    job.plant_in(0, "SOFTGPU_NCCL_INIT_MS=1000000000");
    signal(victim, libc::SIGKILL);
    let (run, incidents) = job.ends_undisturbed();

    assert!(run.stdout.contains("ncclCommInitRankConfig: position 0: not done after"), "{}", run.stdout);
    assert!(!incidents.is_empty() && incidents.len() <= 2, "{stuck}: {incidents:?}");
}

#[test]
fn peer_that_dies_while_nccl_connects_delays_nobody() {
    let job = Job::start(N_STEPS, Collectives::Nccl);
    job.until_step(10);

    // The successor takes long to connect, and dies meanwhile.
    job.plant("next", "SOFTGPU_NCCL_INIT_MS=1000000000");
    let first = job.rank(1);
    signal(first, libc::SIGKILL);
    until("a successor", || (!job.p.path("control/next").exists()).then_some(()));
    let second = until("two ranks", || Some(job.rank(1)).filter(|pid| *pid != first));
    job.until_reached("connect", second);
    let fault = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    signal(second, libc::SIGKILL);
    let (_, incidents) = job.ends_undisturbed();

    assert_eq!(incidents.len(), 1, "{incidents:?}");
    incidents[0].is_recovered_in_time(fault);
}

#[test]
fn slow_gpu_is_reported_as_a_straggler_and_not_replaced() {
    // A member counts as a straggler only after twenty detection times.
    let job = Job::start_with(100_000, Collectives::Nccl, &["--elastic.detection_time", "0.8"]);
    job.until_step(10);
    let pid = job.rank(1);

    job.plant_in(1, "SOFTGPU_SLOW_US=3000");
    let status = until("a straggler", || {
        let status = job.p.run(&["status", "job.yaml", "--json"]);
        let status: Value = serde_json::from_str(&status.stdout).ok()?;
        let ranks = status["nodes"][0]["ranks"].as_array()?.clone();
        ranks.into_iter().find(|rank| rank["slow"] == true)
    });
    job.p.run(&["stop", "job.yaml"]).succeeds();
    let (_, incidents, _) = job.ends();

    assert_eq!(status["pid"], pid, "{status}");
    assert!(incidents.is_empty(), "{incidents:?}");
}

#[test]
fn twenty_kills_in_one_run_leave_weights_and_metrics_unchanged() {
    let n_steps = 130;
    let straight = Project::new();
    Run::of(command(&straight, n_steps, Collectives::Staged).output().unwrap()).succeeds();
    for collectives in BOTH {
        let job = Job::start(n_steps, collectives);
        for kill in 0..20 {
            job.until_step(5 + 5 * kill);
            signal(job.rank(kill * 7 % 5 % 2), libc::SIGKILL);
        }
        let (_, incidents, p) = job.ends();

        assert_eq!(incidents.len(), 20, "{collectives:?}: {incidents:?}");
        assert_eq!(p.metrics("out"), straight.metrics("out"));
        assert!(p.model_bytes("out") == straight.model_bytes("out"), "{collectives:?}: the weights differ");
    }
}

/// Kernels of 8 ms, as those of long rows are on small GPUs: a segment of 128 instructions takes twice the time after which a GPU
/// without a sign of progress counts as hung.
#[test]
fn slow_gpu_trains_with_the_default_detection_time() {
    let p = Project::new();
    let mut command = command(&p, 3, Collectives::Staged);
    command.args(["--dp_replicate_size", "1", "--elastic.detection_time", "1", "--gradient_accumulation_steps", "1"]);
    command.args(["--model.num_hidden_layers", "6"]).env("SOFTGPU_SLOW_US", "8000");
    let child = command.spawn().expect("the binary is built");

    let (run, incidents, _) = Job { p, child }.ends();

    assert!(incidents.is_empty() && !run.stdout.contains("it hangs"), "{}", run.stdout);
}
