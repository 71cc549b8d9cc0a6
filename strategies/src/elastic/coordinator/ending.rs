//! The end of a job (`COORDINATOR-7`): all are done, or it cannot go on.

use super::super::incident::Phase as IncidentPhase;
use super::super::membership::Status;
use super::super::message::{Ending, MemberPhase, MemberReport, Record, Report, WorldPlan};
use super::super::quorum::Blocked;
use super::{Command, Coordinator, Phase, Purpose};
use std::collections::BTreeSet;
use std::time::Instant;

impl Coordinator {
    /// Whether every node that can be heard has been told of the end; then the shell may end, too.
    pub fn all_told(&self) -> bool {
        let Phase::Ended { told } = &self.phase else { return false };
        self.membership.nodes().all(|node| told.contains(&node) || self.membership.is_silent(node))
    }

    /// Whether the world does not train, but only makes its state durable.
    pub(super) fn rests(&self) -> bool {
        self.record.world_plan.as_ref().is_some_and(|world_plan| world_plan.rests)
    }

    /// What the world began from is in a checkpoint, and nothing else is needed of its members: the next one begins there.
    pub(super) fn rest(&mut self, now: Instant) {
        self.enter(now, IncidentPhase::Agree);
        self.manifests.abandon();
        let generation = self.record.generation.next();
        self.write(Record { generation, world_plan: None, idle: false, ..self.record.clone() }, Purpose::Stop);
    }

    /// The job cannot go on. The first reason is kept.
    pub(super) fn fail(&mut self, reason: String) {
        self.ending.get_or_insert(Ending::Failed(reason));
    }

    /// The job is done.
    pub(super) fn finish(&mut self) {
        self.ending.get_or_insert(Ending::Finished);
    }

    /// Whether every rank of the world that runs is done, and the state that they have is in a complete checkpoint.
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

    /// Makes the end durable. Returns whether there is one.
    pub(super) fn write_ending(&mut self) -> bool {
        if matches!(self.phase, Phase::Deposed | Phase::Ended { .. }) {
            return false;
        }
        let Some(ending) = self.ending.clone() else { return false };
        self.write(Record { ending: Some(ending), ..self.record.clone() }, Purpose::End);
        true
    }

    pub(super) fn enter_ended(&mut self, ending: Ending) {
        self.phase = Phase::Ended { told: BTreeSet::new() };
        self.broadcast();
        self.commands.push_back(Command::Ended(ending));
    }

    pub(super) fn note_told(&mut self, report: &Report) {
        let id = self.desired_state_id();
        if let Phase::Ended { told } = &mut self.phase
            && report.desired_state == id
        {
            told.insert(report.node);
        }
    }

    /// Gives up if a node starts process after process in vain, and too few members are there to go on without it.
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

    /// Crashes in a row, up to the one before this world, since a step was committed.
    pub(super) fn n_crashes_before(&self, next: &WorldPlan) -> u32 {
        let progress = self.record.world_plan.as_ref().is_some_and(|last| next.base.step > last.base.step);
        if progress { self.record.n_crashes.min(1) } else { self.record.n_crashes }
    }

    /// Gives up if there were too many.
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
