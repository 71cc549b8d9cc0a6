//! The coordinator's state machine: detect, agree, stop, regroup, heal, run. One instance per term. `life` drives a
//! generation, `next_world` plans the next world, `device_share` keeps ranks off devices that others use, `watch` finds stuck and slow members, `partition` finds nodes that
//! cannot reach each other, `change` replaces a world by choice, `requests` handles the operator's requests, `ending`
//! ends the job, and `status` reports all of it as a value.
//!
//! Invariants:
//! - `COORDINATOR-1` A generation, its world plan with the base state, and the decision to train are durable before they
//!   are announced. If a successor reads a plan without that decision, the world has committed nothing, whichever
//!   members are lost. The coordinator ends if the store rejects its record: its successor has begun.
//! - `COORDINATOR-2` A generation has one world. A world that loses a member before or while it runs is followed by the
//!   next generation, not repaired.
//! - `COORDINATOR-3` A world is formed when [`super::quorum`] permits it, from the state that [`super::commit`] selects,
//!   with a source from [`super::recovery`] for every shard, among members that have left all earlier generations.
//! - `COORDINATOR-4` An incident is open from its first report until members train again; it survives the coordinator.
//!   It is recorded at least once: in doubt, a new coordinator records it again, under the same generation and cause.
//! - `COORDINATOR-5` If the coordinator itself was suspended, no member is blamed and no timeout counts as expired.
//! - `COORDINATOR-6` An operator request is durable before it is announced. A drained node gets no further rank, and is
//!   released once a world runs without it; started again after that, it takes part as any other.
//! - `COORDINATOR-7` A job ends once: when all ranks are done, when a member has failed for good, or after too many
//!   crashes in a row. The ending is durable, with its first reason, before it is announced, unless the store is gone for
//!   good.
//! - `COORDINATOR-8` If too few members would stay for any world, the leaving members first make the state durable, so
//!   that no committed step is lost with them.
//! - `COORDINATOR-9` is in `partition`, `COORDINATOR-10` in `change`, `COORDINATOR-11` in `compute`, `COORDINATOR-12` in
//!   `ending`, `COORDINATOR-13` and `COORDINATOR-14` in `quarantine`, `COORDINATOR-15` in `inputs`, `COORDINATOR-17` in
//!   `corruption`, `COORDINATOR-19` and `COORDINATOR-20` in `lost_world`, `COORDINATOR-21` and `COORDINATOR-23` in `ending`,
//!   `COORDINATOR-22` in `newest_checkpoint`.
//! - `COORDINATOR-16` A report of another job, or one that is older than the latest of its node, changes nothing; nor does its
//!   node become known, judged or refused by it.

mod backoff;
mod change;
mod compute;
mod corruption;
mod device_share;
mod ending;
mod inputs;
mod life;
pub mod lost_world;
pub mod newest_checkpoint;
mod next_world;
pub mod outlook;
mod partition;
pub mod quarantine;
mod requests;
pub mod status;
#[cfg(test)]
mod tests;
mod watch;

use super::checkpoint::Checkpoint;
use super::identity::{Generation, Incarnation, JobId, NodeId, Stale, Step, Term, Worker};
use super::incident::{Cause, Culprit, Incident, Timeline, Why};
use super::inputs::Input;
use super::membership::Membership;
use super::mesh_choice::Policy;
use super::message::{Compute, DesiredState, DesiredStateId, Dispute, Ending, Record, Report, Stage, Unsaved};
use super::quorum::Blocked;
use super::snapshot::Manifests;
use super::straggler::Relieved;
use super::timing::Timing;
use change::{Change, GrowthCheck};
use ending::Failing;
use newest_checkpoint::{Listed, Listing};
use partition::{Partitions, SuspectedPartition};
use quarantine::Quarantine;
use requests::PendingRequests;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;
use watch::Watch;

/// Commands for the shell.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Command {
    /// Send to a node; it need not arrive.
    Send(NodeId, DesiredState),
    /// Make durable, unless the store has a later term; answer with [`Coordinator::handle_persisted`].
    Persist(Record),
    /// An incident is over.
    Resumed(Timeline),
    /// A checkpoint is complete and durable; older ones may go.
    Saved(Checkpoint),
    /// The job is over, and that is durable; nodes are being notified until [`Coordinator::all_notified`].
    Ended(Ending),
    /// A checkpoint could not be saved.
    NotSaved(Unsaved),
    /// A node is refused, for this reason.
    Refused(NodeId, String),
    /// A node takes part although its devices differ from those of the others, as the text says.
    Mixed(NodeId, String),
    /// Look for the newest checkpoint in the store; answer with [`Coordinator::handle_listed`] once the store can be read.
    ListCheckpoints(Listing),
    /// A report names this later term, which the store has lost: lead a term after it (`COORDINATOR-20`).
    Outrun(Term),
}

/// Largest number of incidents that a coordinator remembers.
pub const TIMELINES_MAX: usize = 16;

/// What a coordinator is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// It has begun its term and waits for reports from a world that its predecessor formed.
    TakingOver,
    /// Members are leaving the last world.
    Stopping,
    /// The coordinator plans the next world.
    Regrouping,
    /// Members fetch their state.
    Healing,
    /// Members train.
    Running,
    /// All members are done.
    Finished,
    /// The job failed.
    Failed,
    /// Another coordinator has taken over.
    Deposed,
}

/// A coordinator's activity with its data.
#[derive(Clone, Debug)]
enum Phase {
    TakingOver {
        unheard: BTreeSet<Worker>,
        until: Instant,
    },
    Stopping {
        waiting: BTreeSet<Worker>,
        until: Instant,
    },
    Regrouping {
        since: Instant,
        retry: Option<Instant>,
        blocked: Option<Blocked>,
    },
    Healing {
        waiting: BTreeMap<Worker, u64>,
        until: Instant,
    },
    Running {
        watch: Watch,
        growth_check: Option<GrowthCheck>,
        change: Option<Change>,
    },
    /// `unheard`: nodes of the last world that a new coordinator does not know yet, until they count as gone.
    Ended {
        notified: BTreeSet<NodeId>,
        unheard: BTreeSet<NodeId>,
        until: Instant,
    },
    Deposed,
}

/// Why a world must end.
#[derive(Clone, Debug)]
struct Trouble {
    cause: Cause,
    /// Details of the cause.
    detail: Option<String>,
    /// When the culprit was last known to be healthy.
    healthy: Instant,
}

/// Why a record is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Stop,
    Form,
    Run,
    Save,
    Close,
    Request,
    End,
}

/// The state of a leading coordinator, from the start of its term.
#[derive(Clone, Debug)]
pub struct Coordinator {
    job: JobId,
    timing: Timing,
    policy: Policy,
    began: Instant,
    membership: Membership,
    record: Record,
    writing: Option<(Record, Purpose)>,
    phase: Phase,
    /// Members of `record.world_plan`.
    assignments: BTreeSet<Worker>,
    /// Members that catch up while the others train.
    catching_up: BTreeSet<Worker>,
    /// Members without a rank that send state while a world heals.
    guests: BTreeSet<Worker>,
    /// Why the current world must end.
    trouble: Option<Trouble>,
    /// A member's report of lost peers, and when the coordinator acts on it.
    broken: Option<SuspectedPartition>,
    partitions: Partitions,
    quarantine: Quarantine,
    relieved: Relieved,
    /// State of a lineage up to this one is not used (`COORDINATOR-17`).
    corrupt: Generation,
    /// Differences that repeated steps will settle.
    disputes: Vec<Dispute>,
    /// Nodes that get no rank for now (`COORDINATOR-9`, `COORDINATOR-14`).
    left_out: BTreeSet<NodeId>,
    /// What the ranks compute on, once a node has reported (`COORDINATOR-11`).
    compute: Option<Compute>,
    /// What the nodes train on and with, once a node has reported (`COORDINATOR-15`).
    inputs: Option<Vec<Input>>,
    /// Nodes whose devices and inputs have been judged, by incarnation: `Command::Refused` and `Command::Mixed` are given once.
    judged: BTreeMap<NodeId, Incarnation>,
    incident: Option<Incident>,
    manifests: Manifests,
    complete: Option<Checkpoint>,
    /// Whether the store's checkpoints were listed in this generation.
    listed: Listed,
    /// The latest checkpoint that could not be saved, unless a later one was, and the number of requested checkpoints that are
    /// answered by a failure.
    unsaved: Option<Unsaved>,
    n_unsaved: u64,
    /// The latest step that any member of the last world is known to have committed.
    reached: Step,
    /// When the crashes in a row began, if the last world crashed (`COORDINATOR-21`).
    crashing_since: Option<Instant>,
    /// Since when processes of a node have failed to start.
    failing_starts: BTreeMap<NodeId, Instant>,
    /// When the latest checkpoint became complete in this term, or the term began.
    checkpoint_since: Instant,
    asked: PendingRequests,
    /// Set while the job saves its state before it fails (`COORDINATOR-12`).
    failing: Option<Failing>,
    /// The failure that a silent store may have caused, until a world trains again (`COORDINATOR-23`).
    withdrawn: Option<Failing>,
    /// The ending that is being made durable.
    ending: Option<Ending>,
    /// The latest closed incidents.
    timelines: VecDeque<Timeline>,
    commands: VecDeque<Command>,
}

impl Coordinator {
    /// Begins a term with the record in the store (the default record for a new job).
    pub fn new(now: Instant, job: JobId, term: Term, record: Record, policy: Policy, timing: Timing) -> Coordinator {
        let assignments: BTreeSet<Worker> =
            record.world_plan.iter().flat_map(|f| f.assignments.iter().copied()).collect();
        let catching_up: BTreeSet<Worker> =
            record.world_plan.iter().flat_map(|f| f.catching_up.iter().map(|catch_up| catch_up.worker)).collect();
        let asked = PendingRequests::of(&record);
        let policy = Policy { wanted: record.wanted.unwrap_or(policy.wanted), ..policy };
        let reached = record.world_plan.as_ref().map_or(record.checkpoint.step, |world_plan| world_plan.base.step);
        let mut coordinator = Coordinator {
            job,
            timing,
            policy,
            began: now,
            membership: Membership::new(now, timing),
            phase: Phase::TakingOver { unheard: &assignments | &catching_up, until: now + timing.takeover_grace },
            incident: record.cause.map(|cause| Incident::new(now, now, cause)),
            compute: record.compute.clone(),
            inputs: record.inputs.clone(),
            judged: BTreeMap::new(),
            corrupt: record.corrupt,
            disputes: record.disputes.clone(),
            record: Record { term, ..record },
            writing: None,
            assignments,
            catching_up,
            guests: BTreeSet::new(),
            trouble: None,
            broken: None,
            partitions: Partitions::default(),
            quarantine: Quarantine::default(),
            relieved: Relieved::default(),
            left_out: BTreeSet::new(),
            manifests: Manifests::default(),
            complete: None,
            listed: Listed::NotYet,
            unsaved: None,
            n_unsaved: 0,
            reached,
            crashing_since: None,
            failing_starts: BTreeMap::new(),
            checkpoint_since: now,
            asked,
            failing: None,
            withdrawn: None,
            ending: None,
            timelines: VecDeque::new(),
            commands: VecDeque::new(),
        };
        coordinator.begin(now);
        coordinator
    }

    /// Takes over the world of the record, or begins a new one.
    fn begin(&mut self, now: Instant) {
        if let Some(ending) = self.record.ending.clone() {
            self.enter_ended(now, ending);
            return;
        }
        let interrupted = self.record.world_plan.as_ref().map(|f| f.generation) != Some(self.record.generation);
        if interrupted {
            let why = if self.record.world_plan.is_none() { Why::Started } else { Why::Succession };
            self.trouble(Cause { culprit: Culprit::Job, why }, now);
        } else if let Some(world_plan) = &self.record.world_plan {
            self.manifests.begin(world_plan);
        }
        self.forget_gone(now);
        if let Some(reason) = self.record.failing.clone() {
            self.failing = Some(Failing::new(now, reason, &self.timing));
            if !self.rests() {
                self.end_for_last_save(now);
            }
        }
        self.advance(now);
    }

    /// Handles a node's report.
    ///
    /// # Errors
    /// When the report is from another job or not the latest from its node. Nothing has changed.
    pub fn handle_report(&mut self, now: Instant, report: &Report) -> Result<(), Stale> {
        if report.job != self.job {
            return Err(Stale::Job { found: report.job, have: self.job });
        }
        self.handle_timeout(now);
        self.membership.check(report)?;
        if self.refuses(report) {
            // Members of the world may have run there before.
            if !self.is_gone(report) && (self.membership.boot(report.node).is_some() || self.takes_part(report.node)) {
                self.membership.handle_refused(now, report)?;
                self.take_news(now);
                self.find_dead_ranks(now, report.node);
                self.advance(now);
            }
            return Ok(());
        }
        let has_new_errors = self.has_new_errors(report);
        self.note_new_start(report);
        self.membership.handle_report(now, report)?;
        self.take_news(now);
        self.find_dead_ranks(now, report.node);
        self.note_later(now, report);
        if has_new_errors {
            // Before a checkpoint, the ranks compare all copies of the state.
            self.handle_save(now);
        }
        for member in &report.members {
            self.note(now, member);
        }
        self.advance(now);
        self.note_notified(report);
        self.note_failed_starts(now, report);
        let behind =
            report.desired_state != self.desired_state_id() || !self.membership.evictions(report.node).is_empty();
        if (behind || self.releases(report.node)) && self.has_desired_state() {
            self.send(report.node);
        }
        Ok(())
    }

    /// Handles the store's answer: it wrote the record, or rejected it because it has a record of a later term.
    pub fn handle_persisted(&mut self, now: Instant, accepted: bool) {
        let Some((record, purpose)) = self.writing.take() else { return };
        if !accepted {
            self.phase = Phase::Deposed;
            return;
        }
        self.record = record;
        match purpose {
            Purpose::Stop => self.stop(now),
            Purpose::Form => self.form(now),
            Purpose::Run => self.run(now),
            Purpose::Save => {
                self.checkpoint_since = now;
                self.unsaved = None;
                self.commands.push_back(Command::Saved(self.record.checkpoint));
            }
            Purpose::Request => self.take_up_requests(now),
            Purpose::End => {
                let ending = self.record.ending.clone().expect("it has just been made durable");
                self.enter_ended(now, ending);
            }
            Purpose::Close => {}
        }
        self.handle_timeout(now);
    }

    /// Whether this record is the one whose fate it waits for.
    pub fn awaits(&self, record: &Record) -> bool {
        self.writing.as_ref().is_some_and(|(writing, _)| writing == record)
    }

    /// Handles all expired timers.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.forgive_own_sleep(now);
        self.membership.handle_timeout(now);
        self.take_news(now);
        self.forget_partitions(now);
        self.advance(now);
    }

    /// When to call [`Coordinator::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        let own = match &self.phase {
            // While a record is being written, the coordinator waits for the store's answer.
            Phase::Deposed => return None,
            Phase::Ended { unheard, until, .. } => Some(*until).filter(|_| !unheard.is_empty()),
            _ if self.writing.is_some() => None,
            Phase::TakingOver { until, .. } | Phase::Stopping { until, .. } | Phase::Healing { until, .. } => {
                Some(*until)
            }
            Phase::Regrouping { retry, .. } => *retry,
            Phase::Running { watch, growth_check, .. } => {
                Some(growth_check.map_or(watch.next, |growth_check| growth_check.at.min(watch.next)))
            }
        };
        let broken = self.broken.as_ref().filter(|_| self.writing.is_none()).map(|suspected| suspected.due);
        [own, broken, self.membership.poll_timeout()].into_iter().flatten().min()
    }

    /// The next command.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// The durable record.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Why no world is formed yet, or why the world is not the wanted one.
    pub fn blocked(&self) -> Option<Blocked> {
        match &self.phase {
            Phase::Regrouping { blocked, .. } => blocked.clone(),
            Phase::Running { .. } => self.missing_for_wanted(),
            _ => None,
        }
    }

    /// The coordinator's activity.
    pub fn activity(&self) -> Activity {
        match self.phase {
            Phase::TakingOver { .. } => Activity::TakingOver,
            Phase::Stopping { .. } => Activity::Stopping,
            Phase::Regrouping { .. } => Activity::Regrouping,
            Phase::Healing { .. } => Activity::Healing,
            Phase::Running { .. } => Activity::Running,
            Phase::Ended { .. } if self.record.ending == Some(Ending::Finished) => Activity::Finished,
            Phase::Ended { .. } => Activity::Failed,
            Phase::Deposed => Activity::Deposed,
        }
    }

    fn desired_state_id(&self) -> DesiredStateId {
        let stage = match self.phase {
            Phase::Healing { .. } => Stage::Form,
            Phase::Running { .. } => Stage::Run,
            Phase::Ended { .. } => Stage::End,
            _ => Stage::Stop,
        };
        let Record { term, generation, requests, .. } = self.record;
        DesiredStateId { term, generation, stage, revision: requests.revision() }
    }

    /// A new coordinator sends no desired state until the fate of its predecessor's world is clear.
    fn has_desired_state(&self) -> bool {
        !matches!(self.phase, Phase::TakingOver { .. } | Phase::Deposed)
    }

    fn send(&mut self, node: NodeId) {
        let id = self.desired_state_id();
        let has_world = matches!(id.stage, Stage::Form | Stage::Run);
        let world_plan = self.record.world_plan.clone().filter(|_| has_world);
        let requests = self.record.requests;
        let release = self.membership.boot(node).filter(|_| self.releases(node));
        let desired_state = DesiredState {
            job: self.job,
            id,
            world_plan,
            evict: self.membership.evictions(node),
            requests,
            release,
            refused: None,
        };
        self.commands.push_back(Command::Send(node, desired_state));
    }

    /// All members of the latest world.
    fn members(&self) -> impl Iterator<Item = &Worker> {
        self.assignments.iter().chain(&self.catching_up).chain(&self.guests)
    }

    fn broadcast(&mut self) {
        let nodes: Vec<NodeId> = self.membership.nodes().collect();
        nodes.into_iter().for_each(|node| self.send(node));
    }

    fn write(&mut self, record: Record, purpose: Purpose) {
        let failing = self.failing.as_ref().map(|failing| failing.reason.clone());
        let (compute, inputs) = (self.compute.clone(), self.inputs.clone());
        let (corrupt, disputes) = (self.corrupt, self.disputes.clone());
        let record = Record { compute, inputs, corrupt, disputes, failing, ..record };
        self.commands.push_back(Command::Persist(record.clone()));
        self.writing = Some((record, purpose));
    }
}
