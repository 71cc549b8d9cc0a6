//! Copies of state that differ: silent corruption of one of them.
//!
//! A flipped bit takes part in all gradients from the next step on, so that no copy in memory is that of an undisturbed run.
//! The next world therefore begins from the latest checkpoint, which was saved after its copies agreed, and repeats the steps
//! since. If a majority of the copies contradicts a rank, its process is replaced at once. Otherwise the ranks remember what
//! they computed, and compare it with the repeated steps: the first one to deviate had the corruption.
//!
//! A loss that is not finite although all copies agree may be that of a diverged model, or of a rank that computes wrongly. The
//! next world repeats that step once, from the state in memory; a rank that alone had such a part of the loss is replaced before.
//! If the repeated step is not finite either, the ranks end the job.
//!
//! Invariants:
//! - `COORDINATOR-17` After a difference was found, no world uses state in memory of the same lineage. Copies that differ again
//!   and again after the same step end the job, because no replacement cures a defect of the program.
//! - `COORDINATOR-18` A step that is not finite is repeated in one further world, and never in the same one.

use super::super::copies::Difference;
use super::super::devices::DeviceHealth;
use super::super::identity::{Step, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::membership::Status;
use super::super::message::{Dispute, MemberReport, NotFinite, Report, Settled, printable};
use super::{Coordinator, Trouble};
use std::time::Instant;

/// Differences after the same step, without agreement in between, that end the job.
const TIMES_MAX: u32 = 3;
/// Most disputes that are remembered; a further one replaces the oldest.
const DISPUTES_MAX: usize = 8;

impl Coordinator {
    /// Handles the report that copies of the world's state differ. All its ranks report the same.
    pub(super) fn note_corrupt(&mut self, now: Instant, reporter: &MemberReport, found: &Difference, reason: &str) {
        let Some(world_plan) = self.record.world_plan.clone() else { return };
        // COORDINATOR-13
        let is_rank = world_plan.rank_of(reporter.worker).is_some();
        if !is_rank || self.corrupt >= world_plan.base.lineage {
            return;
        }
        self.corrupt = world_plan.generation;
        let suspects: Vec<Worker> =
            found.suspects.iter().filter_map(|rank| world_plan.assignments.get(*rank as usize).copied()).collect();
        let n_times = self.note_dispute(found);
        if n_times >= TIMES_MAX {
            let tensor = printable(&found.tensor);
            let step = found.step;
            return self.fail(
                now,
                format!("copies of `{tensor}` differed after {step} {n_times} times, although it was recomputed on the same data: this is a defect of the program or of several machines, not of one rank"),
            );
        }
        let culprit = suspects.first().map_or(Culprit::Job, |worker| Culprit::Worker(*worker));
        let complaint = suspects.first().and_then(|worker| self.membership.complaint(*worker));
        let detail = Some([Some(printable(reason)), complaint].into_iter().flatten().collect::<Vec<_>>().join("; "));
        self.trouble_because(Trouble { cause: Cause { culprit, why: Why::Corrupted }, detail, healthy: now });
        suspects.into_iter().for_each(|worker| self.replace_corrupt(now, worker));
    }

    /// Handles the report that a step is not finite. All its ranks report the same (`COORDINATOR-18`).
    pub(super) fn note_not_finite(&mut self, now: Instant, reporter: &MemberReport, found: &NotFinite, reason: &str) {
        let Some(world_plan) = self.record.world_plan.clone() else { return };
        // COORDINATOR-13
        let is_known = self.disputes.iter().any(|dispute| dispute.step == found.step);
        if is_known || world_plan.rank_of(reporter.worker).is_none() {
            return;
        }
        let dispute = Dispute { step: found.step, tensor: String::from("the loss"), n_times: 1 };
        self.remember_dispute(dispute);
        let suspect = found.suspect.and_then(|rank| world_plan.assignments.get(rank as usize).copied());
        let culprit = suspect.map_or(Culprit::Job, Culprit::Worker);
        let cause = Cause { culprit, why: Why::NotFinite };
        self.trouble_because(Trouble { cause, detail: Some(printable(reason)), healthy: now });
        suspect.into_iter().for_each(|worker| self.replace_corrupt(now, worker));
    }

    /// Remembers the dispute. Returns the number of times that copies differed after this step.
    fn note_dispute(&mut self, found: &Difference) -> u32 {
        if let Some(dispute) = self.disputes.iter_mut().find(|dispute| dispute.step == found.step) {
            dispute.n_times += 1;
            return dispute.n_times;
        }
        self.remember_dispute(Dispute { step: found.step, tensor: found.tensor.clone(), n_times: 1 });
        1
    }

    fn remember_dispute(&mut self, dispute: Dispute) {
        if self.disputes.len() == DISPUTES_MAX {
            self.disputes.remove(0);
        }
        self.disputes.push(dispute);
    }

    /// Handles the report that all copies agree after the repetition of a disputed step.
    pub(super) fn note_settled(&mut self, now: Instant, reporter: &MemberReport, settled: &Settled) {
        let Some(at) = self.disputes.iter().position(|dispute| dispute.step == settled.step) else { return };
        let Some(world_plan) = self.record.world_plan.clone() else { return };
        if world_plan.rank_of(reporter.worker).is_none() {
            return;
        }
        let Dispute { step, tensor, .. } = self.disputes.remove(at);
        for rank in &settled.suspects {
            let Some(worker) = world_plan.assignments.get(*rank as usize).copied() else { continue };
            let detail = format!("the repeated {step} shows that its copy of `{}` was wrong", printable(&tensor));
            let cause = Cause { culprit: Culprit::Worker(worker), why: Why::Corrupted };
            self.trouble_because(Trouble { cause, detail: Some(detail), healthy: now });
            self.replace_corrupt(now, worker);
        }
    }

    /// Whether the device of a rank has made memory errors since the node's last report: others may have gone unnoticed.
    pub(super) fn has_new_errors(&self, report: &Report) -> bool {
        let earlier = self.membership.devices(report.node);
        let is_used = |device: usize| {
            let users = report.members.iter().filter(|member| member.device == Some(device as u32));
            users.into_iter().any(|member| self.assignments.contains(&member.worker))
        };
        let risen = |device: &DeviceHealth| earlier.iter().any(|earlier| device.has_new_errors(earlier));
        report.devices.iter().enumerate().any(|(i, device)| risen(device) && is_used(i))
    }

    /// Replaces the process of a rank whose state was corrupted, and counts it against its machine.
    fn replace_corrupt(&mut self, now: Instant, worker: Worker) {
        if matches!(self.membership.status(worker), Status::Alive(_)) {
            self.membership.evict(worker);
        }
        self.suspect(now, worker.member.node);
    }

    /// The steps whose repetition is compared.
    pub(super) fn disputed_steps(&self) -> Vec<Step> {
        self.disputes.iter().map(|dispute| dispute.step).collect()
    }
}
