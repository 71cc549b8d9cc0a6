//! A world that another follows by choice: there are members for a larger one, or who was to catch up has done so, or the
//! operator wants another mesh.
//!
//! Invariant:
//! - `K-10` Such a world ends between two steps: its members come to rest behind a step that all have committed, so nothing
//!   that was begun is thrown away. If anything befalls it meanwhile it ends as any other.

use super::super::identity::Worker;
use super::super::incident::{Cause, Culprit, Why};
use super::super::membership::Status;
use super::super::message::Formation;
use super::super::timing::Timing;
use super::{Coordinator, Phase};
use std::collections::BTreeSet;
use std::time::Instant;

/// When it is looked whether a larger world can be formed: soon after news of members, but not before they have come for
/// a while, since who comes together shall join together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// When it is.
    pub(super) at: Instant,
    /// Later news may not put it off any longer.
    latest: Instant,
}

impl Look {
    /// There is news, and perhaps there was before.
    pub(super) fn after(before: Option<Look>, now: Instant, timing: &Timing) -> Look {
        let latest = before.map_or(now + timing.suspicion, |look| look.latest);
        Look { at: latest.min(now + timing.life), latest }
    }

    /// Without waiting for anybody.
    pub(super) fn at(now: Instant) -> Look {
        Look { at: now, latest: now }
    }
}

/// A change that is under way.
#[derive(Clone, Debug)]
pub(super) struct Change {
    why: Why,
    /// Members that rest.
    paused: BTreeSet<Worker>,
    /// Since when any does: all have committed the same step.
    since: Option<Instant>,
}

impl Coordinator {
    /// There is news of members.
    pub(super) fn look_after_news(&mut self, now: Instant) {
        // Nobody more is needed, so nobody is waited for.
        let is_enough = self.n_candidates() >= self.policy.wanted.size();
        if let Phase::Running { look, .. } = &mut self.phase {
            *look = Some(if is_enough { Look::at(now) } else { Look::after(*look, now, &self.timing) });
        }
    }

    /// Lets a world come to rest if members can form the one that is wanted, or a larger one.
    pub(super) fn consider_growth(&mut self) {
        let Some(formation) = &self.record.formation else { return };
        if !self.have_learnt(formation) {
            return;
        }
        let (mesh, wanted) = (formation.mesh, self.policy.wanted);
        let n_members = self.n_candidates();
        let larger = self.policy.largest(n_members, Some(mesh)).is_some_and(|other| other.size() > mesh.size());
        let resizes = self.record.wanted.is_some() && mesh != wanted && wanted.size() <= n_members;
        let why = match (resizes, larger) {
            (true, _) => Why::Resized,
            (false, true) => Why::Grows,
            (false, false) => return,
        };
        let generation = self.record.generation;
        if let Phase::Running { change, .. } = &mut self.phase {
            change.get_or_insert(Change { why, paused: BTreeSet::new(), since: None });
            self.ask_to_pause(generation);
        }
    }

    /// Whether all who catch up have done so. Until then the world does not change by choice: they would have to begin anew.
    fn have_learnt(&self, formation: &Formation) -> bool {
        formation.learners.iter().all(|learner| match self.membership.status(learner.worker) {
            Status::Alive(member) => learner.holds.iter().all(|shard| member.holds.contains(shard)),
            Status::Dead | Status::Unheard => true,
        })
    }

    /// A member that catches up has done so, and perhaps was the last one.
    pub(super) fn note_learnt(&mut self, now: Instant) {
        let all = self.record.formation.as_ref().is_some_and(|formation| self.have_learnt(formation));
        if let Phase::Running { look, change: None, .. } = &mut self.phase
            && all
        {
            *look = Some(Look::at(now));
        }
    }

    /// A member has come to rest.
    pub(super) fn note_paused(&mut self, now: Instant, worker: Worker) {
        let (n_seats, grace) = (self.seats.len(), self.timing.stop_grace);
        match &mut self.phase {
            Phase::Running { change, .. } => {
                // A coordinator that has just taken over does not know why its predecessor asked for it.
                let change = change.get_or_insert(Change { why: Why::Grows, paused: BTreeSet::new(), since: None });
                change.paused.insert(worker);
                let since = *change.since.get_or_insert(now);
                if change.paused.len() < n_seats && now < since + grace {
                    return;
                }
                let why = change.why;
                self.trouble(Cause { culprit: Culprit::Job, why }, since);
            }
            Phase::TakingOver { .. } => self.trouble(Cause { culprit: Culprit::Job, why: Why::Grows }, now),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_shortly_after_another_joins_with_it_and_nobody_waits_for_long() {
        let timing = Timing::default();
        let start = Instant::now();
        let news = |n: u32| (0..n).map(|i| start + i * timing.life * 9 / 10);

        let alone = news(1).fold(None, |before, now| Some(Look::after(before, now, &timing))).unwrap();
        let many = news(50).fold(None, |before, now| Some(Look::after(before, now, &timing))).unwrap();

        assert_eq!(alone.at, start + timing.life);
        assert_eq!(many.at, start + timing.suspicion);
    }
}
