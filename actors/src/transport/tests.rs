//! The same tests for every transport.

use super::{Downlink, Inbound, Inbox, NotSent, Uplink, in_process};
use crate::quic::tests::fixture::{Coordinator, JOB, Machine, desired_state, node_and_boot, until};
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use phalanx_strategies::elastic::message::{DesiredState, DesiredStateId, Report};
use std::any::Any;
use tokio::sync::mpsc;

/// A coordinator and one node, connected by a transport.
struct Both {
    name: &'static str,
    node: (NodeId, Incarnation),
    downlink: Box<dyn Downlink>,
    inbox: Inbox,
    uplink: Box<dyn Uplink>,
    desired_states: mpsc::Receiver<DesiredState>,
    /// Keeps the transport's resources alive.
    _keep: Box<dyn Any>,
}

fn transports() -> [Both; 2] {
    let node = (NodeId(3), Incarnation(9));
    let pair = in_process::connect(node.0, node.1, 4);
    let in_process = Both {
        name: "in-process",
        node,
        downlink: Box::new(pair.coordinator),
        inbox: pair.inbox,
        uplink: Box::new(pair.node),
        desired_states: pair.desired_states,
        _keep: Box::new(()),
    };
    let coordinator = Coordinator::new();
    let machine = Machine::new();
    let credential = machine.enrol(&coordinator.invite()).unwrap();
    let (link, desired_states) = machine.link(coordinator.addresses(), credential.clone());
    let quic = Both {
        name: "QUIC",
        node: node_and_boot(&credential),
        downlink: Box::new(coordinator.listener),
        inbox: coordinator.events,
        uplink: Box::new(link),
        desired_states,
        _keep: Box::new((machine, coordinator.dir)),
    };
    [in_process, quic]
}

impl Both {
    fn report(&self, number: u64) -> Report {
        let ((node, boot), desired_state) = (self.node, DesiredStateId::default());
        let (devices, members) = Default::default();
        Report {
            job: JOB,
            node,
            boot,
            number,
            desired_state,
            draining: false,
            n_failed_starts: 0,
            devices,
            inputs: vec![],
            members,
        }
    }

    /// Waits for the next event of the coordinator's end that `pick` accepts.
    fn next<T>(&mut self, what: &str, mut pick: impl FnMut(Inbound) -> Option<T>) -> T {
        let what = format!("{what} over {}", self.name);
        until(&what, || self.inbox.try_recv().ok().and_then(&mut pick))
    }

    fn next_report(&mut self) -> Report {
        self.next("a report", |inbound| match inbound {
            Inbound::Report(report) => Some(report),
            Inbound::Heartbeats(mut reports) => reports.pop(),
            _ => None,
        })
    }

    fn until_connected(&mut self) -> (NodeId, Incarnation) {
        self.next("a connection", |inbound| match inbound {
            Inbound::Connected { node, boot, .. } => Some((node, boot)),
            _ => None,
        })
    }

    fn until_disconnected(&mut self) -> (NodeId, Incarnation) {
        self.next("the end", |inbound| match inbound {
            Inbound::Disconnected { node, boot, .. } => Some((node, boot)),
            _ => None,
        })
    }
}

// TP-1, TP-3
#[test]
fn reports_and_desired_states_arrive_over_every_transport() {
    for mut both in transports() {
        assert_eq!(both.until_connected(), both.node, "{}", both.name);
        assert_eq!(both.downlink.connected(), [both.node], "{}", both.name);

        both.uplink.news(&both.report(1)).unwrap();
        assert_eq!(both.next_report(), both.report(1), "{}", both.name);
        both.uplink.heartbeat(&both.report(2)).unwrap();
        assert_eq!(both.next_report(), both.report(2), "{}", both.name);
        both.downlink.send_desired_state(both.node.0, &desired_state(5)).unwrap();
        assert_eq!(until("a desired state", || both.desired_states.try_recv().ok()), desired_state(5), "{}", both.name);
    }
}

// TP-1, TP-2
#[test]
fn newest_desired_state_arrives_in_order_when_the_node_reads_late_over_every_transport() {
    for mut both in transports() {
        both.until_connected();

        for generation in 1..=500 {
            // A rejected desired state is repeated below, as a coordinator does after the next report.
            let _ = both.downlink.send_desired_state(both.node.0, &desired_state(generation));
        }
        let mut taken = vec![];
        until("the newest desired state", || {
            let next = both.desired_states.try_recv().ok().map(|desired_state| desired_state.id.generation.0);
            let is_idle = next.is_none();
            taken.extend(next);
            if is_idle && taken.last().is_some_and(|last| *last < 500) {
                let _ = both.downlink.send_desired_state(both.node.0, &desired_state(500));
            }
            (taken.last() == Some(&500)).then_some(())
        });

        assert!(taken.is_sorted(), "{}: {taken:?}", both.name);
        assert!(taken.len() < 500, "{}: {} desired states waited, expected a bound", both.name, taken.len());
    }
}

// TP-2
#[test]
fn newest_report_arrives_without_blocking_when_the_coordinator_reads_late_over_every_transport() {
    for mut both in transports() {
        both.until_connected();

        for number in 1..=20_000 {
            let _ = both.uplink.news(&both.report(number));
        }
        let mut read: Vec<u64> = vec![];
        let newest = until("the newest report", || {
            match both.inbox.try_recv() {
                Ok(Inbound::Report(report)) => read.push(report.number),
                Ok(_) => {}
                // The node repeats its report with each heartbeat.
                Err(_) => drop(both.uplink.news(&both.report(20_001))),
            }
            read.last().copied().filter(|number| *number >= 20_000)
        });

        assert!(newest >= 20_000 && read.is_sorted(), "{}: {newest}", both.name);
        assert!(read.len() < 20_000, "{}: {} reports waited, expected a bound", both.name, read.len());
    }
}

// TP-3
#[test]
fn desired_state_for_an_unknown_node_is_refused_over_every_transport() {
    for mut both in transports() {
        both.until_connected();

        let outcome = both.downlink.send_desired_state(NodeId(77), &desired_state(1));

        assert_eq!(outcome, Err(NotSent::NotConnected(NodeId(77))), "{}", both.name);
    }
}

// TP-3
#[test]
fn closed_node_end_disconnects_and_gets_no_desired_states_over_every_transport() {
    for mut both in transports() {
        both.until_connected();

        both.uplink.close();
        let gone = both.until_disconnected();

        assert_eq!(gone, both.node, "{}", both.name);
        until("no connection", || both.downlink.connected().is_empty().then_some(()));
        assert!(both.downlink.send_desired_state(both.node.0, &desired_state(1)).is_err(), "{}", both.name);
    }
}

// TP-4
#[test]
fn no_message_of_a_node_arrives_after_its_disconnection_over_every_transport() {
    for mut both in transports() {
        both.until_connected();

        both.uplink.news(&both.report(1)).unwrap();
        both.uplink.close();
        // QUIC may look for another coordinator, but must not send to this one.
        let _ = both.uplink.news(&both.report(2));
        both.until_disconnected();

        assert!(both.inbox.try_recv().is_err(), "{}", both.name);
    }
}

#[test]
fn last_report_of_a_node_in_the_same_process_arrives_before_its_disconnection() {
    let [mut both, _] = transports();
    both.until_connected();

    both.uplink.news(&both.report(1)).unwrap();
    drop(std::mem::replace(&mut both.uplink, Box::new(in_process::connect(NodeId(0), Incarnation(0), 1).node)));

    assert_eq!(both.next_report(), both.report(1));
    assert_eq!(both.until_disconnected(), both.node);
}

#[test]
fn closed_coordinator_end_ends_the_desired_states_of_a_node_in_its_process() {
    let [mut both, _] = transports();
    both.until_connected();
    both.downlink.send_desired_state(both.node.0, &desired_state(1)).unwrap();

    both.downlink.close();

    assert_eq!(both.desired_states.blocking_recv(), Some(desired_state(1)), "an earlier desired state arrives");
    assert_eq!(both.desired_states.blocking_recv(), None);
    assert_eq!(
        both.downlink.send_desired_state(both.node.0, &desired_state(2)),
        Err(NotSent::NotConnected(both.node.0))
    );
}
