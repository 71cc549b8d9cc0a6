//! A run whose ranks may die: the shells around the pure machines of `phalanx_strategies::elastic`.
//!
//! - `words`: what a node and its rank processes say to each other.
//! - `rank`: a rank process: an actor takes orders and gives signs of life, a thread is the device; [`cell`] is what they
//!   share, and `mesh_groups` what the actor has of the device's communicators.
//! - `device`: joins worlds, heals, trains; `beside`: catches up while others train; `heal`: state from memory to memory;
//!   `lacking`: what of it is still to come; `pairs`: who has messages for whom; `seat_memory`: who keeps its memory;
//!   `lent`: and who keeps that of an earlier seat; `warm`: what a process has before its first word.
//! - `node`: the rank processes of a machine and the memory that they share.
//! - `local`: coordinator and node in one process.
//! - `serve`: the coordinator of several nodes, and `standby` until it is needed; `join`: one of them; `head`: both in one process; `muster`: machines
//!   of a cluster's launcher; `ask`: the operator;
//!   `sentence`: what happens, for people; `event_log`: for who comes later.

pub(crate) mod ask;
mod beside;
pub(crate) mod cell;
mod device;
pub(crate) mod event_log;
pub(crate) mod head;
pub(crate) mod heal;
pub(crate) mod join;
mod lacking;
mod lent;
pub(crate) mod local;
mod mesh_groups;
pub(crate) mod muster;
pub(crate) mod node;
mod pairs;
pub(crate) mod rank;
mod seat_memory;
pub(crate) mod sentence;
pub(crate) mod serve;
mod standby;
mod warm;
pub(crate) mod words;
