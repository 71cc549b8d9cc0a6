//! A rank process: an actor takes orders and reports, a thread drives the device.
//!
//! - `process`: the process from its first instruction; `rank_messages`: what a node and its rank processes say to each other;
//!   `failure_report`: why a rank cannot go on; `port`: how the actor reaches the device and the supervisor; `mesh_groups`: the
//!   communicators as their actors own them.
//! - `device`: joins worlds, heals, trains; `world_groups`: the groups of a world; `beside`: catches up while others
//!   train; `heal`: state from memory to memory; `missing_regions`: what of it is still to come; `pairs`: who has
//!   messages for whom.
//! - `arena_contents`: who keeps its memory; `recycled_arenas`: and who keeps that of an earlier rank; `warm`: what a
//!   process has before its first status report.
//!
//! Deliberately absent: world membership. The coordinator decides, and the supervisor passes it on.

pub(crate) mod arena_contents;
mod beside;
pub(crate) mod device;
pub(crate) mod failure_report;
pub(crate) mod heal;
mod mesh_groups;
mod missing_regions;
mod pairs;
mod port;
pub(crate) mod process;
pub(crate) mod rank_messages;
pub(crate) mod recycled_arenas;
mod warm;
pub(crate) mod world_groups;
