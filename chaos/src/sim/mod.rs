//! A whole job in one process and in virtual time: nodes, ranks, coordinators, network and store, from one seed.
//!
//! The machines of `phalanx_strategies::elastic` run unchanged. This module is their shell: it delivers, delays and loses
//! their messages, kills their processes, and reports observations to the [invariants].
//!
//! A run has two phases. In the *safety phase* it injects faults, and the invariants must hold. Then all faults end, and in
//! the *liveness phase* the whole mesh must train again within a time limit.
//! Source: TigerBeetle's VOPR (safety mode and liveness mode).

mod catch_up;
mod clock;
mod comparison;
mod config;
mod control;
mod data_plane;
mod environment;
mod event;
mod faults;
mod network;
mod node;
mod storage;
mod store;
mod strangers;

pub use config::Config;

use crate::dice::Dice;
use crate::environment::N_CANDIDATES;
use crate::invariants::{self, Invariant, Observation, Violation};
use crate::mutation::Mutation;
use crate::plan::{Plan, Planned};
use crate::state;
use clock::{Clock, Clocks};
use comparison::Comparisons;
use control::Candidate;
use data_plane::Collective;
use event::{Event, Queue};
use network::Network;
use node::Node;
use phalanx_strategies::elastic::coordinator::{Activity, quarantine};
use phalanx_strategies::elastic::identity::{Generation, JobId, NodeId, Step, Worker};
use phalanx_strategies::elastic::incident::Timeline;
use phalanx_strategies::elastic::mesh_choice::Policy;
use phalanx_strategies::elastic::message::WorldPlan;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;
use storage::Storage;
use store::Store;
use strangers::Strangers;

/// Outcome of a run.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Outcome {
    /// The seed.
    pub seed: u64,
    /// Hash of the events: equal for equal seeds and plans, and with overwhelming probability only for these.
    pub trace_hash: u64,
    /// Events handled.
    pub n_events: u64,
    /// Virtual duration.
    pub virtual_ms: u64,
    /// The last committed step.
    pub step: Step,
    /// The last world.
    pub generation: Generation,
    /// Number of returns to a checkpoint.
    pub n_rollbacks: u64,
    /// Number of terms.
    pub n_terms: u64,
    /// Worlds with catching-up members.
    pub n_catch_up_plans: u64,
    /// Members that caught up and then got a rank without missing state.
    pub n_caught_up: u64,
    /// Operations of stores that failed.
    pub n_failed_operations: u64,
    /// Nodes that were refused.
    pub n_refused: u64,
    /// Messages of strangers.
    pub n_strangers: u64,
    /// Bits that flipped in a copy of the state.
    pub n_flips: u64,
    /// Comparisons in which copies differed.
    pub n_differences: u64,
    /// Ranks that these comparisons, or the repetition of their steps, have named.
    pub n_named: u64,
    /// All incidents recorded by coordinators, with the time in milliseconds.
    pub incidents: Vec<(u64, Timeline)>,
    /// Faults that took effect, with the time in milliseconds.
    pub injected: Vec<(u64, Planned)>,
    /// The first violated invariant.
    pub violation: Option<Violation>,
}

/// Virtual time between two looks at the job, in microseconds.
const LOOK_US: u64 = 500_000;

/// A simulated job.
pub struct Sim {
    config: Config,
    start: Instant,
    now: u64,
    queue: Queue,
    dice: Dice,
    network: Network,
    store: Store,
    storage: Storage,
    clocks: Clocks,
    strangers: Option<Strangers>,
    comparisons: Comparisons,
    /// Whether nodes report what they train on.
    reports_inputs: bool,
    nodes: Vec<Node>,
    candidates: Vec<Candidate>,
    collectives: BTreeMap<(Generation, Step), Collective>,
    plan: Vec<Planned>,
    /// The last announced world, and its members that are ready.
    world_plan: Option<Arc<WorldPlan>>,
    ready: BTreeSet<Worker>,
    invariants: Vec<Box<dyn Invariant>>,
    /// Machines that never return, and machines that no coordinator hears.
    lost: BTreeSet<NodeId>,
    isolated: Vec<NodeId>,
    /// When the job is shown to the invariants again.
    look_at: u64,
    /// The last committed step.
    step: Step,
    safe: bool,
    trace: u64,
    outcome: Outcome,
}

/// Id of the simulated job.
const JOB: JobId = JobId(1);

/// Runs a job under a plan of faults.
pub fn run(config: Config, plan: &Plan) -> Outcome {
    Sim::new(config, plan).run()
}

impl Sim {
    fn new(config: Config, plan: &Plan) -> Sim {
        let outcome = Outcome {
            seed: config.seed,
            trace_hash: 0,
            n_events: 0,
            virtual_ms: 0,
            step: Step(0),
            generation: Generation(0),
            n_rollbacks: 0,
            n_terms: 0,
            n_catch_up_plans: 0,
            n_caught_up: 0,
            n_failed_operations: 0,
            n_refused: 0,
            n_strangers: 0,
            n_flips: 0,
            n_differences: 0,
            n_named: 0,
            incidents: vec![],
            injected: vec![],
            violation: None,
        };
        let mut sim = Sim {
            config,
            start: Instant::now(),
            now: 0,
            queue: Queue::default(),
            dice: Dice::new(config.seed, "run"),
            network: Network::new(config.seed),
            store: Store::default(),
            storage: Storage::new(config.seed),
            clocks: Clocks {
                nodes: vec![Clock::new(); config.n_nodes as usize],
                candidates: vec![Clock::new(); N_CANDIDATES],
            },
            strangers: Strangers::of(config.seed, plan),
            comparisons: Comparisons::of(config.seed, plan),
            reports_inputs: environment::changes_inputs(plan),
            nodes: (0..config.n_nodes).map(Node::new).collect(),
            candidates: (0..N_CANDIDATES as u32).map(Candidate::new).collect(),
            collectives: BTreeMap::new(),
            plan: plan.0.clone(),
            world_plan: None,
            ready: BTreeSet::new(),
            invariants: invariants::all(config.reproducible, config.verify_steps),
            lost: BTreeSet::new(),
            isolated: vec![],
            look_at: 0,
            step: Step(0),
            safe: false,
            trace: config.seed,
            outcome,
        };
        (0..N_CANDIDATES).for_each(|i| sim.start_candidate(i));
        (0..config.n_nodes as usize).for_each(|i| sim.start_node(i));
        sim
    }

    fn run(mut self) -> Outcome {
        let safety_end = self.config.safety_ms * 1_000;
        // A node that was killed again and again gets no rank for as long as that.
        let quarantine = u64::try_from(quarantine::longest(&self.config.timing).as_micros()).unwrap_or(u64::MAX);
        let deadline = safety_end + self.config.liveness_ms * 1_000 + quarantine;
        let (mut whole_at, mut stops): (Option<Step>, bool) = (None, false);
        while self.outcome.violation.is_none() {
            let Some((at, event)) = self.queue.pop() else { break };
            if !self.safe && at >= safety_end {
                self.now = safety_end;
                self.end_faults();
            }
            self.now = at.max(self.now);
            self.outcome.n_events += 1;
            self.handle(event);
            self.inject();
            self.look(stops);
            if self.safe {
                whole_at = if self.is_whole() { whole_at.or(Some(self.step)) } else { None };
                stops |= whole_at.is_some_and(|step| self.step.0 >= step.0 + 5);
                if stops && self.is_over() {
                    break;
                }
                if stops && !self.is_stopped() {
                    // The leader may have been replaced before an earlier request was durable.
                    self.ask(|coordinator, now| coordinator.handle_stop(now));
                }
                if self.now > deadline {
                    let doing = self.leader().map(|c| (c.activity(), c.blocked().map(|b| b.to_string())));
                    self.violate(
                        "progress",
                        format!("the whole mesh does not train again or does not end; coordinator: {doing:?}"),
                    );
                }
            }
        }
        self.outcome.trace_hash = self.trace;
        self.outcome.virtual_ms = self.now / 1_000;
        self.outcome.step = self.step;
        self.outcome.generation = self.world_plan.as_ref().map_or(Generation(0), |world_plan| world_plan.generation);
        self.outcome
    }

    /// Shows the job to the invariants at regular times.
    fn look(&mut self, stops: bool) {
        if self.now < self.look_at {
            return;
        }
        self.look_at = self.now + LOOK_US;
        let ranks = self.nodes.iter().flat_map(|node| node.ranks.values());
        let n_ready = ranks.filter(|rank| rank.stopped == 0).count();
        let last = self.world_plan.as_ref().map(|world_plan| world_plan.mesh);
        let wanted = self.store.record.wanted.unwrap_or(self.config.policy.wanted);
        let n_needed = Policy { wanted, ..self.config.policy }.smallest(last);
        let (at_ms, step) = (self.now / 1_000, self.step);
        // The safety phase has lasting faults, and is shorter than the limit.
        let may_rest = stops || self.is_stopped() || !self.safe;
        self.observe(&Observation::Looked { at_ms, step, n_ready, n_needed, may_rest });
    }

    /// Whether the requested mesh trains.
    fn is_whole(&self) -> bool {
        let Some(leader) = self.leader().filter(|leader| leader.activity() == Activity::Running) else { return false };
        let wanted = leader.record().wanted.unwrap_or(self.config.policy.wanted);
        let Some(mesh) = self.world_plan.as_ref().map(|world_plan| world_plan.mesh) else { return false };
        if self.lost.is_empty() {
            return mesh == wanted;
        }
        let n_ranks = (self.config.n_nodes as usize - self.lost.len()) * self.config.n_slots as usize;
        self.config.policy.largest(n_ranks, None).is_some_and(|largest| largest.size() == mesh.size())
    }

    fn is_stopped(&self) -> bool {
        self.store.record.requests.stop
    }

    /// Whether the job is finished and all nodes have been shut down.
    fn is_over(&self) -> bool {
        let is_end = |activity| matches!(activity, Activity::Finished | Activity::Failed);
        let finished = self.leader().is_some_and(|leader| is_end(leader.activity()));
        finished && self.nodes.iter().all(|node| node.supervisor.is_none())
    }

    fn is(&self, mutation: Mutation) -> bool {
        self.config.mutation == Some(mutation)
    }

    /// Shows an observation to all invariants.
    fn observe(&mut self, what: &Observation<'_>) {
        let at_ms = self.now / 1_000;
        for invariant in &mut self.invariants {
            if let Err(sentence) = invariant.observe(what) {
                let violation = Violation { invariant: invariant.name().to_owned(), what: sentence, at_ms };
                self.outcome.violation.get_or_insert(violation);
            }
        }
    }

    fn violate(&mut self, invariant: &str, what: String) {
        let violation = Violation { invariant: invariant.to_owned(), what, at_ms: self.now / 1_000 };
        self.outcome.violation.get_or_insert(violation);
    }

    /// Adds an event to the trace hash.
    fn mark(&mut self, tag: u64, a: u64, b: u64) {
        for word in [self.now, tag, a, b] {
            self.trace = state::mix(self.trace ^ word);
        }
    }

    fn handle(&mut self, event: Event) {
        if let Some(node) = event.on_node().filter(|node| self.nodes[*node].suspended > 0) {
            return self.nodes[node].waiting.push(event);
        }
        match event {
            Event::NodeStarts { node } => self.start_node(node),
            Event::NodeTimer { node, boot } => self.node_timer(node, boot),
            Event::DesiredStateArrives { node, desired_state } => self.desired_state_arrives(node, desired_state),
            Event::WorkerStarts { worker } => self.worker_starts(worker),
            Event::WorkerExited { worker } => self.worker_exited(worker),
            Event::StatusReportArrives { status_report } => self.status_report_arrives(*status_report),
            Event::NodeDies { node, back_after_ms } => self.kill_node(node, back_after_ms),
            Event::CandidateStarts { candidate } => self.start_candidate(candidate),
            Event::FaultEnds { fault } => self.end_fault(fault),
            Event::Stranger => self.stranger_comes(),
            Event::Collective { generation, step } => self.try_collective(generation, step),
            Event::ToRank { worker, what } => self.rank_gets(worker, what),
            Event::ToCandidate { candidate, life, what } => self.candidate_gets(candidate, life, what),
        }
    }
}
