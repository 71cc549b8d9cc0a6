//! Elasticity: members, worlds, the state a world starts from, and which steps are committed.
//!
//! Everything here is a pure machine or a pure function. Code map, in the order of an incident:
//! - [`supervisor`]: one per node; notices that a rank died or hangs, reports, starts its successor.
//! - [`membership`]: the coordinator's view of nodes and workers; [`incident`] keeps the first cause and the phases.
//! - [`quorum`]: may a new world replace the last one; [`commit`]: which step the last world reached.
//! - [`mesh_choice`]: who has which rank; [`shadow`]: placement of shadows; [`recovery`]: planning of state transfers.
//! - [`catch_up`]: catching up while the others train.
//! - [`coordinator`]: composes them into generations; [`member`]: what a rank does about it.
//! - [`snapshot`]: which checkpoint is complete; [`succession`]: which coordinator is the one.
//! - [`progress`]: whether a device gets on; [`straggler`]: whether it keeps all others waiting.
//! - [`timing`], [`identity`], [`message`]: durations, names and ordering, and what travels; [`validate`]: what must
//!   hold of it.
//!
//! The protocol is level-triggered. A node sends its whole *report* periodically, and at once when it changes; the
//! coordinator sends the whole *desired state* to every node that has not acknowledged it. Loss, duplication and
//! reordering then need no extra code, and a new coordinator is fully informed by the next round of reports.
//!
//! A member votes for a step once it holds everything the update needs, *before* applying it, and applies the update
//! once it knows that all members have voted. Nothing ever has to be undone: a member that has voted can still commit
//! or discard the step.
//!
//! Deliberately absent: clocks, randomness, sockets, files and the tensors themselves.

pub mod catch_up;
pub mod commit;
pub mod coordinator;
pub mod identity;
pub mod incident;
pub mod member;
pub mod membership;
pub mod mesh_choice;
pub mod message;
pub mod progress;
pub mod quorum;
pub mod recovery;
pub mod shadow;
pub mod snapshot;
pub mod straggler;
pub mod succession;
pub mod supervisor;
pub mod timing;
pub mod validate;
