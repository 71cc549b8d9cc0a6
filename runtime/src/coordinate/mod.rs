//! The coordinator of a job, alone or together with a node in one process.
//!
//! - `serve`: the coordinator of a job, with the settings in `serving` and the port of `listening`; `term`: how its term begins; `survivors`: whether ranks of a job without a coordinator live;
//!   `standby`: waits until no other coordinator is active; `head_node`: coordinator and node in one process; `advertised`: the addresses of a coordinator; `job_number`: the number of a job; `folder_mark`: the
//!   file that shows whose a folder is; `silent_stop`: a stop while the store is silent; `held_lease`: the lease of a job without
//!   a coordinator; `rendezvous`: machines that a cluster launcher started.
//! - `ask`: the operator's client; `past`: what is known of a job without a coordinator; `sentence`: events as text; `event_log`:
//!   events in a file.

mod advertised;
pub(crate) mod ask;
pub(crate) mod event_log;
mod folder_mark;
pub(crate) mod head_node;
pub(crate) mod held_lease;
mod job_number;
pub(crate) mod listening;
pub(crate) mod past;
mod patience;
pub(crate) mod rendezvous;
pub(crate) mod sentence;
pub(crate) mod serve;
pub(crate) mod serving;
mod silent_stop;
mod standby;
mod survivors;
mod term;
mod together;
