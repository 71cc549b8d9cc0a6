//! The seam between a coordinator and the supervisors of its nodes: reports go up, desired states come down.
//!
//! There are two transports. [`crate::quic`] connects processes of different machines; [`in_process`] connects a
//! coordinator with a supervisor of its own process, without sockets and without certificates. Whoever coordinates or
//! supervises holds one end and cannot tell which transport is behind it.
//!
//! Invariants, which one body of tests checks for both:
//! - `TP-1` Reports and desired states are whole and arrive in the order in which they were sent. Some may be lost: the
//!   machines at both ends repeat what has not been taken up, and only the newest counts.
//! - `TP-2` Nothing grows without a bound, and sending never blocks.
//! - `TP-3` The coordinator's end learns when a node connects and when it leaves, and which start of the node it is.
//! - `TP-4` Nothing of a node arrives after the notice that it has left.

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
    /// When it cannot be sent. Success means that it is on its way, not that it has arrived.
    fn send_desired_state(&self, node: NodeId, desired_state: &DesiredState) -> Result<(), NotSent>;

    /// The nodes that are connected, and which start of them.
    fn connected(&self) -> Vec<(NodeId, Incarnation)>;

    /// Ends all connections. May wait for the network: not for an event loop.
    fn close(&self);
}

/// The node's end.
pub trait Uplink: Debug + Send + Sync + 'static {
    /// Sends a heartbeat, which may get lost; another one follows.
    ///
    /// # Errors
    /// When it cannot be sent.
    fn heartbeat(&self, report: &Report) -> Result<(), NotSent>;

    /// Sends a report that is to arrive, at once; instead of an older one that could not be sent yet.
    ///
    /// # Errors
    /// When it cannot be sent.
    fn news(&self, report: &Report) -> Result<(), NotSent>;

    /// Ends the connection; what was sent before is on its way. May wait for the network: not for an event loop.
    fn close(&self);
}

/// What reaches the coordinator's end.
#[derive(Debug)]
pub enum Inbound {
    /// A node is connected. If it was already, this connection has taken the place of that one.
    Connected {
        /// Which.
        node: NodeId,
        /// Incarnation of its supervisor.
        boot: Incarnation,
        /// From where; none if the node is in the same process.
        peer: Option<SocketAddr>,
    },
    /// A node has news. The transport has checked that the sender is the node that the report names.
    Report(Report),
    /// Heartbeats of nodes, which are reports like others; some milliseconds' worth of them.
    Heartbeats(Vec<Report>),
    /// A node is no longer connected. It may come back; whether it is lost is not for the transport to decide.
    Disconnected {
        /// Which.
        node: NodeId,
        /// Incarnation of its supervisor.
        boot: Incarnation,
        /// Why.
        why: String,
    },
    /// An operator asks.
    Request {
        /// The frame of a [`crate::wire::Kind::Request`].
        frame: Vec<u8>,
        /// Takes the frame of a [`crate::wire::Kind::Answer`]. If it is dropped the operator is told that there is none.
        answer: oneshot::Sender<Vec<u8>>,
    },
}

/// Where it comes in.
pub type Inbox = mpsc::Receiver<Inbound>;

/// Why a message was not sent. The machines repeat what matters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotSent {
    /// No such node is connected.
    #[error("{0} is not connected")]
    NotConnected(NodeId),
    /// The other end has gone.
    #[error("the other end is closed")]
    Closed,
    /// The other end has not taken up earlier messages.
    #[error("the other end has not taken up earlier messages")]
    Full,
    /// It is too long.
    #[error(transparent)]
    Wire(#[from] WireError),
}
