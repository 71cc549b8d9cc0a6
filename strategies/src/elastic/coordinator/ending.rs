//! The end of a job (`COORDINATOR-7`): all ranks are done, or the job cannot continue.

use super::super::incident::Phase as IncidentPhase;
use super::super::membership::Status;
use super::super::message::{Ending, MemberPhase, MemberReport, Record, Report, WorldPlan};
use super::super::quorum::Blocked;
use super::{Command, Coordinator, Phase, Purpose};
use std::collections::BTreeSet;
use std::time::Instant;

impl Coordinator {
    /// Whether every node that is not silent has acknowledged the end; then the shell may end, too.
    pub fn all_notified(&self) -> bool {
        let Phase::Ended { notified } = &self.phase else { return false };
        self.membership.nodes().all(|node| notified.contains(&node) || self.membership.is_silent(node))
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

    /// Fails the job. The first reason is kept.
    pub(super) fn fail(&mut self, reason: String) {
        self.ending.get_or_insert(Ending::Failed(reason));
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

    /// Makes the ending durable, if there is one. Returns whether there is.
    pub(super) fn write_ending(&mut self) -> bool {
        if matches!(self.phase, Phase::Deposed | Phase::Ended { .. }) {
            return false;
        }
        let Some(ending) = self.ending.clone() else { return false };
        self.write(Record { ending: Some(ending), ..self.record.clone() }, Purpose::End);
        true
    }

    pub(super) fn enter_ended(&mut self, ending: Ending) {
        self.phase = Phase::Ended { notified: BTreeSet::new() };
        self.broadcast();
        self.commands.push_back(Command::Ended(ending));
    }

    pub(super) fn note_notified(&mut self, report: &Report) {
        let id = self.desired_state_id();
        if let Phase::Ended { notified } = &mut self.phase
            && report.desired_state == id
        {
            notified.insert(report.node);
        }
    }

    /// Fails the job if processes of a node repeatedly fail to start and too few members remain without that node.
    pub(super) fn note_failed_starts(&mut self, now: Instant, report: &Report) {
        let (found, max) = (report.n_failed_starts, self.policy.incidents_max);
        let blocked = matches!(&self.phase, Phase::Regrouping { blocked: Some(Blocked::TooFew { .. }), .. });
        if blocked && found > max {
            let node = report.node;
            self.fail(format!(
                "{node}: {found} processes in a row ended before their first status report, expected at most {max}"
            ));
            self.advance(now);
        }
    }

    /// Number of crashes before this world since a step was last committed.
    pub(super) fn n_crashes_before(&self, next: &WorldPlan) -> u32 {
        let progress = self.record.world_plan.as_ref().is_some_and(|last| next.base.step > last.base.step);
        if progress { self.record.n_crashes.min(1) } else { self.record.n_crashes }
    }

    /// Fails the job after too many crashes in a row. Returns whether it did.
    pub(super) fn is_crash_loop(&mut self, n_crashes: u32) -> bool {
        let max = self.policy.incidents_max;
        if n_crashes <= max {
            return false;
        }
        let cause = self.record.cause.map_or(String::from("unknown"), |cause| cause.to_string());
        self.fail(format!(
            "{n_crashes} crashes in a row and no step committed, expected at most {max}; the last: {cause}"
        ));
        true
    }
}
