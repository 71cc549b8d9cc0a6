//! What a member asks of its shell.

use super::super::commit::{Version, Vote};
use super::super::identity::{Generation, Step};
use super::super::message::Requests;
use super::super::recovery::Transfer;
use super::super::shadow::Shard;
use super::super::snapshot::Part;

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
    /// Leave the previous world and join this one as a rank or as a guest; answer with [`Member::handle_joined`](super::Member::handle_joined).
    Join(Generation),
    /// Fetch a piece of the state `base`; answer with [`Member::handle_fetched`](super::Member::handle_fetched).
    Fetch {
        /// For which world.
        generation: Generation,
        /// Which state.
        base: Version,
        /// What from where.
        transfer: Transfer,
    },
    /// Catch up beside the world of this generation; answer with [`Member::handle_caught_up`](super::Member::handle_caught_up) once all is there, and
    /// with [`Member::handle_followed`](super::Member::handle_followed) for the gradients of each step.
    CatchUp(Generation),
    /// Compute the update that leads to this step; answer with [`Member::handle_computed`](super::Member::handle_computed).
    Compute {
        /// In which world.
        generation: Generation,
        /// Which step.
        step: Step,
    },
    /// Send this vote to all members of the world, together with the operator requests known here.
    Vote(Vote, Requests),
    /// Copy the state and make a part of a checkpoint durable; answer with [`Member::handle_saved`](super::Member::handle_saved).
    Save(Part),
    /// All steps are done and all parts durable: do what else belongs to the end; answer with
    /// [`Member::handle_finished`](super::Member::handle_finished).
    Finish(Generation),
    /// The job is over: end the process.
    Exit,
    /// Tell the supervisor at once: see [`Member::report`](super::Member::report).
    Report,
}
