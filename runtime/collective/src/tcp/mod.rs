//! Collectives between ranks of different machines, over TCP.
//!
//! Every two ranks that share a group have one connection for announcements and some for tensors. Threads of their own
//! read and write them, so operations advance while the rank computes.
//!
//! - [`connect`]: who calls whom; options. - `handshake`: proof of the job's secret. - `frame`: what travels. - `plane`:
//!   connections and threads. - `group`: operations in flight. - `exchange`: one operation. - [`collective`]: the rank and
//!   the communicator.
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
mod group;
mod handshake;
mod plane;
#[cfg(test)]
pub(crate) mod tests;
