//! Members that lose each other while the coordinator still reaches both: a broken connection, or a partition between
//! two nodes.
//!
//! A dead process or machine breaks the connections of all its peers, and their reports arrive first. The coordinator
//! therefore acts on a report of lost peers only after every node of the world has reported again.
//!
//! Invariant:
//! - `COORDINATOR-9` If two nodes cannot reach each other, the next worlds leave out the one that fewer other nodes can
//!   reach. It is retried with exponential backoff: soon at first, because most such failures last for seconds. The backoff
//!   of a pair that a world has connected since stays short: its connection breaks, but there is one.

use super::super::identity::{NodeId, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::message::{Broken, MemberReport, printable};
use super::backoff::Backoff;
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
    /// The nodes whose members have reported it.
    reporters: BTreeSet<NodeId>,
    /// The two nodes that cannot reach each other, if both are known.
    between: Option<(NodeId, NodeId)>,
}

/// Pairs of nodes that cannot reach each other.
#[derive(Clone, Debug, Default)]
pub(super) struct Partitions(BTreeMap<(NodeId, NodeId), Partition>);

#[derive(Clone, Copy, Debug)]
struct Partition {
    backoff: Backoff,
    /// Whether a world has connected the two since.
    reached: bool,
}

/// Limit of the exponential backoff, in doublings of half a detection time: four minutes by default, so that trying costs
/// less than a percent of the time of the others.
const DOUBLINGS_MAX: u32 = 9;
/// The same for a pair that was connected in between, for four seconds by default.
const DOUBLINGS_OF_REACHED_MAX: u32 = 3;
/// A pair that was not found for this many times the first delay begins anew.
const CALM: u32 = 120;

impl Partitions {
    fn find(&mut self, now: Instant, (a, b): (NodeId, NodeId), retry: Duration) {
        let new = || Partition { backoff: Backoff::new(now), reached: false };
        let Partition { backoff, reached } = self.0.entry((a.min(b), a.max(b))).or_insert_with(new);
        backoff.calm_down(now, retry * CALM);
        // Both sides report the same failure.
        if !backoff.holds(now) {
            // A pair that was connected since goes on from the short backoff.
            let n_doublings_max = if std::mem::take(reached) { DOUBLINGS_OF_REACHED_MAX } else { DOUBLINGS_MAX };
            let n_doublings = backoff.n_times.min(n_doublings_max);
            backoff.n_times = n_doublings;
            backoff.count(now);
            backoff.hold(now, retry, n_doublings);
        }
    }

    /// A world has connected all these nodes.
    fn reach(&mut self, nodes: &BTreeSet<NodeId>) {
        for ((a, b), partition) in &mut self.0 {
            partition.reached |= nodes.contains(a) && nodes.contains(b);
        }
    }

    /// The nodes to leave out so that all others can reach each other: repeatedly the node with the most partitions; on
    /// a tie, the one with fewer members, then the one with the higher id.
    fn left_out(&self, now: Instant, n_members: impl Fn(NodeId) -> usize) -> BTreeSet<NodeId> {
        let mut open: BTreeSet<(NodeId, NodeId)> =
            self.0.iter().filter(|(_, partition)| partition.backoff.holds(now)).map(|(pair, _)| *pair).collect();
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
        // COORDINATOR-13
        if !self.is_needed(member.worker) {
            return;
        }
        let here = member.worker.member.node;
        let there = broken.lost.map(|worker| worker.member.node).filter(|node| *node != here);
        let between = there.map(|there| (here, there));
        if let Some(suspected) = &mut self.broken {
            suspected.between = suspected.between.or(between);
            suspected.reporters.insert(here);
            return;
        }
        let culprit = broken.lost.map_or(Culprit::Job, Culprit::Worker);
        let cause = Cause { culprit, why: Why::Unreachable };
        let detail = format!("{}: {}", member.worker, printable(&broken.reason));
        let due = now + self.timing.heartbeat;
        let reporters = BTreeSet::from([here]);
        self.broken = Some(SuspectedPartition { cause, detail, reported: now, due, reporters, between });
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
        let Some(SuspectedPartition { cause, detail, reported, reporters, between, .. }) = self.broken.take() else {
            return;
        };
        match (between, reporters.first()) {
            (Some(pair), _) => {
                self.partitions.find(now, pair, self.timing.detection_time / 2);
                self.find_left_out(now);
            }
            // COORDINATOR-14. A report that names a peer is judged as a partition, whose backoff is shorter.
            (None, Some(reporter)) if reporters.len() == 1 => self.suspect(now, *reporter),
            (None, _) => {}
        }
        self.trouble_because(Trouble { cause, detail: Some(detail), healthy: reported });
    }

    /// Notes that the ranks of the world have connected to each other.
    pub(super) fn note_connected(&mut self) {
        let nodes = self.assignments.iter().map(|worker| worker.member.node).collect();
        self.partitions.reach(&nodes);
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

    pub(super) fn find_left_out(&mut self, now: Instant) {
        let unreachable = self.partitions.left_out(now, |node| self.membership.members(node).count());
        let in_quarantine = self.in_quarantine(now, &unreachable);
        self.left_out = &unreachable | &in_quarantine;
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

    // COORDINATOR-9
    #[test]
    fn pair_whose_connection_keeps_breaking_returns_within_seconds_and_an_unreachable_one_within_minutes() {
        let start = Instant::now();
        let longest = |connects: bool| {
            let (mut partitions, mut now, mut longest) = (Partitions::default(), start, Duration::ZERO);
            for _ in 0..20 {
                partitions.find(now, (NodeId(0), NodeId(1)), RETRY);
                let until = partitions.0[&(NodeId(0), NodeId(1))].backoff.until;
                (longest, now) = (longest.max(until - now), until);
                if connects {
                    partitions.reach(&BTreeSet::from([NodeId(0), NodeId(1), NodeId(2)]));
                }
            }
            longest
        };

        assert_eq!((longest(true), longest(false)), (RETRY * 8, RETRY * 512));
    }

    // COORDINATOR-9
    #[test]
    fn pair_that_was_well_for_long_is_retried_soon_again() {
        let start = Instant::now();
        let mut partitions = partitions(start, &[(0, 1)]);
        partitions.find(start + RETRY, (NodeId(0), NodeId(1)), RETRY);

        let later = start + RETRY * 200;
        partitions.find(later, (NodeId(0), NodeId(1)), RETRY);

        assert_eq!(partitions.0[&(NodeId(0), NodeId(1))].backoff.until, later + RETRY);
    }
}
