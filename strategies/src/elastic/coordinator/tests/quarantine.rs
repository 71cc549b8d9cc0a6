//! Reports count by the role of their sender, and who disturbs the job gets no rank for a while (`COORDINATOR-13`,
//! `COORDINATOR-14`).

use super::*;
use crate::elastic::message::{Broken, MemberReport};

/// A job of two ranks with a spare, or of three ranks, that trains.
fn training(n_ranks: usize) -> Job {
    let mut job = Job::start(shards(n_ranks), 3, Schedule::default());
    job.run_until("training", |job| job.running(shards(n_ranks)) && job.step() >= Step(5));
    job
}

/// The node without a rank.
fn spare(job: &Job) -> Worker {
    let has_rank = |worker: &&Worker| job.coordinator.assignments.contains(worker);
    *job.members.keys().find(|worker| !has_rank(worker)).unwrap()
}

/// The supervisor of a worker reports something that the worker did not say.
fn forge(job: &mut Job, worker: Worker, change: impl FnOnce(MemberReport) -> MemberReport) {
    let report = change(job.members[&worker].report());
    job.nodes.get_mut(&worker.member.node).unwrap().handle_status_report(job.now, report);
    while job.deliver() {}
}

fn broken(lost: Option<Worker>) -> impl FnOnce(MemberReport) -> MemberReport {
    move |report| MemberReport {
        phase: MemberPhase::Guest,
        broken: Some(Broken { lost, corrupt: None, not_finite: None, reason: "no such link\u{1b}[2J".into() }),
        ..report
    }
}

// COORDINATOR-13
#[test]
fn failed_member_without_a_rank_is_excluded_and_the_job_continues() {
    let mut job = training(2);
    let (spare, generation) = (spare(&job), job.coordinator.record().generation);

    forge(&mut job, spare, |report| MemberReport { failure: Some("no data\u{1b}[2J\n".into()), ..report });
    job.run_for(200);

    assert_eq!((&job.ended, job.coordinator.record().generation), (&None, generation));
    assert!(!job.members.contains_key(&spare), "its supervisor has ended it");
    let [(node, text)] = &job.refused[..] else { panic!("{:?}", job.refused) };
    assert_eq!(*node, spare.member.node);
    assert!(text.ends_with("no data\\u{1b}[2J\\n"), "{text}");
}

// COORDINATOR-13
#[test]
fn broken_world_that_only_a_member_without_a_rank_reports_goes_on() {
    let mut job = training(2);
    let (spare, peer) = (spare(&job), *job.coordinator.assignments.first().unwrap());
    let generation = job.coordinator.record().generation;

    for lost in [None, Some(peer)] {
        forge(&mut job, spare, broken(lost));
        job.run_for(100);
    }

    assert_eq!(job.coordinator.record().generation, generation);
}

// COORDINATOR-13
#[test]
fn failed_starts_of_a_node_without_a_rank_do_not_end_the_job() {
    let mut job = training(2);
    let spare = spare(&job);
    job.coordinator.policy.dp_shard_min = 2;
    job.coordinator.timing.crash_patience = Duration::from_secs(1);
    let lost = *job.coordinator.assignments.first().unwrap();

    // Its own processes never start, and nobody can take the rank of the lost node.
    job.failed_starts = true;
    job.kill(spare);
    job.nodes.remove(&lost.member.node);
    job.kill(lost);
    job.run_for(1_500);

    assert_eq!(job.ended, None, "{:?}", job.coordinator.blocked());
}

// COORDINATOR-14
#[test]
fn node_that_alone_reports_broken_worlds_is_left_out_for_a_while() {
    let mut job = training(3);
    let liar = NodeId(1);
    let mut n_worlds = 0;

    while !job.coordinator.left_out.contains(&liar) {
        assert!(n_worlds < 5, "it still disturbs the job");
        let (worker, generation) = (job.worker_on(1), job.coordinator.record().generation);
        forge(&mut job, worker, broken(None));
        job.run_until("another world", |job| {
            job.coordinator.record().generation > generation && job.coordinator.activity() == Activity::Running
        });
        n_worlds += 1;
    }
    job.run_until("a world without it", |job| job.running(shards(2)));

    assert_eq!((n_worlds, &job.ended), (3, &None));
    job.run_until("a world with it", |job| job.running(shards(3)));
}

// COORDINATOR-14
#[test]
fn node_that_starts_again_and_again_is_left_out_if_the_others_can_form_a_world() {
    for n_min in [1, 3] {
        let mut job = training(3);
        job.coordinator.policy.dp_shard_min = n_min;

        for boot in 1..=3 {
            job.run_for(50);
            let worker = job.worker_on(2);
            job.members.remove(&worker);
            let boot = Incarnation(1_000_000 * boot);
            let supervisor = Supervisor::new(job.now, JobId(1), NodeId(2), boot, 1, Timing::default());
            job.nodes.insert(NodeId(2), supervisor);
        }
        job.run_for(10);

        assert_eq!(job.coordinator.left_out.contains(&NodeId(2)), n_min == 1, "at least {n_min} shards");
    }
}
