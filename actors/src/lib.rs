//! The operating system: coordinator, node supervisors, ranks and mesh groups as actors, and the QUIC traffic between
//! them.
//!
//! Code map, in the order of a message's path:
//! - [`wire`]: the only encoder; versions, limits, exact lengths;
//! - [`trust`]: admission: the job's certificate authority, tokens, the join string, credentials;
//! - [`transport`]: the interface between coordinator and nodes; [`quic`] implements it across machines (the coordinator's
//!   listener and the node's link), `transport::in_process` inside a process;
//! - [`control`]: the thread of all control actors of a process, and its panic handling;
//! - [`coordinator`]: the shell around the deciding machines; [`store`] keeps their durable state, [`events`] logs what happens;
//! - [`supervisor`]: the shell around the machine of a node; holds no device state; `timer`: wakes the shells at their machines'
//!   deadlines;
//! - [`rank`]: the shell around the machine of a rank, beside its device thread; [`step_log`]: the device thread's step
//!   counters; [`mesh_group`]: the owner of each of the rank's communicators, for one generation;
//! - `sync_dir`: durable names of files;
//! - [`coordinator_handle`], [`node`]: handles for programs without actors; [`operator`]: operator requests to a job.
//!
//! Writing a checkpoint is not an actor: it blocks, and its writers agree at step boundaries (`phalanx`'s
//! `train::background`).
//!
//! Deliberately absent: decisions. A handler with an `if` about policy belongs in `phalanx_strategies`.

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
mod sync_dir;
mod timer;
pub mod transport;
pub mod trust;
pub mod wire;
