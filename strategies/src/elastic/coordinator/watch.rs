//! Whether a running world makes progress, and who holds it up: by standing still, or by being slow.

use super::super::identity::{NodeId, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::laggard::{LOOKS, Looks};
use super::super::membership::Status;
use super::super::message::{MemberPhase, MemberReport};
use super::super::progress::{At, Patience, Pulses, Wait};
use super::{Coordinator, Phase, Trouble};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Whether a running world makes progress.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    pulses: Pulses<Worker>,
    looks: Looks<Worker>,
    /// Who keeps all others waiting most of the time.
    pub(super) slow: Option<Worker>,
    /// When to look again.
    pub(super) next: Instant,
}

/// A world in which somebody does not get on.
#[derive(Default)]
struct Standstill {
    /// Who neither gets on nor waits for anybody, and since when.
    culprits: BTreeMap<Worker, Instant>,
    /// How many wait in vain for the same collective, and for which.
    waiting: BTreeMap<Wait, usize>,
    /// Since when nobody gets on, if that is so.
    all_since: Option<Instant>,
    /// Who computes at this moment, and who waits.
    busy: BTreeMap<Worker, bool>,
}

impl Watch {
    pub(super) fn new(now: Instant, soon: Duration) -> Watch {
        Watch { pulses: Pulses::new(), looks: Looks::new(), slow: None, next: now + soon }
    }

    /// `K-5`
    pub(super) fn forgive(&mut self, now: Instant, soon: Duration) {
        self.pulses.forgive(now);
        self.next = now + soon;
    }
}

impl Coordinator {
    /// Looks for members that keep all others waiting.
    pub(super) fn watch(&mut self, now: Instant) {
        let Phase::Running { watch, .. } = &mut self.phase else { return };
        if now < watch.next {
            return;
        }
        watch.next = now + self.timing.suspicion;
        let mut pulses = std::mem::take(&mut watch.pulses);
        let mut found = self.standstill(now, &mut pulses);
        if let Phase::Running { watch, .. } = &mut self.phase {
            watch.pulses = pulses;
        }
        self.note_slow(now, std::mem::take(&mut found.busy));
        let nodes: BTreeSet<NodeId> = found.culprits.keys().map(|worker| worker.member.node).collect();
        let job = Cause { culprit: Culprit::Job, why: Why::Stuck };
        match (nodes.len(), found.all_since) {
            (0, None) => {}
            (0, Some(since)) => self.trouble_because(found.trouble(now, job, since)),
            (1, _) if self.policy.evict_stragglers && found.culprits.len() < self.seats.len() + self.learners.len() => {
                for (worker, since) in &found.culprits {
                    self.membership.evict(*worker);
                    let cause = Cause { culprit: Culprit::Worker(*worker), why: Why::Straggles };
                    self.trouble_because(found.trouble(now, cause, *since));
                }
            }
            (1, _) if !self.policy.evict_stragglers => {}
            // If several machines stand still at once, it is not theirs.
            _ => {
                let since = found.culprits.values().min().copied().unwrap_or(now);
                self.trouble_because(found.trouble(now, job, since));
            }
        }
    }

    /// Relieves who is slow of its seat, if there is another one to take it (`A-2` of [`super::super::laggard`]).
    fn note_slow(&mut self, now: Instant, busy: BTreeMap<Worker, bool>) {
        let n_seats = self.seats.len();
        let has_spare = self.n_candidates() > n_seats;
        let (Phase::Running { watch, .. }, Some(formation)) = (&mut self.phase, &self.record.formation) else { return };
        // When somebody reads or writes files, or rests between two steps, the others wait for other reasons.
        if n_seats < 2 || busy.len() < n_seats {
            return;
        }
        let slow = watch.looks.note(busy);
        watch.slow = slow.map(|(worker, ..)| worker);
        let Some((worker, own, others)) = slow.filter(|_| has_spare && self.policy.evict_stragglers) else { return };
        let Some(rank) = formation.rank_of(worker) else { return };
        if self.relieved.relieve(&formation.mesh, rank, worker.member) {
            self.membership.evict(worker);
            let cause = Cause { culprit: Culprit::Worker(worker), why: Why::Straggles };
            let detail = format!("it computed in {own} of {LOOKS} looks, no other in more than {others}");
            self.trouble_because(Trouble { cause, detail: Some(detail), healthy: now });
        }
    }

    fn standstill(&self, now: Instant, pulses: &mut Pulses<Worker>) -> Standstill {
        let patience = Patience { first_step: self.timing.first_step, stuck: self.timing.stuck };
        let mut found = Standstill::default();
        let mut all_wait = true;
        for worker in self.seats.iter().chain(&self.learners) {
            let Status::Alive(member) = self.membership.status(*worker) else { continue };
            match member.progress.at {
                _ if self.learners.contains(worker) => {}
                At::Computes => drop(found.busy.insert(*worker, true)),
                At::Waits(_) => drop(found.busy.insert(*worker, false)),
                At::Rests | At::Stores => {}
            }
            let paused = self.look_at(now, pulses, member, &patience);
            all_wait &= paused.is_some();
            let Some(since) = paused else { continue };
            match member.progress.at {
                At::Waits(wait) => {
                    *found.waiting.entry(wait).or_default() += 1;
                    found.all_since = found.all_since.max(Some(since));
                }
                At::Stores => all_wait = false,
                At::Computes | At::Rests => drop(found.culprits.insert(*worker, since)),
            }
        }
        found.all_since = found.all_since.filter(|_| all_wait);
        found
    }

    fn look_at(
        &self,
        now: Instant,
        pulses: &mut Pulses<Worker>,
        member: &MemberReport,
        patience: &Patience,
    ) -> Option<Instant> {
        let applied = member.promise.applied.map(|version| version.step);
        let paused = pulses.look(now, member.worker, member.progress, applied, patience);
        // Who has learnt that the last step is committed has only files to write.
        paused.filter(|_| member.phase <= MemberPhase::Running)
    }
}

impl Standstill {
    /// What is not done, and for whom.
    fn trouble(&self, now: Instant, cause: Cause, healthy: Instant) -> Trouble {
        let seconds = now.saturating_duration_since(healthy).as_secs_f64();
        let what = if self.culprits.is_empty() { "nobody got on" } else { "no instruction was finished" };
        let waits: Vec<String> = self.waiting.iter().take(4).map(|(wait, n)| format!("{n} wait for {wait}")).collect();
        let waits = if waits.is_empty() { "nobody waits".into() } else { waits.join(", ") };
        Trouble { cause, detail: Some(format!("{what} for {seconds:.1} s; {waits}")), healthy }
    }
}
