//! Desired states, decoded and passed to the machines of a node and of a rank.

use super::{Target, as_piece, honest, piece};
use phalanx_actors::wire::{self, Kind, VERSION};
use phalanx_strategies::elastic::identity::{Incarnation, MemberId, NodeId, Worker};
use phalanx_strategies::elastic::member::{self, Member};
use phalanx_strategies::elastic::message::DesiredState;
use phalanx_strategies::elastic::supervisor::{Command, Supervisor};
use phalanx_strategies::elastic::timing::Timing;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub(super) const TARGET: Target = Target { name: "member", run, seeds };

/// Desired states of one run.
const DESIRED_STATES_MAX: usize = 32;

/// For any desired states, both machines keep running, and the node's reports can be sent.
fn run(mut bytes: &[u8]) {
    let mut now = Instant::now();
    let (node, boot) = (NodeId(0), Incarnation(1_000));
    let worker = Worker { member: MemberId { node, slot: 0 }, incarnation: boot };
    let mut supervisor = Supervisor::new(now, honest::JOB, node, boot, 1, Timing::default());
    let mut member = Member::new(honest::JOB, worker, None, honest::SCHEDULE);
    supervisor.handle_started(now, member.report());
    let mut votes = VecDeque::new();
    for _ in 0..DESIRED_STATES_MAX {
        if bytes.is_empty() {
            break;
        }
        now += Duration::from_millis(20);
        let envelope = [b'p', b'x', VERSION, Kind::DesiredState as u8];
        if let Ok(desired_state) = wire::decode::<DesiredState>(&[&envelope, piece(&mut bytes)].concat()) {
            let _ = supervisor.handle_desired_state(now, desired_state);
        }
        supervisor.handle_timeout(now);
        while let Some(command) = supervisor.poll_command() {
            match command {
                Command::Send(report) => {
                    let frame = wire::encode(&report).expect("a report of one member fits a frame");
                    assert_eq!(wire::decode(&frame), Ok(report));
                }
                Command::Tell(_, desired_state) => drop(member.handle_desired_state(&desired_state)),
                Command::Spawn(_)
                | Command::Examine(_)
                | Command::Kill(_)
                | Command::Shutdown
                | Command::Abandon(_) => {}
            }
        }
        while let Some(command) = member.poll_command() {
            honest::perform(&mut member, command, &mut votes);
        }
        if let Some(member::Command::Vote(vote, requests)) = votes.pop_front() {
            let _ = member.handle_committed(vote.generation, vote.step, requests);
        }
        supervisor.handle_status_report(now, member.report());
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let desired_states = honest::job().desired_states;
    let bodies: Vec<Vec<u8>> = desired_states
        .iter()
        .map(|desired_state| as_piece(&wire::encode(desired_state).expect("the message is short")[4..]))
        .collect();
    bodies.chunks(8).take(12).map(<[_]>::concat).chain([bodies.iter().take(64).flatten().copied().collect()]).collect()
}
