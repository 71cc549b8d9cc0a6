//! A node of a job: its supervisor, and the loop that starts and watches rank processes.
//!
//! - `join`: takes part in a job; `bootstrap`: the coordinator's first message to a node.
//! - `metrics_merge`: merges the events of all ranks; `failures`: failures of ranks.
//! - `processes`: the rank processes of a machine and their shared memory; `devices`: their devices.

pub(crate) mod bootstrap;
mod devices;
mod failures;
pub(crate) mod join;
mod metrics_merge;
pub(crate) mod processes;
