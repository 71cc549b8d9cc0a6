//! A stop reaches a job together with drains of its nodes, or with the loss of one: what ends a whole job signals all its processes.

use super::*;

// COORDINATOR-7
#[test]
fn stopped_job_whose_nodes_all_drain_ends_saved_without_another_world() {
    for is_stopped_first in [true, false] {
        let mut job = Job::start(shards(2), 2, Schedule::default());
        job.run_until("training", |job| job.step() >= Step(5));
        let (now, generation) = (job.now, job.coordinator.record().generation);

        // What ends a whole job signals the coordinator and all nodes at about the same time.
        if is_stopped_first {
            job.coordinator.handle_stop(now);
        }
        job.nodes.values_mut().for_each(|supervisor| supervisor.handle_drain(now));
        if !is_stopped_first {
            job.coordinator.handle_stop(now);
        }
        job.run_until("the end", |job| job.nodes.is_empty());

        let record = job.coordinator.record();
        assert_eq!((&job.ended, record.checkpoint.step), (&Some(Ending::Finished), job.committed));
        assert_eq!(record.generation, generation, "no world is formed to move state");
    }
}

// COORDINATOR-7
#[test]
fn stopped_job_saves_at_once_although_a_member_is_lost_and_may_be_replaced() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    job.coordinator.policy.replace_patience = Duration::from_secs(3600);
    let begin = job.now;

    job.coordinator.handle_stop(job.now);
    let lost = job.worker_on(1);
    job.kill(lost);
    job.nodes.remove(&lost.member.node);
    job.run_until("the end", |job| job.ended.is_some());

    assert_eq!(job.ended, Some(Ending::Finished));
    assert!(job.coordinator.record().checkpoint.step >= job.committed, "no committed step is lost");
    assert!(job.now < begin + Duration::from_secs(60), "{:?}", job.now - begin);
}
