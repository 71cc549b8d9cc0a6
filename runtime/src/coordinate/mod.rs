//! The coordinator of a job, alone or together with a node in one process.
//!
//! - `serve`: the coordinator of a job; `standby`: waits until no other coordinator is active; `head_node`: coordinator and
//!   node in one process; `held_lease`: the lease of a job without a coordinator; `rendezvous`: machines that a cluster
//!   launcher started.
//! - `ask`: the operator's client; `past`: what is known of a job without a coordinator; `sentence`: events as text; `event_log`: events in a file.

pub(crate) mod ask;
pub(crate) mod event_log;
pub(crate) mod head_node;
pub(crate) mod held_lease;
pub(crate) mod past;
mod patience;
pub(crate) mod rendezvous;
pub(crate) mod sentence;
pub(crate) mod serve;
mod standby;
