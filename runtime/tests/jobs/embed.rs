//! A host program with its own event loop starts elastic jobs, follows them and sends them requests.

use crate::support::Project;
use phalanx::api::embed::feed::Events;
use phalanx::api::embed::running::Outcome;
use phalanx::config::JobConfig;
use phalanx::{Event, Job, JobError, Machines, RankProgram, RequestError, Resize, RunningJob, Runtime};
use phalanx_strategies::elastic::identity::NodeId;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Longer than any wait of these tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The bits of the weights do not depend on failures and meshes.
const EXACT: [&str; 6] =
    ["--reproducible", "true", "--gradient_accumulation_steps", "1", "--microbatches_per_step", "4"];
const TWO: [&str; 2] = ["--dp_shard_size", "2"];
const LONG: [&str; 2] = ["--max_steps", "1000000"];

fn runtime() -> Runtime {
    Runtime::new(RankProgram::at(env!("CARGO_BIN_EXE_phalanx"))).unwrap()
}

fn job(p: &Project, overrides: &[&str]) -> Job {
    let keys = overrides.chunks(2).map(|pair| (pair[0].trim_start_matches('-').into(), pair[1].into()));
    let keys: Vec<(String, String)> = keys.collect();
    Job::from_config(JobConfig::load(&p.path("job.yaml"), &keys).unwrap())
}

/// Follows a job to its next event of this kind.
async fn next<T>(events: &mut Events, mut wanted: impl FnMut(Event) -> Option<T>) -> T {
    let found = async {
        loop {
            match events.next().await {
                Some(Ok(event)) => {
                    if let Some(found) = wanted(event) {
                        return found;
                    }
                }
                Some(Err(_)) => {}
                None => panic!("the job has ended without this event"),
            }
        }
    };
    timeout(PATIENCE, found).await.expect("the event comes in time")
}

/// Follows a job to this step or a later one.
async fn step(events: &mut Events, at_least: u64) {
    next(events, |event| matches!(event, Event::Step(m) if m.step >= at_least).then_some(())).await;
}

async fn end(job: &RunningJob) -> Outcome {
    timeout(PATIENCE, job.wait()).await.expect("the job ends in time")
}

async fn pids(job: &RunningJob) -> Vec<u32> {
    let status = job.status().await.unwrap();
    status.nodes.iter().flat_map(|node| &node.ranks).filter_map(|worker| worker.pid).collect()
}

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success(), "process {pid} exists");
}

#[tokio::test]
async fn host_sees_a_killed_rank_replaced_and_the_weights_are_unchanged() {
    let p = Project::new();
    let keys = [&EXACT[..], &TWO[..], &["--max_steps", "60"]].concat();
    p.train(&[&keys[..], &["--output_dir", "straight"]].concat()).succeeds();

    let job = runtime().start(job(&p, &keys)).await.unwrap();
    let mut events = job.events();
    let started = next(&mut events, |event| if let Event::Started(s) = event { Some(s) } else { None }).await;
    step(&mut events, 5).await;
    let victim = pids(&job).await[1];
    kill(victim);
    let incident = next(&mut events, |event| match event {
        Event::Note(text) if text.contains("died") => Some(text),
        _ => None,
    });
    let incident = incident.await;
    let report = end(&job).await.unwrap();

    assert_eq!((started.mesh.size(), started.total_steps), (2, 60));
    assert!(incident.contains("slot 1"), "{incident}");
    assert_eq!((report.steps, report.finished), (60, true));
    assert_eq!(report.model_dir.as_deref(), Some(&*p.path("out/model")));
    assert_eq!(p.model_bytes("out"), p.model_bytes("straight"));
    assert_eq!(job.status().await, Err(RequestError::Ended));
    while let Some(event) = events.next().await {
        event.unwrap();
    }
}

#[tokio::test]
async fn single_rank_process_is_replaced_after_a_kill_and_a_stopped_job_is_saved() {
    let p = Project::new();
    let job = runtime().start(job(&p, &LONG)).await.unwrap();
    let mut events = job.events();

    step(&mut events, 1).await;
    job.save().await.unwrap();
    let saved = next(&mut events, |event| if let Event::Saved { step, .. } = event { Some(step) } else { None }).await;
    let pids = pids(&job).await;
    kill(pids[0]);
    next(&mut events, |event| matches!(event, Event::Note(text) if text.contains("died")).then_some(())).await;
    step(&mut events, saved + 2).await;
    job.stop();
    let report = end(&job).await.unwrap();

    assert_eq!(pids.len(), 1);
    assert!(!report.finished && report.steps >= saved + 2, "{report:?}");
    assert!(report.checkpoint.unwrap().is_dir());
}

#[tokio::test]
async fn two_jobs_run_concurrently_but_not_in_one_folder() {
    let p = Project::new();
    let (here, other) = (runtime(), runtime());
    let keys = |out: &'static str| [&TWO[..], &LONG[..], &["--output_dir", out]].concat();
    let (a, b) = (p.path("a").display().to_string().leak(), p.path("b").display().to_string().leak());

    let first = here.start(job(&p, &keys(a))).await.unwrap();
    let second = here.start(job(&p, &keys(b))).await.unwrap();
    step(&mut first.events(), 3).await;
    step(&mut second.events(), 3).await;
    let again = here.start(job(&p, &keys(a))).await;
    // A lock in the folder excludes another runtime.
    let from_other = other.start(job(&p, &keys(a))).await.unwrap();
    let from_other = end(&from_other).await;

    assert!(matches!(&*again.unwrap_err(), JobError::InUse { path } if path == Path::new(a)));
    assert!(matches!(&*from_other.unwrap_err(), JobError::InUse { path } if path == Path::new(a)));
    drop(first);
    assert_eq!(here.jobs().len(), 2, "a job runs on without its handle");
    here.shutdown().await;
    assert!(!end(&second).await.unwrap().finished);
    assert!(here.jobs().is_empty());
}

#[tokio::test]
async fn errors_are_reported_when_the_job_starts_or_ends() {
    let p = Project::new();

    let misfit = runtime().start(job(&p, &["--tensor_parallel_size", "3"])).await.unwrap_err();
    assert!(misfit.is_input() && misfit.to_string().contains("4 attention heads"), "{misfit}");
    assert!(!p.path("out").exists(), "nothing was written");

    let diverges = ["--learning_rate", "1e30", "--max_grad_norm", "none", "--warmup_steps", "0"];
    let diverges = runtime().start(job(&p, &[&diverges[..], &TWO[..]].concat())).await.unwrap();
    let cause = end(&diverges).await.unwrap_err();
    assert!(cause.is_input() && cause.to_string().contains("not finite"), "{cause}");

    // This program exits without becoming a rank.
    let wrong_program = Runtime::new(RankProgram::at("/bin/true")).unwrap();
    let folder = p.path("elsewhere").display().to_string();
    let elsewhere = ["--output_dir", folder.as_str()];
    let failing = wrong_program.start(job(&p, &[&TWO[..], &elsewhere].concat())).await.unwrap();
    let cause = end(&failing).await.unwrap_err().to_string();
    assert!(cause.contains("before its first step"), "{cause}");
}

/// A node process, here on the same machine. Killed when dropped.
struct Node(Child);

impl Node {
    fn start(p: &Project, join: &str, name: &str) -> Node {
        let log = std::fs::File::create(p.path(&format!("{name}.log"))).unwrap();
        let mut command = p.command(&["node", "--join", join, "--dir", name]);
        Node(command.stdout(log.try_clone().unwrap()).stderr(log).stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn until_mesh(job: &RunningJob, dp_shard: usize) {
    let poll = async {
        loop {
            let status = job.status().await;
            if status.is_ok_and(|s| s.mesh.is_some_and(|mesh| mesh.dp_shard == dp_shard) && s.blocked.is_none()) {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, poll).await.expect("the job reaches the mesh in time");
}

#[tokio::test]
async fn host_coordinates_other_machines_and_drains_one() {
    let p = Project::new();
    let keys = [&EXACT[..], &TWO[..], &LONG[..], &["--save_steps", "none"]].concat();
    let machines = Machines { ranks_here: 1, ..Machines::default() };
    let job = runtime().coordinate(job(&p, &keys), machines).await.unwrap();
    let join = job.join_string().unwrap();
    let mut events = job.events();

    let mut node = Node::start(&p, &join, "node");
    step(&mut events, 3).await;
    until_mesh(&job, 2).await;
    let nodes: Vec<NodeId> = job.status().await.unwrap().nodes.iter().map(|node| node.node).collect();
    let unknown = job.drain(NodeId(77)).await;
    job.resize(Resize { dp_shard_size: Some(1), ..Resize::default() }).await.unwrap();
    until_mesh(&job, 1).await;
    // Drains one of the two nodes.
    let drained = nodes.iter().max().unwrap();
    job.drain(*drained).await.unwrap();
    let left = timeout(PATIENCE, async {
        while node.0.try_wait().unwrap().is_none() && job.status().await.unwrap().nodes.len() == 2 {
            sleep(Duration::from_millis(20)).await;
        }
    });
    left.await.expect("a drained node is released");
    job.stop();
    let report = end(&job).await.unwrap();

    assert_eq!(nodes.len(), 2);
    assert!(matches!(unknown, Err(RequestError::Refused(why)) if why.contains("no node 77")));
    assert!(!report.finished && report.steps >= 3, "{report:?}");
}
