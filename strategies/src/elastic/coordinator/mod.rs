//! The composition: news, agreement, stop, regroup, heal, run. One machine per term of a coordinator.
//! File `next_world` decides what to form, `watch` whether what runs makes progress.
//!
//! Invariants:
//! - `K-1` A generation is durable before anybody is told of it, and so is its world with the state that it begins from.
//!   A record that the store refuses ends the coordinator: its successor has begun.
//! - `K-2` A generation has one world. A world that loses a member before or while it runs is followed by the next
//!   generation, not repaired.
//! - `K-3` A world is formed by the rules of [`super::quorum`], from the state that [`super::commit`] names, with a source
//!   for every shard that [`super::recovery`] found, among members that have left all earlier generations.
//! - `K-4` An incident is open from its first news until members train again; it survives the coordinator. It is recorded at
//!   least once: a new coordinator that cannot know whether it was does so again, under the same generation and cause.
//! - `K-5` If the coordinator itself was asleep, nobody is blamed for it and no patience of its has run out.

mod next_world;
mod watch;

use super::identity::{JobId, NodeId, Stale, Step, Term, Worker};
use super::incident::{Cause, Culprit, Incident, Phase as IncidentPhase, Timeline, Why};
use super::membership::{Change, Membership, Status};
use super::mesh_choice::Policy;
use super::message::{MemberPhase, MemberReport, Order, OrderId, Record, Report, Stage};
use super::quorum::Blocked;
use super::snapshot::{Checkpoint, Manifests};
use super::timing::Timing;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;
use watch::Watch;

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
}

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
    /// Another coordinator has taken over.
    Deposed,
}

/// Its activity and what belongs to it.
#[derive(Clone, Debug)]
enum Phase {
    TakingOver { unheard: BTreeSet<Worker>, until: Instant },
    Stopping { waiting: BTreeSet<Worker>, until: Instant },
    Regrouping { since: Instant, retry: Option<Instant>, blocked: Option<Blocked> },
    Healing { waiting: BTreeSet<Worker>, until: Instant },
    Running { watch: Watch, grow_at: Option<Instant> },
    Deposed,
}

/// What the record that is being written is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Stop,
    Form,
    Save,
    Close,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub struct Coordinator {
    job: JobId,
    timing: Timing,
    policy: Policy,
    membership: Membership,
    record: Record,
    writing: Option<(Record, Purpose)>,
    phase: Phase,
    /// Members of `record.formation`.
    seats: BTreeSet<Worker>,
    /// Who sends state while a world heals; not all of them have a seat in it.
    senders: BTreeSet<Worker>,
    /// Why the world that is now must end.
    trouble: Option<(Cause, Instant)>,
    incident: Option<Incident>,
    manifests: Manifests,
    complete: Option<Checkpoint>,
    commands: VecDeque<Command>,
}

impl Coordinator {
    /// Begins a term with what the store has (the default record for a new job).
    pub fn new(now: Instant, job: JobId, term: Term, record: Record, policy: Policy, timing: Timing) -> Coordinator {
        let seats: BTreeSet<Worker> = record.formation.iter().flat_map(|f| f.seats.iter().copied()).collect();
        let mut coordinator = Coordinator {
            job,
            timing,
            policy,
            membership: Membership::new(now, timing),
            phase: Phase::TakingOver { unheard: seats.clone(), until: now + timing.takeover_grace },
            incident: record.cause.map(|cause| Incident::new(now, now, cause)),
            record: Record { term, ..record },
            writing: None,
            seats,
            senders: BTreeSet::new(),
            trouble: None,
            manifests: Manifests::default(),
            complete: None,
            commands: VecDeque::new(),
        };
        let interrupted =
            coordinator.record.formation.as_ref().map(|f| f.generation) != Some(coordinator.record.generation);
        if interrupted {
            let why = if coordinator.record.formation.is_none() { Why::Started } else { Why::Succession };
            coordinator.trouble = Some((Cause { culprit: Culprit::Job, why }, now));
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
        let behind = report.order != self.order_id() || !self.membership.evictions(report.node).is_empty();
        if behind && self.has_order() {
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
            Purpose::Save => self.commands.push_back(Command::Saved(self.record.checkpoint)),
            Purpose::Close => {}
        }
        self.handle_timeout(now);
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.forgive_own_sleep(now);
        self.membership.handle_timeout(now);
        self.take_news(now);
        self.advance(now);
    }

    /// When to call [`Coordinator::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        let own = match &self.phase {
            // While a record is being written, its answer is waited for.
            Phase::Deposed => return None,
            _ if self.writing.is_some() => None,
            Phase::TakingOver { until, .. } | Phase::Stopping { until, .. } | Phase::Healing { until, .. } => {
                Some(*until)
            }
            Phase::Regrouping { retry, .. } => *retry,
            Phase::Running { watch, grow_at } => Some(grow_at.map_or(watch.next, |at| at.min(watch.next))),
        };
        [own, self.membership.poll_timeout()].into_iter().flatten().min()
    }

    /// The next command.
    pub fn poll_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// What is durable.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Why no world is formed yet, if that is so.
    pub fn blocked(&self) -> Option<&Blocked> {
        if let Phase::Regrouping { blocked, .. } = &self.phase { blocked.as_ref() } else { None }
    }

    /// What it is doing.
    pub fn activity(&self) -> Activity {
        match self.phase {
            Phase::TakingOver { .. } => Activity::TakingOver,
            Phase::Stopping { .. } => Activity::Stopping,
            Phase::Regrouping { .. } => Activity::Regrouping,
            Phase::Healing { .. } => Activity::Healing,
            Phase::Running { .. } => Activity::Running,
            Phase::Deposed => Activity::Deposed,
        }
    }

    /// `K-5`
    fn forgive_own_sleep(&mut self, now: Instant) {
        let late = self.poll_timeout().map(|due| now.saturating_duration_since(due)).unwrap_or_default();
        if late < self.timing.heartbeat / 2 {
            return;
        }
        let more = late + self.timing.suspicion;
        match &mut self.phase {
            Phase::TakingOver { until, .. } | Phase::Stopping { until, .. } | Phase::Healing { until, .. } => {
                *until += more
            }
            Phase::Regrouping { since, .. } => *since += more,
            Phase::Running { watch, .. } => {
                (watch.since, watch.next) = (watch.since + more, now + self.timing.suspicion)
            }
            Phase::Deposed => {}
        }
    }

    fn order_id(&self) -> OrderId {
        let stage = match self.phase {
            Phase::Healing { .. } => Stage::Form,
            Phase::Running { .. } => Stage::Run,
            _ => Stage::Stop,
        };
        OrderId { term: self.record.term, generation: self.record.generation, stage }
    }

    /// Until the fate of the world that it found is clear, a new coordinator orders nothing.
    fn has_order(&self) -> bool {
        !matches!(self.phase, Phase::TakingOver { .. } | Phase::Deposed)
    }

    fn send(&mut self, node: NodeId) {
        let id = self.order_id();
        let formation = if id.stage == Stage::Stop { None } else { self.record.formation.clone() };
        let order = Order { job: self.job, id, formation, evict: self.membership.evictions(node) };
        self.commands.push_back(Command::Send(node, order));
    }

    fn broadcast(&mut self) {
        let nodes: Vec<NodeId> = self.membership.nodes().collect();
        nodes.into_iter().for_each(|node| self.send(node));
    }

    fn write(&mut self, record: Record, purpose: Purpose) {
        self.commands.push_back(Command::Persist(record.clone()));
        self.writing = Some((record, purpose));
    }

    /// The incident that is open, if any, hears of this too; else a running world is troubled by it.
    fn trouble(&mut self, cause: Cause, healthy: Instant) {
        match &mut self.incident {
            Some(incident) => incident.also(cause),
            None if self.trouble.is_some() => return,
            None => {}
        }
        self.trouble.get_or_insert((cause, healthy));
    }

    fn take_news(&mut self, now: Instant) {
        while let Some(change) = self.membership.poll_change() {
            match change {
                Change::Lost { worker, cause, healthy } if self.is_needed(worker) => {
                    if let Phase::Stopping { waiting, .. } = &mut self.phase {
                        waiting.remove(&worker);
                    }
                    self.trouble(cause, healthy);
                }
                Change::Drains(node) if self.seats.iter().any(|worker| worker.member.node == node) => {
                    self.trouble(Cause { culprit: Culprit::Node(node), why: Why::Drains }, now);
                }
                _ => {}
            }
            let soon = now + self.timing.heartbeat / 20;
            match &mut self.phase {
                Phase::Regrouping { retry, .. } => *retry = Some(retry.map_or(soon, |at| at.min(soon))),
                Phase::Running { grow_at, .. } => {
                    grow_at.get_or_insert(now + self.timing.suspicion);
                }
                _ => {}
            }
        }
    }

    fn is_needed(&self, worker: Worker) -> bool {
        self.seats.contains(&worker) || self.senders.contains(&worker)
    }

    /// A new coordinator learns from a node's first report that members of the world that it found are gone.
    fn find_dead_seats(&mut self, now: Instant, node: NodeId) {
        let Phase::TakingOver { unheard, .. } = &self.phase else { return };
        let dead =
            |worker: &&Worker| worker.member.node == node && matches!(self.membership.status(**worker), Status::Dead);
        if let Some(worker) = unheard.iter().find(dead).copied() {
            self.trouble(Cause { culprit: Culprit::Worker(worker), why: Why::Died }, now);
        }
    }

    /// What one member says, as far as the phase waits for it.
    fn note(&mut self, now: Instant, member: &MemberReport) {
        if member.hangs {
            return;
        }
        let generation = self.record.generation;
        let here = member.generation == generation;
        match &mut self.phase {
            Phase::TakingOver { unheard, .. } if here && member.phase >= MemberPhase::Ready => {
                unheard.remove(&member.worker);
            }
            Phase::Stopping { waiting, .. } if here => {
                waiting.remove(&member.worker);
            }
            Phase::Healing { waiting, .. } if here && member.phase >= MemberPhase::Ready => {
                waiting.remove(&member.worker);
            }
            Phase::Running { .. } if here && member.phase == MemberPhase::Running => {
                if let Some(part) = member.saved {
                    self.complete = self.manifests.handle_part(part).or(self.complete);
                }
                // A world whose end is being written down does not resume.
                let ends = self.writing.as_ref().is_some_and(|(_, purpose)| *purpose == Purpose::Stop);
                if let Some(incident) = self.incident.take_if(|_| !ends) {
                    self.commands.push_back(Command::Resumed(incident.close(now, generation)));
                }
            }
            _ => {}
        }
    }

    /// Goes on as far as it can.
    fn advance(&mut self, now: Instant) {
        while self.writing.is_none() && self.advance_once(now) {}
    }

    fn advance_once(&mut self, now: Instant) -> bool {
        match &self.phase {
            Phase::Deposed => false,
            Phase::TakingOver { unheard, until } => {
                if self.trouble.is_some() {
                    self.end_world(now)
                } else if unheard.is_empty() {
                    self.run(now)
                } else if now >= *until {
                    let unheard = unheard.first().copied().expect("checked above");
                    let cause = match self.membership.status(unheard) {
                        Status::Unheard => Cause { culprit: Culprit::Node(unheard.member.node), why: Why::Silent },
                        _ => Cause { culprit: Culprit::Job, why: Why::Succession },
                    };
                    self.trouble(cause, now);
                    self.end_world(now)
                } else {
                    false
                }
            }
            Phase::Stopping { waiting, until } => {
                let late = now >= *until;
                if !waiting.is_empty() && !late {
                    return false;
                }
                let hanging: Vec<Worker> = waiting.iter().copied().collect();
                for worker in hanging {
                    self.membership.evict(worker);
                    self.trouble(Cause { culprit: Culprit::Worker(worker), why: Why::Hangs }, now);
                }
                self.trouble = None;
                self.enter(now, IncidentPhase::Regroup);
                self.phase = Phase::Regrouping { since: now, retry: Some(now), blocked: None };
                true
            }
            Phase::Regrouping { retry: Some(retry), .. } if now >= *retry => self.regroup(now),
            Phase::Regrouping { .. } => false,
            Phase::Healing { waiting, until } => {
                if self.trouble.is_some() {
                    self.end_world(now)
                } else if waiting.is_empty() {
                    self.run(now)
                } else if now >= *until {
                    self.trouble(Cause { culprit: Culprit::Job, why: Why::Stuck }, now);
                    self.end_world(now)
                } else {
                    false
                }
            }
            Phase::Running { .. } => self.advance_running(now),
        }
    }

    fn advance_running(&mut self, now: Instant) -> bool {
        self.watch(now);
        if let Phase::Running { grow_at, .. } = &mut self.phase
            && grow_at.is_some_and(|at| now >= at)
        {
            *grow_at = None;
            self.consider_growth(now);
        }
        if self.trouble.is_some() {
            return self.end_world(now);
        }
        if let Some(checkpoint) = self.complete.take().filter(|new| new.step > self.record.checkpoint.step) {
            self.write(Record { checkpoint, ..self.record.clone() }, Purpose::Save);
        } else if self.incident.is_none() && self.record.cause.is_some() {
            self.write(Record { cause: None, ..self.record.clone() }, Purpose::Close);
        }
        false
    }

    /// The world is to end: first that becomes durable (`K-1`).
    fn end_world(&mut self, now: Instant) -> bool {
        let Some((cause, healthy)) = self.trouble.take() else { return false };
        match &mut self.incident {
            Some(incident) => {
                incident.also(cause);
                incident.enter(now, IncidentPhase::Agree);
            }
            None => self.incident = Some(Incident::new(now, healthy, cause)),
        }
        let cause = self.incident.as_ref().map(|incident| incident.cause());
        self.manifests.abandon();
        self.complete = None;
        self.write(Record { generation: self.record.generation.next(), cause, ..self.record.clone() }, Purpose::Stop);
        false
    }

    fn stop(&mut self, now: Instant) {
        self.senders.clear();
        let alive = |worker: &&Worker| matches!(self.membership.status(**worker), Status::Alive(_));
        let waiting: BTreeSet<Worker> = self.seats.iter().filter(alive).copied().collect();
        self.phase = Phase::Stopping { waiting, until: now + self.timing.stop_grace };
        self.enter(now, IncidentPhase::Abort);
        self.broadcast();
    }

    /// Tries to form the next world (`K-3`).
    fn regroup(&mut self, now: Instant) -> bool {
        let Phase::Regrouping { since, .. } = self.phase else { return false };
        match self.next_world(now, since) {
            Ok(formation) => {
                self.write(Record { formation: Some(Arc::new(formation)), ..self.record.clone() }, Purpose::Form);
            }
            Err(blocked) => {
                let remaining = match blocked {
                    Blocked::Replacements { remaining, .. } | Blocked::StateElsewhere { remaining, .. } => {
                        Some(remaining)
                    }
                    Blocked::LastWorldMayLive { .. } | Blocked::TooFew { .. } => None,
                };
                let retry = remaining.map(|remaining| now + remaining);
                self.phase = Phase::Regrouping { since, retry, blocked: Some(blocked) };
            }
        }
        false
    }

    fn form(&mut self, now: Instant) {
        let formation = self.record.formation.clone().expect("it has just been made durable");
        self.seats = formation.seats.iter().copied().collect();
        let transfers = formation.transfers.iter().flatten();
        let senders = transfers.filter_map(|transfer| transfer.source.sender(transfer.shard));
        self.senders = senders.map(|(worker, _)| worker).collect();
        // What befell members of the last world does not concern this one.
        self.trouble = None;
        self.manifests.begin(&formation);
        self.phase = Phase::Healing { waiting: self.seats.clone(), until: now + self.timing.heal };
        self.enter(now, IncidentPhase::Heal);
        self.broadcast();
        // Members may have been lost while the record was written.
        let lost = |worker: &&Worker| !matches!(self.membership.status(**worker), Status::Alive(_));
        if let Some(worker) = self.seats.iter().chain(&self.senders).find(lost).copied() {
            self.trouble(Cause { culprit: Culprit::Worker(worker), why: Why::Died }, now);
        }
    }

    fn run(&mut self, now: Instant) -> bool {
        self.senders.clear();
        let watch = Watch { step: Step(0), behind: BTreeSet::new(), since: now, next: now + self.timing.suspicion };
        self.phase = Phase::Running { watch, grow_at: Some(now + self.timing.suspicion) };
        self.enter(now, IncidentPhase::Resume);
        self.broadcast();
        true
    }

    fn enter(&mut self, now: Instant, phase: IncidentPhase) {
        if let Some(incident) = &mut self.incident {
            incident.enter(now, phase);
        }
    }
}
