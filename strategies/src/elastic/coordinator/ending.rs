//! The end of a job (`COORDINATOR-7`): all ranks are done, or the job cannot continue.
//!
//! Invariant:
//! - `COORDINATOR-12` A job that fails first makes its committed state durable, if it is newer than the last checkpoint and
//!   members that can form any mesh of the job still hold it. Such a world trains no step. Its own failures, and the time and
//!   the number of worlds that it may take, are bounded; the job then ends with the first reason.
//! - `COORDINATOR-23` A failure whose consequences the store could not record for a while is withdrawn once the store answers:
//!   what silenced the store, such as a full disk, may be what failed. The members do the work again, from the same state; a
//!   failure in that world, or members that cannot form it, end the job as any failure does.
//! - `COORDINATOR-21` Crashes in a row end a job only if they are more than the policy allows and have lasted for
//!   [`Timing::crash_patience`]: whatever kills many processes within seconds may pass. The next world is formed after a pause
//!   that doubles with each crash, so that the number of worlds in that time is bounded, too.

use super::super::identity::NodeId;
use super::super::incident::{Cause, Culprit, Phase as IncidentPhase, Why};
use super::super::membership::Status;
use super::super::message::{Ending, MemberPhase, MemberReport, Record, Report, WorldPlan, printable};
use super::super::quorum::Blocked;
use super::super::timing::Timing;
use super::{Command, Coordinator, Phase, Purpose, Trouble};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Most worlds that a failing job forms to save its state; each may lose a member.
const LAST_SAVES_MAX: u32 = 3;

/// Crashes in a row after which the next world is formed at once.
const CRASHES_WITHOUT_PAUSE: u32 = 2;

/// Most doublings of the pause after further crashes, whose first is the time to suspect a rank.
const PAUSE_DOUBLINGS_MAX: u32 = 5;

/// A job that is about to fail (`COORDINATOR-12`).
#[derive(Clone, Debug)]
pub(super) struct Failing {
    pub(super) reason: String,
    /// How long it may wait for members that hold its state.
    pub(super) until: Instant,
    /// Number of worlds formed to save it.
    pub(super) n_worlds: u32,
}

impl Failing {
    pub(super) fn new(now: Instant, reason: String, timing: &Timing) -> Failing {
        Failing { reason, until: now + timing.takeover_grace + timing.stop_grace + timing.disk_patience, n_worlds: 0 }
    }
}

impl Coordinator {
    /// Whether every node that is not silent has acknowledged the end; then the shell may end, too. A coordinator that inherits
    /// the end waits for the nodes of the last world, which do not know of it.
    pub fn all_notified(&self) -> bool {
        let Phase::Ended { notified, unheard, .. } = &self.phase else { return false };
        unheard.is_empty()
            && self.membership.nodes().all(|node| notified.contains(&node) || self.membership.is_silent(node))
    }

    /// Whether the world does not train, but only makes its state durable.
    pub(super) fn rests(&self) -> bool {
        self.record.world_plan.as_ref().is_some_and(|world_plan| world_plan.rests)
    }

    /// Ends a resting world whose base state is in a checkpoint; the next world starts from that checkpoint.
    pub(super) fn rest(&mut self, now: Instant) {
        self.enter(now, IncidentPhase::Agree);
        self.manifests.abandon();
        let generation = self.record.generation.next();
        self.write(Record { generation, world_plan: None, idle: false, ..self.record.clone() }, Purpose::Stop);
    }

    /// Fails the job, after its committed state is durable (`COORDINATOR-12`). The first reason is kept.
    pub(super) fn fail(&mut self, now: Instant, reason: String) {
        let is_over = self.ending.is_some() || matches!(self.phase, Phase::Ended { .. } | Phase::Deposed);
        if is_over || self.failing.is_some() {
            return;
        }
        if self.record.world_plan.is_none() {
            self.ending = Some(Ending::Failed(reason));
            return;
        }
        self.withdrawn = None;
        self.failing = Some(Failing::new(now, reason, &self.timing));
        self.end_for_last_save(now);
    }

    /// Withdraws a failure, because the store answers again after a time in which it did not (`COORDINATOR-23`). Not one of a job
    /// whose end is already announced.
    pub fn handle_store_back(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Ended { .. } | Phase::Deposed) || self.failing.is_none() {
            return;
        }
        if self.writing.as_ref().is_some_and(|(_, purpose)| *purpose == Purpose::End) {
            self.writing = None;
        }
        self.ending = None;
        if self.writing.is_none() {
            self.end_for_last_save(now);
        }
        self.withdrawn = self.failing.take().map(|failing| Failing::new(now, failing.reason, &self.timing));
        self.handle_timeout(now);
    }

    /// Whether a failure is one that was withdrawn: until a rank's next world begins, its reports repeat it.
    fn is_withdrawn(&self, member: &MemberReport) -> bool {
        let is_of_world = member.generation == self.record.generation && member.phase > MemberPhase::Stopped;
        let has_world = self.record.world_plan.as_ref().is_some_and(|plan| plan.generation == self.record.generation);
        self.withdrawn.is_some() && !(is_of_world && has_world)
    }

    /// Fails the job for the reason that was withdrawn, if its members cannot form a world any more.
    pub(super) fn fail_again(&mut self, now: Instant, next: &Result<WorldPlan, Blocked>) {
        let Some(Failing { until, .. }) = self.withdrawn else { return };
        let is_impossible = match next {
            Ok(_) => false,
            Err(Blocked::TooFew { .. }) if self.all_here() => true,
            Err(_) => now >= until,
        };
        if is_impossible {
            self.failing = self.withdrawn.take();
        }
    }

    /// Ends the current world, if there is one, so that the next one saves its state.
    pub(super) fn end_for_last_save(&mut self, now: Instant) {
        let detail = self.failing.as_ref().map(|failing| failing.reason.clone());
        match &mut self.phase {
            Phase::Regrouping { retry, .. } => *retry = Some(now),
            Phase::TakingOver { .. } | Phase::Healing { .. } | Phase::Running { .. } => {
                let cause = Cause { culprit: Culprit::Job, why: Why::Fails };
                self.trouble_because(Trouble { cause, detail, healthy: now });
            }
            Phase::Stopping { .. } | Phase::Ended { .. } | Phase::Deposed => {}
        }
    }

    /// Handles a member's permanent failure.
    pub(super) fn note_failure(&mut self, now: Instant, member: &MemberReport, reason: &str) {
        if self.is_withdrawn(member) {
            return;
        }
        let takes_part = member.generation == self.record.generation && member.phase > MemberPhase::Stopped;
        if self.failing.is_none() {
            if !self.excludes_failed(now, member, reason) {
                self.fail(now, format!("{}: {}", member.worker, printable(reason)));
            }
        } else if takes_part && self.rests() {
            // The last save has failed. Before it, each report repeats the failure that led to it.
            self.end_failed();
        }
    }

    /// Ends a job whose last save is complete or impossible.
    pub(super) fn end_failed(&mut self) {
        if let Some(Failing { reason, .. }) = &self.failing {
            self.ending.get_or_insert(Ending::Failed(reason.clone()));
        }
    }

    /// Whether the last save of a failing job is impossible: nothing newer than the last checkpoint is left, or it has taken too
    /// many worlds or too long.
    pub(super) fn cannot_save(&self, now: Instant, next: &Result<WorldPlan, Blocked>) -> bool {
        let Some(Failing { until, n_worlds, .. }) = self.failing else { return false };
        match next {
            Ok(next) => n_worlds >= LAST_SAVES_MAX || next.base.step <= self.record.checkpoint.step,
            Err(Blocked::TooFew { .. }) if self.all_here() => true,
            Err(_) => now >= until,
        }
    }

    /// Finishes the job.
    pub(super) fn finish(&mut self) {
        self.ending.get_or_insert(Ending::Finished);
    }

    /// Whether every rank of the running world is done and its state is in a complete checkpoint.
    pub(super) fn all_done(&self) -> bool {
        let saved = |member: &MemberReport| {
            member.commit_state.applied.is_some_and(|applied| applied.step <= self.record.checkpoint.step)
        };
        let done = |worker| match self.membership.status(worker) {
            Status::Alive(member) => {
                (member.generation, member.phase) == (self.record.generation, MemberPhase::Done) && saved(member)
            }
            _ => false,
        };
        !self.assignments.is_empty() && self.assignments.iter().all(|worker| done(*worker))
    }

    /// Ends the job with this reason, although that cannot become durable: the store is gone for good, so that no successor can
    /// begin with it either.
    pub fn handle_store_lost(&mut self, now: Instant, reason: String) {
        if matches!(self.phase, Phase::Ended { .. } | Phase::Deposed) {
            return;
        }
        let ending = Ending::Failed(reason);
        (self.writing, self.record.ending) = (None, Some(ending.clone()));
        self.enter_ended(now, ending);
    }

    /// Makes the ending durable, if there is one. Returns whether there is.
    pub(super) fn write_ending(&mut self) -> bool {
        if matches!(self.phase, Phase::Deposed | Phase::Ended { .. }) {
            return false;
        }
        let Some(ending) = self.ending.clone() else { return false };
        self.write(Record { ending: Some(ending), ..self.record.clone() }, Purpose::End);
        true
    }

    pub(super) fn enter_ended(&mut self, now: Instant, ending: Ending) {
        let of_world: BTreeSet<NodeId> = self.members().map(|worker| worker.member.node).collect();
        let unheard = of_world.into_iter().filter(|node| self.membership.boot(*node).is_none()).collect();
        self.phase = Phase::Ended { notified: BTreeSet::new(), unheard, until: now + self.timing.takeover_grace };
        self.broadcast();
        self.commands.push_back(Command::Ended(ending));
    }

    pub(super) fn note_notified(&mut self, report: &Report) {
        let id = self.desired_state_id();
        let Phase::Ended { notified, unheard, .. } = &mut self.phase else { return };
        unheard.remove(&report.node);
        if report.desired_state == id {
            notified.insert(report.node);
        }
    }

    /// Fails the job if processes of a node repeatedly fail to start and too few members remain without that node.
    pub(super) fn note_failed_starts(&mut self, now: Instant, report: &Report) {
        let (found, max) = (report.n_failed_starts, self.policy.incidents_max);
        if found == 0 {
            self.failing_starts.remove(&report.node);
            return;
        }
        let since = *self.failing_starts.entry(report.node).or_insert(now);
        let blocked = matches!(&self.phase, Phase::Regrouping { blocked: Some(Blocked::TooFew { .. }), .. });
        // COORDINATOR-13. It goes through all members, and this runs after every report of thousands of nodes.
        let counts = || self.record.world_plan.is_none() || self.takes_part(report.node);
        if blocked && found > max && now >= since + self.timing.crash_patience && counts() {
            let node = report.node;
            self.fail(
                now,
                format!(
                    "{node}: {found} processes in a row ended before their first status report, expected at most {max}"
                ),
            );
            self.advance(now);
        }
    }

    /// Number of crashes before this world since a step was last committed.
    pub(super) fn n_crashes_before(&self, next: &WorldPlan) -> u32 {
        if self.has_progressed(next) { self.record.n_crashes.min(1) } else { self.record.n_crashes }
    }

    /// Whether the last world has committed a step.
    fn has_progressed(&self, next: &WorldPlan) -> bool {
        self.record.world_plan.as_ref().is_some_and(|last| next.base.step > last.base.step)
    }

    /// Notes since when worlds fail without a step, `n_crashes` of them before this one.
    pub(super) fn note_crashes(&mut self, now: Instant, next: &WorldPlan, n_crashes: u32) {
        self.crashing_since = match n_crashes {
            0 => None,
            _ if self.has_progressed(next) => Some(now),
            _ => self.crashing_since.or(Some(now)),
        };
    }

    /// Rest of the pause before the world after this many crashes in a row, since `since` (`COORDINATOR-21`). One or two failures
    /// are usual: a machine dies, or another one while its state is fetched.
    pub(super) fn pause_after_crashes(&self, now: Instant, since: Instant, n_crashes: u32) -> Option<Duration> {
        let n_doublings = n_crashes.checked_sub(CRASHES_WITHOUT_PAUSE + 1)?.min(PAUSE_DOUBLINGS_MAX);
        let until = since + self.timing.suspicion * 2u32.pow(n_doublings);
        until.checked_duration_since(now).filter(|left| !left.is_zero() && self.failing.is_none())
    }

    /// Fails the job after too many crashes in a row. Returns whether it did.
    pub(super) fn is_crash_loop(&mut self, now: Instant, n_crashes: u32) -> bool {
        let max = self.policy.incidents_max;
        let is_short = self.crashing_since.is_none_or(|since| now < since + self.timing.crash_patience);
        if n_crashes <= max || is_short || self.failing.is_some() {
            return false;
        }
        let cause = self.record.cause.map_or(String::from("unknown"), |cause| cause.to_string());
        self.fail(
            now,
            format!("{n_crashes} crashes in a row and no step committed, expected at most {max}; the last: {cause}"),
        );
        true
    }
}
