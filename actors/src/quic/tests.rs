//! End to end on loopback, with real sockets, handshakes and files.

pub(crate) mod fixture;
mod flow;
mod hostile;
mod joining;
mod renewal;
