//! The planner: which mesh, schedule and memory policy train a model fastest on given machines.
//!
//! - [`hardware`]: what a device and its links can do, with shipped descriptions.
//! - [`cost`]: seconds of an instruction and of a collective.
//! - [`workload`]: the model and its batch, as far as a plan depends on them.
//! - [`candidate`]: what can be chosen, and everything that is worth trying.
//! - [`reason`]: why a candidate is out, as the sentence that people read.
//! - [`bound`]: a quick estimate of a candidate that errs on the fast and small side.
//! - [`mod@search`]: bounds all candidates, then has the promising ones compiled and simulated by the caller.
//! - [`report`]: a plan as the cells of a table.
//!
//! Deliberately absent: compiling a candidate, which is the caller's.

pub mod bound;
pub mod candidate;
pub mod cost;
pub mod hardware;
pub mod reason;
pub mod report;
pub mod search;
pub mod workload;

pub use candidate::{Candidate, MeshSizes, ZeroStage};
pub use hardware::Hardware;
pub use reason::Reason;
pub use search::{Evaluation, Options, Plan, Ranked, Refusal, search};
pub use workload::Workload;

#[cfg(test)]
mod tests;
