//! Messages arrive despite faults of coordinators and networks.

use super::fixture::{
    Cable, Coordinator, HOUR, JOB, Machine, PUBLISHED, desired_state, next_desired_state, node_and_boot, report, until,
    wait,
};
use crate::quic::QuicError;
use crate::quic::ask::Operator;
use crate::quic::link::{Link, LinkConfig, LinkState, Published};
use crate::quic::listener::Listener;
use crate::quic::shared::OPERATOR;
use crate::transport::{Downlink, Inbound, NotSent, Uplink};
use crate::trust::credential::Credential;
use crate::wire::{self, Kind, Message};
use phalanx_strategies::elastic::identity::{Generation, MemberId, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::message::{DesiredState, DesiredStateId, MemberPhase, MemberReport};
use phalanx_strategies::elastic::timing::Timing;
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant, SystemTime};

#[test]
fn handles_can_be_shared_between_threads() {
    fn shared<T: Send + Sync + Clone>() {}

    shared::<Link>();
    shared::<Listener>();
}

#[test]
fn reports_and_desired_states_arrive() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (link, mut desired_states) = machine.link(coordinator.addresses(), credential.clone());
    assert_eq!(coordinator.connected(), node_and_boot(&credential));

    link.news(&report(&credential, 1)).unwrap();
    assert_eq!(coordinator.report(), report(&credential, 1));
    link.heartbeat(&report(&credential, 2)).unwrap();
    assert_eq!(coordinator.report(), report(&credential, 2));
    coordinator.listener.send_desired_state(node_and_boot(&credential).0, &desired_state(3)).unwrap();
    assert_eq!(next_desired_state(&mut desired_states), desired_state(3));
}

// QUIC-5
#[test]
fn heartbeat_too_long_for_a_datagram_is_sent_as_a_stream() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (link, _desired_states) = machine.link(coordinator.addresses(), credential.clone());
    let (node, boot) = node_and_boot(&credential);
    let member = |slot| MemberReport {
        worker: Worker { member: MemberId { node, slot }, incarnation: boot },
        pid: None,
        address: None,
        device: None,
        hangs: false,
        generation: Generation(1),
        phase: MemberPhase::Running,
        entered: Step(1),
        progress: Default::default(),
        broken: None,
        commit_state: Default::default(),
        holds: Vec::new(),
        saved: None,
        unsaved: None,
        failure: None,
        settled: None,
        fault: None,
    };
    let mut long = report(&credential, 1);
    long.members = (0..1_000).map(member).collect();

    link.heartbeat(&long).unwrap();

    assert!(wire::encode(&long).unwrap().len() > 1200);
    assert_eq!(coordinator.report(), long);
}

// QUIC-5
#[test]
fn desired_state_of_several_megabytes_arrives() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (_link, mut desired_states) = machine.link(coordinator.addresses(), credential.clone());
    coordinator.connected();
    let mut long = desired_state(1);
    let worker =
        |slot| Worker { member: MemberId { node: NodeId(1 << 20), slot }, incarnation: node_and_boot(&credential).1 };
    long.evict = (0..300_000).map(worker).collect();

    coordinator.listener.send_desired_state(node_and_boot(&credential).0, &long).unwrap();

    assert!(wire::encode(&long).unwrap().len() > 4 << 20);
    assert_eq!(next_desired_state(&mut desired_states), long);
}

// QUIC-5
#[test]
fn newer_desired_state_replaces_unsent_ones() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (_link, mut desired_states) = machine.link(coordinator.addresses(), credential.clone());
    coordinator.connected();

    // The test does not read: four wait at the node, four are in flight, the others replace each other.
    let mut n_given = 0;
    while n_given < 1_000 {
        n_given += 1;
        coordinator.listener.send_desired_state(node_and_boot(&credential).0, &desired_state(n_given)).unwrap();
        std::thread::yield_now();
    }
    let mut taken = Vec::new();
    until("the newest desired state", || {
        taken.extend(desired_states.try_recv().ok().map(|desired_state| desired_state.id.generation.0));
        (taken.last() == Some(&n_given)).then_some(())
    });

    assert!(taken.is_sorted(), "{taken:?}");
    assert!(taken.len() < 1_000, "no desired state was replaced");
}

#[test]
fn desired_state_for_a_disconnected_node_is_not_sent() {
    let coordinator = Coordinator::new();

    let outcome = coordinator.listener.send_desired_state(NodeId(3), &desired_state(1));

    assert_eq!(outcome, Err(NotSent::NotConnected(NodeId(3))));
}

#[test]
fn node_finds_the_restarted_coordinator_and_sends_its_whole_report() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (link, mut desired_states) = machine.link(coordinator.addresses(), credential.clone());
    link.news(&report(&credential, 1)).unwrap();
    coordinator.report();

    let mut coordinator = coordinator.restart();

    assert_eq!(coordinator.connected(), node_and_boot(&credential));
    assert_eq!(coordinator.report(), report(&credential, 1), "the node resends its latest report");
    coordinator.listener.send_desired_state(node_and_boot(&credential).0, &desired_state(2)).unwrap();
    assert_eq!(next_desired_state(&mut desired_states), desired_state(2));
}

#[test]
fn node_that_reads_no_desired_states_still_finds_the_restarted_coordinator() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (link, desired_states) = machine.link(coordinator.addresses(), credential.clone());
    coordinator.connected();
    // Four may wait; the fifth blocks the link's reader. A report after each one gives the link time to read it.
    for n in 1..=20 {
        coordinator.listener.send_desired_state(node_and_boot(&credential).0, &desired_state(n)).unwrap();
        link.news(&report(&credential, n)).unwrap();
        coordinator.report();
    }
    assert_eq!(desired_states.len(), 4);

    let mut coordinator = coordinator.restart();

    assert_eq!(coordinator.connected(), node_and_boot(&credential));
}

#[test]
fn restarted_coordinator_fences_its_predecessor_at_once() {
    let slow = Timing::derive(Duration::from_secs(60));
    let mut coordinator = Coordinator::with(|config| config.timing = slow);
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let cable = Cable::to(coordinator.listener.address());
    let (link, _desired_states) = machine.link_within(slow, vec![cable.address.into()], credential.clone());
    coordinator.connected();
    // Before its handshake is confirmed, a node sends no heartbeat that could be answered.
    until("a state", || (*link.state().borrow() == LinkState::Connected(cable.address)).then_some(()));

    // The coordinator dies without closing its connections.
    cable.cut(true);
    let mut coordinator = coordinator.restart();
    cable.cut(false);
    let (beating, name) = (link.clone(), credential.clone());
    std::thread::spawn(move || {
        // Repeated, since a heartbeat or its answer may get lost.
        for number in 1..200 {
            beating.heartbeat(&report(&name, number)).unwrap();
            std::thread::sleep(Duration::from_millis(100));
        }
    });

    // The node's own timeout is three times as long as the fixture's patience.
    assert_eq!(coordinator.connected(), node_and_boot(&credential));
}

#[test]
fn node_connects_to_the_first_address_that_answers() {
    let mut coordinator = Coordinator::new();
    let dead = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut times = Vec::new();
    for _ in 0..5 {
        let machine = Machine::new();
        let credential = machine.enrol(&coordinator.invite()).unwrap();
        let addresses = vec![dead.local_addr().unwrap().into(), coordinator.listener.address().into()];
        let since = Instant::now();

        let (link, _desired_states) = machine.link(addresses, credential);
        coordinator.connected();

        times.push(since.elapsed());
        let connected = LinkState::Connected(coordinator.listener.address());
        until("a state", || (*link.state().borrow() == connected).then_some(()));
    }
    // The median: a busy machine delays single attempts, waiting for the dead address would delay all.
    times.sort();
    assert!(times[2] < Timing::default().detection_time, "{times:?}");
}

#[test]
fn both_sides_detect_a_cut_network_within_the_detection_time() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let cable = Cable::to(coordinator.listener.address());
    let (link, _desired_states) = machine.link(vec![cable.address.into()], credential.clone());
    coordinator.connected();

    let mut times = Vec::new();
    for _ in 0..3 {
        cable.cut(true);
        let since = Instant::now();
        coordinator.event("the loss", |event| matches!(event, Inbound::Disconnected { .. }).then_some(()));
        until("the loss at the node", || matches!(*link.state().borrow(), LinkState::Waiting(_)).then_some(()));
        times.push(since.elapsed());
        cable.cut(false);
        assert_eq!(coordinator.connected(), node_and_boot(&credential));
    }

    // The minimum bounds early detection; the median bounds late detection, since a busy machine delays single cuts.
    times.sort();
    let detection_time = Timing::default().detection_time;
    assert!(detection_time / 2 < times[0] && times[1] < detection_time * 2, "{times:?}");
}

#[test]
fn closed_link_disconnects_its_node_at_once() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (link, _desired_states) = machine.link(coordinator.addresses(), credential);
    coordinator.connected();

    link.close();

    let why = coordinator.event("the disconnection", |event| match event {
        Inbound::Disconnected { why, .. } => Some(why),
        _ => None,
    });
    assert!(why.contains("closed by peer"), "{why}");
    assert_eq!(*link.state().borrow(), LinkState::Closed);
}

#[test]
fn link_without_a_coordinator_learns_the_end_of_its_job_from_the_record() {
    let machine = Machine::new();
    let coordinator = Coordinator::new();
    let (addresses, credential) = (coordinator.addresses(), machine.enrol(&coordinator.invite()).unwrap());
    drop(coordinator);
    let ended = LinkConfig {
        addresses,
        published: Some(Published::new(|| None, || true)),
        dir: machine.dir.path().to_path_buf(),
        timing: Timing::derive(Duration::from_millis(300)),
        n_desired_states_max: 4,
    };

    let (link, _desired_states) = Link::start(ended, credential).unwrap();

    until("the end", || link.is_over().then_some(()));
    assert!(!link.is_connected());
}

// QUIC-3
#[test]
fn later_boot_of_a_node_displaces_the_earlier_one() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let first = machine.enrol(&coordinator.invite()).unwrap();
    let (link, _desired_states) = machine.link(coordinator.addresses(), first.clone());
    assert_eq!(coordinator.connected(), node_and_boot(&first));

    let second = machine.enrol(&coordinator.invite()).unwrap();
    let (_link, _desired_states) = machine.link(coordinator.addresses(), second.clone());
    assert_eq!(coordinator.connected(), node_and_boot(&second));

    assert!(node_and_boot(&first).1 < node_and_boot(&second).1);
    until("the refusal", || match &*link.state().borrow() {
        LinkState::RefusedForGood(why) if why.contains("later boot") => Some(()),
        _ => None,
    });
    assert_eq!(coordinator.listener.connected(), [node_and_boot(&second)]);
}

// QUIC-6
#[test]
fn certificate_is_renewed_long_before_it_expires() {
    let mut coordinator = Coordinator::with(|config| config.lifetime = Duration::from_secs(9));
    let machine = Machine::new();
    let first = machine.enrol(&coordinator.invite()).unwrap();
    let (_link, _desired_states) = machine.link(coordinator.addresses(), first.clone());
    assert_eq!(coordinator.connected(), node_and_boot(&first));

    assert_eq!(coordinator.connected(), node_and_boot(&first), "the node reconnects with the same boot");
    let second = machine.kept();
    assert!(first.certified().not_after < second.certified().not_after);
    assert_eq!(first.certified().name, second.certified().name);
}

#[test]
fn coordinator_and_operator_certificates_are_renewed_before_they_expire() {
    let coordinator = Coordinator::with(|config| config.lifetime = Duration::from_secs(2));
    let operator = || Credential::load(coordinator.dir.path(), OPERATOR).unwrap().unwrap().certified().not_after;
    let (join, first) = (coordinator.invite(), operator());

    until("the operator's new credential", || (operator() > first).then_some(()));
    // Certificates count whole seconds, the last one included.
    let end = first + Duration::from_secs(1);
    until("the end of the first certificates", || (SystemTime::now() > end).then_some(()));

    assert!(Machine::new().enrol(&join).is_ok());
}

// QUIC-6
#[test]
fn connection_ends_with_its_certificate() {
    let mut coordinator = Coordinator::with(|config| config.lifetime = Duration::from_secs(2));
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();

    let reason = wait(async {
        let connection = super::fixture::connect(&coordinator.addresses(), &credential).await.unwrap();
        connection.closed().await
    });

    assert!(reason.to_string().contains("its certificate has expired"), "{reason}");
    assert!(credential.certified().not_after <= SystemTime::now());
    coordinator.event("the end", |event| matches!(event, Inbound::Disconnected { .. }).then_some(()));
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Question(String);

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Reply(Vec<u64>);

impl Message for Question {
    const KIND: Kind = Kind::Request;
}

impl Message for Reply {
    const KIND: Kind = Kind::Answer;
}

#[test]
fn operator_request_is_answered() {
    let mut coordinator = Coordinator::new();
    let addresses = coordinator.addresses();
    let credential = Credential::load(coordinator.dir.path(), OPERATOR).unwrap().unwrap();
    let asking = std::thread::spawn(move || {
        wait(async {
            let operator = Operator::connect(&addresses, &credential, &Timing::default()).await.unwrap();
            let answers = (
                operator.ask(wire::encode(&Question("status".to_owned())).unwrap()).await,
                operator.ask(wire::encode(&Question("nonsense".to_owned())).unwrap()).await,
            );
            operator.close().await;
            answers
        })
    });
    let mut request = || {
        coordinator.event("a request", |event| match event {
            Inbound::Request { frame, answer } => Some((wire::decode::<Question>(&frame).unwrap(), answer)),
            _ => None,
        })
    };

    let (question, answer) = request();
    assert_eq!(question, Question("status".to_owned()));
    answer.send(wire::encode(&Reply(vec![1, 2, 3])).unwrap()).unwrap();
    drop(request());
    let (status, nonsense) = asking.join().unwrap();

    assert_eq!(wire::decode(&status.unwrap()), Ok(Reply(vec![1, 2, 3])));
    assert_eq!(nonsense, Err(QuicError::Refused("it does not answer this request".to_owned())));
}

#[test]
fn two_jobs_run_in_one_process() {
    let mut coordinators = [Coordinator::new(), Coordinator::with(|config| config.job.0 = JOB.0 + 1)];
    let machine = Machine::new();
    let join = coordinators[1].listener.invite(coordinators[1].addresses(), HOUR, 1).unwrap();

    let credential = machine.enrol(&join).unwrap();
    let (_link, _desired_states) = machine.link(coordinators[1].addresses(), credential.clone());

    assert_eq!(coordinators[1].connected(), node_and_boot(&credential));
    assert_eq!(credential.certified().name.job.0, JOB.0 + 1);
    assert!(coordinators[0].drain().is_empty());
}

// TP-5
#[test]
fn nodes_of_a_coordinator_that_stops_leading_turn_to_its_successor() {
    let (mut deposed, mut leader) = (Coordinator::new(), None);
    let machine = Machine::new();
    let credential = machine.enrol(&deposed.invite()).unwrap();
    let (link, _desired_states) = machine.link(deposed.addresses(), credential.clone());
    deposed.connected();

    // The deposed one has the only address that the node knows, until another one publishes its own.
    deposed.listener.set_leads(false);
    let why = deposed.event("the disconnection", |event| match event {
        Inbound::Disconnected { why, .. } => Some(why),
        _ => None,
    });
    let successor = leader.insert(deposed.beside());
    let address = successor.addresses()[0].to_string();
    std::fs::write(machine.dir.path().join(PUBLISHED), address).unwrap();

    assert_eq!(successor.connected(), node_and_boot(&credential), "the node ended with: {why}");
    until("the end of the handshake", || link.is_connected().then_some(()));
    assert!(deposed.listener.connected().is_empty());
}

// TP-5
#[test]
fn coordinator_that_does_not_lead_answers_operators_and_serves_nodes_once_it_leads_again() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    coordinator.listener.set_leads(false);
    let (link, _desired_states) = machine.link(coordinator.addresses(), credential.clone());

    let operator = Credential::load(coordinator.dir.path(), OPERATOR).unwrap().unwrap();
    let connected = wait(Operator::connect(&coordinator.addresses(), &operator, &Timing::default()));
    let why = until("the reason", || match &*link.state().borrow() {
        LinkState::Waiting(why) => Some(why.clone()),
        _ => None,
    });
    let before = coordinator.listener.connected();
    coordinator.listener.set_leads(true);

    assert!(connected.is_ok() && before.is_empty());
    assert!(why.contains("does not lead the job"), "{why}");
    assert_eq!(coordinator.connected(), node_and_boot(&credential));
}

#[test]
fn node_leaves_a_coordinator_whose_term_is_older_than_one_that_it_has_met() {
    let mut coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (_link, mut desired_states) = machine.link(coordinator.addresses(), credential.clone());
    let (node, _) = coordinator.connected();
    let of_term = |term| {
        let state = desired_state(term);
        DesiredState { id: DesiredStateId { term: Term(term), ..state.id }, ..state }
    };

    coordinator.listener.send_desired_state(node, &of_term(2)).unwrap();
    assert_eq!(next_desired_state(&mut desired_states), of_term(2));
    coordinator.listener.send_desired_state(node, &of_term(1)).unwrap();

    let why = coordinator.event("the disconnection", |event| match event {
        Inbound::Disconnected { why, .. } => Some(why),
        _ => None,
    });
    assert!(why.contains("another one leads"), "{why}");
    assert_eq!(coordinator.connected(), node_and_boot(&credential), "it looks for a coordinator again");
}
