//! The interface between a coordinator and the supervisors of its nodes: nodes send reports, the coordinator sends desired
//! states.
//!
//! There are two transports. [`crate::quic`] connects processes of different machines; [`in_process`] connects a
//! coordinator with a supervisor of its own process, without sockets and certificates. Coordinators and supervisors work
//! with either transport through [`Downlink`] and [`Uplink`].
//!
//! Invariants, checked by the same tests for both:
//! - `TP-1` Reports and desired states are self-contained and arrive in the order in which they were sent. Some may be
//!   lost: the machines at both ends repeat unconfirmed messages, and only the newest counts.
//! - `TP-2` All queues are bounded, and sending never blocks.
//! - `TP-3` The coordinator's end receives a notice when a node connects or disconnects, with the node's boot.
//! - `TP-4` No message of a node arrives after the notice of its disconnection.
//!
//! Of connections between machines:
//! - `TP-5` A coordinator that does not lead holds no node: its nodes are closed with the reason, and look for the one that leads.

use crate::wire::WireError;
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use phalanx_strategies::elastic::message::{DesiredState, Report};
use std::fmt::Debug;
use std::net::SocketAddr;
use tokio::sync::{mpsc, oneshot};

pub mod in_process;
#[cfg(test)]
mod tests;

/// The coordinator's end.
pub trait Downlink: Debug + Send + Sync + 'static {
    /// Sends a desired state to a node.
    ///
    /// # Errors
    /// When the desired state cannot be sent. Success does not mean that it has arrived.
    fn send_desired_state(&self, node: NodeId, desired_state: &DesiredState) -> Result<(), NotSent>;

    /// The connected nodes and their boots.
    fn connected(&self) -> Vec<(NodeId, Incarnation)>;

    /// Tells whether the coordinator leads the job (`TP-5`).
    fn set_leads(&self, leads: bool);

    /// Ends all connections. May wait for the network: not for an event loop.
    fn close(&self);
}

/// The node's end.
pub trait Uplink: Debug + Send + Sync + 'static {
    /// Sends a heartbeat. It may be lost; the next one repeats its content.
    ///
    /// # Errors
    /// When the heartbeat cannot be sent.
    fn heartbeat(&self, report: &Report) -> Result<(), NotSent>;

    /// Sends a report reliably and at once. It replaces an older one that is not sent yet.
    ///
    /// # Errors
    /// When the report cannot be sent.
    fn news(&self, report: &Report) -> Result<(), NotSent>;

    /// Why the coordinator rejects this node for good, if it does.
    fn refusal(&self) -> Option<String>;

    /// Whether a coordinator is connected.
    fn is_connected(&self) -> bool;

    /// Whether the record of the job shows that it is over, although no coordinator has told this node.
    fn is_over(&self) -> bool;

    /// Ends the connection; earlier messages may still arrive. May wait for the network: not for an event loop.
    fn close(&self);
}

/// A message or notice to the coordinator.
#[derive(Debug)]
pub enum Inbound {
    /// A node is connected. The connection replaces an earlier one of the same node.
    Connected {
        /// The node.
        node: NodeId,
        /// Incarnation of its supervisor.
        boot: Incarnation,
        /// The node's address; none if the node is in the same process.
        peer: Option<SocketAddr>,
    },
    /// News of a node. The transport has checked that the report is the sender's own.
    Report(Report),
    /// Heartbeats of nodes, collected over some milliseconds.
    Heartbeats(Vec<Report>),
    /// A node is no longer connected. It may reconnect; the transport does not decide whether the node is lost.
    Disconnected {
        /// The node.
        node: NodeId,
        /// Incarnation of its supervisor.
        boot: Incarnation,
        /// Reason of the disconnection.
        why: String,
    },
    /// A request of an operator.
    Request {
        /// The frame of a [`crate::wire::Kind::Request`].
        frame: Vec<u8>,
        /// Takes the frame of a [`crate::wire::Kind::Answer`]. Dropping it rejects the request.
        answer: oneshot::Sender<Vec<u8>>,
    },
}

/// Receiver of the coordinator's messages.
pub type Inbox = mpsc::Receiver<Inbound>;

/// Why a message was not sent. The machines repeat it if it still matters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotSent {
    /// The node is not connected.
    #[error("{0} is not connected")]
    NotConnected(NodeId),
    /// The other end is closed.
    #[error("the other end is closed")]
    Closed,
    /// The queue to the other end is full.
    #[error("the queue to the other end is full")]
    Full,
    /// The message exceeds the limit of a frame.
    #[error(transparent)]
    Wire(#[from] WireError),
}
