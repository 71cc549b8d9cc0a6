//! The coordinator of a job, alone or together with a node in one process.
//!
//! - `serve`: the coordinator of a job, and `standby` until it is needed; `head_node`: coordinator and node in one
//!   process, of a job of one machine or of several; `rendezvous`: machines of a cluster's launcher.
//! - `ask`: the operator; `sentence`: what happens, for people; `event_log`: the same in a file.

pub(crate) mod ask;
pub(crate) mod event_log;
pub(crate) mod head_node;
pub(crate) mod rendezvous;
pub(crate) mod sentence;
pub(crate) mod serve;
mod standby;
