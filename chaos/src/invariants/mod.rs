//! What must hold in every run, one promise a file, checked at every observation.

mod all_joined;
mod attribution;
mod committed_steps;
mod ending;
mod exactly_once;
mod golden;
mod learners;
mod nothing_stale;
mod one_world;
mod promise;
mod two_copies;

use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::incident::Timeline;
use phalanx_strategies::elastic::message::{Formation, OrderId, Record};
use phalanx_strategies::elastic::shadow::Shard;
use std::ops::Range;

/// What an onlooker who sees everything sees.
#[derive(Clone, Debug)]
pub enum Observation<'a> {
    /// A coordinator begins a term.
    Leads(Term),
    /// A record is durable.
    Persisted(&'a Record),
    /// A node has taken up an order, after this one.
    Ordered {
        /// Who.
        node: NodeId,
        /// The one before.
        before: OrderId,
        /// Which order.
        order: OrderId,
    },
    /// A supervisor has killed a worker on the order of a coordinator.
    Evicted {
        /// Who.
        node: NodeId,
        /// In whose term.
        term: Term,
    },
    /// The device of a member has joined a world.
    Joined {
        /// Who.
        worker: Worker,
        /// Which world.
        generation: Generation,
    },
    /// A member begins with a step.
    Computes {
        /// Who.
        worker: Worker,
        /// In which world.
        formation: &'a Formation,
    },
    /// The gradients of a step are reduced: these microbatches were in it, one run per data rank.
    Reduced(&'a [Range<usize>], usize),
    /// A member has voted for the update that it took from a reduction.
    Voted {
        /// Who.
        worker: Worker,
        /// The world whose members reduced it.
        generation: Generation,
        /// The latest generation that it had been told of.
        told: Generation,
        /// The step.
        step: Step,
    },
    /// A member has learnt that a step is committed.
    Learnt {
        /// Who.
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
    Announced(&'a Formation),
    /// A new world begins from this state.
    Formed(&'a Formation),
    /// All members of a world are ready: those with a seat have their state. These are those that have each shard in memory.
    Healed(&'a Formation, Vec<(Shard, Vec<Worker>)>),
    /// A worker has the state of a step; part and value.
    State {
        /// Who.
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
    /// A sentence that says how the promise is broken.
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
        Box::new(promise::Promise::default()),
        Box::new(two_copies::TwoCopies),
        Box::new(exactly_once::ExactlyOnce),
        Box::new(ending::Ending::default()),
        Box::new(golden::Golden::new(reproducible)),
        Box::new(attribution::Attribution::default()),
        Box::new(all_joined::AllJoined::default()),
        Box::new(learners::Learners),
    ]
}
