//! Commands from a member to its shell.

use super::super::commit::{Version, Vote};
use super::super::identity::{Generation, Step};
use super::super::message::Requests;
use super::super::recovery::Transfer;
use super::super::shadow::Shard;
use crate::elastic::checkpoint::Part;

/// Commands for the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Command {
    /// Abort everything in progress for earlier generations: collectives, transfers, the open step.
    Abort(Generation),
    /// Apply the open update: the state becomes this one.
    Apply(Version),
    /// Drop the open update.
    Discard,
    /// Free the state of all other shards.
    Keep(Vec<Shard>),
    /// Leave the previous world and join this one as a rank or as a guest; answer with
    /// [`Member::handle_joined`](super::Member::handle_joined).
    Join(Generation),
    /// Fetch a piece of the state `base`; answer with [`Member::handle_fetched`](super::Member::handle_fetched).
    Fetch {
        /// The world.
        generation: Generation,
        /// The state.
        base: Version,
        /// The piece and its source.
        transfer: Transfer,
    },
    /// Catch up beside the world of this generation; answer with
    /// [`Member::handle_caught_up`](super::Member::handle_caught_up) once the state is complete, and with
    /// [`Member::handle_followed`](super::Member::handle_followed) for the gradients of each step.
    CatchUp(Generation),
    /// Compute the update that leads to this step; answer with
    /// [`Member::handle_computed`](super::Member::handle_computed).
    Compute {
        /// The world.
        generation: Generation,
        /// The step.
        step: Step,
    },
    /// Send this vote to all members of the world, together with the operator requests known to this one.
    Vote(Vote, Requests),
    /// Copy the state and make a part of a checkpoint durable; answer with
    /// [`Member::handle_saved`](super::Member::handle_saved).
    Save(Part),
    /// All steps are done and all parts durable: do everything else that the end requires; answer with
    /// [`Member::handle_finished`](super::Member::handle_finished).
    Finish(Generation),
    /// The job is over: end the process.
    Exit,
    /// Send the status report to the supervisor at once: see [`Member::report`](super::Member::report).
    Report,
}
