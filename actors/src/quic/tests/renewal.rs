//! Certificates expire while a node or its coordinator is away; the key of a node outlives them.

use super::fixture::{Coordinator, Machine, PUBLISHED, connect, node_and_boot, until, wait};
use crate::quic::QuicError;
use crate::quic::link::LinkState;
use crate::quic::shared::OPERATOR;
use crate::trust::credential::Credential;
use std::time::{Duration, SystemTime};

/// Short enough to wait for its end.
const LIFETIME: Duration = Duration::from_secs(2);

fn until_expired(credential: &Credential) {
    let end = credential.certified().not_after;
    until("the end of a certificate", || (SystemTime::now() > end).then_some(()));
}

// TRUST-7
#[test]
fn node_renews_its_expired_certificate_and_keeps_its_boot() {
    let mut coordinator = Coordinator::with(|config| config.lifetime = LIFETIME);
    let machine = Machine::new();
    let first = machine.enrol(&coordinator.invite()).unwrap();
    until_expired(&first);

    let (_link, _desired_states) = machine.link(coordinator.addresses(), first.clone());

    assert_eq!(coordinator.connected(), node_and_boot(&first));
    assert!(machine.kept().certified().not_after > first.certified().not_after);
}

// TRUST-7
#[test]
fn node_restarts_with_its_expired_certificate_after_its_token_was_revoked() {
    let coordinator = Coordinator::with(|config| config.lifetime = LIFETIME);
    let (machine, join) = (Machine::new(), coordinator.invite());
    let first = machine.enrol(&join).unwrap();
    coordinator.listener.revoke(join.token.id).unwrap();
    until_expired(&first);

    let second = machine.enrol(&join).unwrap();

    assert_eq!(node_and_boot(&first).0, node_and_boot(&second).0);
    assert!(node_and_boot(&first).1 < node_and_boot(&second).1);
}

// TRUST-7
#[test]
fn expired_certificate_is_not_renewed_once_the_node_has_started_again() {
    let coordinator = Coordinator::with(|config| config.lifetime = LIFETIME);
    let (machine, join) = (Machine::new(), coordinator.invite());
    let first = machine.enrol(&join).unwrap();
    machine.enrol(&join).unwrap();
    until_expired(&first);

    let (link, _desired_states) = machine.link(coordinator.addresses(), first);

    until("the refusal", || match &*link.state().borrow() {
        LinkState::RefusedForGood(why) if why.contains("has started again") => Some(()),
        _ => None,
    });
}

// QUIC-6, TRUST-7
#[test]
fn expired_certificate_is_only_good_for_its_renewal() {
    let mut coordinator = Coordinator::with(|config| config.lifetime = LIFETIME);
    let node = Machine::new().enrol(&coordinator.invite()).unwrap();
    let operator = Credential::load(coordinator.dir.path(), OPERATOR).unwrap().unwrap();
    until_expired(&node);
    until_expired(&operator);

    for credential in [node, operator] {
        let reason = wait(async {
            match connect(&coordinator.addresses(), &credential).await {
                Ok(connection) => connection.closed().await.to_string(),
                Err(err) => err.to_string(),
            }
        });
        assert!(reason.contains("its certificate has expired"), "{reason}");
    }
    assert!(coordinator.drain().is_empty());
}

#[test]
fn node_finds_a_coordinator_that_returns_at_another_address_by_the_published_one() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    // Nothing listens there.
    let gone = vec!["127.0.0.1:9".parse().unwrap()];
    let (link, _desired_states) = machine.link(gone, credential.clone());
    until("a failure", || matches!(*link.state().borrow(), LinkState::Waiting(_)).then_some(()));

    let address = coordinator.addresses()[0].to_string();
    std::fs::write(machine.dir.path().join(PUBLISHED), format!("{address}\n")).unwrap();

    assert_eq!(coordinator.connected(), node_and_boot(&credential));
}

#[test]
fn coordinator_does_not_start_without_the_key_of_its_nodes() {
    let coordinator = Coordinator::new();
    let machine = Machine::new();
    machine.enrol(&coordinator.invite()).unwrap();
    let key = coordinator.dir.path().join("authority.key");
    let kept = std::fs::read(&key).unwrap();

    std::fs::remove_file(&key).unwrap();
    let refused = coordinator.start_again().unwrap_err();

    let text = refused.to_string();
    assert!(matches!(refused, QuicError::Trust(_)) && text.contains("authority.key is missing, but 1 node"), "{text}");
    assert!(!key.exists(), "no other key is made");
    crate::trust::file::write(&key, &kept).unwrap();
    assert!(coordinator.start_again().is_ok());
}
