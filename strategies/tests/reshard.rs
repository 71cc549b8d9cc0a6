//! `SHADOW-4` over real programs: the pieces that a recovery plan names together contain the state that a rank of one mesh
//! needs, for any other mesh that held it.
#![allow(missing_docs)]

#[allow(dead_code)] // only some helpers are used here
mod support;

use phalanx_strategies::compile::{StepSpec, compile_step};
use phalanx_strategies::elastic::identity::{Incarnation, MemberId, NodeId, Worker};
use phalanx_strategies::elastic::recovery::plan;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, Head};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::held_box::HeldBox;
use phalanx_strategies::target::Nowhere;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use support::{any_parallel, families, model, spec};

/// Family, layers, key/value heads, tied embeddings.
type Model = (&'static str, usize, usize, bool);

const LAYERS: usize = 6;

/// The boxes that a rank's updates change and that recovery must restore.
fn updated(model_of: Model, spec: &StepSpec, mesh_rank: MeshRank) -> Vec<HeldBox> {
    let (family, layers, kv_heads, tied) = model_of;
    let batch = BatchShape { n_rows: 1, seq_len: 24 };
    let mut forward = model(family, layers, kv_heads, tied).forward(batch, Head::Loss).unwrap();
    forward.mesh_rank = mesh_rank;
    let program = compile_step(forward, spec, &Nowhere::default()).unwrap().program;
    let trained = program.params.iter().filter(|param| param.trainable);
    let weights = trained.flat_map(|param| param.boxes(&param.updated));
    weights.chain(program.optimizer_state().into_iter().flat_map(|state| state.boxes)).collect()
}

fn elements(boxes: &[HeldBox]) -> BTreeSet<(String, usize)> {
    let of = |held: &HeldBox| -> Vec<(String, usize)> {
        let rows = held.runs().flat_map(|(index, at)| index..index + at.len());
        rows.map(|index| (held.name.clone(), index)).collect()
    };
    boxes.iter().flat_map(of).collect()
}

fn worker(rank: usize) -> Worker {
    Worker { member: MemberId { node: NodeId(0), slot: rank as u32 }, incarnation: Incarnation(1) }
}

/// Elements that ranks of `to` still miss after all transfers of the plan.
fn missing(model_of: Model, spec: &StepSpec, from: Mesh, to: Mesh) -> BTreeSet<(String, usize)> {
    let have: Vec<Shard> = (0..from.size()).map(|rank| Shard::of(&from, rank)).collect();
    let had: BTreeMap<Shard, BTreeSet<(String, usize)>> = have
        .iter()
        .enumerate()
        .map(|(rank, shard)| (*shard, elements(&updated(model_of, spec, MeshRank { mesh: from, rank }))))
        .collect();
    let holders: BTreeMap<Worker, &[Shard]> = (0..from.size()).map(|rank| (worker(rank), &have[rank..=rank])).collect();
    let assignments: Vec<Worker> = (0..to.size()).map(worker).collect();
    let needs: Vec<Vec<Shard>> = (0..to.size()).map(|rank| vec![Shard::of(&to, rank)]).collect();

    let plan = plan(&assignments, &needs, &holders).unwrap();

    let mut missing = BTreeSet::new();
    for (rank, transfers) in plan.iter().enumerate().filter(|(_, transfers)| !transfers.is_empty()) {
        let mut wanted = elements(&updated(model_of, spec, MeshRank { mesh: to, rank }));
        for transfer in transfers {
            let (_, held) = transfer.source.sender(transfer.shard).unwrap();
            wanted.retain(|element| !had[&held].contains(element));
        }
        missing.extend(wanted);
    }
    missing
}

fn any_mesh() -> impl Strategy<Value = Mesh> {
    (1usize..4, 1usize..3, 1usize..4, 1usize..3, 0u32..3).prop_map(|(pp, dp_replicate, dp_shard, cp, tp)| Mesh {
        pp,
        dp_replicate,
        dp_shard,
        cp,
        tp: 1 << tp,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_element_that_a_rank_needs_is_in_a_piece_that_the_plan_names(
        family in families(),
        kv_heads in prop::sample::select(vec![1usize, 2, 4]), tied: bool, dropout in prop::option::of(support::dropouts()),
        from in any_mesh(), to in any_mesh(), parallel in any_parallel(), optimizer in support::optimizers(),
    ) {
        let lora = dropout.map(|dropout| support::adapters(family, dropout));
        let optimizer = support::fitting(optimizer, &[from, to]);
        let spec = StepSpec { parallel, lora, optimizer, ..spec(2, Precision::F32, Recompute::None) };

        let missing = missing((family, LAYERS, kv_heads, tied), &spec, from, to);

        prop_assert!(missing.is_empty(), "{from} to {to}: {missing:?}");
    }

    // RECOVERY-3
    #[test]
    fn ranks_with_the_same_shard_have_the_same_boxes_in_the_same_order_in_every_mesh(
        family in families(), tied: bool, from in any_mesh(), replicas in 1usize..3,
        parallel in any_parallel(), optimizer in support::optimizers(),
    ) {
        let optimizer = support::fitting(optimizer, &[from]);
        let spec = StepSpec { parallel, optimizer, ..spec(2, Precision::F32, Recompute::None) };
        let model_of = (family, LAYERS, 2, tied);
        let to = Mesh { dp_replicate: replicas, dp_shard: from.cp, cp: from.dp_shard, ..from };
        let boxes = |mesh: Mesh| -> Vec<(Shard, Vec<HeldBox>)> {
            let of = |rank| (Shard::of(&mesh, rank), updated(model_of, &spec, MeshRank { mesh, rank }));
            (0..mesh.size()).map(of).collect()
        };

        let (first, second) = (boxes(from), boxes(to));

        for (shard, held) in &first {
            for (_, other) in first.iter().chain(&second).filter(|(other, _)| other == shard) {
                prop_assert_eq!(held, other, "{} and {}: {:?}", from, to, shard);
            }
        }
    }
}
