//! Plans which state is sent from which member when a world is formed.
//!
//! Invariants:
//! - `RECOVERY-1` A plan covers every missing shard of every rank from members that hold it, or names the shards that
//!   no member holds. It never mixes memory and disk, which are at different steps.
//! - `RECOVERY-2` A rank reuses its own copy; otherwise it fetches from the least loaded holders.
//! - `RECOVERY-3` Holders of identical state, such as replicas and shadows, are listed consecutively and without
//!   duplicates, and each is asked for an equal part.
//! - `RECOVERY-4` A shard has at most [`SOURCES_MAX`] sources, unless it consists of more pieces; a plan has at most
//!   [`TRANSFERS_MAX`] transfers, unless it needs more pieces.
//!
//! State that was cut differently is fetched piece by piece; the common elements follow from the program's boxes
//! (`program::held`), which both sides compute locally. A piece may contain no common element.

use super::checkpoint::Checkpoint;
use super::identity::Worker;
use super::shadow::{Cut, Shard};
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum number of sources of one shard. More would hardly be faster, and the world waits for each of them.
pub const SOURCES_MAX: usize = 4;

/// Maximum number of transfers of a world plan: each one takes space in the plan and a connection between two members.
pub const TRANSFERS_MAX: usize = 60_000;

/// One transfer of state to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// The shard that it belongs to.
    pub shard: Shard,
    /// Where it comes from.
    pub source: Source,
}

/// A holder of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// In the memory of a worker that trained the same shard.
    Replica(Worker),
    /// In the memory of a worker that kept a shadow of it.
    Shadow(Worker),
    /// In the memory of a worker that holds this shard of another cut, which contains a part of it.
    Survivor(Worker, Shard),
    /// In a complete checkpoint.
    Disk(Checkpoint),
}

impl Source {
    /// The sender, and the shard that it holds.
    pub fn sender(&self, shard: Shard) -> Option<(Worker, Shard)> {
        match *self {
            Source::Replica(worker) | Source::Shadow(worker) => Some((worker, shard)),
            Source::Survivor(worker, held) => Some((worker, held)),
            Source::Disk(_) => None,
        }
    }
}

/// Shards that no member holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing(pub Vec<Shard>);

/// The part that one of several holders sends (`RECOVERY-3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Index of the part, from 0.
    pub part: u32,
    /// Number of equal parts.
    pub n_parts: u32,
}

impl Share {
    /// Whether the part exists and the number of parts is at most [`SOURCES_MAX`].
    pub fn is_valid(&self) -> bool {
        self.part < self.n_parts && self.n_parts as usize <= SOURCES_MAX
    }
}

/// Plans the transfers to each rank. `holders` are the workers that have the base state.
///
/// # Errors
/// The shards that only the checkpoint has (`RECOVERY-1`).
pub fn plan(
    assignments: &[Worker],
    needs: &[Vec<Shard>],
    holders: &BTreeMap<Worker, &[Shard]>,
) -> Result<Vec<Vec<Transfer>>, Missing> {
    let index = Index::of(holders);
    let mut missing = Vec::new();
    let mut to_fetch: Vec<(usize, Shard, Vec<Shard>)> = Vec::new();
    for (rank, (worker, shards)) in assignments.iter().zip(needs).enumerate() {
        let own = holders.get(worker).copied().unwrap_or_default();
        for shard in shards.iter().filter(|shard| !own.contains(shard)) {
            match index.pieces(*shard) {
                Some(pieces) => to_fetch.push((rank, *shard, pieces)),
                None => missing.push(*shard),
            }
        }
    }
    if !missing.is_empty() {
        missing.sort_unstable();
        missing.dedup();
        return Err(Missing(missing));
    }
    let n_pieces: usize = to_fetch.iter().map(|(.., pieces)| pieces.len()).sum();
    let mut load = Load::default();
    let mut plan = vec![Vec::new(); assignments.len()];
    for (rank, shard, pieces) in to_fetch {
        // RECOVERY-4
        let n_sources_max = (SOURCES_MAX / pieces.len()).min(TRANSFERS_MAX / n_pieces).max(1);
        for piece in pieces {
            let sources = load.share(assignments[rank], &index.cuts[&piece.cut][&piece], n_sources_max);
            plan[rank].extend(sources.into_iter().map(|(from, own)| {
                let source = match (piece == shard, own) {
                    (true, true) => Source::Replica(from),
                    (true, false) => Source::Shadow(from),
                    (false, _) => Source::Survivor(from, piece),
                };
                Transfer { shard, source }
            }));
        }
    }
    Ok(plan)
}

/// The transfers of a rank, grouped by identical state (`RECOVERY-3`).
pub fn shared(transfers: &[Transfer]) -> impl Iterator<Item = &[Transfer]> {
    let what = |transfer: &Transfer| (transfer.shard, transfer.source.sender(transfer.shard).map(|(_, held)| held));
    transfers.chunk_by(move |a, b| what(a) == what(b))
}

/// The transfers of a rank, each with the part that its source sends.
pub fn shares(transfers: &[Transfer]) -> impl Iterator<Item = (Transfer, Share)> {
    shared(transfers).flat_map(|group| {
        let n_parts = group.len() as u32;
        group.iter().zip(0..).map(move |(transfer, part)| (*transfer, Share { part, n_parts }))
    })
}

/// Transfers of every shard from the checkpoint.
pub fn from_disk(needs: &[Vec<Shard>], checkpoint: Checkpoint) -> Vec<Vec<Transfer>> {
    let fetch = |shard: &Shard| Transfer { shard: *shard, source: Source::Disk(checkpoint) };
    needs.iter().map(|shards| shards.iter().map(fetch).collect()).collect()
}

/// Upper bound of the transfers from one mesh to another, as if no rank could reuse its own state.
pub fn n_transfers(from: &Mesh, to: &Mesh) -> usize {
    let cut = Cut::of(from);
    (0..to.size()).map(|rank| Shard::of(to, rank).pieces(cut).count()).sum()
}

/// The holders of a shard, and whether it is their own.
type Holders = Vec<(Worker, bool)>;

/// The holders of each shard, by cut.
#[derive(Default)]
struct Index {
    cuts: BTreeMap<Cut, BTreeMap<Shard, Holders>>,
}

impl Index {
    fn of(holders: &BTreeMap<Worker, &[Shard]>) -> Index {
        let mut index = Index::default();
        for (worker, shards) in holders {
            for shard in *shards {
                let held = index.cuts.entry(shard.cut).or_default();
                held.entry(*shard).or_default().push((*worker, shards[0] == *shard));
            }
        }
        index
    }

    /// Held pieces that together contain the shard: the shard itself, else all its pieces in another cut.
    fn pieces(&self, shard: Shard) -> Option<Vec<Shard>> {
        if self.cuts.get(&shard.cut).is_some_and(|held| held.contains_key(&shard)) {
            return Some(vec![shard]);
        }
        let pieces = |(cut, held): (&Cut, &BTreeMap<Shard, Holders>)| -> Option<Vec<Shard>> {
            let pieces = shard.pieces(*cut).map(|piece| held.contains_key(&piece).then_some(piece));
            pieces.collect::<Option<Vec<Shard>>>().filter(|pieces| !pieces.is_empty())
        };
        self.cuts.iter().find_map(pieces)
    }
}

/// What each worker sends, in units of 1/[`PIECE`] of a piece.
#[derive(Default)]
struct Load(BTreeMap<Worker, usize>);

/// Divisible by any number of sources up to [`SOURCES_MAX`].
const PIECE: usize = 12;
const _: () = assert!(PIECE.is_multiple_of(2) && PIECE.is_multiple_of(3) && PIECE.is_multiple_of(SOURCES_MAX));

impl Load {
    /// Chooses which holders send a piece to `to` (`RECOVERY-2`).
    fn share(&mut self, to: Worker, holders: &[(Worker, bool)], n_max: usize) -> Holders {
        if let Some(itself) = holders.iter().find(|(worker, _)| *worker == to) {
            return vec![*itself];
        }
        let load = |worker: &Worker| self.0.get(worker).copied().unwrap_or(0);
        let mut by_load: Vec<(usize, usize)> =
            holders.iter().enumerate().map(|(i, (worker, _))| (load(worker), i)).collect();
        let n = n_max.min(by_load.len());
        // Only a few of thousands of replicas are needed, so they are not all sorted.
        by_load.select_nth_unstable(n - 1);
        by_load.truncate(n);
        by_load.sort_unstable();
        let sources: Holders = by_load.into_iter().map(|(_, i)| holders[i]).collect();
        sources.iter().for_each(|(worker, _)| *self.0.entry(*worker).or_default() += PIECE / n);
        sources
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Incarnation, MemberId, NodeId};
    use proptest::prelude::*;

    fn worker(node: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(node), slot: 0 }, incarnation: Incarnation(1) }
    }

    fn part(part: u32, n_parts: u32) -> Shard {
        Shard { part, cut: Cut { n_parts, ..Cut::WHOLE }, ..Shard::WHOLE }
    }

    #[test]
    fn newcomers_fetch_from_the_least_loaded_replicas() {
        let have = [part(0, 1)];
        let holders: BTreeMap<Worker, &[Shard]> = (0..6).map(|i| (worker(i), &have[..])).collect();
        let assignments: Vec<Worker> = (0..8).map(worker).collect();
        let needs = vec![have.to_vec(); 8];

        let plan = plan(&assignments, &needs, &holders).unwrap();

        assert!(plan[..6].iter().all(Vec::is_empty));
        let from = |ranks: [u32; SOURCES_MAX]| {
            ranks.map(|i| Transfer { shard: have[0], source: Source::Replica(worker(i)) }).to_vec()
        };
        assert_eq!(plan[6..], [from([0, 1, 2, 3]), from([4, 5, 0, 1])]);
    }

    // RECOVERY-3
    #[test]
    fn holders_of_a_piece_share_its_transfer_unless_the_receiver_holds_it() {
        let (old, new) = ([part(0, 2), part(1, 2)], part(0, 1));
        let (both, turned) = (old, [old[1], old[0]]);
        let holders: BTreeMap<Worker, &[Shard]> = [(worker(0), &both[..]), (worker(1), &turned[..])].into();

        let same = plan(&[worker(2)], &[vec![old[0]]], &holders).unwrap();
        let other = plan(&[worker(2), worker(0)], &[vec![new], vec![new]], &holders).unwrap();

        let [replica, shadow] = [Source::Replica(worker(0)), Source::Shadow(worker(1))];
        assert_eq!(same[0], [replica, shadow].map(|source| Transfer { shard: old[0], source }));
        let of = |from: u32, piece: usize| Transfer { shard: new, source: Source::Survivor(worker(from), old[piece]) };
        assert_eq!(other[0], [of(0, 0), of(1, 0), of(0, 1), of(1, 1)]);
        assert_eq!(other[1], [of(0, 0), of(0, 1)], "a rank takes its own pieces from itself only");
        let asked: Vec<(u32, u32)> = shares(&other[0]).map(|(_, share)| (share.part, share.n_parts)).collect();
        assert_eq!(asked, [(0, 2), (1, 2), (0, 2), (1, 2)]);
        assert_eq!(shared(&other[1]).count(), 2);
    }

    // RECOVERY-4
    #[test]
    fn each_piece_has_fewer_sources_when_the_plan_would_list_too_many_transfers() {
        let have = [part(0, 1)];
        let n_transfers = |n_new: u32| {
            let holders: BTreeMap<Worker, &[Shard]> = (0..8).map(|i| (worker(i), &have[..])).collect();
            let assignments: Vec<Worker> = (8..8 + n_new).map(worker).collect();
            let needs = vec![have.to_vec(); n_new as usize];
            plan(&assignments, &needs, &holders).unwrap().iter().map(Vec::len).sum::<usize>()
        };

        assert_eq!([15_000, 25_000, 65_000].map(n_transfers), [60_000, 50_000, 65_000]);
    }

    proptest! {
        // RECOVERY-1, RECOVERY-2, RECOVERY-3, RECOVERY-4
        #[test]
        fn missing_state_comes_from_few_holders_in_balanced_shares(
            n_parts in 1u32..5, n_replicas in 1u32..7, n_shadows in 0u32..5, n_new in 1u32..9, other in 1u32..5, shift: u32,
        ) {
            let shard = |i: u32| part(i % n_parts, n_parts);
            let held: Vec<Vec<Shard>> = (0..n_parts * n_replicas)
                .map(|i| if i < n_shadows && n_parts > 1 { vec![shard(i), shard(i + 1)] } else { vec![shard(i)] })
                .collect();
            let holders: BTreeMap<Worker, &[Shard]> = (0..).map(worker).zip(held.iter().map(|held| &held[..])).collect();
            // Some of the workers that take a rank hold state already.
            let first = shift % (n_parts * n_replicas + 1);
            let assignments: Vec<Worker> = (first..first + n_new).map(worker).collect();
            let needs: Vec<Vec<Shard>> = (0..n_new).map(|i| vec![part(i % other, other)]).collect();

            let plan = plan(&assignments, &needs, &holders).unwrap();

            let mut given: BTreeMap<Worker, usize> = BTreeMap::new();
            for ((to, needs), transfers) in assignments.iter().zip(&needs).zip(&plan) {
                let own = holders.get(to).copied().unwrap_or_default();
                prop_assert_eq!(own.contains(&needs[0]), transfers.is_empty());
                let pieces: Vec<Shard> = needs[0].pieces(Cut { n_parts, ..Cut::WHOLE }).collect();
                let mut found = Vec::new();
                prop_assert!(transfers.len() <= pieces.len().max(SOURCES_MAX));
                for group in shared(transfers) {
                    let senders: Vec<(Worker, Shard)> =
                        group.iter().map(|transfer| transfer.source.sender(transfer.shard).unwrap()).collect();
                    let distinct: BTreeMap<Worker, Shard> = senders.iter().copied().collect();
                    prop_assert_eq!(distinct.len(), group.len(), "no source is named twice");
                    let (_, piece) = senders[0];
                    prop_assert!(distinct.iter().all(|(from, held)| *held == piece && holders[from].contains(&piece)));
                    let itself = own.contains(&piece);
                    prop_assert!(!itself || group.len() == 1 && distinct.contains_key(to));
                    if !itself {
                        let n_have = holders.values().filter(|held| held.contains(&piece)).count();
                        prop_assert_eq!(group.len(), n_have.min((SOURCES_MAX / pieces.len()).max(1)));
                        distinct.keys().for_each(|from| *given.entry(*from).or_default() += PIECE / group.len());
                    }
                    found.push(piece);
                }
                if !transfers.is_empty() {
                    prop_assert_eq!(found, pieces);
                }
            }
            // The loads of workers that hold only the same shard differ by at most one piece.
            for i in n_shadows..n_parts * n_replicas {
                for j in (i + n_parts..n_parts * n_replicas).step_by(n_parts as usize) {
                    let load = |i: u32| given.get(&worker(i)).copied().unwrap_or(0);
                    let to_itself = |i: u32| assignments.contains(&worker(i));
                    prop_assert!(load(i).abs_diff(load(j)) <= PIECE || to_itself(i) || to_itself(j), "{:?}", given);
                }
            }
        }
    }

    #[test]
    fn lost_shard_comes_from_its_shadow() {
        let have = [part(0, 2), part(1, 2)];
        let holders: BTreeMap<Worker, &[Shard]> = [(worker(0), &have[..])].into();

        let plan = plan(&[worker(0), worker(1)], &[vec![have[0]], vec![have[1]]], &holders).unwrap();

        assert_eq!(plan[1], [Transfer { shard: have[1], source: Source::Shadow(worker(0)) }]);
    }

    #[test]
    fn another_cut_is_fetched_piece_by_piece_and_own_pieces_are_reused() {
        let have: Vec<Shard> = (0..4).map(|i| part(i, 4)).collect();
        let holders: BTreeMap<Worker, &[Shard]> = (0..4).map(|i| (worker(i as u32), &have[i..=i])).collect();
        let assignments = [worker(0), worker(1), worker(2)];

        let plan = plan(&assignments, &[vec![part(0, 3)], vec![part(1, 3)], vec![part(2, 3)]], &holders).unwrap();

        let from = |i: u32| Source::Survivor(worker(i), part(i, 4));
        let sources = |rank: usize| -> Vec<Source> { plan[rank].iter().map(|t: &Transfer| t.source).collect() };
        assert_eq!(sources(0), [from(0), from(1)]);
        assert_eq!(sources(1), [from(1), from(2)]);
        assert_eq!(sources(2), [from(2), from(3)]);
    }

    #[test]
    fn other_stages_and_tensor_shards_come_from_every_holder_of_a_possible_part() {
        let (from, to) = (Mesh { pp: 2, tp: 2, ..Mesh::ONE }, Mesh { dp_shard: 2, tp: 2, ..Mesh::ONE });
        let have: Vec<Shard> = (0..4).map(|rank| Shard::of(&from, rank)).collect();
        let holders: BTreeMap<Worker, &[Shard]> = (0..4).map(|i| (worker(i as u32), &have[i..=i])).collect();
        let assignments: Vec<Worker> = (0..4).map(worker).collect();
        let needs: Vec<Vec<Shard>> = (0..4).map(|rank| vec![Shard::of(&to, rank)]).collect();

        let plan = plan(&assignments, &needs, &holders).unwrap();

        for (rank, transfers) in plan.iter().enumerate() {
            let sources: Vec<Source> = transfers.iter().map(|transfer| transfer.source).collect();
            // From both stages, and from its own tensor shard only.
            let tensor = rank % 2;
            assert_eq!(sources, [tensor, 2 + tensor].map(|i| Source::Survivor(worker(i as u32), have[i])), "{rank}");
        }
        assert_eq!(n_transfers(&from, &to), 8);
    }

    #[test]
    fn cut_with_a_lost_piece_is_skipped_for_a_complete_one() {
        let (old, new) = (Mesh { pp: 2, ..Mesh::ONE }, Mesh { tp: 2, ..Mesh::ONE });
        let (first, second) = ([Shard::of(&old, 0)], Shard::of(&old, 1));
        let shards = [Shard::of(&new, 0), Shard::of(&new, 1)];
        // The second stage died when the new world had healed.
        let holders: BTreeMap<Worker, &[Shard]> = [(worker(0), &first[..]), (worker(1), &shards[..])].into();

        let whole = plan(&[worker(0)], &[vec![Shard::WHOLE]], &holders).unwrap();
        let lost = plan(&[worker(0)], &[vec![second]], &[(worker(0), &first[..])].into());

        assert_eq!(
            whole[0].iter().map(|t| t.source).collect::<Vec<_>>(),
            shards.map(|s| Source::Survivor(worker(1), s))
        );
        assert_eq!(lost, Err(Missing(vec![second])));
    }

    #[test]
    fn shards_that_no_member_holds_are_reported() {
        let have = [part(0, 2)];
        let holders: BTreeMap<Worker, &[Shard]> = [(worker(0), &have[..])].into();

        let plan = plan(&[worker(0), worker(1)], &[vec![part(0, 2)], vec![part(1, 2)]], &holders);

        assert_eq!(plan, Err(Missing(vec![part(1, 2)])));
    }
}
