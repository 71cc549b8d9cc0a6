//! After copies of the state differed, no world uses state in memory of that lineage (`COORDINATOR-17`).

use super::*;
use crate::elastic::copies::{Claim, Difference, Holder};
use crate::elastic::message::{MemberReport, NotFinite, Settled};

fn replicas(dp_replicate: usize) -> Mesh {
    Mesh { dp_replicate, ..Mesh::ONE }
}

/// A job of replicas, one on each node, that trains past its checkpoint of step 100.
fn training(n: usize) -> Job {
    let mut job = Job::start(replicas(n), n as u32, Schedule { save_steps: 100, last_step: None });
    job.run_until("training", |job| job.running(replicas(n)) && job.step() >= Step(110));
    assert_eq!(job.coordinator.record().checkpoint.step, Step(100));
    job
}

fn difference(step: Step, suspects: Vec<u32>) -> Difference {
    let claim = |rank| Claim { holder: Holder { rank, part: 0 }, value: u64::from(rank) };
    Difference { step, tensor: "w".into(), name: 7, suspects, claims: vec![claim(0), claim(1)] }
}

/// All ranks find this difference in their world.
fn differ(job: &mut Job, found: &Difference) {
    let generation = job.coordinator.record().generation;
    for member in job.members.values_mut() {
        let _ = member.handle_corrupt(generation, found.clone(), "copies of `w` differ");
    }
    while job.deliver() {}
}

fn world_plan(job: &Job) -> &WorldPlan {
    job.coordinator.record().world_plan.as_ref().unwrap()
}

fn resume(job: &mut Job, n: usize, after: Generation) {
    job.run_until("training again", |job| job.running(replicas(n)) && job.coordinator.record().generation > after);
}

#[test]
fn world_after_a_difference_begins_from_the_checkpoint_and_the_suspect_is_replaced() {
    let mut job = training(3);
    let (generation, suspect) = (world_plan(&job).generation, world_plan(&job).assignments[1]);

    differ(&mut job, &difference(Step(115), vec![1]));
    resume(&mut job, 3, generation);

    let next = world_plan(&job);
    assert_eq!(next.base, Version { lineage: next.generation, step: Step(100) });
    assert!(!next.assignments.contains(&suspect), "its process is replaced");
    assert_eq!(next.disputed, [Step(115)]);
    let incident = job.coordinator.status(job.now).timelines.last().unwrap().clone();
    assert_eq!(incident.cause, Cause { culprit: Culprit::Worker(suspect), why: Why::Corrupted });
    assert_eq!(incident.detail.as_deref(), Some("copies of `w` differ"));
}

#[test]
fn state_in_memory_is_not_used_by_a_new_coordinator_either() {
    let mut job = training(2);
    let generation = world_plan(&job).generation;

    differ(&mut job, &difference(Step(115), vec![]));
    job.succeed();
    resume(&mut job, 2, generation);

    assert!(world_plan(&job).base.lineage > generation);
    assert!(job.coordinator.record().corrupt >= generation);
}

#[test]
fn next_failure_of_the_repeated_world_uses_its_memory_again() {
    let mut job = training(2);
    let generation = world_plan(&job).generation;
    differ(&mut job, &difference(Step(115), vec![]));
    resume(&mut job, 2, generation);
    let (repeated, victim) = (world_plan(&job).generation, world_plan(&job).assignments[0]);
    job.run_until("a step", |job| job.step() >= Step(103));

    job.kill(victim);
    resume(&mut job, 2, repeated);

    assert_eq!(world_plan(&job).base.lineage, repeated);
}

#[test]
fn repeated_step_names_the_rank_without_another_return_to_the_checkpoint() {
    let mut job = training(2);
    let generation = world_plan(&job).generation;
    differ(&mut job, &difference(Step(115), vec![]));
    resume(&mut job, 2, generation);
    let (repeated, suspect) = (world_plan(&job).generation, world_plan(&job).assignments[1]);
    assert_eq!(job.coordinator.record().disputes.len(), 1);

    let settled = Settled { step: Step(115), suspects: vec![1] };
    for member in job.members.values_mut() {
        member.handle_settled(repeated, settled.clone()).unwrap();
    }
    while job.deliver() {}
    resume(&mut job, 2, repeated);

    let next = world_plan(&job);
    assert_eq!(next.base.lineage, repeated);
    assert!(!next.assignments.contains(&suspect), "its process is replaced");
    assert_eq!((&next.disputed, &job.coordinator.record().disputes), (&vec![], &vec![]));
    let named = Cause { culprit: Culprit::Worker(suspect), why: Why::Corrupted };
    assert!(job.coordinator.status(job.now).timelines.iter().any(|incident| incident.cause == named));
}

#[test]
fn difference_that_comes_back_three_times_after_one_step_ends_the_job() {
    let mut job = training(2);
    for _ in 0..2 {
        let generation = world_plan(&job).generation;
        differ(&mut job, &difference(Step(115), vec![]));
        resume(&mut job, 2, generation);
    }

    differ(&mut job, &difference(Step(115), vec![]));
    job.run_until("the end", |job| job.ended.is_some());

    let Some(Ending::Failed(reason)) = &job.ended else { panic!("{:?}", job.ended) };
    assert!(reason.starts_with("copies of `w` differed after step 115 3 times"), "{reason}");
    assert_eq!(job.coordinator.record().checkpoint.step, Step(100), "corrupt state is not saved");
}

// COORDINATOR-18
#[test]
fn step_that_is_not_finite_is_repeated_from_memory_and_the_suspect_replaced() {
    for suspect in [None, Some(1)] {
        let mut job = training(2);
        let (before, at) = (world_plan(&job).clone(), job.step());
        let found = NotFinite { step: at.next(), suspect };

        for member in job.members.values_mut() {
            member.handle_not_finite(before.generation, found.clone(), "the loss is not finite").unwrap();
        }
        while job.deliver() {}
        resume(&mut job, 2, before.generation);

        let next = world_plan(&job);
        assert_eq!((next.base.lineage, &next.disputed), (before.base.lineage, &vec![at.next()]), "no step is lost");
        assert!(next.base.step >= at);
        assert_eq!(next.assignments.contains(&before.assignments[1]), suspect.is_none());
        let culprit = suspect.map_or(Culprit::Job, |rank| Culprit::Worker(before.assignments[rank as usize]));
        let found = Cause { culprit, why: Why::NotFinite };
        assert!(job.coordinator.status(job.now).timelines.iter().any(|incident| incident.cause == found));
    }
}

// COORDINATOR-13
#[test]
fn difference_that_only_a_member_without_a_rank_reports_is_ignored() {
    let mut job = Job::start(replicas(2), 3, Schedule::default());
    job.run_until("training", |job| job.running(replicas(2)) && job.step() >= Step(5));
    let generation = job.coordinator.record().generation;
    let has_rank = |worker: &&Worker| job.coordinator.assignments.contains(worker);
    let spare = *job.members.keys().find(|worker| !has_rank(worker)).unwrap();

    let corrupt = Some(Box::new(difference(Step(5), vec![0])));
    let broken =
        Some(crate::elastic::message::Broken { lost: None, corrupt, not_finite: None, reason: "differs".into() });
    let report = MemberReport { broken, ..job.members[&spare].report() };
    job.nodes.get_mut(&spare.member.node).unwrap().handle_status_report(job.now, report);
    while job.deliver() {}
    job.run_for(50);

    assert_eq!((&job.ended, job.coordinator.record().generation), (&None, generation));
}
