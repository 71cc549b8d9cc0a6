//! The composition: news, agreement, stop, regroup, heal, run. One machine per term of a coordinator.
//! File `life` is the life of a generation, `next_world` decides what to form, `watch` whether what runs makes progress,
//! `rift` who cannot reach whom, `change` how a world makes room for another by choice, `wishes` what the operator wants, `ending` when the job is over; `status` is all of it as a value.
//!
//! Invariants:
//! - `K-1` A generation is durable before anybody is told of it, and so is its world with the state that it begins from, and
//!   that it trains: of one that was not to train yet a successor knows that it has committed nothing, whoever is lost with it.
//!   A record that the store refuses ends the coordinator: its successor has begun.
//! - `K-2` A generation has one world. A world that loses a member before or while it runs is followed by the next
//!   generation, not repaired.
//! - `K-3` A world is formed by the rules of [`super::quorum`], from the state that [`super::commit`] names, with a source
//!   for every shard that [`super::recovery`] found, among members that have left all earlier generations.
//! - `K-4` An incident is open from its first news until members train again; it survives the coordinator. It is recorded at
//!   least once: a new coordinator that cannot know whether it was does so again, under the same generation and cause.
//! - `K-5` If the coordinator itself was asleep, nobody is blamed for it and no patience of its has run out.
//! - `K-6` What the operator wants is durable before anybody is told of it. A drained node gets no seat again, and is
//!   released when no seat is there any more and a world runs without it.
//! - `K-7` A job ends once: when all seats are done, when a member has failed for good, or after too many crashes in a row.
//!   That is durable before anybody is told of it, with the first reason.
//! - `K-8` If too few members would stay for any world, those that are to leave first make the state durable: nothing that
//!   was committed is lost with them.
//! - `K-9` is in `rift`, `K-10` in `change`.

mod change;
mod ending;
mod life;
mod next_world;
mod rift;
pub mod status;
#[cfg(test)]
mod tests;
mod watch;
mod wishes;

use super::identity::{JobId, NodeId, Stale, Term, Worker};
use super::incident::{Cause, Culprit, Incident, Timeline, Why};
use super::laggard::Relieved;
use super::membership::Membership;
use super::mesh_choice::Policy;
use super::message::{Ending, Order, OrderId, Record, Report, Stage};
use super::quorum::Blocked;
use super::snapshot::{Checkpoint, Manifests};
use super::timing::Timing;
use change::{Change, Look};
use rift::{Breach, Rifts};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;
use watch::Watch;
use wishes::Asked;

/// What the shell must do next.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Command {
    /// Send to a node; it need not arrive.
    Send(NodeId, Order),
    /// Make durable, unless the store has a later term; answer with [`Coordinator::handle_persisted`].
    Persist(Record),
    /// An incident is over.
    Resumed(Timeline),
    /// A checkpoint is complete and durable; older ones may go.
    Saved(Checkpoint),
    /// The job is over, and that is durable; nodes are being told until [`Coordinator::all_told`].
    Ended(Ending),
}

/// Bound of the incidents that a coordinator remembers.
pub const TIMELINES_MAX: usize = 16;

/// What a coordinator is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// It has begun its term and listens to a world that it did not form.
    TakingOver,
    /// Members are leaving the last world.
    Stopping,
    /// The next world is looked for.
    Regrouping,
    /// Members fetch their state.
    Healing,
    /// Members train.
    Running,
    /// All members are done.
    Finished,
    /// The job could not go on.
    Failed,
    /// Another coordinator has taken over.
    Deposed,
}

/// Its activity and what belongs to it.
#[derive(Clone, Debug)]
enum Phase {
    TakingOver { unheard: BTreeSet<Worker>, until: Instant },
    Stopping { waiting: BTreeSet<Worker>, until: Instant },
    Regrouping { since: Instant, retry: Option<Instant>, blocked: Option<Blocked> },
    Healing { waiting: BTreeMap<Worker, u64>, until: Instant },
    Running { watch: Watch, look: Option<Look>, change: Option<Change> },
    Ended { told: BTreeSet<NodeId> },
    Deposed,
}

/// Why a world must end.
#[derive(Clone, Debug)]
struct Trouble {
    cause: Cause,
    /// What there is to say about it.
    detail: Option<String>,
    /// When its culprit was last known to be well.
    healthy: Instant,
}

/// What the record that is being written is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Stop,
    Form,
    Run,
    Save,
    Close,
    Wish,
    End,
}

/// See the [module](self).
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
    /// Members of `record.formation`.
    seats: BTreeSet<Worker>,
    /// Who catches up while they train.
    learners: BTreeSet<Worker>,
    /// Who sends state while a world heals and has no seat in it.
    guests: BTreeSet<Worker>,
    /// Why the world that is now must end.
    trouble: Option<Trouble>,
    /// That a member of it has lost others, and when that is believed.
    broken: Option<Breach>,
    rifts: Rifts,
    relieved: Relieved,
    /// Nodes that get no seat for now (`K-9`).
    left_out: BTreeSet<NodeId>,
    incident: Option<Incident>,
    manifests: Manifests,
    complete: Option<Checkpoint>,
    asked: Asked,
    /// How the job is to end, before that is durable.
    ending: Option<Ending>,
    /// The latest incidents that are over.
    timelines: VecDeque<Timeline>,
    commands: VecDeque<Command>,
}

impl Coordinator {
    /// Begins a term with what the store has (the default record for a new job).
    pub fn new(now: Instant, job: JobId, term: Term, record: Record, policy: Policy, timing: Timing) -> Coordinator {
        let seats: BTreeSet<Worker> = record.formation.iter().flat_map(|f| f.seats.iter().copied()).collect();
        let learners: BTreeSet<Worker> =
            record.formation.iter().flat_map(|f| f.learners.iter().map(|learner| learner.worker)).collect();
        let asked = Asked::of(&record);
        let policy = Policy { wanted: record.wanted.unwrap_or(policy.wanted), ..policy };
        let mut coordinator = Coordinator {
            job,
            timing,
            policy,
            began: now,
            membership: Membership::new(now, timing),
            phase: Phase::TakingOver { unheard: &seats | &learners, until: now + timing.takeover_grace },
            incident: record.cause.map(|cause| Incident::new(now, now, cause)),
            record: Record { term, ..record },
            writing: None,
            seats,
            learners,
            guests: BTreeSet::new(),
            trouble: None,
            broken: None,
            rifts: Rifts::default(),
            relieved: Relieved::default(),
            left_out: BTreeSet::new(),
            manifests: Manifests::default(),
            complete: None,
            asked,
            ending: None,
            timelines: VecDeque::new(),
            commands: VecDeque::new(),
        };
        if let Some(ending) = coordinator.record.ending.clone() {
            coordinator.enter_ended(ending);
            return coordinator;
        }
        let interrupted =
            coordinator.record.formation.as_ref().map(|f| f.generation) != Some(coordinator.record.generation);
        if interrupted {
            let why = if coordinator.record.formation.is_none() { Why::Started } else { Why::Succession };
            coordinator.trouble(Cause { culprit: Culprit::Job, why }, now);
        } else if let Some(formation) = &coordinator.record.formation {
            coordinator.manifests.begin(formation);
        }
        coordinator.advance(now);
        coordinator
    }

    /// A node reports.
    ///
    /// # Errors
    /// When the report is of another job or not the latest of its node. Nothing has changed.
    pub fn handle_report(&mut self, now: Instant, report: &Report) -> Result<(), Stale> {
        if report.job != self.job {
            return Err(Stale::Job { found: report.job, have: self.job });
        }
        self.handle_timeout(now);
        self.membership.handle_report(now, report)?;
        self.take_news(now);
        self.find_dead_seats(now, report.node);
        for member in &report.members {
            self.note(now, member);
        }
        self.advance(now);
        self.note_told(report);
        self.note_stillborn(now, report);
        let behind = report.order != self.order_id() || !self.membership.evictions(report.node).is_empty();
        if (behind || self.releases(report.node)) && self.has_order() {
            self.send(report.node);
        }
        Ok(())
    }

    /// The store has written the record, or refused it because it has one of a later term.
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
            Purpose::Save => self.commands.push_back(Command::Saved(self.record.checkpoint)),
            Purpose::Wish => self.take_up_wishes(now),
            Purpose::End => {
                let ending = self.record.ending.clone().expect("it has just been made durable");
                self.enter_ended(ending);
            }
            Purpose::Close => {}
        }
        self.handle_timeout(now);
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.forgive_own_sleep(now);
        self.membership.handle_timeout(now);
        self.take_news(now);
        self.forget_rifts(now);
        self.advance(now);
    }

    /// When to call [`Coordinator::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        let own = match &self.phase {
            // While a record is being written, its answer is waited for.
            Phase::Deposed => return None,
            Phase::Ended { .. } => None,
            _ if self.writing.is_some() => None,
            Phase::TakingOver { until, .. } | Phase::Stopping { until, .. } | Phase::Healing { until, .. } => {
                Some(*until)
            }
            Phase::Regrouping { retry, .. } => *retry,
            Phase::Running { watch, look, .. } => Some(look.map_or(watch.next, |look| look.at.min(watch.next))),
        };
        let broken = self.broken.as_ref().filter(|_| self.writing.is_none()).map(|breach| breach.due);
        [own, broken, self.membership.poll_timeout()].into_iter().flatten().min()
    }

    /// The next command.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// What is durable.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Why no world is formed yet, or not the one that is wanted.
    pub fn blocked(&self) -> Option<Blocked> {
        match &self.phase {
            Phase::Regrouping { blocked, .. } => blocked.clone(),
            Phase::Running { .. } => self.lacks(),
            _ => None,
        }
    }

    /// What it is doing.
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

    fn order_id(&self) -> OrderId {
        let stage = match self.phase {
            Phase::Healing { .. } => Stage::Form,
            Phase::Running { .. } => Stage::Run,
            Phase::Ended { .. } => Stage::End,
            _ => Stage::Stop,
        };
        let Record { term, generation, wishes, .. } = self.record;
        OrderId { term, generation, stage, revision: wishes.revision() }
    }

    /// Until the fate of the world that it found is clear, a new coordinator orders nothing.
    fn has_order(&self) -> bool {
        !matches!(self.phase, Phase::TakingOver { .. } | Phase::Deposed)
    }

    fn send(&mut self, node: NodeId) {
        let id = self.order_id();
        let has_world = matches!(id.stage, Stage::Form | Stage::Run);
        let formation = self.record.formation.clone().filter(|_| has_world);
        let wishes = self.record.wishes;
        let release = self.membership.boot(node).filter(|_| self.releases(node));
        let order = Order { job: self.job, id, formation, evict: self.membership.evictions(node), wishes, release };
        self.commands.push_back(Command::Send(node, order));
    }

    /// All who take part in the latest world.
    fn members(&self) -> impl Iterator<Item = &Worker> {
        self.seats.iter().chain(&self.learners).chain(&self.guests)
    }

    fn broadcast(&mut self) {
        let nodes: Vec<NodeId> = self.membership.nodes().collect();
        nodes.into_iter().for_each(|node| self.send(node));
    }

    fn write(&mut self, record: Record, purpose: Purpose) {
        self.commands.push_back(Command::Persist(record.clone()));
        self.writing = Some((record, purpose));
    }
}
