//! The operating system: coordinator, node supervisors, ranks and mesh groups as actors, and the QUIC traffic between
//! them.
//!
//! Code map, in the order in which a message passes:
//! - [`wire`]: the only place that encodes; versions, limits, exact lengths;
//! - [`trust`]: who may take part: the job's certificate authority, tokens, the join string, credentials;
//! - [`quic`]: the sockets: the coordinator's listener and the node's link to it.
//!
//! To come: `coordinator` (the shell around the machines of `phalanx_strategies`), `supervisor` (spawns, watches and
//! kills the ranks of a node; holds no device state), `rank` and `mesh_group`.
//!
//! Deliberately absent, now and later: decisions. A handler with an `if` about policy belongs in `phalanx_strategies`.

#[cfg(test)]
mod fuzz;
pub mod quic;
pub mod trust;
pub mod wire;
