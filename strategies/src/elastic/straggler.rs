//! Straggler detection: a straggler makes progress while all others wait for it most of the time.
//!
//! The expected speed of a device is unknown; only whether it computes or waits is observable. Equal members compute for
//! the same share of the time. In a pipeline with uneven stages the slowest stage delays the others, whichever member
//! runs it; therefore:
//! - `STRAGGLER-1` The holder of a rank is replaced for slowness once. If its successor is as slow, the work is uneven.
//! - `STRAGGLER-2` A straggler is replaced only if there is a spare: a slow member is better than none.
//! - `STRAGGLER-3` The slot of a straggler gets a rank again only if the other slots do not suffice.
//!
//! Each member is observed separately, from its regular reports, which need not be simultaneous. If one member computes
//! most of the time and all others at most two fifths of it, steps take about twice as long as without it.

use super::identity::{MemberId, Worker};
use crate::mesh::Mesh;
use std::collections::{BTreeMap, BTreeSet};

/// Number of observations kept; 20 seconds at the default detection time.
pub const N_OBSERVATIONS: u32 = 40;
/// A straggler computes in at least this many observations.
pub const BUSY: u32 = N_OBSERVATIONS * 3 / 5;
/// All other members compute in at most this many observations.
pub const IDLE: u32 = N_OBSERVATIONS * 2 / 5;

/// Which members computed in the latest observations.
#[derive(Clone, Debug, Default)]
pub struct Observations<W: Ord> {
    /// One bit per observation, the latest in the lowest bit.
    computed: BTreeMap<W, u64>,
    n: u32,
}

impl<W: Copy + Ord> Observations<W> {
    /// A history without observations.
    pub fn new() -> Observations<W> {
        Observations { computed: BTreeMap::new(), n: 0 }
    }

    /// Records for each member whether it computes rather than waits. Returns the straggler, if any, in how many of
    /// [`N_OBSERVATIONS`] it computed, and in how many the busiest other member did.
    pub fn note(&mut self, members: impl IntoIterator<Item = (W, bool)>) -> Option<(W, u32, u32)> {
        for (who, computes) in members {
            let history = self.computed.entry(who).or_default();
            *history = (*history << 1 | u64::from(computes)) & ((1 << N_OBSERVATIONS) - 1);
        }
        self.n = N_OBSERVATIONS.min(self.n + 1);
        let (mut first, mut second) = (None, 0);
        for (who, history) in &self.computed {
            let n = history.count_ones();
            match first {
                Some((_, most)) if n <= most => second = second.max(n),
                before => {
                    second = before.map_or(0, |(_, most)| most);
                    first = Some((*who, n));
                }
            }
        }
        let (who, most) = first?;
        (self.n == N_OBSERVATIONS && most >= BUSY && second <= IDLE).then_some((who, most, second))
    }
}

/// Ranks whose straggler was replaced, and the slots of those stragglers (`STRAGGLER-1`, `STRAGGLER-3`).
#[derive(Clone, Debug, Default)]
pub struct Relieved {
    assignments: BTreeSet<([usize; 5], usize)>,
    slots: BTreeSet<MemberId>,
}

impl Relieved {
    /// Whether the holder of this rank may be replaced; records the replacement.
    pub fn relieve(&mut self, mesh: &Mesh, rank: usize, holder: MemberId) -> bool {
        let is_new = self.assignments.insert(([mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp], rank));
        if is_new {
            self.slots.insert(holder);
        }
        is_new
    }

    /// These members without those in slow slots, if at least `n` remain.
    pub fn without(&self, members: BTreeSet<Worker>, n: usize) -> BTreeSet<Worker> {
        let fast: BTreeSet<Worker> =
            members.iter().copied().filter(|worker| !self.slots.contains(&worker.member)).collect();
        if fast.len() >= n { fast } else { members }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Incarnation, NodeId};

    /// Observes two members, which compute in `a` and `b` of four observations.
    fn observe(observations: &mut Observations<char>, n: u32, [a, b]: [u32; 2]) -> Vec<Option<(char, u32, u32)>> {
        (0..n).map(|i| observations.note([('a', i % 4 < a), ('b', (i + 1) % 4 < b)])).collect()
    }

    #[test]
    fn member_that_computes_while_all_others_wait_is_a_straggler() {
        let found = observe(&mut Observations::new(), 3 * N_OBSERVATIONS, [4, 1]);

        assert!(
            found[..N_OBSERVATIONS as usize - 1].iter().all(Option::is_none),
            "no straggler is found before enough observations"
        );
        assert!(
            found[N_OBSERVATIONS as usize - 1..]
                .iter()
                .all(|slow| *slow == Some(('a', N_OBSERVATIONS, N_OBSERVATIONS / 4))),
            "{found:?}"
        );
    }

    #[test]
    fn no_straggler_is_found_when_all_compute_or_all_wait_or_one_is_half_as_fast() {
        for shares in [[4, 4], [3, 3], [1, 1], [4, 2], [0, 0]] {
            let found = observe(&mut Observations::new(), 3 * N_OBSERVATIONS, shares);
            assert!(found.iter().all(Option::is_none), "{shares:?}: {found:?}");
        }
    }

    #[test]
    fn member_that_recovers_speed_is_no_straggler() {
        let mut observations = Observations::new();
        observe(&mut observations, N_OBSERVATIONS, [4, 1]);

        assert_eq!(observe(&mut observations, N_OBSERVATIONS, [4, 4]).last(), Some(&None));
    }

    // STRAGGLER-1
    #[test]
    fn rank_is_relieved_once() {
        let mut relieved = Relieved::default();
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let mut relieve = |mesh: &Mesh, rank| relieved.relieve(mesh, rank, worker(0).member);

        assert!(relieve(&mesh, 0) && relieve(&mesh, 1) && !relieve(&mesh, 0));
        assert!(relieve(&Mesh { dp_shard: 3, ..mesh }, 0), "another mesh divides the work differently");
    }

    // STRAGGLER-3
    #[test]
    fn slow_slot_is_used_if_the_others_do_not_suffice() {
        let mut relieved = Relieved::default();
        relieved.relieve(&Mesh::ONE, 0, worker(1).member);
        let members: BTreeSet<Worker> = (0..4).map(worker).collect();

        assert_eq!(relieved.without(members.clone(), 3), [worker(0), worker(2), worker(3)].into());
        assert_eq!(relieved.without(members.clone(), 4), members);
    }

    fn worker(node: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(node), slot: 0 }, incarnation: Incarnation(1) }
    }
}
