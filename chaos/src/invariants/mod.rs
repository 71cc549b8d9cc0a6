//! What must hold in every run, one promise a file, checked at every observation.

mod all_joined;
mod attribution;
mod catch_up;
mod committed_steps;
mod ending;
mod exactly_once;
mod golden;
mod nothing_lost;
mod nothing_stale;
mod one_world;
mod two_copies;

use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::incident::Timeline;
use phalanx_strategies::elastic::message::{DesiredStateId, Record, WorldPlan};
use phalanx_strategies::elastic::shadow::Shard;
use std::ops::Range;

/// What an onlooker who sees everything sees.
#[derive(Clone, Debug)]
pub enum Observation<'a> {
    /// A coordinator begins a term.
    Leads(Term),
    /// A record is durable.
    Persisted(&'a Record),
    /// A node has taken up a desired state, after this one.
    DesiredStateTaken {
        /// The worker.
        node: NodeId,
        /// The one before.
        before: DesiredStateId,
        /// Which desired state.
        desired_state: DesiredStateId,
    },
    /// A supervisor has killed a worker on the desired state of a coordinator.
    Evicted {
        /// The worker.
        node: NodeId,
        /// Term of the coordinator.
        term: Term,
    },
    /// The device of a member has joined a world.
    JoinedWorld {
        /// The worker.
        worker: Worker,
        /// Which world.
        generation: Generation,
    },
    /// A member begins with a step.
    Computes {
        /// The worker.
        worker: Worker,
        /// In which world.
        world_plan: &'a WorldPlan,
    },
    /// The gradients of a step are reduced: these microbatches were in it, one run per data rank.
    Reduced(&'a [Range<usize>], usize),
    /// A member has voted for the update that it took from a reduction.
    Voted {
        /// The worker.
        worker: Worker,
        /// The world whose members reduced it.
        generation: Generation,
        /// The latest generation that it had been told of.
        told: Generation,
        /// The step.
        step: Step,
    },
    /// A member has learnt that a step is committed.
    Committed {
        /// The worker.
        worker: Worker,
        /// The world in which it did.
        generation: Generation,
        /// The latest generation that it had been told of.
        told: Generation,
        /// The step.
        step: Step,
        /// What identifies the update.
        digest: u64,
    },
    /// A new world counts a step that no member is known to have learnt.
    Decided {
        /// The world in which it was voted for.
        generation: Generation,
        /// The step.
        step: Step,
        /// What identifies the update.
        digest: u64,
    },
    /// A coordinator tells of a world, which may be one of the past.
    Announced(&'a WorldPlan),
    /// A new world begins from this state.
    Formed(&'a WorldPlan),
    /// All members of a world are ready: those with a rank have their state. These are those that have each shard in
    /// memory.
    Healed(&'a WorldPlan, Vec<(Shard, Vec<Worker>)>),
    /// A worker has the state of a step; part and value.
    State {
        /// The worker.
        worker: Worker,
        /// Which state.
        version: Version,
        /// The pieces.
        atoms: &'a [(u64, u64)],
    },
    /// Something befalls a node that may cost its memory, and goes on if `lasts`.
    Disturbed {
        /// Which.
        node: NodeId,
        /// Whether it has just begun and lasts.
        lasts: bool,
    },
    /// What lasted is over.
    Calm(NodeId),
    /// An incident is over.
    Resumed(&'a Timeline),
}

/// A promise.
pub trait Invariant {
    /// Its name, for reports.
    fn name(&self) -> &'static str;

    /// Looks at what happened.
    ///
    /// # Errors
    /// A sentence that describes the violation.
    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String>;
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Violation {
    /// Which promise.
    pub invariant: String,
    /// How.
    pub what: String,
    /// When, in virtual milliseconds.
    pub at_ms: u64,
}

/// All of them. With `reproducible`, states must be those of a run in which nothing happened.
pub fn all(reproducible: bool) -> Vec<Box<dyn Invariant>> {
    vec![
        Box::new(committed_steps::CommittedSteps::default()),
        Box::new(one_world::OneWorld::default()),
        Box::new(nothing_stale::NothingStale::default()),
        Box::new(nothing_lost::NothingLost::default()),
        Box::new(two_copies::TwoCopies),
        Box::new(exactly_once::ExactlyOnce),
        Box::new(ending::Ending::default()),
        Box::new(golden::Golden::new(reproducible)),
        Box::new(attribution::Attribution::default()),
        Box::new(all_joined::AllJoined::default()),
        Box::new(catch_up::CatchingUp),
    ]
}
