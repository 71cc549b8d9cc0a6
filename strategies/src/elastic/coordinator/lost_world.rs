//! Worlds whose members do not return, and nodes that the operator declares gone.
//!
//! Invariants:
//! - `COORDINATOR-19` Whenever enough members for a world are present, steps go on after a bounded time: the coordinator waits for
//!   members of the last world, or for state that only they hold, no longer than `replace_patience`, unless that never ends. The
//!   next world then begins from the newest checkpoint, and its incident counts the steps that it repeats.
//! - `COORDINATOR-20` A record that is older than the job, because it was restored from a backup, is believed until a report
//!   contradicts it. The coordinator then ends the world that it does not know, under a later term and generation than any
//!   report has named, and the next world begins from the members' state if it is complete.

use super::super::commit::{CommitState, Version, decide};
use super::super::identity::{Generation, Incarnation, NodeId, Step};
use super::super::incident::{Cause, Culprit, Incident, Why};
use super::super::message::{Ending, MemberReport, Record, Report, WorldPlan};
use super::super::quorum::{Blocked, FOREVER};
use super::{Command, Coordinator, Phase, Purpose};
use std::time::{Duration, Instant};

/// Why a node cannot be declared gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotGone {
    /// No such node has taken part.
    #[error("{0} has never taken part in this job")]
    Unknown(NodeId),
    /// It reports.
    #[error("{0} reports, so it is not gone; drain it without --gone")]
    Reports(NodeId),
}

impl Coordinator {
    /// Declares a silent node gone: its processes count as dead and may not return (`QUORUM-4`).
    ///
    /// # Errors
    /// When the node reports or is unknown. Nothing has changed.
    pub fn handle_gone(&mut self, now: Instant, node: NodeId) -> Result<(), NotGone> {
        self.handle_timeout(now);
        let of_world = self.members().filter(|worker| worker.member.node == node).map(|worker| worker.incarnation);
        let before = self.asked.gone.get(&node).copied();
        let last: Option<Incarnation> = of_world.chain(self.membership.last_incarnation(node)).chain(before).max();
        let last = last.ok_or(NotGone::Unknown(node))?;
        if !self.membership.is_silent(node) {
            return Err(NotGone::Reports(node));
        }
        self.asked.gone.insert(node, last);
        self.handle_timeout(now);
        Ok(())
    }

    /// Forgets the nodes that are declared gone on record.
    pub(super) fn forget_gone(&mut self, now: Instant) {
        for (node, last) in self.record.gone.clone() {
            self.membership.declare_gone(node, last);
            self.find_dead_ranks(now, node);
        }
        self.take_news(now);
    }

    /// Whether a report is of a process that was declared gone.
    pub(super) fn is_gone(&self, report: &Report) -> bool {
        self.record.gone.get(&report.node).is_some_and(|last| report.boot <= *last)
    }

    /// How long the coordinator waits for any member of the last world to leave it (`QUORUM-3`).
    pub(super) fn lost_patience(&self) -> Duration {
        self.policy.replace_patience.max(self.timing.disk_patience)
    }

    /// Notes the latest step that a member of the last world has committed.
    pub(super) fn note_reached(&mut self, member: &MemberReport) {
        let Some(applied) = member.commit_state.applied else { return };
        let lineage = self.record.world_plan.as_ref().map(|world_plan| world_plan.base.lineage);
        if self.record.unrecorded || lineage == Some(applied.lineage) {
            self.reached = self.reached.max(applied.step);
        }
    }

    /// Counts the steps that a new world repeats.
    pub(super) fn note_repeated(&mut self, world_plan: &WorldPlan) {
        let step = world_plan.base.step;
        if world_plan.base.lineage != world_plan.generation {
            self.reached = self.reached.max(step);
            return;
        }
        let n_repeated = self.reached.0.saturating_sub(step.0);
        self.reached = step;
        if let Some(incident) = self.incident.as_mut().filter(|_| n_repeated > 0) {
            incident.repeats(n_repeated);
        }
    }

    /// Ends a stopped job whose last steps are lost, or do not return. Returns whether it did.
    pub(super) fn give_up_stopped(&mut self, waited: Duration, next: &Result<WorldPlan, Blocked>) -> bool {
        if !self.record.requests.stop || self.failing.is_some() {
            return false;
        }
        let saved = self.record.checkpoint.step;
        let why = match next {
            Ok(next) if next.base.lineage == next.generation && self.reached > saved => {
                "no member holds them any more".into()
            }
            Err(blocked) if waited >= self.stop_patience() => blocked.to_string(),
            _ => return false,
        };
        if self.reached <= saved {
            self.finish();
            return true;
        }
        let reason = format!(
            "stopped at {} without its last steps: {why}; the newest checkpoint is that of {saved}",
            self.reached
        );
        self.ending.get_or_insert(Ending::Failed(reason));
        true
    }

    /// How long a stopped job waits for a world that can save its state.
    pub(super) fn stop_patience(&self) -> Duration {
        let patience = self.lost_patience();
        if patience < FOREVER / 2 { patience } else { self.timing.disk_patience * 6 }
    }

    /// `COORDINATOR-20`. The coordinator acts on a later generation only if its own record is still the latest: the store refuses
    /// what a coordinator without the lease writes.
    pub(super) fn note_later(&mut self, now: Instant, report: &Report) {
        if matches!(self.phase, Phase::Deposed | Phase::Ended { .. }) {
            return;
        }
        if report.desired_state.term > self.record.term {
            self.commands.push_back(Command::Outrun(report.desired_state.term));
            return;
        }
        if self.writing.is_some() {
            return;
        }
        let of_members = report.members.iter().flat_map(|member| [member.generation, member.commit_state.entered]);
        let latest = of_members.chain([report.desired_state.generation]).max().unwrap_or_default();
        if latest <= self.record.generation {
            return;
        }
        let cause = Cause { culprit: Culprit::Job, why: Why::Succession };
        let detail = format!(
            "the coordinator's record ends at {}, but {} is at {latest}: it was restored from a backup",
            self.record.generation, report.node
        );
        match &mut self.incident {
            Some(incident) => incident.explain(Some(detail)),
            None => self.incident = Some(Incident::new(now, now, cause).because(Some(detail))),
        }
        self.manifests.abandon();
        self.complete = None;
        let cause = self.incident.as_ref().map(Incident::cause);
        let record = self.record.clone();
        let (generation, world_plan) = (latest.next(), None);
        self.write(Record { generation, world_plan, cause, unrecorded: true, idle: false, ..record }, Purpose::Stop);
    }

    /// The state that the members of a world without a plan have committed, and where they voted for it, if it is newer than the
    /// checkpoint on record (`COORDINATOR-20`). One of them has left the world, so it can commit nothing more.
    pub(super) fn unrecorded_state(&self) -> Option<(Version, Generation)> {
        let states = || self.here().map(|member| &member.commit_state);
        let of = |state: &CommitState| state.applied.map(|applied| (applied.lineage, state.entered));
        let (lineage, entered) = states().filter_map(of).max()?;
        let latest = states().filter(|state| of(state) == Some((lineage, entered)));
        let step = decide(entered, Step(0), latest)?;
        let is_newer = step > self.record.checkpoint.step && lineage > self.corrupt;
        is_newer.then_some((Version { lineage, step }, entered))
    }
}
