//! A node of a job: its supervisor, and the loop that starts and watches rank processes.
//!
//! - `join`: takes part in a job of another machine, after an `enrolment`; `part`: of any job; `node_loop`: its loop, until it is over or
//!   the node is to `leave`; `bootstrap`: the coordinator's first message to a node;
//!   `shared_folder`: whether the node sees the job's output folder.
//! - `metrics_merge`: merges the events of all ranks; `failures`: failures of ranks.
//! - `folder`: the folder with the key of a node, for one process at a time.
//! - `processes`: the rank processes of a machine and their shared memory; `devices`: their devices;
//!   `processor_waits`: how long they wait for a processor.

pub(crate) mod bootstrap;
mod devices;
pub(crate) mod enrolment;
mod failures;
pub(crate) mod folder;
pub(crate) mod join;
pub(crate) mod leave;
mod metrics_merge;
pub(crate) mod node_loop;
pub(crate) mod part;
pub(crate) mod processes;
mod processor_waits;
pub(crate) mod shared_folder;
