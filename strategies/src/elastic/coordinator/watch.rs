//! Whether a running world makes progress, who holds it up, and whether it could be larger.

use super::super::identity::{NodeId, Step, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::membership::Status;
use super::super::message::MemberPhase;
use super::{Coordinator, Phase};
use std::collections::BTreeSet;
use std::time::Instant;

/// Whether a running world makes progress.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    /// The last step that all have entered.
    pub(super) step: Step,
    /// Who has not entered the next one.
    pub(super) behind: BTreeSet<Worker>,
    pub(super) since: Instant,
    pub(super) next: Instant,
}

impl Coordinator {
    /// Looks for members that keep all others waiting.
    pub(super) fn watch(&mut self, now: Instant) {
        let Phase::Running { watch, .. } = &mut self.phase else { return };
        if now < watch.next {
            return;
        }
        watch.next = now + self.timing.suspicion;
        // Who has learnt that the last step is committed waits for storage; all others have entered that step.
        let past = |worker: &Worker| match self.membership.status(*worker) {
            Status::Alive(member) => member.phase > MemberPhase::Running,
            _ => false,
        };
        if self.seats.iter().any(past) {
            (watch.since, watch.behind) = (now, BTreeSet::new());
            return;
        }
        let entered = |worker: &Worker| match self.membership.status(*worker) {
            Status::Alive(member) => member.entered,
            _ => Step(0),
        };
        let steps: Vec<(Step, Worker)> = self.seats.iter().map(|worker| (entered(worker), *worker)).collect();
        let slowest = steps.iter().map(|(step, _)| *step).min().unwrap_or_default();
        if slowest > watch.step {
            (watch.step, watch.since) = (slowest, now);
        }
        let behind: BTreeSet<Worker> = steps.iter().filter(|(step, _)| *step == slowest).map(|(_, w)| *w).collect();
        // Reports are not of one moment: only who was behind at two looks is.
        let before = std::mem::replace(&mut watch.behind, behind);
        if now < watch.since + self.timing.stuck {
            return;
        }
        let healthy = std::mem::replace(&mut watch.since, now);
        let culprits: Vec<Worker> = watch.behind.intersection(&before).copied().collect();
        let nodes: BTreeSet<NodeId> = culprits.iter().map(|worker| worker.member.node).collect();
        // If several machines are behind at once, it is not theirs.
        if nodes.len() != 1 || culprits.len() == steps.len() {
            self.trouble(Cause { culprit: Culprit::Job, why: Why::Stuck }, healthy);
        } else if self.policy.evict_stragglers {
            for worker in culprits {
                self.membership.evict(worker);
                self.trouble(Cause { culprit: Culprit::Worker(worker), why: Why::Straggles }, healthy);
            }
        }
    }

    /// Ends a world if members can form the one that is wanted, or a larger one.
    pub(super) fn consider_growth(&mut self, now: Instant) {
        let Some(formation) = &self.record.formation else { return };
        let (mesh, wanted) = (formation.mesh, self.policy.wanted);
        let n_members = self.candidates().len();
        let larger = self.policy.largest(n_members, Some(mesh)).is_some_and(|other| other.size() > mesh.size());
        let resizes = self.record.wanted.is_some() && mesh != wanted && wanted.size() <= n_members;
        let why = match (resizes, larger) {
            (true, _) => Why::Resized,
            (false, true) => Why::Grows,
            (false, false) => return,
        };
        self.trouble(Cause { culprit: Culprit::Job, why }, now);
    }
}
