//! Reports and requests, decoded and passed to the coordinator's machine: a malicious node or operator with a valid
//! certificate must not bring it down.

use super::{Target, as_piece, honest, piece};
use phalanx_actors::operator::Request;
use phalanx_actors::wire::{self, Kind, Message, VERSION};
use phalanx_strategies::elastic::coordinator::{Command, Coordinator};
use phalanx_strategies::elastic::identity::Term;
use phalanx_strategies::elastic::message::{Record, Report};
use phalanx_strategies::elastic::timing::Timing;
use std::time::{Duration, Instant};

pub(super) const TARGET: Target = Target { name: "coordinator", run, seeds };

const REPORT: u8 = 0;
const REQUEST: u8 = 1;
const PERSISTED: u8 = 2;
const N_KINDS: u8 = 4;
/// Events of one run.
const EVENTS_MAX: usize = 64;

/// For any messages, the coordinator keeps running, its desired states can be sent, its records read again, and its status
/// shown.
fn run(mut bytes: &[u8]) {
    let mut now = Instant::now();
    let mut coordinator =
        Coordinator::new(now, honest::JOB, Term(1), Record::default(), honest::policy(), Timing::default());
    for _ in 0..EVENTS_MAX {
        let Some((&kind, rest)) = bytes.split_first() else { break };
        bytes = rest;
        match kind % N_KINDS {
            REPORT => {
                if let Some(report) = decoded::<Report>(piece(&mut bytes)) {
                    let _ = coordinator.handle_report(now, &report);
                }
            }
            REQUEST => {
                if let Some(request) = decoded::<Request>(piece(&mut bytes)) {
                    ask(&mut coordinator, now, request);
                }
            }
            PERSISTED => coordinator.handle_persisted(now, true),
            _ => {
                now += Duration::from_millis(4) * u32::from(kind);
                coordinator.handle_timeout(now);
            }
        }
        while let Some(command) = coordinator.poll_command() {
            match command {
                Command::Send(_, desired_state) => {
                    let frame = wire::encode(&desired_state).expect("a small world fits a frame");
                    assert_eq!(wire::decode(&frame).as_ref(), Ok(&desired_state));
                }
                Command::Persist(record) => record.check().expect("the record is valid"),
                Command::Resumed(_) | Command::Saved(_) | Command::Ended(_) => {}
                Command::ListCheckpoints(listing) => coordinator.handle_listed(now, listing, None),
                Command::Refused(..) | Command::Mixed(..) | Command::NotSaved(_) | Command::Outrun(_) => {}
            }
        }
    }
    let status = coordinator.status(now);
    assert!(status.generation == coordinator.record().generation);
}

fn ask(coordinator: &mut Coordinator, now: Instant, request: Request) {
    match request {
        Request::Status => drop(coordinator.status(now)),
        Request::Drain(node) => drop(coordinator.handle_drain(now, node)),
        Request::DeclareGone(node) => drop(coordinator.handle_gone(now, node)),
        Request::Resize(mesh) => drop(coordinator.handle_resize(now, mesh)),
        Request::Save => coordinator.handle_save(now),
        Request::Stop => coordinator.handle_stop(now),
    }
}

fn decoded<M: Message>(body: &[u8]) -> Option<M> {
    wire::decode(&[&[b'p', b'x', VERSION, M::KIND as u8], body].concat()).ok()
}

fn seeds() -> Vec<Vec<u8>> {
    let body = |message| as_piece(&body_of(message));
    let input = |report: &Report| [vec![REPORT], body(wire::encode(report)), vec![PERSISTED, 3 + N_KINDS, PERSISTED]];
    let reports: Vec<u8> = honest::job().reports.iter().flat_map(input).flatten().collect();
    let sent = |request: Request| [vec![REQUEST], body(wire::encode(&request)), vec![PERSISTED, 255]].concat();
    let requests = [Request::Save, Request::Resize(phalanx_strategies::mesh::Mesh::ONE), Request::Stop].map(sent);
    let half = reports.len() / 2;
    vec![reports.clone(), [&reports[..half], &requests.concat(), &reports[half..]].concat(), requests.concat()]
}

/// The frame without its envelope.
fn body_of(frame: Result<Vec<u8>, wire::WireError>) -> Vec<u8> {
    let frame = frame.expect("the message is short");
    assert!(wire::check(Kind::Report, &frame).is_ok() || wire::check(Kind::Request, &frame).is_ok());
    frame[4..].to_vec()
}
