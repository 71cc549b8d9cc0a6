//! A supervisor whose devices fail, or whose node is refused.

use super::tests::{drain, reports, started, stop};
use super::*;
use crate::elastic::message::Refusal;
use std::time::Duration;

/// A node whose first device has failed, with a running rank on each device but the last `n_free`.
fn with_failed_device(now: Instant, n_devices: u32, n_free: u32) -> (Supervisor, Vec<Worker>) {
    let health = |i: u32| DeviceHealth { id: format!("GPU-{i}"), name: "G".into(), ..DeviceHealth::default() };
    let n_slots = n_devices - n_free;
    let devices = Devices::new((0..n_devices).map(health).collect(), n_slots);
    let supervisor = Supervisor::new(now, JobId(1), NodeId(0), Incarnation(5), n_slots, Timing::default());
    let mut supervisor = supervisor.with_devices(devices, 1);
    let spawned = |command| if let Command::Spawn(worker) = command { Some(worker) } else { None };
    let workers: Vec<Worker> = drain(&mut supervisor).into_iter().filter_map(spawned).collect();
    for worker in &workers {
        supervisor.handle_started(now, Member::new(JobId(1), *worker, None, Schedule::default()).report());
    }
    drain(&mut supervisor);
    supervisor.handle_health(now, vec![DeviceHealth { fault: Some("Xid 79".into()), ..health(0) }]);
    (supervisor, workers)
}

// SUPERVISOR-9
#[test]
fn rank_of_a_failed_device_is_reported_and_killed_and_its_successor_gets_a_free_device() {
    let now = Instant::now();
    let (mut supervisor, workers) = with_failed_device(now, 3, 1);

    let commands = drain(&mut supervisor);
    assert!(!commands.contains(&Command::Kill(workers[0])), "the coordinator names the cause first");
    let report = &reports(commands)[0];
    assert_eq!((report.members[0].device, report.devices[0].fault.as_deref()), (Some(0), Some("Xid 79")));
    supervisor.handle_timeout(now + Timing::default().suspicion);
    let kills = drain(&mut supervisor).into_iter().filter(|command| matches!(command, Command::Kill(_)));
    assert_eq!(kills.collect::<Vec<_>>(), [Command::Kill(workers[0])]);
    supervisor.handle_exited(now, workers[0]);

    let successor = Worker { incarnation: Incarnation(6), ..workers[0] };
    assert!(drain(&mut supervisor).contains(&Command::Spawn(successor)));
    assert_eq!((supervisor.device_of(0), supervisor.device_of(1)), (Some(2), Some(1)));
}

// SUPERVISOR-9
#[test]
fn slot_of_a_failed_device_stays_empty_without_a_free_device() {
    let now = Instant::now();
    let (mut supervisor, workers) = with_failed_device(now, 2, 0);
    let evicts = stop(1, 1, vec![workers[0]]);
    supervisor.handle_desired_state(now, evicts).unwrap();
    supervisor.handle_exited(now, workers[0]);
    supervisor.handle_desired_state(now, stop(1, 2, vec![])).unwrap();
    supervisor.handle_timeout(now + Duration::from_secs(60));

    let commands = drain(&mut supervisor);

    assert!(commands.iter().all(|command| !matches!(command, Command::Spawn(_) | Command::Abandon(_))));
    assert_eq!(reports(commands).last().unwrap().members.len(), 1, "the other rank continues");
}

// SUPERVISOR-10
#[test]
fn node_abandons_the_job_with_its_last_device() {
    let now = Instant::now();
    let (mut supervisor, workers) = with_failed_device(now, 1, 0);

    supervisor.handle_exited(now, workers[0]);

    let commands = drain(&mut supervisor);
    let faults = vec!["G GPU-0: Xid 79".to_owned()];
    assert_eq!(commands.last(), Some(&Command::Abandon(Abandonment::NoDevices(faults))), "{commands:?}");
    assert_eq!(reports(commands).last().unwrap().members, []);
}

// SUPERVISOR-10
#[test]
fn refused_node_kills_its_processes_and_ends_with_the_reason() {
    let now = Instant::now();
    let (mut supervisor, worker, _) = started(now);
    let refused = |boot| {
        let refusal = Refusal { boot: Incarnation(boot), reason: "no GPU".into() };
        DesiredState { refused: Some(refusal), ..stop(1, 1, vec![]) }
    };

    supervisor.handle_desired_state(now, refused(4)).unwrap();
    assert!(!drain(&mut supervisor).contains(&Command::Kill(worker)), "the refusal was for the previous boot");
    supervisor.handle_desired_state(now, refused(5)).unwrap();
    assert!(drain(&mut supervisor).contains(&Command::Kill(worker)));
    supervisor.handle_exited(now, worker);

    let abandon = Command::Abandon(Abandonment::Refused("no GPU".into()));
    assert_eq!(drain(&mut supervisor).last(), Some(&abandon));
}
