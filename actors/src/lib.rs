//! The operating system: coordinator, node supervisors, ranks and mesh groups as actors, and the QUIC traffic between
//! them.
//!
//! Code map, in the order in which a message passes:
//! - [`wire`]: the only place that encodes; versions, limits, exact lengths;
//! - [`trust`]: who may take part: the job's certificate authority, tokens, the join string, credentials;
//! - [`transport`]: the seam between coordinator and nodes; [`quic`] is the one across machines: the coordinator's listener and
//!   the node's link to it; `transport::in_process` is the one inside a process;
//! - [`control`]: the one thread of all control actors of a process, and what becomes of a panic;
//! - [`coordinator`]: the shell around the machines that decide; [`store`] is what survives it, [`events`] what it tells;
//! - [`supervisor`]: the shell around the machine of a node; holds no device state;
//! - [`rank`]: the shell around the machine of a rank, beside its device thread; [`step_log`]: what it hears of the device's
//!   steps; [`mesh_group`]: the owner of each of its communicators, for one generation;
//! - [`coordinator_handle`], [`node`]: both for programs without actors of their own; [`operator`]: what can be asked
//!   of a job.
//!
//! Writing a checkpoint is no actor: it blocks, and what its writers must agree on they settle at the boundaries of steps
//! (`phalanx`'s `train::background`).
//!
//! Deliberately absent, now and later: decisions. A handler with an `if` about policy belongs in `phalanx_strategies`.

pub mod control;
pub mod coordinator;
pub mod coordinator_handle;
pub mod events;
#[cfg(any(test, feature = "fuzzing"))]
mod fuzz;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod mesh_group;
pub mod node;
pub mod operator;
pub mod quic;
pub mod rank;
pub mod step_log;
pub mod store;
pub mod supervisor;
pub mod transport;
pub mod trust;
pub mod wire;
