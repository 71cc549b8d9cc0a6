//! A rank process: an actor receives desired states and sends reports; a thread drives the device.
//!
//! - `process`: the start of the process; `beginning`: what it needs before its device thread runs; `rank_messages`: messages
//!   between a node and its rank processes; `failure_report`: why a rank failed; `port`: connects the actor to the device and the
//!   supervisor; `mesh_groups`: communicators as owned by their actors.
//! - `device`: joins worlds, heals, trains; `instance`: a rank in one world; `device_watch`: ends the process when its device hangs;
//!   `world_groups`: the groups of a world; `beside`: catches up while others train; `heal`: transfers state from memory to memory;
//!   `missing_regions`: state that has not arrived; `pairs`: the pairs of members that exchange messages.
//! - `arena_contents`: when a rank keeps its arena; `recycled_arenas`: reuse of arenas of earlier ranks; `warm`: memory that is
//!   prepared before the first status report; `opening`: the device, opened beside the rest of the start; `cpu_limit`: a rank at its
//!   limit of CPU time asks for the end of the job.
//!
//! Deliberately absent: world membership. The coordinator decides, and the supervisor passes it on.

pub(crate) mod arena_contents;
mod beginning;
mod beside;
mod cpu_limit;
pub(crate) mod device;
pub(crate) mod device_watch;
pub(crate) mod failure_report;
pub(crate) mod heal;
pub(crate) mod instance;
mod mesh_groups;
mod missing_regions;
mod opening;
pub(crate) mod pairs;
mod port;
pub(crate) mod process;
pub(crate) mod rank_messages;
pub(crate) mod recycled_arenas;
mod warm;
pub(crate) mod world_groups;
