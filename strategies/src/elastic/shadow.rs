//! Placement of shadows: every shard has a second copy, so that losing one node loses no state.
//!
//! A *shadow* receives the same reduced gradients as the rank it stands for and applies the same update: a replicated
//! log, as in state-machine replication. Replicas along `dp_replicate` on another node serve as well, without overhead.
//!
//! Invariants:
//! - `SHADOW-1` With two nodes or more, each shard is held on at least two nodes.
//! - `SHADOW-2` A rank holds at most one shadow more than if all ranks of its node shared them evenly.
//! - `SHADOW-3` With one node and two processes or more, each shard is held by at least two processes.
//! - `SHADOW-4` A shard's [pieces](Shard::pieces) in any other cut together contain the whole shard.

use super::identity::{NodeId, Worker};
use crate::mesh::{Axis, Mesh};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The numbers of parts into which a mesh cuts the model and optimizer state. The program's boxes define where the cuts
/// are ([`crate::program::held`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cut {
    /// Pipeline stages.
    pub n_stages: u32,
    /// Tensor shards of each stage.
    pub n_tensors: u32,
    /// Parts into which `dp_shard` × `cp` cut each tensor shard.
    pub n_parts: u32,
}

impl Cut {
    /// One piece.
    pub const WHOLE: Cut = Cut { n_stages: 1, n_tensors: 1, n_parts: 1 };

    /// The cut of a mesh.
    pub fn of(mesh: &Mesh) -> Cut {
        Cut { n_stages: mesh.pp as u32, n_tensors: mesh.tp as u32, n_parts: (mesh.dp_shard * mesh.cp) as u32 }
    }
}

/// A part of the model and optimizer state. Ranks that differ only on `dp_replicate` have the same shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Shard {
    /// Pipeline stage.
    pub stage: u32,
    /// Tensor shard.
    pub tensor: u32,
    /// Index of the part, of those into which `dp_shard` × `cp` cut the tensor shard.
    pub part: u32,
    /// Number of each.
    pub cut: Cut,
}

impl Shard {
    /// The whole state.
    pub const WHOLE: Shard = Shard { stage: 0, tensor: 0, part: 0, cut: Cut::WHOLE };

    /// The shard that a rank of a mesh trains.
    pub fn of(mesh: &Mesh, rank: usize) -> Shard {
        let at = mesh.coord(rank);
        Shard {
            stage: at.on(Axis::Pp) as u32,
            tensor: at.on(Axis::Tp) as u32,
            part: (at.on(Axis::DpShard) * mesh.cp + at.on(Axis::Cp)) as u32,
            cut: Cut::of(mesh),
        }
    }

    /// The shards of another cut that together contain this one (`SHADOW-4`); in its own cut, itself.
    ///
    /// Tensors are cut at fractions of their heads, columns or tokens, and elements copied to several tensor shards go to
    /// neighbours, so shards without a common fraction share no element. The same holds for the parts, which
    /// [`crate::program::collective::part`] cuts at the whole number of units below a fraction, but only within one tensor
    /// shard: other tensor shards have other elements at the same fraction. The schedule assigns layers to stages, and a
    /// tied embedding lies on two stages, so the pieces of a cut with another number of stages include all its stages.
    pub fn pieces(self, cut: Cut) -> impl Iterator<Item = Shard> {
        let own = self.cut;
        let stages = if own.n_stages == cut.n_stages { self.stage..self.stage + 1 } else { 0..cut.n_stages };
        let tensors = touched(self.tensor, own.n_tensors, cut.n_tensors);
        let same = own.n_tensors == cut.n_tensors;
        let parts = if same { touched(self.part, own.n_parts, cut.n_parts) } else { 0..cut.n_parts };
        stages.flat_map(move |stage| {
            let parts = parts.clone();
            tensors.clone().flat_map(move |tensor| parts.clone().map(move |part| Shard { stage, tensor, part, cut }))
        })
    }
}

/// The parts of `other` equal ones that overlap part `i` of `n` equal ones.
fn touched(i: u32, n: u32, other: u32) -> Range<u32> {
    let [i, n, other] = [i, n, other].map(u64::from);
    (i * other / n) as u32..((i + 1) * other).div_ceil(n) as u32
}

/// The shards of each rank: its own first, then shadows of other ranks, if `shadows`.
pub fn place(mesh: &Mesh, assignments: &[Worker], shadows: bool) -> Vec<Vec<Shard>> {
    let mut holds: Vec<Vec<Shard>> = (0..assignments.len()).map(|rank| vec![Shard::of(mesh, rank)]).collect();
    if !shadows {
        return holds;
    }
    let mut ranks_of: BTreeMap<Shard, Vec<usize>> = BTreeMap::new();
    for (rank, held) in holds.iter().enumerate() {
        ranks_of.entry(held[0]).or_default().push(rank);
    }
    let node = |rank: usize| assignments[rank].member.node;
    // Ranks by the number of shadows they hold; a node is looked up through its least loaded rank.
    let mut by_load: BTreeSet<(usize, usize)> = (0..assignments.len()).map(|rank| (0, rank)).collect();
    for (shard, ranks) in ranks_of {
        let home = node(ranks[0]);
        if ranks.iter().any(|rank| node(*rank) != home) {
            continue;
        }
        let elsewhere = by_load.iter().find(|(_, rank)| node(*rank) != home);
        // Without another node, another process protects against the death of one process.
        let beside = || by_load.iter().find(|(_, rank)| ranks.len() == 1 && *rank != ranks[0]);
        let Some(&(load, rank)) = elsewhere.or_else(beside) else { continue };
        by_load.remove(&(load, rank));
        by_load.insert((load + 1, rank));
        holds[rank].push(shard);
    }
    holds
}

/// Shards whose copies are all on one node.
pub fn unprotected(assignments: &[Worker], holds: &[Vec<Shard>]) -> Vec<Shard> {
    let mut nodes_of: BTreeMap<Shard, BTreeSet<NodeId>> = BTreeMap::new();
    for (worker, shards) in assignments.iter().zip(holds) {
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
    use crate::program::collective::part;
    use proptest::prelude::*;

    fn assignments(nodes: &[u32]) -> Vec<Worker> {
        let worker = |(slot, node): (usize, &u32)| Worker {
            member: MemberId { node: NodeId(*node), slot: slot as u32 },
            incarnation: Incarnation(1),
        };
        nodes.iter().enumerate().map(worker).collect()
    }

    proptest! {
        // SHADOW-1, SHADOW-2
        #[test]
        fn every_shard_has_a_copy_left_after_the_loss_of_any_node(
            pp in 1usize..3, dp_replicate in 1usize..3, dp_shard in 1usize..5, tp in 1usize..3,
            n_nodes in 2u32..5, scatter: u64,
        ) {
            let mesh = Mesh { pp, dp_replicate, dp_shard, tp, ..Mesh::ONE };
            let rng = crate::rng::CounterRng::new(scatter);
            let mut nodes: Vec<u32> = (0..mesh.size() as u64).map(|i| (rng.bits(i) % u64::from(n_nodes)) as u32).collect();
            nodes[0] = 0;
            if nodes.len() > 1 { nodes[1] = 1; }
            let assignments = assignments(&nodes);

            let holds = place(&mesh, &assignments, true);

            if mesh.size() > 1 {
                prop_assert_eq!(unprotected(&assignments, &holds), []);
            }
            // A rank gets one more shadow only if the ranks on all other nodes have as many.
            for held in holds.iter().filter(|held| held.len() > 2) {
                let owner_node = (0..assignments.len()).find(|r| holds[*r][0] == held[held.len() - 1]).unwrap();
                let spared = (0..assignments.len()).filter(|r| assignments[*r].member.node != assignments[owner_node].member.node);
                for other in spared {
                    prop_assert!(holds[other].len() + 1 >= held.len(), "{holds:?}");
                }
            }
        }
    }

    proptest! {
        // SHADOW-3
        #[test]
        fn single_node_survives_any_process_loss_and_reports_total_loss_of_the_node(
            pp in 1usize..3, dp_replicate in 1usize..3, dp_shard in 1usize..5, tp in 1usize..3,
        ) {
            let mesh = Mesh { pp, dp_replicate, dp_shard, tp, ..Mesh::ONE };
            let assignments = assignments(&vec![0; mesh.size()]);

            let holds = place(&mesh, &assignments, true);

            let all: BTreeSet<Shard> = holds.iter().map(|held| held[0]).collect();
            for dead in 0..if assignments.len() > 1 { assignments.len() } else { 0 } {
                let others = holds.iter().enumerate().filter(|(rank, _)| *rank != dead);
                let left: BTreeSet<Shard> = others.flat_map(|(_, held)| held.iter().copied()).collect();
                prop_assert_eq!(&left, &all, "rank {} is dead", dead);
            }
            prop_assert_eq!(unprotected(&assignments, &holds).len(), all.len());
        }

        // SHADOW-4 for one parameter; `tests/reshard.rs` checks whole models.
        #[test]
        fn parts_that_share_an_element_of_a_parameter_are_pieces_of_each_other(
            len in 0usize..700, unit in 1usize..40, n in 1u32..12, other_n in 1u32..12,
        ) {
            let shard = |part, n_parts| Shard { part, cut: Cut { n_parts, ..Cut::WHOLE }, ..Shard::WHOLE };
            for i in 0..n {
                let a = part(len, unit, n as usize, i as usize);
                let pieces: Vec<Shard> = shard(i, n).pieces(shard(0, other_n).cut).collect();
                for j in 0..other_n {
                    let b = part(len, unit, other_n as usize, j as usize);
                    if a.start.max(b.start) < a.end.min(b.end) {
                        prop_assert!(pieces.contains(&shard(j, other_n)), "{i} of {n}, {j} of {other_n}");
                    }
                }
            }
        }

        #[test]
        fn shard_is_its_only_piece_in_its_own_cut(
            pp in 1usize..4, dp_shard in 1usize..4, cp in 1usize..3, tp in 1usize..4,
        ) {
            let mesh = Mesh { pp, dp_shard, cp, tp, ..Mesh::ONE };
            for rank in 0..mesh.size() {
                let shard = Shard::of(&mesh, rank);
                prop_assert_eq!(shard.pieces(shard.cut).collect::<Vec<_>>(), [shard]);
            }
        }
    }

    #[test]
    fn replicas_on_other_nodes_need_no_shadows() {
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };

        assert!(place(&mesh, &assignments(&[0, 0, 1, 1]), true).iter().all(|held| held.len() == 1));
        let apart: usize = place(&mesh, &assignments(&[0, 1, 0, 1]), true).iter().map(Vec::len).sum();
        assert_eq!(apart, 6, "both replicas of a shard are on one node");
    }

    #[test]
    fn disabled_shadows_are_not_placed() {
        let mesh = Mesh { dp_shard: 3, ..Mesh::ONE };
        let assignments = assignments(&[0, 1, 1]);

        let holds = place(&mesh, &assignments, false);

        assert!(holds.iter().all(|held| held.len() == 1));
        assert_eq!(unprotected(&assignments, &holds).len(), 3);
    }

    #[test]
    fn pieces_share_a_fraction_and_cover_all_stages_of_another_stage_count() {
        let mesh = |pp, dp_shard, tp| Mesh { pp, dp_shard, tp, ..Mesh::ONE };
        let pieces = |rank, from: Mesh, to: Mesh| -> Vec<(u32, u32, u32)> {
            Shard::of(&from, rank).pieces(Cut::of(&to)).map(|s| (s.stage, s.tensor, s.part)).collect()
        };

        assert_eq!(pieces(1, mesh(1, 3, 1), mesh(1, 4, 1)), [(0, 0, 1), (0, 0, 2)]);
        assert_eq!(pieces(1, mesh(1, 1, 2), mesh(1, 2, 4)), [(0, 2, 0), (0, 2, 1), (0, 3, 0), (0, 3, 1)]);
        assert_eq!(pieces(3, mesh(2, 2, 1), mesh(3, 2, 1)), [(0, 0, 1), (1, 0, 1), (2, 0, 1)]);
    }
}
