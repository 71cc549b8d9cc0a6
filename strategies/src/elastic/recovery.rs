//! Which state comes from whom when a world is formed.
//!
//! Invariants:
//! - `R-1` A plan covers every shard that a rank shall hold and does not have, from sources that have it, or names what
//!   is in nobody's memory. It never mixes memory and disk: they are of different steps.
//! - `R-2` A rank takes from itself what it has; else from the source that has sent least so far.
//!
//! What was cut in another way is taken piece by piece; which elements the two have in common is for the program's boxes
//! to say (`program::held`), which both sides compute alone. A piece may turn out to have none.

use super::identity::Worker;
use super::shadow::{Cut, Shard};
use super::snapshot::Checkpoint;
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One piece of state that a rank fetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// What it becomes part of.
    pub shard: Shard,
    /// Where it is.
    pub source: Source,
}

/// Where state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// In the memory of a worker that trained the same shard.
    Replica(Worker),
    /// In the memory of a worker that kept a shadow of it.
    Shadow(Worker),
    /// In the memory of a worker that holds this shard of another cut, and so some of it.
    Survivor(Worker, Shard),
    /// In a complete checkpoint.
    Disk(Checkpoint),
}

impl Source {
    /// Who sends, and what that one has it as.
    pub fn sender(&self, shard: Shard) -> Option<(Worker, Shard)> {
        match *self {
            Source::Replica(worker) | Source::Shadow(worker) => Some((worker, shard)),
            Source::Survivor(worker, held) => Some((worker, held)),
            Source::Disk(_) => None,
        }
    }
}

/// Shards that no memory has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing(pub Vec<Shard>);

/// What each rank fetches from the memory of others. `holders` are the workers that have the state of the right step.
///
/// # Errors
/// What only the disk has (`R-1`).
pub fn plan(
    seats: &[Worker],
    needs: &[Vec<Shard>],
    holders: &BTreeMap<Worker, &[Shard]>,
) -> Result<Vec<Vec<Transfer>>, Missing> {
    let mut index = Index::default();
    for (worker, shards) in holders {
        for shard in *shards {
            let held = index.cuts.entry(shard.cut).or_default();
            held.entry(*shard).or_default().push((*worker, shards[0] == *shard));
        }
    }
    let mut missing = Vec::new();
    let mut plan = Vec::new();
    for (worker, shards) in seats.iter().zip(needs) {
        let own = holders.get(worker).copied().unwrap_or_default();
        let mut transfers = Vec::new();
        for shard in shards.iter().filter(|shard| !own.contains(shard)) {
            match index.sources(*worker, *shard) {
                Some(sources) => {
                    transfers.extend(sources.into_iter().map(|source| Transfer { shard: *shard, source }));
                }
                None => missing.push(*shard),
            }
        }
        plan.push(transfers);
    }
    if missing.is_empty() {
        return Ok(plan);
    }
    missing.sort_unstable();
    missing.dedup();
    Err(Missing(missing))
}

/// Everything that each rank shall hold, from the checkpoint.
pub fn from_disk(needs: &[Vec<Shard>], checkpoint: Checkpoint) -> Vec<Vec<Transfer>> {
    let fetch = |shard: &Shard| Transfer { shard: *shard, source: Source::Disk(checkpoint) };
    needs.iter().map(|shards| shards.iter().map(fetch).collect()).collect()
}

/// Pieces that travel at most when a world of one mesh becomes one of another: as many as if nobody had anything already.
pub fn n_transfers(from: &Mesh, to: &Mesh) -> usize {
    let cut = Cut::of(from);
    (0..to.size()).map(|rank| Shard::of(to, rank).pieces(cut).count()).sum()
}

/// Who has a shard, and whether as its own.
type Holders = Vec<(Worker, bool)>;

#[derive(Default)]
struct Index {
    /// Who has what of each cut.
    cuts: BTreeMap<Cut, BTreeMap<Shard, Holders>>,
    /// Pieces that a worker sends.
    load: BTreeMap<Worker, usize>,
}

impl Index {
    /// Pieces that together are the shard: itself, else those of any cut that is whole where it matters.
    fn sources(&mut self, to: Worker, shard: Shard) -> Option<Vec<Source>> {
        let Index { cuts, load } = self;
        if let Some(holders) = cuts.get(&shard.cut).and_then(|held| held.get(&shard)) {
            let (from, own) = least_loaded(load, to, holders);
            return Some(vec![if own { Source::Replica(from) } else { Source::Shadow(from) }]);
        }
        let pieces = |(cut, held): (&Cut, &BTreeMap<Shard, Holders>)| -> Option<Vec<Shard>> {
            let pieces = shard.pieces(*cut).map(|piece| held.contains_key(&piece).then_some(piece));
            pieces.collect::<Option<Vec<Shard>>>().filter(|pieces| !pieces.is_empty())
        };
        let pieces = cuts.iter().find_map(pieces)?;
        let source = |piece: Shard| Source::Survivor(least_loaded(load, to, &cuts[&piece.cut][&piece]).0, piece);
        Some(pieces.into_iter().map(source).collect())
    }
}

/// `R-2`
fn least_loaded(load: &mut BTreeMap<Worker, usize>, to: Worker, holders: &[(Worker, bool)]) -> (Worker, bool) {
    let cost = |worker: &Worker| if *worker == to { None } else { Some(load.get(worker).copied().unwrap_or(0)) };
    let (from, own) = *holders.iter().min_by_key(|(worker, _)| cost(worker)).expect("a part in the index has a holder");
    if from != to {
        *load.entry(from).or_default() += 1;
    }
    (from, own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Incarnation, MemberId, NodeId};

    fn worker(node: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(node), slot: 0 }, incarnation: Incarnation(1) }
    }

    fn part(part: u32, n_parts: u32) -> Shard {
        Shard { part, cut: Cut { n_parts, ..Cut::WHOLE }, ..Shard::WHOLE }
    }

    #[test]
    fn newcomers_take_from_different_replicas() {
        let have = [part(0, 1)];
        let holders: BTreeMap<Worker, &[Shard]> = [(worker(0), &have[..]), (worker(1), &have[..])].into();
        let seats = [worker(0), worker(1), worker(2), worker(3)];
        let needs = vec![have.to_vec(); 4];

        let plan = plan(&seats, &needs, &holders).unwrap();

        assert!(plan[0].is_empty() && plan[1].is_empty());
        assert_eq!(plan[2], [Transfer { shard: have[0], source: Source::Replica(worker(0)) }]);
        assert_eq!(plan[3], [Transfer { shard: have[0], source: Source::Replica(worker(1)) }]);
    }

    #[test]
    fn a_lost_shard_comes_from_its_shadow() {
        let have = [part(0, 2), part(1, 2)];
        let holders: BTreeMap<Worker, &[Shard]> = [(worker(0), &have[..])].into();

        let plan = plan(&[worker(0), worker(1)], &[vec![have[0]], vec![have[1]]], &holders).unwrap();

        assert_eq!(plan[1], [Transfer { shard: have[1], source: Source::Shadow(worker(0)) }]);
    }

    #[test]
    fn another_cut_is_taken_piece_by_piece_and_from_oneself_first() {
        let have: Vec<Shard> = (0..4).map(|i| part(i, 4)).collect();
        let holders: BTreeMap<Worker, &[Shard]> = (0..4).map(|i| (worker(i as u32), &have[i..=i])).collect();
        let seats = [worker(0), worker(1), worker(2)];

        let plan = plan(&seats, &[vec![part(0, 3)], vec![part(1, 3)], vec![part(2, 3)]], &holders).unwrap();

        let from = |i: u32| Source::Survivor(worker(i), part(i, 4));
        let sources = |rank: usize| -> Vec<Source> { plan[rank].iter().map(|t: &Transfer| t.source).collect() };
        assert_eq!(sources(0), [from(0), from(1)]);
        assert_eq!(sources(1), [from(1), from(2)]);
        assert_eq!(sources(2), [from(2), from(3)]);
    }

    #[test]
    fn other_stages_and_tensor_shards_are_taken_from_all_that_may_have_a_part() {
        let (from, to) = (Mesh { pp: 2, tp: 2, ..Mesh::ONE }, Mesh { dp_shard: 2, tp: 2, ..Mesh::ONE });
        let have: Vec<Shard> = (0..4).map(|rank| Shard::of(&from, rank)).collect();
        let holders: BTreeMap<Worker, &[Shard]> = (0..4).map(|i| (worker(i as u32), &have[i..=i])).collect();
        let seats: Vec<Worker> = (0..4).map(worker).collect();
        let needs: Vec<Vec<Shard>> = (0..4).map(|rank| vec![Shard::of(&to, rank)]).collect();

        let plan = plan(&seats, &needs, &holders).unwrap();

        for (rank, transfers) in plan.iter().enumerate() {
            let sources: Vec<Source> = transfers.iter().map(|transfer| transfer.source).collect();
            // Of both stages, and of its own tensor shard only.
            let tensor = rank % 2;
            assert_eq!(sources, [tensor, 2 + tensor].map(|i| Source::Survivor(worker(i as u32), have[i])), "{rank}");
        }
        assert_eq!(n_transfers(&from, &to), 8);
    }

    #[test]
    fn a_cut_of_which_a_piece_is_lost_is_left_for_another() {
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
    fn what_is_in_no_memory_is_named() {
        let have = [part(0, 2)];
        let holders: BTreeMap<Worker, &[Shard]> = [(worker(0), &have[..])].into();

        let plan = plan(&[worker(0), worker(1)], &[vec![part(0, 2)], vec![part(1, 2)]], &holders);

        assert_eq!(plan, Err(Missing(vec![part(1, 2)])));
    }
}
