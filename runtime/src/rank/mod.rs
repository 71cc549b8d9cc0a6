//! A rank process: an actor takes orders and reports, a thread drives the device.
//!
//! - `process`: the process from its first instruction; `words`: what a node and its rank processes say to each other;
//!   `excuse`: why a rank cannot go on; `cell`: the state that actor and device share; `mesh_groups`: what the actor has of
//!   the device's communicators.
//! - `device`: joins worlds, heals, trains; `world_plan`: the groups of a world; `beside`: catches up while others train;
//!   `heal`: state from memory to memory; `lacking`: what of it is still to come; `pairs`: who has messages for whom.
//! - `seat_memory`: who keeps its memory; `lent`: and who keeps that of an earlier seat; `warm`: what a process has before
//!   its first word.
//!
//! Deliberately absent: who is a member of which world. The coordinator decides, and the supervisor passes it on.

mod beside;
pub(crate) mod cell;
pub(crate) mod device;
pub(crate) mod excuse;
pub(crate) mod heal;
mod lacking;
pub(crate) mod lent;
mod mesh_groups;
mod pairs;
pub(crate) mod process;
pub(crate) mod seat_memory;
mod warm;
pub(crate) mod words;
pub(crate) mod world_plan;
