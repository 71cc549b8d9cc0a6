//! Members that lose each other although the coordinator hears both: a connection that broke, or nodes between which
//! nothing passes.
//!
//! A process that died and a machine that is gone break the connections of all others, and that is what others say first.
//! So what members have lost is believed only once those whose loss it may be are known to be well.
//!
//! Invariant:
//! - `K-9` Of two nodes that cannot reach each other one is left out of the next worlds: the one that fewer others can
//!   reach. It is tried again after ever longer times.

use super::super::identity::{NodeId, Worker};
use super::super::incident::{Cause, Culprit, Why};
use super::super::message::{Broken, MemberReport};
use super::change::Look;
use super::{Coordinator, Phase, Trouble};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// What a member has said of its world, and when it is believed.
#[derive(Clone, Debug)]
pub(super) struct Breach {
    cause: Cause,
    detail: String,
    said: Instant,
    pub(super) due: Instant,
    /// Who cannot reach whom, if both are known.
    between: Option<(NodeId, NodeId)>,
}

/// Pairs of nodes that could not reach each other.
#[derive(Clone, Debug, Default)]
pub(super) struct Rifts(BTreeMap<(NodeId, NodeId), Rift>);

#[derive(Clone, Copy, Debug)]
struct Rift {
    until: Instant,
    /// How often it was found.
    n_times: u32,
}

/// Bound of the doublings of the time after which a pair is tried again.
const DOUBLINGS_MAX: u32 = 6;

impl Rifts {
    fn find(&mut self, now: Instant, (a, b): (NodeId, NodeId), retry: Duration) {
        let rift = self.0.entry((a.min(b), a.max(b))).or_insert(Rift { until: now, n_times: 0 });
        // Both sides speak of one failure.
        if rift.n_times == 0 || now >= rift.until {
            *rift = Rift { until: now + retry * 2u32.pow(rift.n_times.min(DOUBLINGS_MAX)), n_times: rift.n_times + 1 };
        }
    }

    /// Whom to leave out, so that all others may reach each other: again and again the one with the most rifts; of equal
    /// ones the one with fewer members, then the later one.
    fn left_out(&self, now: Instant, n_members: impl Fn(NodeId) -> usize) -> BTreeSet<NodeId> {
        let mut open: BTreeSet<(NodeId, NodeId)> =
            self.0.iter().filter(|(_, rift)| now < rift.until).map(|(pair, _)| *pair).collect();
        let mut out = BTreeSet::new();
        while !open.is_empty() {
            let mut n_rifts: BTreeMap<NodeId, usize> = BTreeMap::new();
            open.iter().flat_map(|(a, b)| [a, b]).for_each(|node| *n_rifts.entry(*node).or_default() += 1);
            let worst = |(node, n): &(&NodeId, &usize)| (**n, std::cmp::Reverse(n_members(**node)), **node);
            let (worst, _) = n_rifts.iter().max_by_key(worst).expect("a rift has two ends");
            open.retain(|(a, b)| a != worst && b != worst);
            out.insert(*worst);
        }
        out
    }
}

impl Coordinator {
    /// A member says that its world cannot go on.
    pub(super) fn note_broken(&mut self, now: Instant, member: &MemberReport, broken: &Broken) {
        let here = member.worker.member.node;
        let there = broken.lost.map(|worker| worker.member.node).filter(|node| *node != here);
        let between = there.map(|there| (here, there));
        if let Some(breach) = &mut self.broken {
            breach.between = breach.between.or(between);
            return;
        }
        let culprit = broken.lost.map_or(Culprit::Job, Culprit::Worker);
        let cause = Cause { culprit, why: Why::Unreachable };
        let detail = format!("{}: {}", member.worker, broken.reason);
        let due = now + self.timing.heartbeat;
        self.broken = Some(Breach { cause, detail, said: now, due, between });
    }

    /// Believes what a member has said, once every node of the world is known to be well since.
    pub(super) fn believe_broken(&mut self, now: Instant) {
        let Some(breach) = self.broken.as_ref().filter(|breach| now >= breach.due) else { return };
        let well = |worker: &Worker| self.membership.heard(worker.member.node).is_some_and(|heard| heard > breach.said);
        if !self.members().all(well) {
            // It will be heard, or be silent for too long.
            let due = now + self.timing.life;
            self.broken.as_mut().expect("checked above").due = due;
            return;
        }
        let Some(Breach { cause, detail, said, between, .. }) = self.broken.take() else { return };
        if let Some(pair) = between {
            self.rifts.find(now, pair, self.timing.disk_patience);
            self.find_left_out(now);
        }
        self.trouble_because(Trouble { cause, detail: Some(detail), healthy: said });
    }

    /// Nodes that were left out for long enough may be in the next world.
    pub(super) fn forget_rifts(&mut self, now: Instant) {
        if self.left_out.is_empty() {
            return;
        }
        let before = self.left_out.len();
        self.find_left_out(now);
        if self.left_out.len() == before {
            return;
        }
        match &mut self.phase {
            Phase::Running { look, .. } => *look = Some(Look::at(now)),
            Phase::Regrouping { retry, .. } => *retry = Some(now),
            _ => {}
        }
    }

    fn find_left_out(&mut self, now: Instant) {
        self.left_out = self.rifts.left_out(now, |node| self.membership.members(node).count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: Duration = Duration::from_secs(60);

    fn rifts(now: Instant, pairs: &[(u32, u32)]) -> Rifts {
        let mut rifts = Rifts::default();
        pairs.iter().for_each(|(a, b)| rifts.find(now, (NodeId(*a), NodeId(*b)), RETRY));
        rifts
    }

    // K-9
    #[test]
    fn the_node_that_most_others_cannot_reach_is_left_out_and_no_other() {
        let now = Instant::now();

        let out = rifts(now, &[(0, 2), (1, 2), (2, 3)]).left_out(now, |_| 4);

        assert_eq!(out, BTreeSet::from([NodeId(2)]));
    }

    // K-9
    #[test]
    fn of_two_nodes_the_one_with_fewer_members_is_left_out() {
        let now = Instant::now();
        let members = |node: NodeId| if node == NodeId(0) { 1 } else { 8 };

        assert_eq!(rifts(now, &[(1, 0)]).left_out(now, members), BTreeSet::from([NodeId(0)]));
        assert_eq!(rifts(now, &[(1, 0)]).left_out(now, |_| 8), BTreeSet::from([NodeId(1)]));
    }

    // K-9
    #[test]
    fn a_pair_is_tried_again_after_ever_longer_times() {
        let start = Instant::now();
        let mut rifts = rifts(start, &[(0, 1), (1, 0)]);

        let is_out = |rifts: &Rifts, after: Duration| !rifts.left_out(start + after, |_| 1).is_empty();
        assert!(is_out(&rifts, RETRY / 2) && !is_out(&rifts, RETRY), "both sides speak of one failure");
        rifts.find(start + RETRY, (NodeId(1), NodeId(0)), RETRY);

        assert!(is_out(&rifts, RETRY * 5 / 2) && !is_out(&rifts, RETRY * 3));
    }
}
