//! Whether a running world makes progress, and which member delays it, because it is stuck or slow.

use super::super::identity::{NodeId, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::membership::Status;
use super::super::message::{MemberPhase, MemberReport};
use super::super::progress::{At, Patience, Pauses, Wait};
use super::super::straggler::{N_OBSERVATIONS, Observations};
use super::{Coordinator, Phase, Trouble};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Whether a running world makes progress.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    pauses: Pauses<Worker>,
    observations: Observations<Worker>,
    /// The member for which all others wait most of the time.
    pub(super) slow: Option<Worker>,
    /// Time of the next check.
    pub(super) next: Instant,
}

/// A world in which a member makes no progress.
#[derive(Default)]
struct Standstill {
    /// Members that neither make progress nor wait, and since when.
    culprits: BTreeMap<Worker, Instant>,
    /// Number of members that wait for each collective without progress.
    waiting: BTreeMap<Wait, usize>,
    /// Since when no member makes progress, if none does.
    all_since: Option<Instant>,
    /// Whether each member computes (`true`) or waits (`false`) now.
    busy: BTreeMap<Worker, bool>,
}

impl Watch {
    pub(super) fn new(now: Instant, soon: Duration) -> Watch {
        Watch { pauses: Pauses::new(), observations: Observations::new(), slow: None, next: now + soon }
    }

    /// `COORDINATOR-5`
    pub(super) fn forgive(&mut self, now: Instant, soon: Duration) {
        self.pauses.forgive(now);
        self.next = now + soon;
    }
}

impl Coordinator {
    /// Finds members for which all others wait.
    pub(super) fn watch(&mut self, now: Instant) {
        let Phase::Running { watch, .. } = &mut self.phase else { return };
        if now < watch.next {
            return;
        }
        watch.next = now + self.timing.suspicion;
        let mut pauses = std::mem::take(&mut watch.pauses);
        let mut found = self.standstill(now, &mut pauses);
        if let Phase::Running { watch, .. } = &mut self.phase {
            watch.pauses = pauses;
        }
        self.note_slow(now, std::mem::take(&mut found.busy));
        let nodes: BTreeSet<NodeId> = found.culprits.keys().map(|worker| worker.member.node).collect();
        let job = Cause { culprit: Culprit::Job, why: Why::Stuck };
        match (nodes.len(), found.all_since) {
            (0, None) => {}
            (0, Some(since)) => self.trouble_because(found.trouble(now, job, since)),
            (1, _)
                if self.policy.evict_stragglers
                    && found.culprits.len() < self.assignments.len() + self.catching_up.len() =>
            {
                for (worker, since) in &found.culprits {
                    self.membership.evict(*worker);
                    let cause = Cause { culprit: Culprit::Worker(*worker), why: Why::Straggles };
                    let trouble = found.trouble(now, cause, *since);
                    let complaint = self.membership.complaint(*worker);
                    let detail = trouble.detail.map(|detail| with_complaint(detail, complaint));
                    self.trouble_because(Trouble { detail, ..trouble });
                }
            }
            (1, _) if !self.policy.evict_stragglers => {}
            // If several machines stand still at once, the fault is not theirs.
            _ => {
                let since = found.culprits.values().min().copied().unwrap_or(now);
                self.trouble_because(found.trouble(now, job, since));
            }
        }
    }

    /// Replaces a straggler if a spare can take its rank (`STRAGGLER-2` of [`super::super::straggler`]).
    fn note_slow(&mut self, now: Instant, busy: BTreeMap<Worker, bool>) {
        let n_assigned = self.assignments.len();
        let has_spare = self.n_candidates() > n_assigned;
        let (Phase::Running { watch, .. }, Some(world_plan)) = (&mut self.phase, &self.record.world_plan) else {
            return;
        };
        // While a member reads or writes files, or pauses between two steps, the others wait for other reasons.
        if n_assigned < 2 || busy.len() < n_assigned {
            return;
        }
        let slow = watch.observations.note(busy);
        watch.slow = slow.map(|(worker, ..)| worker);
        let Some((worker, own, others)) = slow.filter(|_| has_spare && self.policy.evict_stragglers) else { return };
        let Some(rank) = world_plan.rank_of(worker) else { return };
        if self.relieved.relieve(&world_plan.mesh, rank, worker.member) {
            let complaint = self.membership.complaint(worker);
            self.membership.evict(worker);
            let cause = Cause { culprit: Culprit::Worker(worker), why: Why::Straggles };
            let detail =
                format!("it computed in {own} of {N_OBSERVATIONS} observations, no other rank in more than {others}");
            let detail = Some(with_complaint(detail, complaint));
            self.trouble_because(Trouble { cause, detail, healthy: now });
        }
    }

    fn standstill(&self, now: Instant, pauses: &mut Pauses<Worker>) -> Standstill {
        let patience = Patience { first_step: self.timing.first_step, stuck: self.timing.stuck };
        let mut found = Standstill::default();
        let mut all_wait = true;
        for worker in self.assignments.iter().chain(&self.catching_up) {
            let Status::Alive(member) = self.membership.status(*worker) else { continue };
            match member.progress.at {
                _ if self.catching_up.contains(worker) => {}
                At::Computes => drop(found.busy.insert(*worker, true)),
                At::Waits(_) => drop(found.busy.insert(*worker, false)),
                At::Idle | At::Stores => {}
            }
            let paused = self.observe_member(now, pauses, member, &patience);
            all_wait &= paused.is_some();
            let Some(since) = paused else { continue };
            match member.progress.at {
                At::Waits(wait) => {
                    *found.waiting.entry(wait).or_default() += 1;
                    found.all_since = found.all_since.max(Some(since));
                }
                At::Stores => all_wait = false,
                At::Computes | At::Idle => drop(found.culprits.insert(*worker, since)),
            }
        }
        found.all_since = found.all_since.filter(|_| all_wait);
        found
    }

    fn observe_member(
        &self,
        now: Instant,
        pauses: &mut Pauses<Worker>,
        member: &MemberReport,
        patience: &Patience,
    ) -> Option<Instant> {
        let applied = member.commit_state.applied.map(|version| version.step);
        let paused = pauses.observe(now, member.worker, member.progress, applied, patience);
        // After the commit of the last step, a member has only files left to write.
        paused.filter(|_| member.phase <= MemberPhase::Running)
    }
}

/// Adds what the driver of the culprit's device complains about.
fn with_complaint(detail: String, complaint: Option<String>) -> String {
    complaint.map_or(detail.clone(), |complaint| format!("{detail}; {complaint}"))
}

impl Standstill {
    /// Describes the missing progress and the waiting members.
    fn trouble(&self, now: Instant, cause: Cause, healthy: Instant) -> Trouble {
        let seconds = now.saturating_duration_since(healthy).as_secs_f64();
        let what = if self.culprits.is_empty() { "no member made progress" } else { "no instruction was finished" };
        let waits: Vec<String> =
            self.waiting.iter().take(4).map(|(wait, n)| format!("{n} waiting for {wait}")).collect();
        let waits = if waits.is_empty() { "no member waits".into() } else { waits.join(", ") };
        Trouble { cause, detail: Some(format!("{what} for {seconds:.1} s; {waits}")), healthy }
    }
}
