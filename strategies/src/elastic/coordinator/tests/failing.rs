//! What is committed is saved before a job fails (`COORDINATOR-12`).

use super::*;

fn reason(job: &Job) -> &str {
    let Some(Ending::Failed(reason)) = &job.ended else { panic!("{:?}", job.ended) };
    reason
}

fn fail(job: &mut Job, worker: Worker, reason: &str) {
    job.members.get_mut(&worker).unwrap().handle_failed(reason);
}

// COORDINATOR-12
#[test]
fn committed_steps_are_saved_before_a_failure_of_one_or_of_all_members_ends_the_job() {
    for n_failed in [1, 2] {
        let mut job = Job::start(shards(2), 2, Schedule::default());
        job.run_until("training", |job| job.step() >= Step(5));

        (0..n_failed).for_each(|node| {
            let worker = job.worker_on(node);
            fail(&mut job, worker, "the loss is not finite");
        });
        job.run_until("the end", |job| job.nodes.is_empty());

        let committed = job.committed;
        assert!(reason(&job).ends_with("the loss is not finite"), "{}", reason(&job));
        assert_eq!(job.coordinator.record().checkpoint.step, committed, "{n_failed} members failed");
        assert!(committed >= Step(5));
    }
}

// COORDINATOR-12
#[test]
fn survivors_save_their_state_in_a_smaller_world_than_the_policy_allows_to_train() {
    let two = Mesh { dp_replicate: 2, ..Mesh::ONE };
    let mut job = Job::start(two, 2, Schedule::default());
    job.coordinator.policy.dp_replicate_min = 2;
    job.run_until("training", |job| job.step() >= Step(5));

    job.failed_starts = true;
    let lost = job.worker_on(1);
    job.kill(lost);
    job.run_until("the end", |job| job.nodes.is_empty());

    assert!(reason(&job).contains("ended before their first status report"), "{}", reason(&job));
    assert_eq!(job.coordinator.record().checkpoint.step, job.committed);
}

// COORDINATOR-12
#[test]
fn state_is_saved_before_too_many_crashes_end_the_job() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));

    job.crashing = Some(NodeId(0));
    job.run_until("the job's failure", |job| job.ended.is_some());

    assert!(reason(&job).contains(" crashes in a row"), "{}", reason(&job));
    assert_eq!(job.coordinator.record().checkpoint.step, job.committed);
}

// COORDINATOR-12
#[test]
fn failure_of_the_last_save_ends_the_job_with_the_first_reason() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let workers = [job.worker_on(0), job.worker_on(1)];

    fail(&mut job, workers[0], "no space left on the disk");
    job.refuses_to_save = true;
    job.run_until("the end", |job| job.nodes.is_empty());

    assert!(reason(&job).ends_with("no space left on the disk"), "{}", reason(&job));
    assert_eq!(job.coordinator.record().checkpoint.step, Step(0));
}

// COORDINATOR-12
#[test]
fn job_without_state_beyond_its_checkpoint_fails_at_once() {
    let mut job = Job::start(shards(2), 2, Schedule { save_steps: 5, last_step: None });
    job.run_until("a checkpoint", |job| job.coordinator.record().checkpoint.step >= Step(5));
    job.policy.shadows = false;
    let workers = [job.worker_on(0), job.worker_on(1)];

    job.failed_starts = true;
    workers.into_iter().for_each(|worker| job.kill(worker));
    let before = job.coordinator.record().checkpoint;
    job.run_until("the end", |job| job.nodes.is_empty());

    assert!(reason(&job).contains("ended before their first status report"), "{}", reason(&job));
    assert_eq!(job.coordinator.record().checkpoint, before);
}

/// A job whose last save fails while the store takes no record that `is_refused`.
fn failing_in_silence(is_refused: fn(&Record) -> bool) -> Job {
    let mut job = Job::start(shards(2), 2, Schedule { save_steps: 0, last_step: Some(Step(20)) });
    (job.refuses_to_save, job.refuses_record) = (true, is_refused);
    job.run_until("a record that waits", |job| job.coordinator.writing.as_ref().is_some_and(|(r, _)| is_refused(r)));
    job.refuses_record = |_| false;
    job
}

// COORDINATOR-23
#[test]
fn save_that_failed_while_the_store_was_silent_is_done_again_once_it_answers() {
    for lease_is_first in [false, true] {
        let mut job = failing_in_silence(|record| record.failing.is_some());

        job.refuses_to_save = false;
        if lease_is_first {
            job.coordinator.handle_store_back(job.now);
            job.coordinator.handle_persisted(job.now, true);
        } else {
            job.coordinator.handle_persisted(job.now, true);
            job.coordinator.handle_store_back(job.now);
        }
        job.run_until("the end", |job| job.nodes.is_empty());

        assert_eq!(job.ended, Some(Ending::Finished));
        assert_eq!(job.coordinator.record().checkpoint.step, Step(20));
    }
}

// COORDINATOR-23
#[test]
fn ending_in_failure_that_is_not_durable_is_withdrawn_once_the_store_answers() {
    let mut job = failing_in_silence(|record| record.ending.is_some());
    let (ending, _) = job.coordinator.writing.clone().unwrap();

    job.refuses_to_save = false;
    job.coordinator.handle_store_back(job.now);
    let awaits = job.coordinator.awaits(&ending);
    job.run_until("the end", |job| job.nodes.is_empty());

    assert!(!awaits, "the ending has no effect");
    assert_eq!(job.ended, Some(Ending::Finished));
    assert_eq!(job.coordinator.record().checkpoint.step, Step(20));
}

// COORDINATOR-23
#[test]
fn failure_that_returns_after_it_was_withdrawn_ends_the_job() {
    for members_die in [false, true] {
        let mut job = failing_in_silence(|record| record.failing.is_some());
        let workers = [job.worker_on(0), job.worker_on(1)];

        job.coordinator.handle_persisted(job.now, true);
        job.coordinator.handle_store_back(job.now);
        job.failed_starts = members_die;
        workers.into_iter().filter(|_| members_die).for_each(|worker| job.kill(worker));
        job.run_until("the end", |job| job.nodes.is_empty());

        assert!(!reason(&job).is_empty());
        assert_eq!(job.coordinator.record().checkpoint.step, Step(0));
    }
}

// COORDINATOR-12
#[test]
fn next_coordinator_completes_the_last_save() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    let worker = job.worker_on(0);

    job.stuck = true;
    fail(&mut job, worker, "the loss is not finite");
    job.run_until("a durable reason", |job| job.coordinator.record().failing.is_some());
    job.stuck = false;
    job.succeed();
    job.run_until("the end", |job| job.nodes.is_empty());

    assert!(reason(&job).ends_with("the loss is not finite"), "{}", reason(&job));
    assert_eq!(job.coordinator.record().checkpoint.step, job.committed);
}
