//! How a job survives change: who takes part, in which world, from which state, and which steps count.
//!
//! Everything here is a pure machine or a pure function. Code map, in the order of an incident:
//! - [`supervisor`]: one per node; notices that a rank died or hangs, reports, starts its successor.
//! - [`membership`]: the coordinator's view of nodes and workers; [`incident`] keeps the first cause and the phases.
//! - [`quorum`]: may a new world replace the last one; [`commit`]: which step the last world reached.
//! - [`mesh_choice`]: who sits where; [`shadow`]: who keeps a copy of whose state; [`recovery`]: who sends it to whom.
//! - [`learner`]: who catches up while the others train.
//! - [`coordinator`]: composes them into generations; [`member`]: what a rank does about it.
//! - [`snapshot`]: which checkpoint is complete; [`succession`]: which coordinator is the one.
//! - [`progress`]: whether a device gets on; [`laggard`]: whether it keeps all others waiting.
//! - [`timing`], [`identity`], [`message`]: durations, names and ordering, and what travels; [`sound`]: what must hold of it.
//!
//! The protocol is level-triggered. A node sends its whole *report*, again and again and at once when it changes; the
//! coordinator sends its whole *order* to whoever has not taken it up. Loss, duplication and reordering then need no
//! code of their own, and a coordinator that knows nothing is told everything by the next round of reports.
//!
//! A member votes for a step once it holds all that the step's update needs, *before* it applies it; it applies the
//! update once it has learnt that all have voted. So nothing ever has to be undone: who has voted can go either way.
//!
//! Deliberately absent: clocks, randomness, sockets, files and the tensors themselves.

pub mod commit;
pub mod coordinator;
pub mod identity;
pub mod incident;
pub mod laggard;
pub mod learner;
pub mod member;
pub mod membership;
pub mod mesh_choice;
pub mod message;
pub mod progress;
pub mod quorum;
pub mod recovery;
pub mod shadow;
pub mod snapshot;
pub mod sound;
pub mod succession;
pub mod supervisor;
pub mod timing;
