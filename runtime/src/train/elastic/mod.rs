//! A run whose ranks may die: the shells around the pure machines of `phalanx_strategies::elastic`.
//!
//! - `words`: what a node and its rank processes say to each other.
//! - `rank`: a rank process: one thread takes orders, one gives signs of life, one is the device; [`cell`] is what they share.
//! - `device`: joins worlds, heals, trains; `heal`: state from memory to memory; `pairs`: who has messages for whom.
//! - `node`: the rank processes of a machine and the memory that they share.
//! - `local`: coordinator and node in one process.
//! - `serve`: the coordinator of several nodes; `join`: one of them; `ask`: the operator.

pub(crate) mod ask;
pub(crate) mod cell;
mod device;
mod heal;
pub(crate) mod join;
pub(crate) mod local;
pub(crate) mod node;
mod pairs;
pub(crate) mod rank;
pub(crate) mod serve;
pub(crate) mod words;
