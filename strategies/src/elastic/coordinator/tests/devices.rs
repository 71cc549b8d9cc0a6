//! Failing devices, and nodes whose devices differ from those of the job.

use super::*;

fn device(i: u32, model: &str) -> DeviceHealth {
    DeviceHealth { id: format!("GPU-{i}"), name: model.to_owned(), ..DeviceHealth::default() }
}

/// A job of two nodes with two devices each, of which a rank uses the first.
fn job_on_devices() -> Job {
    let mut job = Job::start(shards(2), 0, Schedule::default());
    (0..2).for_each(|node| start_node(&mut job, node, &["H100", "H100"]));
    job.run_until("training", |job| job.step() >= Step(5));
    job
}

fn start_node(job: &mut Job, node: u32, models: &[&str]) {
    job.start_node(node);
    let health = (0..).zip(models).map(|(i, model)| device(i, model)).collect();
    let supervisor = job.nodes.remove(&NodeId(node)).unwrap();
    job.nodes.insert(NodeId(node), supervisor.with_devices(Devices::new(health, 1), 1));
}

#[test]
fn rank_of_a_failed_device_is_replaced_on_another_device_and_the_incident_names_the_fault() {
    let mut job = job_on_devices();
    let failed = DeviceHealth { fault: Some("Xid 79".into()), ..device(0, "H100") };

    job.nodes.get_mut(&NodeId(1)).unwrap().handle_health(job.now, vec![failed]);
    job.run_until("the next world", |job| job.coordinator.record().generation > Generation(1));
    job.run_until("recovery", |job| job.running(shards(2)));

    let status = job.coordinator.status(job.now);
    let incident = status.timelines.iter().find(|incident| incident.cause.why == Why::DeviceFailed).unwrap();
    assert!(matches!(incident.cause.culprit, Culprit::Worker(worker) if worker.member.node == NodeId(1)));
    assert_eq!(incident.detail.as_deref(), Some("H100 GPU-0: Xid 79"));
    assert_eq!(status.nodes[1].ranks[0].device, Some(1));
    assert_eq!(status.nodes[1].devices[0].fault.as_deref(), Some("Xid 79"));
}

#[test]
fn copies_are_compared_for_a_checkpoint_soon_after_the_device_of_a_rank_made_memory_errors() {
    let mut job = job_on_devices();
    let errors = |i, n| DeviceHealth { n_uncorrected: Some(n), ..device(i, "H100") };
    let report = |job: &mut Job, health| {
        job.nodes.get_mut(&NodeId(1)).unwrap().handle_health(job.now, vec![health]);
        job.run_for(300);
        job.coordinator.record().n_saves
    };

    // The count may be older than the job, and no rank uses device 1.
    let n_saves = [errors(0, 3), errors(1, 0), errors(1, 2), errors(0, 3)].map(|health| report(&mut job, health));
    assert_eq!(n_saves, [0; 4]);
    assert_eq!([errors(0, 4), errors(0, 4)].map(|health| report(&mut job, health)), [1, 1]);
    assert_eq!(job.coordinator.record().generation, Generation(1), "the job trains on");
}

#[test]
fn world_shrinks_when_a_node_has_no_other_device() {
    let mut job = job_on_devices();
    let failed = [0, 1].map(|i| DeviceHealth { fault: Some("Xid 48".into()), ..device(i, "H100") });

    job.nodes.get_mut(&NodeId(1)).unwrap().handle_health(job.now, failed.to_vec());
    job.run_until("a smaller world", |job| job.running(shards(1)));

    assert!(!job.nodes.contains_key(&NodeId(1)), "the node has left");
    job.run_for(500);
    assert!(job.running(shards(1)));
}

// COORDINATOR-11
#[test]
fn node_without_devices_is_refused_by_a_job_on_devices_also_after_a_succession() {
    let mut job = job_on_devices();
    for node in [2, 3] {
        start_node(&mut job, node, &[]);

        job.run_until("the refusal", |job| !job.nodes.contains_key(&NodeId(node)));

        assert!(job.coordinator.status(job.now).nodes.iter().all(|other| other.node != NodeId(node)));
        job.succeed();
    }
    job.run_until("training", |job| job.running(shards(2)));
}

// COORDINATOR-11
#[test]
fn first_node_decides_also_for_the_next_coordinator_before_there_is_a_world() {
    let mut job = Job::start(shards(2), 0, Schedule::default());
    // One node is too few for any world.
    job.policy.dp_shard_min = 2;
    job.succeed();
    start_node(&mut job, 0, &["H100"]);
    job.run_for(5);
    assert_eq!(job.coordinator.record().world_plan, None);
    job.nodes.clear();
    job.succeed();

    start_node(&mut job, 1, &[]);
    job.run_until("the refusal", |job| !job.nodes.contains_key(&NodeId(1)));

    assert_eq!(job.coordinator.record().compute, Some(Compute::Devices("H100".into())));
}

// COORDINATOR-11
#[test]
fn node_with_devices_is_refused_by_a_job_on_processors() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    start_node(&mut job, 2, &["H100"]);

    job.run_until("the refusal", |job| !job.nodes.contains_key(&NodeId(2)));

    let (_, reason) = job.refused.last().unwrap();
    assert!(reason.contains("node 2 computes on GPUs (H100) and the ranks of this job on processors"), "{reason}");
}

// COORDINATOR-11
#[test]
fn device_of_another_model_is_refused_only_if_results_must_be_reproducible() {
    for one_model in [true, false] {
        let mut job = Job::start(shards(2), 0, Schedule::default());
        job.policy.one_model = one_model;
        let (policy, timing) = (job.policy, Timing::default());
        job.coordinator = Coordinator::new(job.now, JobId(1), Term(1), Record::default(), policy, timing);
        start_node(&mut job, 0, &["H100"]);
        job.run_for(5);
        start_node(&mut job, 1, &["A100"]);

        job.run_for(100);

        assert_eq!(job.nodes.contains_key(&NodeId(1)), !one_model);
        assert_eq!((job.refused.len(), job.mixed.len()), if one_model { (1, 0) } else { (0, 1) });
        let (_, text) = job.refused.first().or(job.mixed.first()).unwrap();
        assert!(text.starts_with("node 1 has a GPU of another model (A100) than the job (H100)"), "{text}");
    }
}
