//! A rank that gets no processor: its job waits for it, instead of ending it and repeating its steps.

use crate::support::job::until;
use crate::support::{Project, Run, ranks_of};
use phalanx_needs::Need;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// Four times as long as a rank may be silent, and short of the time after which it counts as hung for whatever reason.
const STARVED: Duration = Duration::from_secs(2);
/// Steps in that time, of which a thousandth of a processor still does a few, and a whole one hundreds.
const N_STARVED_MAX: usize = 50;
/// More than a busy machine does before it gets to take the processors away.
const N_STEPS: usize = 2_000;
const JOB: [&str; 8] =
    ["--max_steps", "2000", "--gradient_accumulation_steps", "1", "--reproducible", "true", "--save_steps", "none"];

/// A control group whose processes get a thousandth of a processor, unless its quota is lifted.
struct ControlGroup(PathBuf);

impl ControlGroup {
    /// Skips the calling test if the machine does not let it create one.
    #[track_caller]
    fn new() -> Option<ControlGroup> {
        let name = format!("phalanx-test-{}", std::process::id());
        let folders = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"].map(|root| Path::new(root).join(&name));
        let group = folders.into_iter().find_map(|folder| {
            std::fs::create_dir(&folder).ok()?;
            let group = ControlGroup(folder);
            group.limit(true).then_some(group)
        });
        if group.is_none() {
            phalanx_needs::skip(Need::CpuQuota, "no control group with a quota of processor time can be created");
        }
        group
    }

    /// Sets or lifts the quota, in either version of control groups; returns whether the system accepts that.
    fn limit(&self, is_limited: bool) -> bool {
        let write = |file: &str, text: &str| std::fs::write(self.0.join(file), text).is_ok();
        let (quota, max) = if is_limited { ("1000", "1000 1000000") } else { ("-1", "max 1000000") };
        write("cpu.max", max) || write("cpu.cfs_period_us", "1000000") && write("cpu.cfs_quota_us", quota)
    }

    /// Takes the processors away from a process.
    fn starve(&self, pid: u32) {
        assert!(self.limit(true));
        std::fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // Its processes may be about to end.
        let removed = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            std::fs::remove_dir(&self.0).is_ok()
        });
        assert!(removed || std::thread::panicking(), "{} cannot be removed", self.0.display());
    }
}

fn start(p: &Project, keys: &[&str]) -> Child {
    let mut command = p.command(&[&["train", "job.yaml"], keys].concat());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn until_step(p: &Project, n: usize) {
    until("a step", || (p.path("out/metrics.jsonl").exists() && p.metrics("out").len() >= n).then_some(()));
}

/// Runs a job of `n_ranks`, and takes the processors away from its last rank.
fn survives(keys: &[&str], n_ranks: usize) {
    let p = Project::new();
    let Some(group) = ControlGroup::new() else { return };
    let keys = [&JOB[..], keys].concat();
    p.train(&[&keys[..], &["--output_dir", "straight"]].concat()).succeeds();

    let job = start(&p, &keys);
    for n in [20, 60] {
        until_step(&p, n);
        let ranks = until("ranks", || Some(ranks_of(job.id())).filter(|ranks| ranks.len() == n_ranks));
        group.starve(ranks[n_ranks - 1]);
        let before = until("the lines of steps that it has done before", || {
            let n = p.metrics("out").len();
            std::thread::sleep(STARVED / 4);
            (p.metrics("out").len() <= n + N_STARVED_MAX / 4).then_some(n)
        });
        std::thread::sleep(STARVED);
        let after = p.metrics("out").len();
        assert!(
            after < N_STEPS && after <= before + N_STARVED_MAX,
            "steps {before} to {after}: the rank had a processor"
        );
        assert!(group.limit(false));
    }
    Run::of(job.wait_with_output().unwrap()).succeeds();
    drop(group);

    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap_or_default();
    let incidents: Vec<&str> = events.lines().filter(|line| line.contains("\"event\":\"incident\"")).collect();
    assert!(incidents.iter().all(|line| line.contains("\"why\":\"Started\"")), "{incidents:#?}");
    assert_eq!(p.metrics("out"), p.metrics("straight"), "every step is done once");
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
}

// SUPERVISOR-12
#[test]
fn rank_without_a_processor_is_waited_for() {
    survives(&[], 1);
    survives(&["--dp_shard_size", "2"], 2);
}
