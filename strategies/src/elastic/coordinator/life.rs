//! The life of a generation: reports arrive, members stop, the next world forms, heals and runs.

use super::super::identity::{Incarnation, MemberId, NodeId, Worker};
use super::super::incident::{Cause, Culprit, Incident, Phase as IncidentPhase, Why};
use super::super::membership::{Change, Status};
use super::super::message::{MemberPhase, MemberReport, Record};
use super::super::quorum::Blocked;
use super::change::GrowthCheck;
use super::watch::Watch;
use super::{Command, Coordinator, Phase, Purpose, TIMELINES_MAX, Trouble};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most ranks of a world that is planned as soon as it has enough members.
const AT_ONCE_MAX: usize = 64;

impl Coordinator {
    /// `COORDINATOR-5`
    pub(super) fn forgive_own_sleep(&mut self, now: Instant) {
        let late = self.poll_timeout().map(|due| now.saturating_duration_since(due)).unwrap_or_default();
        if late < self.timing.life / 2 {
            return;
        }
        let more = late + self.timing.suspicion;
        match &mut self.phase {
            Phase::TakingOver { until, .. }
            | Phase::Stopping { until, .. }
            | Phase::Healing { until, .. }
            | Phase::Ended { until, .. } => *until += more,
            Phase::Regrouping { since, .. } => *since += more,
            Phase::Running { watch, .. } => watch.forgive(now, self.timing.suspicion),
            Phase::Deposed => {}
        }
    }

    /// Adds the cause to the open incident, if any; otherwise opens one for the running world.
    pub(super) fn trouble(&mut self, cause: Cause, healthy: Instant) {
        self.trouble_because(Trouble { cause, detail: None, healthy });
    }

    pub(super) fn trouble_because(&mut self, trouble: Trouble) {
        match &mut self.incident {
            Some(incident) => incident.also(trouble.cause),
            None if self.trouble.is_some() => return,
            None => {}
        }
        self.trouble.get_or_insert(trouble);
    }

    pub(super) fn take_news(&mut self, now: Instant) {
        let mut is_news = false;
        while let Some(change) = self.membership.poll_change() {
            is_news = true;
            match change {
                Change::Lost { worker, cause, complaint, healthy } => {
                    if let Phase::Stopping { waiting, .. } = &mut self.phase {
                        waiting.remove(&worker);
                    }
                    if self.is_needed(worker) {
                        self.trouble_because(Trouble { cause, detail: complaint, healthy });
                    }
                }
                Change::Restarted { node, lived } if lived < self.timing.disk_patience * 2 => self.suspect(now, node),
                Change::Drains(node) if !self.ends_soon() && self.takes_part(node) => {
                    self.trouble(Cause { culprit: Culprit::Node(node), why: Why::Drains }, now);
                }
                _ => {}
            }
        }
        if !is_news {
            return;
        }
        let soon = if self.is_complete() { now } else { now + self.timing.heartbeat / 60 };
        match &mut self.phase {
            Phase::Regrouping { retry, .. } => *retry = Some(retry.map_or(soon, |at| at.min(soon))),
            Phase::Running { .. } => self.schedule_growth_check(now),
            _ => {}
        }
    }

    /// Whether the successor of a world can be planned now. The nodes of a new job come within moments of each other, and so do the
    /// acknowledgements of a large world, whose plan takes time: planning waits for more of them.
    fn is_complete(&self) -> bool {
        let n_wanted = self.policy.wanted.size();
        self.record.world_plan.is_some() && n_wanted <= AT_ONCE_MAX && self.eligible(Duration::ZERO).len() >= n_wanted
    }

    /// Whether a worker has a part in the latest world.
    pub(super) fn is_needed(&self, worker: Worker) -> bool {
        [&self.assignments, &self.catching_up, &self.guests].into_iter().any(|members| members.contains(&worker))
    }

    /// A node's first report shows a new coordinator which members of its predecessor's world have died.
    pub(super) fn find_dead_ranks(&mut self, now: Instant, node: NodeId) {
        if let Phase::Stopping { waiting, .. } = &mut self.phase {
            // Of this node only: a report of each of thousands of nodes comes here.
            let first = |node| Worker { member: MemberId { node, slot: 0 }, incarnation: Incarnation(0) };
            let here = first(node)..first(NodeId(node.0.saturating_add(1)));
            let is_dead = |worker: &Worker| matches!(self.membership.status(*worker), Status::Dead);
            let dead: Vec<Worker> = waiting.range(here).copied().filter(is_dead).collect();
            dead.iter().for_each(|worker| _ = waiting.remove(worker));
        }
        let Phase::TakingOver { unheard, .. } = &self.phase else { return };
        let dead =
            |worker: &&Worker| worker.member.node == node && matches!(self.membership.status(**worker), Status::Dead);
        if let Some(worker) = unheard.iter().find(dead).copied() {
            self.trouble(Cause { culprit: Culprit::Worker(worker), why: Why::Died }, now);
        }
    }

    /// Handles what the current phase waits for in one member's report.
    pub(super) fn note(&mut self, now: Instant, member: &MemberReport) {
        if let Some(reason) = &member.failure {
            self.note_failure(now, member, reason);
        }
        if member.hangs {
            return;
        }
        self.note_reached(member);
        let generation = self.record.generation;
        let here = member.generation == generation;
        let lives = matches!(self.phase, Phase::TakingOver { .. } | Phase::Healing { .. } | Phase::Running { .. });
        if let Some(broken) = member.broken.as_ref().filter(|_| here && lives) {
            match (&broken.corrupt, &broken.not_finite) {
                (Some(found), _) => self.note_corrupt(now, member, found, &broken.reason),
                (None, Some(found)) => self.note_not_finite(now, member, found, &broken.reason),
                (None, None) => self.note_broken(now, member, broken),
            }
        }
        if let Some(settled) = member.settled.as_ref().filter(|_| here && lives) {
            self.note_settled(now, member, settled);
        }
        if here && member.phase == MemberPhase::Paused {
            self.note_paused(now, member.worker);
        }
        if here && member.phase == MemberPhase::CatchingUp && !member.holds.is_empty() {
            self.note_caught_up(now);
        }
        if let Some(unsaved) = member.unsaved.as_ref().filter(|unsaved| here && unsaved.of.generation == generation) {
            self.note_unsaved(unsaved);
        }
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
            Phase::Healing { waiting, until } if here => {
                if let Some(ticks) = waiting.get_mut(&member.worker)
                    && std::mem::replace(ticks, member.progress.ticks) != member.progress.ticks
                {
                    *until = now + self.timing.heal;
                }
            }
            Phase::Running { .. } if here && member.phase >= MemberPhase::Running => self.note_running(now, member),
            _ => {}
        }
    }

    /// Handles the report of a member that trains: the world has resumed.
    fn note_running(&mut self, now: Instant, member: &MemberReport) {
        if let Some(part) = member.saved {
            self.complete = self.manifests.handle_part(part).or(self.complete);
        }
        // A world that rests or whose end is being made durable does not resume.
        let rests = self.record.world_plan.as_ref().is_some_and(|world_plan| world_plan.rests);
        let ends = rests || self.writing.as_ref().is_some_and(|(_, purpose)| *purpose == Purpose::Stop);
        let Some(incident) = self.incident.take_if(|_| !ends) else { return };
        let step = self.record.world_plan.as_ref().map(|f| f.base.step).unwrap_or_default();
        let timeline = incident.close(now, self.record.generation, step);
        self.timelines.push_back(timeline.clone());
        if self.timelines.len() > TIMELINES_MAX {
            self.timelines.pop_front();
        }
        self.commands.push_back(Command::Resumed(timeline));
    }

    /// Takes every step that needs no further event.
    pub(super) fn advance(&mut self, now: Instant) {
        while self.writing.is_none()
            && (self.write_ending()
                || self.write_decisions()
                || self.write_asked()
                || self.write_listed()
                || self.advance_once(now))
        {}
    }

    fn advance_once(&mut self, now: Instant) -> bool {
        self.believe_broken(now);
        match &mut self.phase {
            Phase::Deposed => false,
            Phase::Ended { unheard, until, .. } => {
                if now >= *until {
                    unheard.clear();
                }
                false
            }
            Phase::TakingOver { unheard, until } => {
                if self.trouble.is_some() {
                    self.end_world(now)
                } else if unheard.is_empty() {
                    self.let_train(now)
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
                let waiting = waiting.clone();
                self.regroup_without(&waiting, now);
                true
            }
            // Nothing is left to save.
            Phase::Regrouping { .. } if self.record.requests.stop && self.record.world_plan.is_none() => {
                self.finish();
                true
            }
            Phase::Regrouping { retry: Some(retry), .. } if now >= *retry => self.regroup(now),
            Phase::Regrouping { .. } => false,
            Phase::Healing { waiting, until } => {
                if self.trouble.is_some() {
                    self.end_world(now)
                } else if waiting.is_empty() {
                    self.let_train(now)
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

    /// Begins a new world after the last one has stopped, but for these workers, which are given up.
    fn regroup_without(&mut self, waiting: &BTreeSet<Worker>, now: Instant) {
        for worker in waiting.iter().copied() {
            let cause = if matches!(self.membership.status(worker), Status::Alive(_)) {
                self.membership.evict(worker);
                Cause { culprit: Culprit::Worker(worker), why: Why::Hangs }
            } else {
                Cause { culprit: Culprit::Node(worker.member.node), why: Why::Silent }
            };
            self.trouble(cause, now);
        }
        self.trouble = None;
        self.enter(now, IncidentPhase::Regroup);
        self.phase = Phase::Regrouping { since: now, retry: Some(now), blocked: None };
    }

    fn advance_running(&mut self, now: Instant) -> bool {
        self.watch(now);
        self.find_drained_ranks(now);
        if let Phase::Running { growth_check, .. } = &mut self.phase
            && growth_check.is_some_and(|growth_check| now >= growth_check.at)
        {
            *growth_check = None;
            if self.failing.is_none() {
                self.consider_growth();
            }
        }
        if self.trouble.is_some() {
            return self.end_world(now);
        }
        if self.write_checkpoint() {
            return false;
        }
        if self.all_done() {
            if self.failing.is_some() {
                self.end_failed();
                return true;
            }
            if self.rests() && !self.record.requests.stop {
                self.rest(now);
                return false;
            }
            self.finish();
            return true;
        } else if self.incident.is_none() && self.record.cause.is_some() {
            self.write(Record { cause: None, ..self.record.clone() }, Purpose::Close);
        }
        false
    }

    /// Ends the world; the decision becomes durable first (`COORDINATOR-1`).
    fn end_world(&mut self, now: Instant) -> bool {
        let Some(Trouble { cause, detail, healthy }) = self.trouble.take() else { return false };
        match &mut self.incident {
            Some(incident) => {
                incident.also(cause);
                incident.explain(detail);
                incident.enter(now, IncidentPhase::Agree);
            }
            None => self.incident = Some(Incident::new(now, healthy, cause).because(detail)),
        }
        let n_crashes = self.record.n_crashes + u32::from(cause.why.is_crash());
        if cause.why.is_crash() {
            self.crashing_since.get_or_insert(now);
        }
        let cause = self.incident.as_ref().map(|incident| incident.cause());
        self.manifests.abandon();
        self.complete = None;
        let generation = self.record.generation.next();
        self.write(Record { generation, cause, n_crashes, ..self.record.clone() }, Purpose::Stop);
        false
    }

    pub(super) fn stop(&mut self, now: Instant) {
        self.guests.clear();
        self.broken = None;
        // A member that has not yet reported to a new coordinator may hold the only copy of the state.
        let is_new = now < self.began + self.timing.takeover_grace;
        let alive = |worker: &&Worker| match self.membership.status(**worker) {
            Status::Alive(_) => true,
            Status::Unheard => is_new,
            Status::Dead => false,
        };
        let members = self.assignments.iter().chain(&self.catching_up);
        let mut waiting: BTreeSet<Worker> = members.filter(alive).copied().collect();
        let chosen = |cause: &Cause| matches!(cause.why, Why::Grows | Why::Resized | Why::Straggles);
        if self.record.unrecorded || self.record.cause.as_ref().is_some_and(chosen) {
            // Also wait for the joining members and for a straggler's replacement: without them the same world would
            // be formed again.
            let others = self.membership.alive().map(|member| member.worker);
            waiting.extend(others.filter(|worker| !self.drains(worker.member.node)));
        }
        if self.record.world_plan.is_none() {
            self.assignments.clear();
            self.catching_up.clear();
        }
        self.phase = Phase::Stopping { waiting, until: now + self.timing.stop_grace };
        self.enter(now, IncidentPhase::Abort);
        self.broadcast();
    }

    /// Tries to form the next world (`COORDINATOR-3`).
    fn regroup(&mut self, now: Instant) -> bool {
        let Phase::Regrouping { since, .. } = self.phase else { return false };
        let next = self.next_world(now, since);
        let waited = now.saturating_duration_since(since);
        if self.awaits_listing(waited, &next) {
            let retry = self.record.requests.stop.then(|| since + self.stop_patience());
            self.phase = Phase::Regrouping { since, retry, blocked: Some(Blocked::Listing) };
            return false;
        }
        self.fail_again(now, &next);
        if self.cannot_save(now, &next) {
            self.end_failed();
            return true;
        }
        if self.give_up_stopped(waited, &next) {
            return true;
        }
        match next {
            Ok(world_plan) => {
                let n_crashes = self.n_crashes_before(&world_plan);
                self.note_crashes(now, &world_plan, n_crashes);
                if self.is_crash_loop(now, n_crashes) {
                    return true;
                }
                if let Some(remaining) = self.pause_after_crashes(now, since, n_crashes) {
                    let blocked = Some(Blocked::Crashes { n_crashes, remaining });
                    self.phase = Phase::Regrouping { since, retry: Some(now + remaining), blocked };
                    return false;
                }
                if let Some(failing) = &mut self.failing {
                    failing.n_worlds += 1;
                }
                let world_plan = Some(Arc::new(world_plan));
                let record = self.record.clone();
                self.write(Record { world_plan, n_crashes, idle: true, unrecorded: false, ..record }, Purpose::Form);
            }
            Err(blocked) => {
                let remaining = match blocked {
                    // After the first time, the leaving members save their state; after the second, any device will do.
                    Blocked::TooFew { .. } => {
                        let times = [self.timing.suspicion, self.policy.replace_patience];
                        let ends = times.into_iter().filter_map(|time| since.checked_add(time));
                        ends.filter(|end| *end > now).map(|end| end - now).min()
                    }
                    _ => blocked.remaining(),
                };
                let retry = remaining.filter(|remaining| !remaining.is_zero()).map(|remaining| now + remaining);
                let gives_up_at = self.failing.as_ref().or(self.withdrawn.as_ref()).map(|failing| failing.until);
                let ends_at = self.record.requests.stop.then(|| since + self.stop_patience());
                let retry = retry.into_iter().chain(gives_up_at).chain(ends_at).min();
                self.phase = Phase::Regrouping { since, retry, blocked: Some(blocked) };
            }
        }
        false
    }

    pub(super) fn form(&mut self, now: Instant) {
        let world_plan = self.record.world_plan.clone().expect("it has just been made durable");
        self.assignments = world_plan.assignments.iter().copied().collect();
        self.catching_up = world_plan.catching_up.iter().map(|catch_up| catch_up.worker).collect();
        self.guests = world_plan.guests.iter().copied().collect();
        // Failures of members of the last world do not concern this one.
        (self.trouble, self.broken) = (None, None);
        self.manifests.begin(&world_plan);
        self.note_repeated(&world_plan);
        self.asked.restart_from(world_plan.base.step);
        let waiting = self.assignments.iter().chain(&self.catching_up).map(|worker| (*worker, 0)).collect();
        self.phase = Phase::Healing { waiting, until: now + self.timing.heal };
        self.enter(now, IncidentPhase::Heal);
        self.broadcast();
        // Members may have been lost while the record was written.
        let lost = |worker: &&Worker| !matches!(self.membership.status(**worker), Status::Alive(_));
        let lost = self.members().find(lost).copied();
        if let Some(worker) = lost {
            self.trouble(Cause { culprit: Culprit::Worker(worker), why: Why::Died }, now);
        }
    }

    /// Lets the members train once all have their state; the decision becomes durable first (`COORDINATOR-1`).
    fn let_train(&mut self, now: Instant) -> bool {
        if self.record.idle {
            self.write(Record { idle: false, ..self.record.clone() }, Purpose::Run);
            return false;
        }
        self.run(now);
        true
    }

    pub(super) fn run(&mut self, now: Instant) {
        self.guests.clear();
        self.note_connected();
        self.withdrawn = None;
        let watch = Watch::new(now, self.timing.suspicion);
        let growth_check = Some(GrowthCheck::after(None, now, &self.timing));
        self.phase = Phase::Running { watch, growth_check, change: None };
        self.enter(now, IncidentPhase::Resume);
        self.broadcast();
    }

    pub(super) fn enter(&mut self, now: Instant, phase: IncidentPhase) {
        if let Some(incident) = &mut self.incident {
            incident.enter(now, phase);
        }
    }
}
