//! The transport inside one process: bounded channels, no sockets, no certificates.
//!
//! It has one node, which is connected until one of the ends closes. A full channel rejects a message; the machines repeat
//! it with their next heartbeat.

use super::{Downlink, Inbound, Inbox, NotSent, Uplink};
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use phalanx_strategies::elastic::message::{DesiredState, Report};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

/// The coordinator's end. Closing or dropping it ends the connection.
#[derive(Debug)]
pub struct CoordinatorEnd {
    node: NodeId,
    boot: Incarnation,
    desired_states: Mutex<Option<mpsc::Sender<DesiredState>>>,
    is_open: Arc<AtomicBool>,
}

/// The node's end. Closing or dropping it ends the connection.
#[derive(Debug)]
pub struct NodeEnd {
    node: NodeId,
    boot: Incarnation,
    inbound: Mutex<Option<mpsc::Sender<Inbound>>>,
    /// True until one of the ends closes.
    is_open: Arc<AtomicBool>,
}

/// Both ends of a connection to a node in this process.
#[derive(Debug)]
pub struct Pair {
    /// Sends desired states.
    pub coordinator: CoordinatorEnd,
    /// Messages to the coordinator.
    pub inbox: Inbox,
    /// Sends reports.
    pub node: NodeEnd,
    /// Desired states to the node.
    pub desired_states: mpsc::Receiver<DesiredState>,
}

/// Connects a coordinator with a node in its process. At most `n_max` messages wait in each direction.
///
/// # Panics
/// When `n_max` is zero.
#[must_use]
pub fn connect(node: NodeId, boot: Incarnation, n_max: usize) -> Pair {
    let (tx, desired_states) = mpsc::channel(n_max);
    // One more, for the notice of the connection below.
    let (inbound, inbox) = mpsc::channel(n_max + 1);
    let connected = Inbound::Connected { node, boot, peer: None };
    inbound.try_send(connected).expect("the channel is empty and its receiver is alive");
    let is_open = Arc::new(AtomicBool::new(true));
    Pair {
        coordinator: CoordinatorEnd { node, boot, desired_states: Mutex::new(Some(tx)), is_open: Arc::clone(&is_open) },
        inbox,
        node: NodeEnd { node, boot, inbound: Mutex::new(Some(inbound)), is_open },
        desired_states,
    }
}

impl Downlink for CoordinatorEnd {
    fn send_desired_state(&self, node: NodeId, desired_state: &DesiredState) -> Result<(), NotSent> {
        let desired_states = self.desired_states.lock().unwrap_or_else(PoisonError::into_inner);
        let is_there = node == self.node && self.is_open.load(Ordering::Acquire);
        let desired_states = desired_states.as_ref().filter(|_| is_there).ok_or(NotSent::NotConnected(node))?;
        desired_states.try_send(desired_state.clone()).map_err(|error| match error {
            TrySendError::Full(_) => NotSent::Full,
            TrySendError::Closed(_) => NotSent::NotConnected(node),
        })
    }

    fn connected(&self) -> Vec<(NodeId, Incarnation)> {
        let is_open = self.is_open.load(Ordering::Acquire);
        is_open.then_some((self.node, self.boot)).into_iter().collect()
    }

    /// Nothing changes: this node can have no other coordinator.
    fn set_leads(&self, _leads: bool) {}

    fn close(&self) {
        self.is_open.store(false, Ordering::Release);
        self.desired_states.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Drop for CoordinatorEnd {
    fn drop(&mut self) {
        self.close();
    }
}

impl NodeEnd {
    fn send(&self, message: Inbound) -> Result<(), NotSent> {
        let inbound = self.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        inbound.as_ref().ok_or(NotSent::Closed)?.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => NotSent::Full,
            TrySendError::Closed(_) => NotSent::Closed,
        })
    }
}

impl Uplink for NodeEnd {
    fn heartbeat(&self, report: &Report) -> Result<(), NotSent> {
        self.send(Inbound::Heartbeats(vec![report.clone()]))
    }

    fn news(&self, report: &Report) -> Result<(), NotSent> {
        self.send(Inbound::Report(report.clone()))
    }

    /// Never: the node was not identified by a certificate.
    fn refusal(&self) -> Option<String> {
        None
    }

    fn is_connected(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Never: the node ends with the process that coordinates it.
    fn is_over(&self) -> bool {
        false
    }

    fn close(&self) {
        self.is_open.store(false, Ordering::Release);
        let why = "the node has closed the connection".to_owned();
        let gone = Inbound::Disconnected { node: self.node, boot: self.boot, why };
        // If the channel is full, its end tells the coordinator.
        let _ = self.send(gone);
        self.inbound.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

impl Drop for NodeEnd {
    fn drop(&mut self) {
        self.close();
    }
}
