//! The coordinator of a job, alone or together with a node in one process.
//!
//! - `serve`: the coordinator of several nodes, and `standby` until it is needed; `head`: coordinator and node in one
//!   process; `local`: the same without a network; `muster`: machines of a cluster's launcher.
//! - `chorus`: the events of all ranks as one; `ask`: the operator; `sentence`: what happens, for people; `event_log`: the
//!   same in a file.

pub(crate) mod ask;
mod chorus;
pub(crate) mod event_log;
pub(crate) mod head;
pub(crate) mod local;
pub(crate) mod muster;
pub(crate) mod sentence;
pub(crate) mod serve;
mod standby;
