//! Machines join as nodes; invalid joins are rejected.

use super::fixture::{Coordinator, HOUR, Log, Machine, dial, node_and_boot, wait};
use crate::quic::QuicError;
use crate::quic::enrol::{self, Join};
use crate::trust::Fingerprint;
use crate::trust::authority::Authority;
use crate::trust::join::JoinString;
use crate::trust::register::{Application, Register};
use crate::trust::tls;
use crate::trust::token::{Proof, Token};
use phalanx_strategies::elastic::identity::{JobId, NodeId};
use std::time::Duration;

#[test]
fn machine_keeps_its_node_id_when_it_restarts() {
    let coordinator = Coordinator::new();
    let join = coordinator.invite();
    let (one, other) = (Machine::new(), Machine::new());

    let nodes_and_boots = [&one, &other, &one].map(|machine| node_and_boot(&machine.enrol(&join).unwrap()));

    assert_eq!(nodes_and_boots.map(|(node, _)| node), [NodeId(0), NodeId(1), NodeId(0)]);
    assert!(nodes_and_boots[0].1 < nodes_and_boots[2].1, "each start is a new boot");
}

#[test]
fn node_restarts_with_its_certificate_when_its_token_is_revoked() {
    let coordinator = Coordinator::new();
    let join = coordinator.invite();
    let machine = Machine::new();
    let first = node_and_boot(&machine.enrol(&join).unwrap());
    coordinator.listener.revoke(join.token.id).unwrap();

    let second = node_and_boot(&machine.enrol(&join).unwrap());

    assert_eq!(first.0, second.0);
    assert!(first.1 < second.1);
}

#[test]
fn node_whose_files_were_cut_off_joins_again_with_the_token() {
    let coordinator = Coordinator::new();
    let join = coordinator.invite();
    let machine = Machine::new();
    machine.enrol(&join).unwrap();
    let cut_off = |name: &str| crate::trust::file::write(&machine.dir.path().join(name), b"").unwrap();

    cut_off("node.grant");
    let same_key = node_and_boot(&machine.enrol(&join).unwrap());
    cut_off("node.key");
    let new_key = node_and_boot(&machine.enrol(&join).unwrap());

    assert_eq!((same_key.0, new_key.0), (NodeId(0), NodeId(1)));
}

#[test]
fn coordinator_whose_key_or_register_was_cut_off_names_the_way_out_once_nodes_have_joined() {
    for name in ["authority.key", "register"] {
        let coordinator = Coordinator::new();
        Machine::new().enrol(&coordinator.invite()).unwrap();
        let place = coordinator.dir.path().to_owned();
        crate::trust::file::write(&place.join(name), b"").unwrap();

        let found = Authority::open(&place, JobId(7)).map(drop).and_then(|()| Register::open(&place).map(drop));

        let text = found.unwrap_err().to_string();
        assert!(text.contains(name) && text.contains("damaged") && text.contains("end the nodes and remove"), "{text}");
    }
}

#[test]
fn join_string_stays_valid_when_the_coordinator_restarts() {
    let coordinator = Coordinator::new();
    let join = coordinator.invite();

    let _coordinator = coordinator.restart();

    assert!(Machine::new().enrol(&join).is_ok());
}

#[test]
fn wrong_token_is_refused_with_one_log_line() {
    let (log, _guard) = Log::start();
    let mut coordinator = Coordinator::new();
    let secret = Token::new().unwrap().secret;
    let join = coordinator.invite();
    let wrong = JoinString { token: Token { secret, ..join.token }, ..join };

    let outcome = Machine::new().enrol(&wrong);

    assert_eq!(outcome.unwrap_err(), QuicError::Refused("the token is unknown or wrong".to_owned()));
    let line = log.refusal();
    assert!(line.contains(&format!("the proof for token {} is wrong", wrong.token.id)), "{line}");
    assert!(coordinator.drain().is_empty());
}

#[test]
fn expired_token_is_refused_with_one_log_line() {
    let (log, _guard) = Log::start();
    let coordinator = Coordinator::new();
    let join = coordinator.listener.invite(coordinator.addresses(), Duration::ZERO, 1).unwrap();

    let err = Machine::new().enrol(&join).unwrap_err();

    assert!(err.to_string().contains("has expired"), "{err}");
    assert!(log.refusal().contains("has expired"));
}

#[test]
fn token_without_uses_left_is_refused() {
    let coordinator = Coordinator::new();
    let join = coordinator.listener.invite(coordinator.addresses(), HOUR, 1).unwrap();
    Machine::new().enrol(&join).unwrap();

    let err = Machine::new().enrol(&join).unwrap_err();

    assert!(err.to_string().contains("has no uses left"), "{err}");
}

// TRUST-2
#[test]
fn node_sends_nothing_to_a_coordinator_of_another_authority() {
    let (log, _guard) = Log::start();
    let coordinator = Coordinator::new();
    let join = JoinString { authority: Fingerprint([7; 32]), ..coordinator.invite() };

    let err = Machine::new().enrol(&join).unwrap_err();

    assert!(matches!(&err, QuicError::Unreachable { why, .. } if why.contains("UnknownIssuer")), "{err}");
    assert!(log.refusal().contains("error 48"), "the coordinator receives only the alert unknown_ca");
}

// TRUST-1
#[test]
fn join_replayed_on_another_connection_is_refused_with_one_log_line() {
    let (log, _guard) = Log::start();
    let coordinator = Coordinator::new();
    let join = coordinator.invite();
    let tls = || tls::stranger(coordinator.listener.fingerprint()).unwrap();
    let machine = Machine::new();
    let applicant = crate::trust::credential::Applicant::open(machine.dir.path(), "node").unwrap();
    let signing_request = applicant.signing_request().unwrap();

    let outcomes = wait(async {
        let first = dial(&join.addresses, tls()).await.unwrap();
        let proof = Proof::new(&join.token.secret, &enrol::channel(&first), &signing_request);
        let overheard = Join::WithToken(Application { token: join.token.id, proof, signing_request });
        let second = dial(&join.addresses, tls()).await.unwrap();
        let replayed = enrol::ask(&second, &overheard).await.map_err(enrol::refusal);
        let original = enrol::ask(&first, &overheard).await.map_err(enrol::refusal);
        (replayed, original)
    });

    assert_eq!(outcomes.0, Err(QuicError::Refused("the token is unknown or wrong".to_owned())));
    assert!(outcomes.1.is_ok(), "the join is valid on its own connection: {:?}", outcomes.1);
    assert!(log.refusal().contains("the proof for token"));
}

// QUIC-1
#[test]
fn join_repeated_on_its_own_connection_is_not_answered() {
    let coordinator = Coordinator::new();
    let join = coordinator.invite();
    let tls = || tls::stranger(coordinator.listener.fingerprint()).unwrap();
    let machine = Machine::new();
    let applicant = crate::trust::credential::Applicant::open(machine.dir.path(), "node").unwrap();
    let signing_request = applicant.signing_request().unwrap();

    let again = wait(async {
        let connection = dial(&join.addresses, tls()).await.unwrap();
        let proof = Proof::new(&join.token.secret, &enrol::channel(&connection), &signing_request);
        let join = Join::WithToken(Application { token: join.token.id, proof, signing_request });
        enrol::ask(&connection, &join).await.unwrap();
        tokio::time::timeout(Duration::from_millis(300), enrol::ask(&connection, &join)).await
    });

    assert!(!matches!(again, Ok(Ok(_))), "{again:?}");
    let next = node_and_boot(&machine.enrol(&coordinator.invite()).unwrap());
    assert_eq!(next.0, NodeId(0));
}

// QUIC-1
#[test]
fn rejoin_without_a_certificate_is_refused() {
    let (log, _guard) = Log::start();
    let coordinator = Coordinator::new();
    let tls = || tls::stranger(coordinator.listener.fingerprint()).unwrap();

    let outcome = wait(async {
        let connection = dial(&coordinator.addresses(), tls()).await.unwrap();
        enrol::ask(&connection, &Join::Again).await.map_err(enrol::refusal)
    });

    assert_eq!(outcome, Err(QuicError::Refused("it asks to rejoin without a certificate".to_owned())));
    log.refusal();
}

// WIRE-1
#[test]
fn damaged_joins_are_rejected_or_decode_to_valid_joins() {
    let proof = Proof::new(&Token::new().unwrap().secret, &[1; 32], b"request");
    let application = Application { token: Token::new().unwrap().id, proof, signing_request: vec![0x30; 40] };

    crate::fuzz::damage(&[Join::WithToken(application), Join::Again], 100_000);
}
