//! The planner: which mesh, schedule and memory policy train a model fastest on given machines.
//!
//! - [`hardware`]: descriptions of devices and their links.
//! - [`cost`]: seconds of an instruction and of a collective.
//! - [`overhead`]: memory of a device besides the buffers of programs.
//! - [`workload`]: the model and its batch, as far as a plan depends on them.
//! - [`candidate`]: the choices of a plan, and all candidates worth trying.
//! - [`reason`]: why a candidate is rejected, as a sentence.
//! - [`bound`]: a quick lower bound on the time and memory of a candidate.
//! - [`mod@search`]: bounds all candidates; the caller compiles and simulates the promising ones.
//! - [`report`]: a plan as rows of a table.
//!
//! Deliberately absent: compiling a candidate, which the caller does.

pub mod bound;
pub mod candidate;
pub mod cost;
pub mod hardware;
pub mod overhead;
pub mod reason;
pub mod report;
pub mod search;
pub mod workload;

pub use candidate::{Candidate, MeshSizes, ZeroStage};
pub use hardware::{CONTEXT_BYTES, Hardware};
pub use overhead::Overhead;
pub use reason::Reason;
pub use search::{Evaluation, Options, Plan, Ranked, Refusal, search};
pub use workload::Workload;

#[cfg(test)]
mod tests;
