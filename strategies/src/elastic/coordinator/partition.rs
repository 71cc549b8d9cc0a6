//! Members that lose each other while the coordinator still reaches both: a broken connection, or a partition between
//! two nodes.
//!
//! A dead process or machine breaks the connections of all its peers, and their reports arrive first. The coordinator
//! therefore acts on a report of lost peers only after every node of the world has reported again.
//!
//! Invariant:
//! - `COORDINATOR-9` If two nodes cannot reach each other, the next worlds leave out the one that fewer other nodes can
//!   reach. It is retried with exponential backoff.

use super::super::identity::{NodeId, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::message::{Broken, MemberReport};
use super::change::GrowthCheck;
use super::{Coordinator, Phase, Trouble};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A member's report that its world cannot continue, and when the coordinator acts on it.
#[derive(Clone, Debug)]
pub(super) struct SuspectedPartition {
    cause: Cause,
    detail: String,
    reported: Instant,
    pub(super) due: Instant,
    /// The two nodes that cannot reach each other, if both are known.
    between: Option<(NodeId, NodeId)>,
}

/// Pairs of nodes that cannot reach each other.
#[derive(Clone, Debug, Default)]
pub(super) struct Partitions(BTreeMap<(NodeId, NodeId), Partition>);

#[derive(Clone, Copy, Debug)]
struct Partition {
    until: Instant,
    /// Number of times the partition was found.
    n_times: u32,
}

/// Limit of the exponential backoff, in doublings.
const DOUBLINGS_MAX: u32 = 6;

impl Partitions {
    fn find(&mut self, now: Instant, (a, b): (NodeId, NodeId), retry: Duration) {
        let partition = self.0.entry((a.min(b), a.max(b))).or_insert(Partition { until: now, n_times: 0 });
        // Both sides report the same failure.
        if partition.n_times == 0 || now >= partition.until {
            *partition = Partition {
                until: now + retry * 2u32.pow(partition.n_times.min(DOUBLINGS_MAX)),
                n_times: partition.n_times + 1,
            };
        }
    }

    /// The nodes to leave out so that all others can reach each other: repeatedly the node with the most partitions; on
    /// a tie, the one with fewer members, then the one with the higher id.
    fn left_out(&self, now: Instant, n_members: impl Fn(NodeId) -> usize) -> BTreeSet<NodeId> {
        let mut open: BTreeSet<(NodeId, NodeId)> =
            self.0.iter().filter(|(_, partition)| now < partition.until).map(|(pair, _)| *pair).collect();
        let mut out = BTreeSet::new();
        while !open.is_empty() {
            let mut n_partitions: BTreeMap<NodeId, usize> = BTreeMap::new();
            open.iter().flat_map(|(a, b)| [a, b]).for_each(|node| *n_partitions.entry(*node).or_default() += 1);
            let worst = |(node, n): &(&NodeId, &usize)| (**n, std::cmp::Reverse(n_members(**node)), **node);
            let (worst, _) = n_partitions.iter().max_by_key(worst).expect("a partition has two ends");
            open.retain(|(a, b)| a != worst && b != worst);
            out.insert(*worst);
        }
        out
    }
}

impl Coordinator {
    /// Handles a member's report that its world cannot continue.
    pub(super) fn note_broken(&mut self, now: Instant, member: &MemberReport, broken: &Broken) {
        let here = member.worker.member.node;
        let there = broken.lost.map(|worker| worker.member.node).filter(|node| *node != here);
        let between = there.map(|there| (here, there));
        if let Some(suspected) = &mut self.broken {
            suspected.between = suspected.between.or(between);
            return;
        }
        let culprit = broken.lost.map_or(Culprit::Job, Culprit::Worker);
        let cause = Cause { culprit, why: Why::Unreachable };
        let detail = format!("{}: {}", member.worker, broken.reason);
        let due = now + self.timing.heartbeat;
        self.broken = Some(SuspectedPartition { cause, detail, reported: now, due, between });
    }

    /// Acts on a report of lost peers once every node of the world has reported since.
    pub(super) fn believe_broken(&mut self, now: Instant) {
        let Some(suspected) = self.broken.as_ref().filter(|suspected| now >= suspected.due) else { return };
        let well =
            |worker: &Worker| self.membership.heard(worker.member.node).is_some_and(|heard| heard > suspected.reported);
        if !self.members().all(well) {
            // The node will either report or time out.
            let due = now + self.timing.heartbeat / 3;
            self.broken.as_mut().expect("checked above").due = due;
            return;
        }
        let Some(SuspectedPartition { cause, detail, reported, between, .. }) = self.broken.take() else { return };
        if let Some(pair) = between {
            self.partitions.find(now, pair, self.timing.disk_patience);
            self.find_left_out(now);
        }
        self.trouble_because(Trouble { cause, detail: Some(detail), healthy: reported });
    }

    /// Nodes whose exclusion has expired may be in the next world.
    pub(super) fn forget_partitions(&mut self, now: Instant) {
        if self.left_out.is_empty() {
            return;
        }
        let before = self.left_out.len();
        self.find_left_out(now);
        if self.left_out.len() == before {
            return;
        }
        match &mut self.phase {
            Phase::Running { growth_check, .. } => *growth_check = Some(GrowthCheck::at(now)),
            Phase::Regrouping { retry, .. } => *retry = Some(now),
            _ => {}
        }
    }

    fn find_left_out(&mut self, now: Instant) {
        self.left_out = self.partitions.left_out(now, |node| self.membership.members(node).count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: Duration = Duration::from_secs(60);

    fn partitions(now: Instant, pairs: &[(u32, u32)]) -> Partitions {
        let mut partitions = Partitions::default();
        pairs.iter().for_each(|(a, b)| partitions.find(now, (NodeId(*a), NodeId(*b)), RETRY));
        partitions
    }

    // COORDINATOR-9
    #[test]
    fn only_the_node_that_most_others_cannot_reach_is_left_out() {
        let now = Instant::now();

        let out = partitions(now, &[(0, 2), (1, 2), (2, 3)]).left_out(now, |_| 4);

        assert_eq!(out, BTreeSet::from([NodeId(2)]));
    }

    // COORDINATOR-9
    #[test]
    fn node_with_fewer_members_is_left_out_when_two_nodes_lose_each_other() {
        let now = Instant::now();
        let members = |node: NodeId| if node == NodeId(0) { 1 } else { 8 };

        assert_eq!(partitions(now, &[(1, 0)]).left_out(now, members), BTreeSet::from([NodeId(0)]));
        assert_eq!(partitions(now, &[(1, 0)]).left_out(now, |_| 8), BTreeSet::from([NodeId(1)]));
    }

    // COORDINATOR-9
    #[test]
    fn partitioned_pair_is_retried_with_growing_delays() {
        let start = Instant::now();
        let mut partitions = partitions(start, &[(0, 1), (1, 0)]);

        let is_out = |partitions: &Partitions, after: Duration| !partitions.left_out(start + after, |_| 1).is_empty();
        assert!(is_out(&partitions, RETRY / 2) && !is_out(&partitions, RETRY), "both sides report the same failure");
        partitions.find(start + RETRY, (NodeId(1), NodeId(0)), RETRY);

        assert!(is_out(&partitions, RETRY * 5 / 2) && !is_out(&partitions, RETRY * 3));
    }
}
