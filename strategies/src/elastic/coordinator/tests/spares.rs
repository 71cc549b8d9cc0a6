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

const REPLICAS: Mesh = Mesh { dp_replicate: 2, ..Mesh::ONE };
const TENSORS: Mesh = Mesh { tp: 2, ..Mesh::ONE };

/// A node with two devices, and a third slot that shares the first of them; trains on both.
fn job_with_a_spare_on_a_device(wanted: Mesh) -> Job {
    let mut job = Job::start(wanted, 0, Schedule::default());
    job.coordinator.policy.replace_patience = Duration::from_secs(1);
    let boot = Incarnation(1_000);
    let device = |i| DeviceHealth { id: format!("GPU-{i}"), ..DeviceHealth::default() };
    let supervisor = Supervisor::new(job.now, JobId(1), NodeId(0), boot, 3, Timing::default());
    job.nodes.insert(NodeId(0), supervisor.with_devices(Devices::new([0, 1].map(device).into(), 3), 1));
    job.run_until("training", |job| job.step() >= Step(5) && job.members.len() == 3);
    assert_eq!(job.slots_of_world(), [0, 1]);
    job
}

impl Job {
    fn slots_of_world(&self) -> Vec<u32> {
        let world_plan = self.coordinator.record().world_plan.clone().unwrap();
        world_plan.assignments.iter().map(|worker| worker.member.slot).collect()
    }

    fn kill_in(&mut self, slot: u32) {
        let worker = *self.members.keys().find(|worker| worker.member.slot == slot).unwrap();
        self.kill(worker);
    }
}

#[test]
fn spare_takes_the_rank_of_its_device() {
    let mut job = job_with_a_spare_on_a_device(REPLICAS);

    job.failed_starts = true;
    job.kill_in(0);
    job.tick();

    assert_eq!(job.slots_of_world(), [2, 1]);
}

#[test]
fn rank_of_another_device_is_left_to_its_successor_there() {
    let mut job = job_with_a_spare_on_a_device(REPLICAS);
    let generation = job.coordinator.record().generation;

    job.failed_starts = true;
    job.kill_in(1);
    job.run_for(20);
    let meanwhile = job.coordinator.activity();
    job.failed_starts = false;
    job.run_until("recovery", |job| job.running(REPLICAS));

    assert_eq!(meanwhile, Activity::Regrouping);
    assert_eq!(job.slots_of_world(), [0, 1]);
    assert_eq!(job.coordinator.record().generation, generation.next(), "no world was formed meanwhile");
}

#[test]
fn spare_takes_a_rank_of_another_device_only_if_replacements_have_had_their_time_and_no_smaller_world_exists() {
    for (wanted, then, slots) in [(REPLICAS, Mesh::ONE, vec![0]), (TENSORS, TENSORS, vec![0, 2])] {
        let mut job = job_with_a_spare_on_a_device(wanted);

        job.failed_starts = true;
        job.kill_in(1);
        job.run_until("recovery", |job| job.running(then) && job.slots_of_world() == slots);

        let timeline = job.coordinator.timelines.back().unwrap();
        assert!(timeline.total() >= Duration::from_secs(1), "{timeline}");
    }
}

// COORDINATOR-10
#[test]
fn world_does_not_grow_onto_a_device_that_has_its_share_of_ranks() {
    let mut job = job_with_a_spare_on_a_device(REPLICAS);
    job.coordinator.policy.replace_patience = Duration::from_millis(1);
    job.failed_starts = true;
    job.kill_in(1);
    job.kill_in(2);
    job.run_until("a smaller world", |job| job.running(Mesh::ONE));
    job.coordinator.policy.replace_patience = Duration::from_secs(1);
    let generation = job.coordinator.record().generation;

    job.failed_starts = false;
    job.run_until("the other processes", |job| job.members.len() == 3);
    job.run_until("the larger world", |job| job.running(REPLICAS));

    assert_eq!(job.slots_of_world(), [0, 1]);
    assert_eq!(job.coordinator.record().generation, generation.next());
}
