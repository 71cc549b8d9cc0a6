//! The control plane over QUIC: one UDP port at the coordinator, one connection from each node.
//!
//! Code map:
//! - [`listener`]: the coordinator's side; `accept` identifies peers, `node` and `operator` serve them, by way of what all
//!   connections have in common (`shared`);
//! - [`link`]: the node's side, which reconnects without limit; [`enrol`]: enrols a machine as a node;
//! - [`ask`]: the operator's side;
//! - `batch`: batches heartbeats; `complaint`: logs rejected peers;
//! - `transport`: QUIC parameters, all from `Timing`; `frame`: one message per stream; `dial`: connects to the first
//!   address that answers.
//!
//! Each message has its own stream: the end of the stream is the end of the message, and a lost or late message does not
//! delay others. Heartbeats are datagrams. Each side runs on its own thread, so that no other work of the process delays a
//! heartbeat.
//!
//! Invariants:
//! - `QUIC-1` A peer without a certificate can only join, once per connection. None of its data reaches another
//!   component.
//! - `QUIC-2` The certificate of a connection decides which messages are accepted: a node may send its own reports and
//!   renew its certificate; an operator may send requests.
//! - `QUIC-3` Each node has one connection: the latest connection of its latest boot.
//! - `QUIC-4` A protocol violation closes the connection, logs one line, and changes nothing else.
//! - `QUIC-5` Everything has a bound: channels, streams, bytes, handshakes, time. Reports and desired states are
//!   self-contained, so a newer one replaces one that is not sent yet.
//! - `QUIC-6` A connection ends when the certificate of its handshake expires.
//!
//! Deliberately absent: tensors and checkpoints (TCP is three times as fast at a fifth of the CPU work), migration of
//! connections to other addresses, and session resumption.

use crate::trust::TrustError;
use crate::wire::WireError;
use phalanx_strategies::elastic::timing::TimingError;
use std::net::SocketAddr;

mod accept;
pub mod ask;
mod batch;
mod complaint;
mod dial;
pub mod enrol;
mod frame;
pub mod link;
pub mod listener;
pub mod listener_config;
mod node;
mod operator;
pub mod shared;
mod transport;

/// For fuzz targets.
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    pub(crate) use super::enrol::{Join, Renew};
    use crate::trust::register::Application;
    use crate::trust::token::{Proof, Token};

    /// All kinds of join messages.
    pub(crate) fn joins() -> [Join; 3] {
        let Token { id, secret } = Token::new().expect("the system has random numbers");
        let signing_request = vec![0x30; 40];
        let proof = Proof::new(&secret, &[7; 32], &signing_request);
        [Join::Again, Join::Renewal, Join::WithToken(Application { token: id, proof, signing_request })]
    }
}

#[cfg(test)]
pub(crate) mod tests;

/// Why a side of the control plane failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuicError {
    /// The address is not local, or in use.
    #[error("cannot listen on {address}: {kind}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        kind: std::io::ErrorKind,
    },
    /// The system cannot provide a thread or an event loop.
    #[error("cannot start a thread for the control plane: {0}")]
    Thread(std::io::ErrorKind),
    /// A key or a certificate is invalid.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The timeouts are inconsistent.
    #[error(transparent)]
    Timing(#[from] TimingError),
    /// A message cannot be encoded or decoded.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// No coordinator answers.
    #[error("no coordinator answers at {addresses}: {why}")]
    Unreachable {
        /// The addresses that were tried.
        addresses: String,
        /// The last failure.
        why: String,
    },
    /// The coordinator rejected this peer.
    #[error("the coordinator refuses: {0}")]
    Refused(String),
    /// The coordinator rejected the expired certificate of this peer.
    #[error("the coordinator refuses: {0}")]
    Expired(String),
    /// The coordinator rejected this peer, and will reject it again: its node has started again, or its job is another one.
    #[error("the coordinator refuses: {0}")]
    RefusedForGood(String),
    /// The connection was lost.
    #[error("the connection to the coordinator was lost: {0}")]
    Lost(String),
}
