//! Where the state of each rank is held a second time, so that no node takes the last copy of anything with it.
//!
//! A *shadow* receives the same reduced gradients as the rank it stands for and applies the same update: a replicated
//! log, as in state-machine replication. Replicas along `dp_replicate` on another node serve as well and cost nothing.
//!
//! Invariants:
//! - `H-1` With two nodes or more, each shard is held on at least two nodes.
//! - `H-2` No rank holds more than one shadow more than needed if all ranks of its node share evenly.

use super::identity::{NodeId, Worker};
use crate::mesh::{Axis, Mesh};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A part of the model and optimizer state. Ranks that differ on `dp_replicate` only have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Shard {
    /// Pipeline stage.
    pub stage: u32,
    /// Tensor shard.
    pub tensor: u32,
    /// Which of the parts into which `dp_shard` × `cp` cut it.
    pub part: u32,
    /// How many of those there are.
    pub n_parts: u32,
}

impl Shard {
    /// What a rank of a mesh trains.
    pub fn of(mesh: &Mesh, rank: usize) -> Shard {
        let at = mesh.coord(rank);
        Shard {
            stage: at.on(Axis::Pp) as u32,
            tensor: at.on(Axis::Tp) as u32,
            part: (at.on(Axis::DpShard) * mesh.cp + at.on(Axis::Cp)) as u32,
            n_parts: (mesh.dp_shard * mesh.cp) as u32,
        }
    }

    /// Whether the two have elements in common. Parts are cut at the whole numbers below equal fractions.
    pub fn overlaps(&self, other: &Shard) -> bool {
        let (part, n) = (u64::from(self.part), u64::from(self.n_parts));
        let (other_part, other_n) = (u64::from(other.part), u64::from(other.n_parts));
        (self.stage, self.tensor) == (other.stage, other.tensor)
            && part * other_n < (other_part + 1) * n
            && other_part * n < (part + 1) * other_n
    }
}

/// What each rank holds: its own shard first, then the shadows of others.
pub fn place(mesh: &Mesh, seats: &[Worker]) -> Vec<Vec<Shard>> {
    let mut holds: Vec<Vec<Shard>> = (0..seats.len()).map(|rank| vec![Shard::of(mesh, rank)]).collect();
    let mut nodes_of: BTreeMap<Shard, BTreeSet<NodeId>> = BTreeMap::new();
    let mut ranks_of: BTreeMap<NodeId, Vec<usize>> = BTreeMap::new();
    for (rank, worker) in seats.iter().enumerate() {
        nodes_of.entry(holds[rank][0]).or_default().insert(worker.member.node);
        ranks_of.entry(worker.member.node).or_default().push(rank);
    }
    // Ranks by the number of shadows they hold; a node is looked up through its least loaded rank.
    let mut by_load: BTreeSet<(usize, usize)> = (0..seats.len()).map(|rank| (0, rank)).collect();
    for (shard, nodes) in nodes_of.iter().filter(|(_, nodes)| nodes.len() == 1) {
        let elsewhere = |rank: usize| !nodes.contains(&seats[rank].member.node);
        let Some(&(load, rank)) = by_load.iter().find(|(_, rank)| elsewhere(*rank)) else { continue };
        by_load.remove(&(load, rank));
        by_load.insert((load + 1, rank));
        holds[rank].push(*shard);
    }
    holds
}

/// Shards of which one node has the only copy.
pub fn unprotected(seats: &[Worker], holds: &[Vec<Shard>]) -> Vec<Shard> {
    let mut nodes_of: BTreeMap<Shard, BTreeSet<NodeId>> = BTreeMap::new();
    for (worker, shards) in seats.iter().zip(holds) {
        for shard in shards {
            nodes_of.entry(*shard).or_default().insert(worker.member.node);
        }
    }
    nodes_of.into_iter().filter(|(_, nodes)| nodes.len() < 2).map(|(shard, _)| shard).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Incarnation, MemberId};
    use proptest::prelude::*;

    fn seats(nodes: &[u32]) -> Vec<Worker> {
        let worker = |(slot, node): (usize, &u32)| Worker {
            member: MemberId { node: NodeId(*node), slot: slot as u32 },
            incarnation: Incarnation(1),
        };
        nodes.iter().enumerate().map(worker).collect()
    }

    proptest! {
        // H-1, H-2
        #[test]
        fn losing_any_node_leaves_a_copy_of_everything(
            pp in 1usize..3, dp_replicate in 1usize..3, dp_shard in 1usize..5, tp in 1usize..3,
            n_nodes in 2u32..5, scatter: u64,
        ) {
            let mesh = Mesh { pp, dp_replicate, dp_shard, tp, ..Mesh::ONE };
            let rng = crate::rng::CounterRng::new(scatter);
            let mut nodes: Vec<u32> = (0..mesh.size() as u64).map(|i| (rng.bits(i) % u64::from(n_nodes)) as u32).collect();
            nodes[0] = 0;
            if nodes.len() > 1 { nodes[1] = 1; }
            let seats = seats(&nodes);

            let holds = place(&mesh, &seats);

            if mesh.size() > 1 {
                prop_assert_eq!(unprotected(&seats, &holds), []);
            }
            // Whoever has a shadow too many got it because the ranks on all other nodes had as many.
            for held in holds.iter().filter(|held| held.len() > 2) {
                let owner_node = (0..seats.len()).find(|r| holds[*r][0] == held[held.len() - 1]).unwrap();
                let spared = (0..seats.len()).filter(|r| seats[*r].member.node != seats[owner_node].member.node);
                for other in spared {
                    prop_assert!(holds[other].len() + 1 >= held.len(), "{holds:?}");
                }
            }
        }
    }

    #[test]
    fn replicas_on_other_nodes_need_no_shadows() {
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };

        assert!(place(&mesh, &seats(&[0, 0, 1, 1])).iter().all(|held| held.len() == 1));
        let apart: usize = place(&mesh, &seats(&[0, 1, 0, 1])).iter().map(Vec::len).sum();
        assert_eq!(apart, 6, "both replicas of a shard are on one node");
    }

    #[test]
    fn one_node_protects_nothing_and_says_so() {
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let seats = seats(&[0, 0]);

        assert_eq!(unprotected(&seats, &place(&mesh, &seats)).len(), 2);
    }

    #[test]
    fn parts_of_other_cuts_overlap_where_their_fractions_do() {
        let part = |part, n_parts| Shard { stage: 0, tensor: 0, part, n_parts };

        let touched: Vec<u32> = (0..4).filter(|i| part(*i, 4).overlaps(&part(1, 3))).collect();

        assert_eq!(touched, [1, 2]);
    }
}
