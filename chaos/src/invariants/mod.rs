//! The invariants of every run, one per file, checked at every observation.

mod all_joined;
mod attribution;
mod catch_up;
mod committed_steps;
mod corruption;
mod ending;
mod exactly_once;
mod golden;
mod leases;
mod newest_checkpoint;
mod nothing_lost;
mod nothing_stale;
mod one_world;
mod same_inputs;
mod steps_go_on;
mod strangers;
mod two_copies;

use phalanx_strategies::elastic::checkpoint::Checkpoint;
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::incident::Timeline;
use phalanx_strategies::elastic::message::{DesiredStateId, Record, WorldPlan};
use phalanx_strategies::elastic::shadow::Shard;
use std::ops::Range;

/// An event of the simulation, shown to all invariants.
#[derive(Clone, Debug)]
pub enum Observation<'a> {
    /// A coordinator begins a term.
    Leads(Term),
    /// A record is durable.
    Persisted(&'a Record),
    /// A node has accepted a desired state.
    DesiredStateTaken {
        /// The node.
        node: NodeId,
        /// The previous desired state.
        before: DesiredStateId,
        /// The accepted desired state.
        desired_state: DesiredStateId,
    },
    /// A supervisor has killed a worker on the desired state of a coordinator.
    Evicted {
        /// The node.
        node: NodeId,
        /// Term of the coordinator.
        term: Term,
    },
    /// The device of a member has joined a world.
    JoinedWorld {
        /// The worker.
        worker: Worker,
        /// The world.
        generation: Generation,
    },
    /// A member begins a step.
    Computes {
        /// The worker.
        worker: Worker,
        /// The member's world.
        world_plan: &'a WorldPlan,
    },
    /// The gradients of a step are reduced over these microbatches, one run per data rank.
    Reduced(&'a [Range<usize>], usize),
    /// A member has voted for a reduced update.
    Voted {
        /// The worker.
        worker: Worker,
        /// The world that reduced the update.
        generation: Generation,
        /// The latest generation of the member.
        latest: Generation,
        /// The step.
        step: Step,
    },
    /// A member has received the commit of a step.
    Committed {
        /// The worker.
        worker: Worker,
        /// The world that committed the step.
        generation: Generation,
        /// The latest generation of the member.
        latest: Generation,
        /// The step.
        step: Step,
        /// Hash of the update.
        digest: u64,
    },
    /// A new world counts a step as committed although no member may have received the commit.
    Decided {
        /// The world that voted for the step.
        generation: Generation,
        /// The step.
        step: Step,
        /// Hash of the update.
        digest: u64,
    },
    /// All parts of a checkpoint are durable, and its world was not replaced on record before.
    CheckpointCommitted(Checkpoint),
    /// A coordinator announces a world, possibly an older one again.
    Announced(&'a WorldPlan),
    /// A new world begins.
    Formed(&'a WorldPlan),
    /// All members of a world are ready: those with a rank have their state. Lists the holders of each shard in memory.
    Healed(&'a WorldPlan, Vec<(Shard, Vec<Worker>)>),
    /// A worker has the state of a step.
    State {
        /// The worker.
        worker: Worker,
        /// Version of the state.
        version: Version,
        /// The pieces: name and value.
        atoms: &'a [(u64, u64)],
    },
    /// A fault disturbs a node, which may lose its memory.
    Disturbed {
        /// The node.
        node: NodeId,
        /// Whether the fault lasts until [`Observation::Undisturbed`].
        lasts: bool,
    },
    /// A lasting fault of this node is over.
    Undisturbed(NodeId),
    /// A fault disturbs coordinators or their store, so that another one may take over.
    CoordinationDisturbed {
        /// Whether the fault lasts until [`Observation::CoordinationUndisturbed`].
        lasts: bool,
    },
    /// A lasting fault of the coordinators or their store is over.
    CoordinationUndisturbed,
    /// A machine starts.
    NodeStarted {
        /// The node.
        node: NodeId,
        /// Incarnation of its supervisor.
        boot: Incarnation,
        /// What its ranks train on.
        data_set: u64,
    },
    /// A message was delivered to a receiver that must ignore it.
    Stranger {
        /// The message.
        what: &'a str,
        /// Whether the receiver has changed otherwise than by the time that has passed.
        has_effect: bool,
    },
    /// A bit has flipped in a copy of the state.
    Flipped {
        /// The worker that holds the copy.
        worker: Worker,
        /// Its world.
        generation: Generation,
        /// The last update of the state.
        step: Step,
        /// Number of copies that a majority may consist of, or 0 if this copy is not one of them.
        n_independent: usize,
    },
    /// The ranks of a world have found copies that differ.
    Differs {
        /// The world.
        generation: Generation,
        /// The step.
        step: Step,
        /// The workers that most copies contradict.
        suspects: &'a [Worker],
    },
    /// The repetition of a step shows that the copy of this worker was wrong.
    Named {
        /// The worker.
        worker: Worker,
        /// The step.
        step: Step,
    },
    /// The job at a regular time.
    Looked {
        /// Virtual time in milliseconds.
        at_ms: u64,
        /// The last committed step.
        step: Step,
        /// Ranks that can train.
        n_ready: usize,
        /// Ranks of the smallest world.
        n_needed: usize,
        /// Whether a lasting fault, or the end of the job, is a reason to make no step.
        may_rest: bool,
    },
    /// An incident is over.
    Resumed(&'a Timeline),
}

/// An invariant of a run.
pub trait Invariant {
    /// Name of the invariant, for reports.
    fn name(&self) -> &'static str;

    /// Checks an observation.
    ///
    /// # Errors
    /// A description of the violation.
    fn observe(&mut self, what: &Observation<'_>) -> Result<(), String>;
}

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Violation {
    /// Name of the invariant.
    pub invariant: String,
    /// Description of the violation.
    pub what: String,
    /// Virtual time in milliseconds.
    pub at_ms: u64,
}

/// All invariants. With `reproducible`, states must equal those of an undisturbed run; copies of the state are compared every
/// `verify_steps` steps.
pub fn all(reproducible: bool, verify_steps: u64) -> Vec<Box<dyn Invariant>> {
    vec![
        Box::new(committed_steps::CommittedSteps::default()),
        Box::new(one_world::OneWorld::default()),
        Box::new(nothing_stale::NothingStale::default()),
        Box::new(nothing_lost::NothingLost::default()),
        Box::new(newest_checkpoint::NewestCheckpoint::default()),
        Box::new(two_copies::TwoCopies),
        Box::new(exactly_once::ExactlyOnce),
        Box::new(ending::Ending::default()),
        Box::new(golden::Golden::new(reproducible)),
        Box::new(attribution::Attribution::default()),
        Box::new(all_joined::AllJoined::default()),
        Box::new(catch_up::CatchingUp),
        Box::new(leases::Leases::default()),
        Box::new(same_inputs::SameInputs::default()),
        Box::new(strangers::Strangers),
        Box::new(corruption::Corruption::new(verify_steps)),
        Box::new(steps_go_on::StepsGoOn::default()),
    ]
}
