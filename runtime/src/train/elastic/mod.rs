//! A run whose ranks may die: the shells around the pure machines of `phalanx_strategies::elastic`.
//!
//! - `words`: what a node and its rank processes say to each other.
//! - `rank`: a rank process: one thread takes orders, one gives signs of life, one is the device; [`cell`] is what they share.
//! - `device`: joins worlds, heals, trains; `heal`: state from memory to memory; `pairs`: who has messages for whom.
//! - `node`: the rank processes of a machine and the memory that they share.
//! - `incidents`: `events.jsonl`. - `local`: coordinator and node in one process.

pub(crate) mod cell;
mod device;
mod heal;
mod incidents;
pub(crate) mod local;
pub(crate) mod node;
mod pairs;
pub(crate) mod rank;
pub(crate) mod words;
