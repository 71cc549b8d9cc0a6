//! The control plane's sockets: one UDP port of the coordinator, one connection of each node to it.
//!
//! Code map:
//! - [`listener`]: the coordinator's side; `accept` tells members from strangers, `node` and `operator` serve them;
//! - [`link`]: the node's side; reconnects for ever; [`enrol`]: how a machine becomes a node;
//! - [`ask`]: the operator's side;
//! - `batch`: what makes heartbeats cheap; `complaint`: refusals in the log;
//! - `transport`: QUIC's parameters, all from `Timing`; `frame`: one message, one stream; `dial`: connects to the first
//!   address that answers.
//!
//! A message is a stream of its own: it ends where the stream ends, it is lost or late without holding up others, and
//! nothing has to be parsed to find its end. Heartbeats are datagrams. Both sides run on a thread of their own, so that
//! nothing that the process does delays a heartbeat.
//!
//! Invariants:
//! - `QUIC-1` Who has shown no certificate can do one thing: join, once per connection. Nothing that it sends reaches
//!   another component.
//! - `QUIC-2` What a connection may say depends on its certificate: a node speaks for itself only, and asks for nothing
//!   but a newer certificate; an operator only asks.
//! - `QUIC-3` Of a node there is one connection: the one of its latest boot, and of those the latest.
//! - `QUIC-4` Whoever breaks the protocol loses its connection, with one line in the log, and changes nothing.
//! - `QUIC-5` Everything has a bound: channels, streams, bytes, handshakes, time. Reports and orders are whole, so the
//!   newest replaces one that could not be sent.
//! - `QUIC-6` A connection ends with the certificate that it began with.
//!
//! Deliberately absent: tensors and checkpoints (TCP is three times as fast and a fifth of the work), migration of
//! connections to other addresses, and resumption of sessions.

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
mod node;
mod operator;
mod transport;

/// For fuzz targets.
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    pub(crate) use super::enrol::{Join, Renew};
    use crate::trust::register::Application;
    use crate::trust::token::{Proof, Token};

    /// What machines say that want to be nodes.
    pub(crate) fn joins() -> [Join; 2] {
        let Token { id, secret } = Token::new().expect("there are random numbers");
        let signing_request = vec![0x30; 40];
        let proof = Proof::new(&secret, &[7; 32], &signing_request);
        [Join::Again, Join::WithToken(Application { token: id, proof, signing_request })]
    }
}

#[cfg(test)]
pub(crate) mod tests;

/// Why a side of the control plane does not come about.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuicError {
    /// The address is not ours, or taken.
    #[error("cannot listen on {address}: {kind}")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// In the system's words.
        kind: std::io::ErrorKind,
    },
    /// No thread or no event loop.
    #[error("cannot start a thread for the control plane: {0}")]
    Thread(std::io::ErrorKind),
    /// Keys or certificates.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// Timeouts that do not fit each other.
    #[error(transparent)]
    Timing(#[from] TimingError),
    /// A message that cannot be sent or read.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// No coordinator answers.
    #[error("no coordinator answers at {addresses}: {why}")]
    Unreachable {
        /// Where it was tried.
        addresses: String,
        /// The last failure.
        why: String,
    },
    /// The other side does not want us.
    #[error("the coordinator refuses: {0}")]
    Refused(String),
    /// The connection ended in the middle.
    #[error("the connection to the coordinator was lost: {0}")]
    Lost(String),
}
