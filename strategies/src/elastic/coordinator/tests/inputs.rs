//! Nodes whose inputs differ from those of the job.

use super::*;
use crate::elastic::inputs::Input;

fn input(value: &str) -> Vec<Input> {
    vec![
        Input { name: "tokenizer".into(), value: "1".into() },
        Input { name: "`datasets[0]`".into(), value: value.into() },
    ]
}

fn start_node(job: &mut Job, node: u32, value: &str) {
    job.start_node(node);
    let supervisor = job.nodes.remove(&NodeId(node)).unwrap();
    job.nodes.insert(NodeId(node), supervisor.with_inputs(input(value)));
}

// COORDINATOR-15
#[test]
fn node_with_other_data_is_refused_also_after_a_succession_and_the_job_goes_on() {
    let mut job = Job::start(shards(2), 0, Schedule::default());
    (0..2).for_each(|node| start_node(&mut job, node, "a"));
    job.run_until("training", |job| job.step() >= Step(5));
    for node in [2, 3] {
        let step = job.step();
        start_node(&mut job, node, "b");

        job.run_until("the refusal", |job| !job.nodes.contains_key(&NodeId(node)));

        let (_, reason) = job.refused.last().unwrap();
        assert!(reason.starts_with(&format!("node {node} has another `datasets[0]`: b instead of a")), "{reason}");
        assert!(job.coordinator.status(job.now).nodes.iter().all(|other| other.node != NodeId(node)));
        job.run_until("further steps", |job| job.step() > Step(step.0 + 5));
        job.succeed();
    }
    job.run_until("training", |job| job.running(shards(2)));
}

// COORDINATOR-15
#[test]
fn inputs_of_the_first_node_decide_also_for_the_next_coordinator_before_there_is_a_world() {
    let mut job = Job::start(shards(2), 0, Schedule::default());
    // One node is too few for any world.
    job.policy.dp_shard_min = 2;
    job.succeed();
    start_node(&mut job, 0, "a");
    job.run_for(5);
    assert_eq!(job.coordinator.record().world_plan, None);
    job.nodes.clear();
    job.succeed();

    start_node(&mut job, 1, "b");
    job.run_until("the refusal", |job| !job.nodes.contains_key(&NodeId(1)));

    assert_eq!(job.coordinator.record().inputs, Some(input("a")));
}

// COORDINATOR-15
#[test]
fn job_of_one_machine_is_later_led_over_nodes_that_name_their_inputs() {
    let mut job = Job::start(shards(2), 2, Schedule::default());
    job.run_until("training", |job| job.step() >= Step(5));
    assert_eq!(job.coordinator.record().inputs, None);
    job.nodes.clear();
    job.members.clear();
    job.succeed();

    (2..4).for_each(|node| start_node(&mut job, node, "a"));
    job.run_until("the decision", |job| job.coordinator.record().inputs.is_some());

    assert_eq!((&job.refused, job.coordinator.record().inputs.clone()), (&vec![], Some(input("a"))));
}

// COORDINATOR-16
#[test]
fn report_of_an_earlier_start_of_a_node_with_other_data_changes_nothing() {
    let mut job = Job::start(shards(2), 0, Schedule::default());
    (0..2).for_each(|node| start_node(&mut job, node, "a"));
    job.run_until("training", |job| job.step() >= Step(5));
    let mut earlier =
        Supervisor::new(job.now, JobId(1), NodeId(1), Incarnation(0), 1, Timing::default()).with_inputs(input("b"));
    earlier.handle_timeout(job.now);
    let sent = std::iter::from_fn(|| earlier.poll_command());
    let report = sent.filter_map(|c| if let supervisor::Command::Send(report) = c { Some(report) } else { None });
    let report = report.last().unwrap();
    let mut expected = job.coordinator.clone();
    expected.handle_timeout(job.now);

    let result = job.coordinator.handle_report(job.now, &report);

    assert!(matches!(result, Err(Stale::Incarnation { .. })), "{result:?}");
    assert_eq!(format!("{:?}", job.coordinator), format!("{expected:?}"));
}

// COORDINATOR-15
#[test]
fn refused_restart_of_a_node_proves_that_the_world_on_it_has_ended() {
    let mut job = Job::start(shards(1), 0, Schedule::default());
    (0..2).for_each(|node| start_node(&mut job, node, "a"));
    job.run_until("training", |job| job.step() >= Step(5));
    let of_world = |job: &Job| job.coordinator.record().world_plan.as_ref().unwrap().assignments[0].member.node;
    let node = of_world(&job);
    job.members.retain(|worker, _| worker.member.node != node);

    let boot = Incarnation(1_000_000);
    let restarted = Supervisor::new(job.now, JobId(1), node, boot, 1, Timing::default()).with_inputs(input("b"));
    job.nodes.insert(node, restarted);
    let began = job.now;
    job.run_until("training on the other node", |job| job.running(shards(1)) && of_world(job) != node);

    assert!(job.now - began < Timing::default().detection_time, "{:?}", job.now - began);
    assert_eq!(job.refused.len(), 1);
    let cause = job.coordinator.timelines.back().unwrap().cause;
    assert_eq!(cause.why, Why::Died);
}
