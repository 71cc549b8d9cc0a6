//! A node of a job: its supervisor, and the rank processes that it starts and watches.
//!
//! - `join`: one machine takes part in a job; `welcome`: what its coordinator tells it first.
//! - `chorus`: the events of all ranks as one; `failures`: why ranks could not begin or go on.
//! - `processes`: the rank processes of a machine and the memory that they share.

mod chorus;
mod failures;
pub(crate) mod join;
pub(crate) mod processes;
pub(crate) mod welcome;
