//! The end of a supervisor: its job is over, or its node leaves.

use super::tests::{drain, reports, started, stop};
use super::*;

// SUPERVISOR-11
#[test]
fn supervisor_that_no_coordinator_has_told_of_the_end_ends_with_the_job() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(now, JobId(1), NodeId(0), Incarnation(5), 1, Timing::default());
    let Some(Command::Spawn(worker)) = supervisor.poll_command() else { panic!("nothing is started") };

    supervisor.handle_over(now);
    supervisor.handle_over(now);

    let kills = drain(&mut supervisor).into_iter().filter(|command| *command == Command::Kill(worker));
    assert_eq!(kills.count(), 1, "a process that is starting holds no state");
    supervisor.handle_exited(now, worker);
    assert_eq!(drain(&mut supervisor).last(), Some(&Command::Shutdown));
}

// SUPERVISOR-11
#[test]
fn drained_node_leaves_at_once_if_no_coordinator_has_told_it_anything() {
    let now = Instant::now();
    let (mut supervisor, worker, _) = started(now);

    supervisor.handle_drain(now);
    supervisor.handle_timeout(now + Timing::default().stop_grace);
    let is_killed = drain(&mut supervisor).contains(&Command::Kill(worker));
    supervisor.handle_exited(now, worker);

    assert!(is_killed);
    assert_eq!(drain(&mut supervisor).last(), Some(&Command::Shutdown));
}

// SUPERVISOR-5
#[test]
fn released_node_kills_its_running_and_starting_processes() {
    let now = Instant::now();
    let mut supervisor = Supervisor::new(now, JobId(1), NodeId(0), Incarnation(5), 1, Timing::default());
    let Some(Command::Spawn(worker)) = supervisor.poll_command() else { panic!("nothing is started") };

    supervisor.handle_desired_state(now, DesiredState { release: Some(Incarnation(4)), ..stop(1, 1, vec![]) }).unwrap();
    assert!(!drain(&mut supervisor).contains(&Command::Kill(worker)), "the release was for the previous boot");
    supervisor.handle_desired_state(now, DesiredState { release: Some(Incarnation(5)), ..stop(1, 1, vec![]) }).unwrap();
    assert!(drain(&mut supervisor).contains(&Command::Kill(worker)));
    let status_report = Member::new(JobId(1), worker, None, Schedule::default()).report();
    supervisor.handle_started(now, status_report);
    assert!(
        drain(&mut supervisor).contains(&Command::Kill(worker)),
        "a process that starts after its kill is killed again"
    );
    supervisor.handle_exited(now, worker);

    let commands = drain(&mut supervisor);
    assert_eq!(commands.last(), Some(&Command::Shutdown));
    assert!(reports(commands)[0].draining);
}

// SUPERVISOR-5
#[test]
fn supervisor_shuts_down_once_its_processes_have_exited_or_been_killed() {
    let now = Instant::now();
    let (mut supervisor, worker, _) = started(now);
    let mut desired_state = stop(1, 1, vec![]);
    desired_state.id.stage = Stage::End;

    supervisor.handle_desired_state(now, desired_state).unwrap();
    let commands = drain(&mut supervisor);
    assert!(matches!(commands[0], Command::Tell(..)) && !commands.contains(&Command::Kill(worker)));
    supervisor.handle_timeout(now + Timing::default().stop_grace);
    assert!(drain(&mut supervisor).contains(&Command::Kill(worker)));
    supervisor.handle_exited(now, worker);

    let commands = drain(&mut supervisor);
    assert_eq!(commands.last(), Some(&Command::Shutdown));
    assert_eq!(reports(commands)[0].members, []);
    assert_eq!(supervisor.poll_timeout(), None);
}
