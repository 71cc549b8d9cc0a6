//! Members whose reports the others do not confirm, and nodes that come and go.
//!
//! A certificate proves which node reports, not that its report is true, and a machine may be broken without knowing it.
//!
//! Invariants:
//! - `COORDINATOR-13` A report counts by the role of its sender. A member without a rank ends neither the world nor the job: one
//!   that fails is excluded, and its other reports about the world are ignored.
//! - `COORDINATOR-14` A node that alone reports broken worlds without naming a peer, or starts again and again soon after it
//!   joined, gets no rank for a while, with exponential backoff, as long as the others can form a world.

use super::super::identity::NodeId;
use super::super::incident::{Cause, Culprit, Why};
use super::super::membership::Status;
use super::super::message::{MemberReport, printable};
use super::super::timing::Timing;
use super::backoff::Backoff;
use super::{Command, Coordinator};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Nodes that disturb the job.
#[derive(Clone, Debug, Default)]
pub(super) struct Quarantine(BTreeMap<NodeId, Backoff>);

/// Disturbances before a quarantine: single ones happen on every machine.
const TIMES_MIN: u32 = 3;
/// Limit of the exponential backoff, in doublings.
const DOUBLINGS_MAX: u32 = 6;
/// A node without a disturbance for this many of the shortest quarantines is trusted again.
const FORGOTTEN_AFTER: u32 = 12;

/// The longest time for which a node gets no rank (`COORDINATOR-14`).
pub fn longest(timing: &Timing) -> Duration {
    timing.disk_patience.saturating_mul(2u32.pow(DOUBLINGS_MAX))
}

impl Quarantine {
    fn suspect(&mut self, now: Instant, node: NodeId, shortest: Duration) {
        let backoff = self.0.entry(node).or_insert_with(|| Backoff::new(now));
        backoff.calm_down(now, shortest * FORGOTTEN_AFTER);
        backoff.count(now);
        if let Some(n_doublings) = backoff.n_times.checked_sub(TIMES_MIN) {
            backoff.hold(now, shortest, n_doublings.min(DOUBLINGS_MAX));
        }
    }

    /// The nodes in quarantine.
    pub(super) fn at(&self, now: Instant) -> BTreeSet<NodeId> {
        self.0.iter().filter(|(_, backoff)| backoff.holds(now)).map(|(node, _)| *node).collect()
    }
}

impl Coordinator {
    /// Counts a disturbance of the job by a node (`COORDINATOR-14`).
    pub(super) fn suspect(&mut self, now: Instant, node: NodeId) {
        self.quarantine.suspect(now, node, self.timing.disk_patience);
        self.find_left_out(now);
    }

    /// The nodes in quarantine, if the members of all others can form a world.
    pub(super) fn in_quarantine(&self, now: Instant, unreachable: &BTreeSet<NodeId>) -> BTreeSet<NodeId> {
        let suspects = self.quarantine.at(now);
        if suspects.is_empty() {
            return suspects;
        }
        let others = self.membership.alive().filter(|member| {
            let node = member.worker.member.node;
            !suspects.contains(&node) && !unreachable.contains(&node) && !self.drains(node)
        });
        let last = self.record.world_plan.as_ref().map(|world_plan| world_plan.mesh);
        let suffice = self.policy.largest(others.count(), last).is_some();
        if suffice { suspects } else { BTreeSet::new() }
    }

    /// Excludes a member that has failed for good and has no rank (`COORDINATOR-13`). Returns whether it has none.
    pub(super) fn excludes_failed(&mut self, now: Instant, member: &MemberReport, reason: &str) -> bool {
        let worker = member.worker;
        // Before the first world, all members have the same part.
        if self.record.world_plan.is_none() || self.assignments.contains(&worker) {
            return false;
        }
        if matches!(self.membership.status(worker), Status::Alive(_)) {
            let text = format!("{worker} failed without a rank, so the job continues: {}", printable(reason));
            self.commands.push_back(Command::Refused(worker.member.node, text));
            self.membership.evict(worker);
            if self.is_needed(worker) {
                // It catches up or sends state; its supervisor ends it.
                self.trouble(Cause { culprit: Culprit::Worker(worker), why: Why::Died }, now);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORTEST: Duration = Duration::from_secs(5);

    // COORDINATOR-14
    #[test]
    fn quarantine_begins_at_the_third_disturbance_and_doubles() {
        let start = Instant::now();
        let mut quarantine = Quarantine::default();
        let node = NodeId(3);
        let mut lengths = Vec::new();
        let mut now = start;

        for _ in 0..5 {
            quarantine.suspect(now, node, SHORTEST);
            let is_held = |after: u32| quarantine.at(now + SHORTEST * after).contains(&node);
            lengths.push((0..8).take_while(|after| is_held(*after)).count());
            now += SHORTEST;
        }

        assert_eq!(lengths, [0, 0, 1, 2, 4]);
    }

    // COORDINATOR-14
    #[test]
    fn node_is_trusted_again_after_a_long_time_without_disturbance() {
        let start = Instant::now();
        let mut quarantine = Quarantine::default();
        let later = start + SHORTEST * (FORGOTTEN_AFTER + 1);

        [start, start, later, later].into_iter().for_each(|now| quarantine.suspect(now, NodeId(3), SHORTEST));

        assert_eq!(quarantine.at(later), BTreeSet::new());
    }
}
