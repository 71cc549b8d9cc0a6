//! Who is slow: a member that gets on, and for most of the time is the only one that does, since all others wait for it.
//!
//! How fast a device should be nobody knows; what is seen is who computes and who waits. Members that are alike compute for
//! the same share of the time. In a pipeline whose stages are uneven the slow stage may keep the others waiting for most of
//! the time, whoever holds it; therefore:
//! - `A-1` The holder of a seat is relieved of it for slowness once. If the next one is as slow, it is the work.
//! - `A-2` For slowness nobody is relieved without a spare: a slow member is better than none.
//! - `A-3` The place of a member that was slow, which the next process there shares, gets a seat only if others do not suffice.
//!
//! Each member is looked at by itself, with the reports that come anyhow: those of two members need not be of one moment.
//! If one computes for most of the time and all others for at most two fifths of it, steps are about twice as long
//! as they would be without it.

use super::identity::{MemberId, Worker};
use crate::mesh::Mesh;
use std::collections::{BTreeMap, BTreeSet};

/// Looks at a world that are remembered; 20 seconds at the default detection time.
pub const LOOKS: u32 = 40;
/// Who is slow computes in so many of them.
pub const BUSY: u32 = LOOKS * 3 / 5;
/// All others compute in no more than so many.
pub const IDLE: u32 = LOOKS * 2 / 5;

/// Who computed in the latest looks at a world.
#[derive(Clone, Debug, Default)]
pub struct Looks<W: Ord> {
    /// A bit for each look, the latest lowest.
    computed: BTreeMap<W, u64>,
    n: u32,
}

impl<W: Copy + Ord> Looks<W> {
    /// Nothing has been seen yet.
    pub fn new() -> Looks<W> {
        Looks { computed: BTreeMap::new(), n: 0 }
    }

    /// A look at all members: each, and whether it computes rather than waits. Returns who is slow, in how many of
    /// [`LOOKS`] it computed, and in how many the busiest of the others.
    pub fn note(&mut self, members: impl IntoIterator<Item = (W, bool)>) -> Option<(W, u32, u32)> {
        for (who, computes) in members {
            let history = self.computed.entry(who).or_default();
            *history = (*history << 1 | u64::from(computes)) & ((1 << LOOKS) - 1);
        }
        self.n = LOOKS.min(self.n + 1);
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
        (self.n == LOOKS && most >= BUSY && second <= IDLE).then_some((who, most, second))
    }
}

/// Seats of which somebody was relieved, and the places whose processes were (`A-1`, `A-3`).
#[derive(Clone, Debug, Default)]
pub struct Relieved {
    seats: BTreeSet<([usize; 5], usize)>,
    places: BTreeSet<MemberId>,
}

impl Relieved {
    /// Whether the holder of this seat may be relieved of it; notes that it is.
    pub fn relieve(&mut self, mesh: &Mesh, rank: usize, holder: MemberId) -> bool {
        let is_new = self.seats.insert(([mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp], rank));
        if is_new {
            self.places.insert(holder);
        }
        is_new
    }

    /// These members without those in slow places, if that leaves `n`.
    pub fn without(&self, members: BTreeSet<Worker>, n: usize) -> BTreeSet<Worker> {
        let fast: BTreeSet<Worker> =
            members.iter().copied().filter(|worker| !self.places.contains(&worker.member)).collect();
        if fast.len() >= n { fast } else { members }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Incarnation, NodeId};

    /// Looks at two members; each computes in so many of four.
    fn look(looks: &mut Looks<char>, n: u32, [a, b]: [u32; 2]) -> Vec<Option<(char, u32, u32)>> {
        (0..n).map(|i| looks.note([('a', i % 4 < a), ('b', (i + 1) % 4 < b)])).collect()
    }

    #[test]
    fn who_computes_while_all_others_wait_is_slow() {
        let found = look(&mut Looks::new(), 3 * LOOKS, [4, 1]);

        assert!(found[..LOOKS as usize - 1].iter().all(Option::is_none), "nobody is before enough was seen");
        assert!(found[LOOKS as usize - 1..].iter().all(|slow| *slow == Some(('a', LOOKS, LOOKS / 4))), "{found:?}");
    }

    #[test]
    fn nobody_is_slow_where_all_compute_or_all_wait_much_or_one_is_half_as_fast() {
        for shares in [[4, 4], [3, 3], [1, 1], [4, 2], [0, 0]] {
            let found = look(&mut Looks::new(), 3 * LOOKS, shares);
            assert!(found.iter().all(Option::is_none), "{shares:?}: {found:?}");
        }
    }

    #[test]
    fn who_gets_fast_again_is_slow_no_more() {
        let mut looks = Looks::new();
        look(&mut looks, LOOKS, [4, 1]);

        assert_eq!(look(&mut looks, LOOKS, [4, 4]).last(), Some(&None));
    }

    //
    #[test]
    fn a_seat_is_relieved_once() {
        let mut relieved = Relieved::default();
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let mut relieve = |mesh: &Mesh, rank| relieved.relieve(mesh, rank, worker(0).member);

        assert!(relieve(&mesh, 0) && relieve(&mesh, 1) && !relieve(&mesh, 0));
        assert!(relieve(&Mesh { dp_shard: 3, ..mesh }, 0), "in another mesh it is another share of the work");
    }

    //
    #[test]
    fn a_slow_place_is_used_if_the_others_do_not_suffice() {
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
