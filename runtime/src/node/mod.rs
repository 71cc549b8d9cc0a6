//! A node of a job: its supervisor, and the rank processes that it starts and watches.
//!
//! - `join`: one machine takes part in a job; `welcome`: what its coordinator tells it first.
//! - `processes`: the rank processes of a machine and the memory that they share.

pub(crate) mod join;
pub(crate) mod processes;
pub(crate) mod welcome;
