//! Replacement of a rank by a member that is ready.

use super::*;

// COORDINATOR-3
#[test]
fn spare_that_acknowledges_after_the_survivors_takes_the_rank_at_once() {
    let mut job = Job::start(Mesh { dp_replicate: 2, ..Mesh::ONE }, 3, Schedule::default());
    job.coordinator.policy.replace_patience = Duration::from_secs(1);
    job.run_until("training", |job| job.step() >= Step(5) && job.members.len() == 3);
    let assigned = |job: &Job| job.coordinator.record().world_plan.clone().unwrap().assignments.clone();
    // Nodes acknowledge in the order of their numbers.
    let (spare, before) = (job.worker_on(2), assigned(&job));
    assert!(!before.contains(&spare), "{before:?}");

    job.failed_starts = true;
    job.kill(before[0]);
    let killed = job.now;
    job.run_until("another world", |job| assigned(job) != before);

    assert!(assigned(&job).contains(&spare));
    assert_eq!(job.now, killed + TICK, "no time passes after the last acknowledgement");
}
