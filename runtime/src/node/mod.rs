//! A node of a job: its supervisor, and the loop that starts and watches rank processes.
//!
//! - `join`: one machine takes part in a job; `bootstrap`: what its coordinator tells it first.
//! - `metrics_merge`: the events of all ranks as one; `failures`: why ranks could not begin or go on.
//! - `processes`: the rank processes of a machine and the memory that they share.

pub(crate) mod bootstrap;
mod failures;
pub(crate) mod join;
mod metrics_merge;
pub(crate) mod processes;
