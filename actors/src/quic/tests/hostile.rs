//! Hostile peers: the coordinator rejects each with one log line and serves its members undisturbed.

use super::fixture::{
    Coordinator, HOUR, Log, Machine, connect, desired_state, dial, next_desired_state, node_and_boot, report, until,
    wait,
};
use crate::quic::accept::UNKNOWN_MAX;
use crate::quic::link::Link;
use crate::transport::{Downlink, Inbound, Uplink};
use crate::trust::authority::Authority;
use crate::trust::credential::{Credential, Grant};
use crate::trust::name::Role;
use crate::trust::tls;
use crate::trust::validity::Validity;
use crate::wire::{self, Kind};
use bytes::Bytes;
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId};
use phalanx_strategies::elastic::message::{DesiredState, Report};
use quinn::ConnectionError;
use std::net::UdpSocket;
use std::path::Path;
use std::time::SystemTime;
use tokio::sync::mpsc::Receiver;

/// A well-behaved node beside the hostile one, which must not affect it.
struct Witness {
    _machine: Machine,
    link: Link,
    desired_states: Receiver<DesiredState>,
    credential: Credential,
}

impl Witness {
    fn new(coordinator: &mut Coordinator) -> Witness {
        let machine = Machine::new();
        let credential = machine.enrol(&coordinator.invite()).unwrap();
        let (link, desired_states) = machine.link(coordinator.addresses(), credential.clone());
        assert_eq!(coordinator.connected(), node_and_boot(&credential));
        Witness { _machine: machine, link, desired_states, credential }
    }

    /// Checks that the coordinator still serves the witness.
    fn check(&mut self, coordinator: &mut Coordinator) {
        self.link.news(&report(&self.credential, 99)).unwrap();
        until("the witness's report", || (coordinator.report() == report(&self.credential, 99)).then_some(()));
        coordinator.listener.send_desired_state(node_and_boot(&self.credential).0, &desired_state(99)).unwrap();
        assert_eq!(next_desired_state(&mut self.desired_states), desired_state(99));
    }
}

/// A credential issued by the coordinator's own authority.
fn issued(coordinator: &Coordinator, role: Role, validity: Validity) -> Credential {
    let authority = Authority::open(coordinator.dir.path(), super::fixture::JOB).unwrap();
    authority.credential(role, validity).unwrap()
}

fn valid() -> Validity {
    Validity::starting(SystemTime::now(), HOUR)
}

const INTRUDER: Role = Role::Node { node: NodeId(77), boot: Incarnation(1) };

/// Connects, runs `act`, and returns why the coordinator closed the connection.
fn provoke(
    coordinator: &Coordinator,
    credential: &Credential,
    act: impl AsyncFnOnce(&quinn::Connection),
) -> ConnectionError {
    wait(async {
        let connection = connect(&coordinator.addresses(), credential).await.unwrap();
        act(&connection).await;
        connection.closed().await
    })
}

async fn send(connection: &quinn::Connection, bytes: &[u8]) {
    let mut stream = connection.open_uni().await.unwrap();
    // The coordinator may stop reading before the end.
    let _ = stream.write_all(bytes).await;
    let _ = stream.finish();
}

/// Makes the frame that a node sends.
type Frame = fn(&Credential) -> Vec<u8>;

fn changed(node: &Credential, change: impl FnOnce(&mut Report)) -> Vec<u8> {
    let mut report = report(node, 1);
    change(&mut report);
    wire::encode(&report).unwrap()
}

// QUIC-4
#[test]
fn protocol_violation_ends_its_connection_with_one_log_line() {
    let cases: [(&str, Frame, &str); 9] = [
        ("garbage", |_| b"garbage".to_vec(), "begins with"),
        ("nothing", |_| Vec::new(), "less than an envelope"),
        ("oversized", |_| vec![b'p'; (1 << 20) + 1], "of at most 1048576 bytes, found more"),
        ("truncated", |node| changed(node, |_| {})[..8].to_vec(), "malformed"),
        ("trailing", |node| [changed(node, |_| {}), vec![0]].concat(), "bytes after it"),
        ("of another node", |node| changed(node, |report| report.node = NodeId(0)), "its certificate is for"),
        ("of another boot", |node| changed(node, |report| report.boot = Incarnation(2)), "its certificate is for"),
        ("of another job", |node| changed(node, |report| report.job = JobId(8)), "its certificate is for"),
        ("a desired state", |_| wire::encode(&desired_state(1)).unwrap(), "expected a report (kind 1), found kind 2"),
    ];
    for (case, frame, why) in cases {
        let (log, _guard) = Log::start();
        let mut coordinator = Coordinator::new();
        let mut witness = Witness::new(&mut coordinator);
        let credential = issued(&coordinator, INTRUDER, valid());
        let frame = frame(&credential);

        let reason = provoke(&coordinator, &credential, async |connection| send(connection, &frame).await);

        assert!(reason.to_string().contains(why), "{case}: {reason}");
        assert!(log.refusal().contains(why), "{case}");
        let reports = coordinator.drain().into_iter().any(|e| matches!(e, Inbound::Report(_) | Inbound::Heartbeats(_)));
        assert!(!reports, "{case} was taken for a report");
        witness.check(&mut coordinator);
    }
}

// QUIC-4
#[test]
fn invalid_datagram_ends_its_connection_with_one_log_line() {
    let (log, _guard) = Log::start();
    let mut coordinator = Coordinator::new();
    let mut witness = Witness::new(&mut coordinator);
    let credential = issued(&coordinator, INTRUDER, valid());

    let reason = provoke(&coordinator, &credential, async |connection| {
        connection.send_datagram(Bytes::from_static(b"garbage")).unwrap();
    });

    assert!(reason.to_string().contains("begins with"), "{reason}");
    log.refusal();
    witness.check(&mut coordinator);
}

// QUIC-2
#[test]
fn operator_request_from_a_node_is_refused_with_one_log_line() {
    let (log, _guard) = Log::start();
    let mut coordinator = Coordinator::new();
    let mut witness = Witness::new(&mut coordinator);
    let credential = issued(&coordinator, INTRUDER, valid());
    let request = [b"px".as_slice(), &[wire::VERSION, Kind::Request as u8], b"stop"].concat();

    let reason = provoke(&coordinator, &credential, async |connection| {
        let (mut tx, _rx) = connection.open_bi().await.unwrap();
        tx.write_all(&request).await.unwrap();
        tx.finish().unwrap();
        connection.closed().await;
    });

    assert!(reason.to_string().contains("expected a renewal (kind 5), found kind 6"), "{reason}");
    assert!(log.refusal().contains("node 77"));
    let requests = coordinator.drain().into_iter().any(|e| matches!(e, Inbound::Request { .. }));
    assert!(!requests);
    witness.check(&mut coordinator);
}

// QUIC-2
#[test]
fn report_from_an_operator_is_ignored() {
    let mut coordinator = Coordinator::new();
    let mut witness = Witness::new(&mut coordinator);
    let credential = issued(&coordinator, Role::Operator, valid());
    let frame = wire::encode(&report(&issued(&coordinator, INTRUDER, valid()), 1)).unwrap();

    wait(async {
        let connection = connect(&coordinator.addresses(), &credential).await.unwrap();
        send(&connection, &frame).await;
        connection.send_datagram(frame.into()).unwrap();
        // The answer to a request shows that the coordinator has handled the report before it.
        let (mut tx, mut rx) = connection.open_bi().await.unwrap();
        tx.write_all(b"garbage").await.unwrap();
        tx.finish().unwrap();
        assert!(rx.read_to_end(10).await.is_err());
    });

    let reports = coordinator.drain().into_iter().any(|e| matches!(e, Inbound::Report(_) | Inbound::Heartbeats(_)));
    assert!(!reports);
    witness.check(&mut coordinator);
}

/// Tries to connect; returns why the coordinator refuses it, in the handshake or after it: a certificate that is only good for its
/// renewal passes the handshake, and the client may notice that before the coordinator closes the connection.
fn refused(coordinator: &Coordinator, credential: &Credential) -> String {
    wait(async {
        match connect(&coordinator.addresses(), credential).await {
            Ok(connection) => connection.closed().await.to_string(),
            Err(err) => err.to_string(),
        }
    })
}

/// A credential of another authority whose holder trusts the coordinator's, so that only the coordinator rejects.
fn foreign(coordinator: &Coordinator, dir: &Path) -> Credential {
    let ours = Authority::open(coordinator.dir.path(), super::fixture::JOB).unwrap();
    let leaf = Authority::open(dir, super::fixture::JOB).unwrap().credential(INTRUDER, valid()).unwrap();
    let grant =
        Grant { certificate: leaf.certificate().to_vec(), authority: ours.certificate().to_vec(), bootstrap: vec![] };
    leaf.renewed(grant).unwrap()
}

// QUIC-1
#[test]
fn certificate_of_another_authority_is_refused_with_one_log_line() {
    let (log, _guard) = Log::start();
    let mut coordinator = Coordinator::new();
    let mut witness = Witness::new(&mut coordinator);
    let elsewhere = tempfile::tempdir().unwrap();

    let why = refused(&coordinator, &foreign(&coordinator, elsewhere.path()));

    assert!(why.contains("invalid peer certificate"), "{why}");
    log.refusal();
    witness.check(&mut coordinator);
}

#[test]
fn expired_certificate_is_refused_with_one_log_line() {
    let (log, _guard) = Log::start();
    let mut coordinator = Coordinator::new();
    let mut witness = Witness::new(&mut coordinator);
    let validity = Validity::starting(SystemTime::now() - 2 * HOUR, HOUR);

    let why = refused(&coordinator, &issued(&coordinator, INTRUDER, validity));

    assert!(why.contains("its certificate has expired"), "{why}");
    assert!(log.refusal().contains("xpired"));
    witness.check(&mut coordinator);
}

// TRUST-3
#[test]
fn certificate_of_another_job_is_refused_when_the_authority_is_the_same() {
    let (log, _guard) = Log::start();
    let coordinator = Coordinator::new();
    let other = Authority::open(coordinator.dir.path(), JobId(8)).unwrap();
    let leaf = other.credential(INTRUDER, valid()).unwrap();
    let ours = Authority::open(coordinator.dir.path(), super::fixture::JOB).unwrap();
    let grant =
        Grant { certificate: leaf.certificate().to_vec(), authority: ours.certificate().to_vec(), bootstrap: vec![] };

    refused(&coordinator, &leaf.renewed(grant).unwrap());

    log.refusal();
}

// QUIC-1
#[test]
fn members_are_served_during_a_flood_of_unauthenticated_peers() {
    let (log, _guard) = Log::start();
    let mut coordinator = Coordinator::new();
    let mut witness = Witness::new(&mut coordinator);
    let mut tls = tls::stranger(coordinator.listener.fingerprint()).unwrap();
    tls.alpn_protocols = vec![tls::MEMBER.to_vec()];

    wait(async {
        let attempts: Vec<_> = (0..300)
            .map(|_| {
                let (addresses, tls) = (coordinator.addresses(), tls.clone());
                tokio::spawn(async move {
                    if let Ok(connection) = dial(&addresses, tls).await {
                        connection.closed().await;
                    }
                })
            })
            .collect();
        for attempt in attempts {
            attempt.await.unwrap();
        }
    });

    let lines = log.refusals();
    assert!((1..=100).contains(&lines.len()), "{} lines", lines.len());
    let expected = [
        "expected a certificate, found none; without a certificate a peer can only join",
        "too many handshakes in progress",
        "rejected further peers that are not listed",
    ];
    for line in &lines {
        assert!(expected.iter().any(|why| line.contains(why)), "{line}");
    }
    assert!(coordinator.drain().is_empty());
    witness.check(&mut coordinator);
}

// QUIC-5
#[test]
fn node_joins_while_silent_strangers_hold_more_connections_than_there_may_be() {
    let mut coordinator = Coordinator::new();
    let tls = tls::stranger(coordinator.listener.fingerprint()).unwrap();
    let (addresses, (tx, rx)) = (coordinator.addresses(), std::sync::mpsc::channel());
    let (end, ends) = tokio::sync::oneshot::channel::<()>();
    let strangers = std::thread::spawn(move || {
        wait(async {
            let mut held = Vec::new();
            for _ in 0..3 * UNKNOWN_MAX {
                // The stranger completes its handshake, sends no join, and keeps the connection alive.
                held.extend(dial(&addresses, tls.clone()).await);
            }
            tx.send(held).unwrap();
            let _ = ends.await;
        });
    });
    let held = rx.recv().unwrap();

    let mut witness = Witness::new(&mut coordinator);

    let n_held = held.iter().filter(|connection| connection.close_reason().is_none()).count();
    assert!(n_held > UNKNOWN_MAX / 2, "the strangers had left: {n_held} of {}", held.len());
    witness.check(&mut coordinator);
    drop(end);
    strangers.join().unwrap();
}

#[test]
fn datagrams_that_are_not_quic_are_ignored() {
    let mut coordinator = Coordinator::new();
    let mut witness = Witness::new(&mut coordinator);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;

    for n in 0..5_000_usize {
        let bytes: Vec<u8> = (0..n % 1_400)
            .map(|_| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                seed as u8
            })
            .collect();
        socket.send_to(&bytes, coordinator.listener.address()).unwrap();
    }

    witness.check(&mut coordinator);
}
