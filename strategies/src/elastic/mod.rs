//! Elasticity: members, worlds, the state a world starts from, and which steps are committed.
//!
//! Everything here is a pure machine or a pure function. Code map, in the order of an incident:
//! - [`supervisor`]: one per node; notices that a rank died or hangs, reports, starts its successor; [`devices`]: on which device.
//! - [`membership`]: the coordinator's view of nodes and workers; [`incident`] keeps the first cause and the phases.
//! - [`quorum`]: may a new world replace the last one; [`commit`]: which step the last world reached.
//! - [`mesh_choice`]: assignment of ranks; [`shadow`]: placement of shadows; [`recovery`]: planning of state transfers.
//! - [`catch_up`]: catching up while the others train.
//! - [`fingerprint`], [`copies`]: which state exists more than once, and whether the copies agree;
//!   [`dispute`]: whose copy was wrong.
//! - [`coordinator`]: composes them into generations; [`member`]: a rank's part in a generation.
//! - [`checkpoint`]: its name and its parts; [`snapshot`]: which one is complete; [`succession`]: which coordinator is current.
//! - [`progress`]: whether a device makes progress; [`straggler`]: whether all others wait for it.
//! - [`timing`], [`identity`], [`message`]: durations, ordered ids and messages; [`validate`]: which messages are valid.
//!
//! The protocol is level-triggered. A node sends its whole *report* periodically, and at once when it changes; the
//! coordinator sends the whole *desired state* to every node that has not acknowledged it. Loss, duplication and
//! reordering then need no extra code, and the next round of reports gives a new coordinator the full state.
//!
//! A member votes for a step once it holds everything the update needs, *before* applying it, and applies the update
//! once all members have voted. No update is ever undone: a member that has voted can still commit or discard the
//! step.
//!
//! Deliberately absent: clocks, randomness, sockets, files and the tensors themselves.

pub mod catch_up;
pub mod checkpoint;
pub mod commit;
pub mod coordinator;
pub mod copies;
pub mod devices;
pub mod dispute;
pub mod fingerprint;
pub mod identity;
pub mod incident;
pub mod inputs;
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
