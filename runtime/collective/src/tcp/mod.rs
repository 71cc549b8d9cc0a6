//! Collectives between ranks of different machines, over TCP.
//!
//! Every two ranks that share a group have one connection for announcements and several for tensors. Dedicated threads
//! read and write them, so operations advance while the rank computes.
//!
//! - [`connect`]: making connections; options. - [`listener`]: the
//!   listening socket of a rank, which authenticates connections. - `handshake`: proof of the job's secret. - `frame`: the wire format. -
//!   `plane`: connections and threads; what the threads do: `reader`, `writer`. - `job`: bytes that go to one peer. - `group`: operations in flight. - `exchange`: one operation. - `sums`: its
//!   sums. - `gate`: accesses to operands. - [`collective`]: the rank and the communicator.
//!
//! Deliberately absent: encryption, and authentication beyond the handshake.

pub mod collective;
mod commands;
pub mod connect;
mod exchange;
mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod group;
mod handshake;
mod job;
pub mod listener;
mod plane;
mod reader;
mod sums;
#[cfg(test)]
pub(crate) mod tests;
mod writer;
