//! Planned world changes: enough members for a larger world, members that have finished catching up, or a mesh the
//! operator requested.
//!
//! Invariant:
//! - `COORDINATOR-10` A planned change ends the world between two steps: its members pause behind a step that all have
//!   committed, so no started step is discarded. A failure meanwhile ends the world like any other failure.

use super::super::identity::Worker;
use super::super::incident::{Cause, Culprit, Why};
use super::super::membership::Status;
use super::super::message::WorldPlan;
use super::super::timing::Timing;
use super::{Coordinator, Phase};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// When to check whether a larger world can be formed: soon after members change, but with a delay, so that members
/// arriving together join together.
#[derive(Clone, Copy, Debug)]
pub(super) struct GrowthCheck {
    /// Time of the check.
    pub(super) at: Instant,
    /// Latest time to which further changes may postpone the check.
    latest: Instant,
}

impl GrowthCheck {
    /// Schedules a check after a change, taking an already scheduled one into account.
    pub(super) fn after(before: Option<GrowthCheck>, now: Instant, timing: &Timing) -> GrowthCheck {
        let latest = before.map_or(now + timing.suspicion, |growth_check| growth_check.latest);
        GrowthCheck { at: latest.min(now + timing.heartbeat / 3), latest }
    }

    /// An immediate check.
    pub(super) fn at(now: Instant) -> GrowthCheck {
        GrowthCheck { at: now, latest: now }
    }
}

/// A planned change in progress.
#[derive(Clone, Debug)]
pub(super) struct Change {
    why: Why,
    /// Members that have paused.
    paused: BTreeSet<Worker>,
    /// When the first member paused; all have then committed the same step.
    since: Option<Instant>,
}

impl Coordinator {
    /// Handles a change of members.
    pub(super) fn schedule_growth_check(&mut self, now: Instant) {
        // No further member is needed, so the check runs at once.
        let is_enough = self.eligible(Duration::ZERO).len() >= self.policy.wanted.size();
        if let Phase::Running { growth_check, .. } = &mut self.phase {
            *growth_check = Some(if is_enough {
                GrowthCheck::at(now)
            } else {
                GrowthCheck::after(*growth_check, now, &self.timing)
            });
        }
    }

    /// Pauses the world if the members can form the requested mesh, or a larger one.
    pub(super) fn consider_growth(&mut self) {
        let Some(world_plan) = &self.record.world_plan else { return };
        if !self.have_caught_up(world_plan) {
            return;
        }
        let (mesh, wanted) = (world_plan.mesh, self.policy.wanted);
        let n_members = self.eligible(Duration::ZERO).len();
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

    /// Whether all catching-up members have finished. A planned change before that would make them start over.
    fn have_caught_up(&self, world_plan: &WorldPlan) -> bool {
        world_plan.catching_up.iter().all(|catch_up| match self.membership.status(catch_up.worker) {
            Status::Alive(member) => catch_up.holds.iter().all(|shard| member.holds.contains(shard)),
            Status::Dead | Status::Unheard => true,
        })
    }

    /// Handles a member that has finished catching up; it may be the last one.
    pub(super) fn note_caught_up(&mut self, now: Instant) {
        let all = self.record.world_plan.as_ref().is_some_and(|world_plan| self.have_caught_up(world_plan));
        if let Phase::Running { growth_check, change: None, .. } = &mut self.phase
            && all
        {
            *growth_check = Some(GrowthCheck::at(now));
        }
    }

    /// Handles a member that has paused.
    pub(super) fn note_paused(&mut self, now: Instant, worker: Worker) {
        let (n_assigned, grace) = (self.assignments.len(), self.timing.stop_grace);
        match &mut self.phase {
            Phase::Running { change, .. } => {
                // The reason of a pause that a predecessor requested is not in the record.
                let change = change.get_or_insert(Change { why: Why::Grows, paused: BTreeSet::new(), since: None });
                change.paused.insert(worker);
                let since = *change.since.get_or_insert(now);
                if change.paused.len() < n_assigned && now < since + grace {
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
    fn members_arriving_shortly_after_each_other_join_together() {
        let timing = Timing::default();
        let start = Instant::now();
        let news = |n: u32| (0..n).map(|i| start + i * timing.heartbeat * 3 / 10);

        let alone = news(1).fold(None, |before, now| Some(GrowthCheck::after(before, now, &timing))).unwrap();
        let many = news(50).fold(None, |before, now| Some(GrowthCheck::after(before, now, &timing))).unwrap();

        assert_eq!(alone.at, start + timing.heartbeat / 3);
        assert_eq!(many.at, start + timing.suspicion);
    }
}
