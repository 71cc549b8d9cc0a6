//! Every model compiles for every rank of every mesh, to programs that verify and whose buffers never overlap while in
//! use.

mod support;

use phalanx_strategies::compile::{Compiled, Parallel, StepSpec, compile_forward, compile_step};
use phalanx_strategies::mesh::{Axis, Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, Head};
use phalanx_strategies::objective::Objective;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::pipeline::ScheduleKind;
use phalanx_strategies::program::Param;
use phalanx_strategies::target::Nowhere;
use proptest::prelude::*;
use std::collections::BTreeMap;
use support::{any_parallel, assert_no_live_buffer_is_overwritten, families, model, spec};

fn any_mesh() -> impl Strategy<Value = Mesh> {
    (1usize..4, 1usize..3, 1usize..4, 1usize..3, prop::sample::select(vec![1usize, 2, 4]))
        .prop_map(|(pp, dp_replicate, dp_shard, cp, tp)| Mesh { pp, dp_replicate, dp_shard, cp, tp })
        .prop_filter("small", |m| m.size() <= 24)
}

fn compile(
    (family, layers, kv_heads, tied): (&str, usize, usize, bool),
    objective: &Objective,
    spec: &StepSpec,
    mesh_rank: MeshRank,
    target: &Nowhere,
) -> (Compiled, Compiled) {
    let forward = || {
        let batch = BatchShape { n_rows: objective.rows_per_sample(), seq_len: 16 };
        let mut forward = objective.program(&model(family, layers, kv_heads, tied), batch).unwrap();
        forward.mesh_rank = mesh_rank;
        forward
    };
    let step = compile_step(forward(), spec, target).unwrap();
    (step, compile_forward(forward(), spec, target).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_model_compiles_for_every_rank_of_every_mesh(
        family in families(),
        kv_heads in prop::sample::select(vec![1usize, 2, 4]), tied: bool, dropout in prop::option::of(support::dropouts()), n in 1usize..4,
        mesh in any_mesh(), parallel in any_parallel(),
        precision in prop::sample::select(vec![Precision::F32, Precision::Bf16, Precision::Fp8]),
        recompute in prop::sample::select(vec![Recompute::None, Recompute::Selective, Recompute::Full]),
        optimizer in support::optimizers(), target in support::targets(), objective in support::objectives(),
    ) {
        let lora = dropout.map(|dropout| support::adapters(family, dropout));
        let optimizer = support::fitting(optimizer, &[mesh]);
        let spec = StepSpec { parallel, lora, optimizer, ..spec(n, precision, recompute) };

        for rank in 0..mesh.size() {
            let (step, eval) = compile((family, 6, kv_heads, tied), &objective, &spec, MeshRank { mesh, rank }, &target);

            assert_no_live_buffer_is_overwritten(&step);
            assert_no_live_buffer_is_overwritten(&eval);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Includes key/value heads that several tensor-parallel ranks hold, in their own tensor or packed with others.
    #[test]
    fn every_element_of_a_model_and_of_the_optimizers_state_is_saved_by_one_rank(
        family in families(), kv_heads in prop::sample::select(vec![1usize, 2, 4]), tied: bool, dropout in prop::option::of(support::dropouts()),
        mesh in any_mesh(), optimizer in support::optimizers(),
    ) {
        let lora = dropout.map(|dropout| support::adapters(family, dropout));
        let optimizer = support::fitting(optimizer, &[mesh]);
        let spec = StepSpec { lora, optimizer, ..spec(2, Precision::F32, Recompute::None) };
        let mut saved: BTreeMap<String, Vec<u32>> = BTreeMap::new();

        for rank in 0..mesh.size() {
            let mesh_rank = MeshRank { mesh, rank };
            let (step, _) = compile((family, 6, kv_heads, tied), &Objective::Supervised, &spec, mesh_rank, &Nowhere::default());
            let is_owned = |p: &Param| p.owned && mesh_rank.on(Axis::DpReplicate) == 0;
            let weights = step.program.params.iter().filter(|p| is_owned(p)).flat_map(|p| p.boxes(&p.updated));
            let state = step.program.optimizer_state().into_iter().filter(|state| is_owned(state.param));
            for held in weights.chain(state.flat_map(|state| state.boxes)).filter(|held| held.owned) {
                let times = saved.entry(held.name.clone()).or_insert_with(|| vec![0; held.shape.iter().product()]);
                held.runs().for_each(|(i, at)| times[i..i + at.len()].iter_mut().for_each(|n| *n += 1));
            }
        }

        let forward = model(family, 6, kv_heads, tied).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
        for part in forward.params.iter().flat_map(|p| &p.parts) {
            prop_assert!(saved.contains_key(&part.name), "{}", part.name);
            let state = optimizer.state(part.shape.len()).iter().map(|tensor| format!("{}.{}", tensor.name, part.name));
            for name in state.filter(|_| dropout.is_none()) {
                prop_assert!(saved.contains_key(&name), "{}", name);
            }
        }
        for (name, times) in saved {
            prop_assert!(times.iter().all(|n| *n == 1), "{}: {:?}", name, times);
        }
    }
}

fn error(family: &str, kv_heads: usize, mesh: Mesh, parallel: Parallel) -> String {
    let batch = BatchShape { n_rows: 1, seq_len: 12 };
    let mut forward = model(family, 3, kv_heads, false).forward(batch, Head::Loss).unwrap();
    forward.mesh_rank = MeshRank { mesh, rank: 0 };
    let spec = StepSpec { parallel, ..spec(2, Precision::F32, Recompute::None) };
    compile_step(forward, &spec, &Nowhere::default()).unwrap_err().to_string()
}

#[test]
fn heads_that_cannot_be_shared_are_refused_with_degrees_that_fit() {
    let text = error("llama", 2, Mesh { tp: 3, ..Mesh::ONE }, Parallel::default());

    assert!(text.contains("4 attention heads with 2 key/value heads") && text.contains("1, 2, 4 would fit"), "{text}");
}

#[test]
fn more_chunks_than_blocks_are_refused() {
    let plain = error("llama", 2, Mesh { pp: 4, ..Mesh::ONE }, Parallel::default());
    let schedule = ScheduleKind::Interleaved { chunks: 2 };
    let interleaved = error("gpt2", 4, Mesh { pp: 2, ..Mesh::ONE }, Parallel { schedule, ..Parallel::default() });

    assert!(plain.contains("3 blocks cannot fill 4 pipeline chunks") && plain.contains("at most 3"), "{plain}");
    assert!(interleaved.contains("3 blocks cannot fill 4 pipeline chunks (pipeline_parallel_size 2 with 2 each)"));
}

#[test]
fn rows_that_cannot_be_cut_are_refused() {
    let text = error("llama", 2, Mesh { cp: 4, ..Mesh::ONE }, Parallel::default());

    assert!(text.contains("12 tokens") && text.contains("8 would fit"), "{text}");
}

#[test]
fn reproducible_run_rejects_context_parallelism_and_ranks_without_work() {
    let parallel = Parallel { logical_shards: Some(2), ..Parallel::default() };

    let axis = error("llama", 2, Mesh { cp: 2, ..Mesh::ONE }, parallel);
    let idle = error("llama", 2, Mesh { dp_shard: 3, ..Mesh::ONE }, parallel);

    assert!(axis.contains("context_parallel_size is 2, expected 1"), "{axis}");
    assert!(idle.contains("2 microbatches per step are too few for 3"), "{idle}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_reproducible_arrangement_compiles(
        family in families(), tied: bool, n_leaves in 1usize..9,
        pp in 1usize..4, dp_replicate in 1usize..4, dp_shard in 1usize..4, tp in 1usize..3, parallel in any_parallel(),
        target in support::targets(),
    ) {
        let mesh = Mesh { pp, dp_replicate, dp_shard, cp: 1, tp };
        let n_leaves = n_leaves.max(mesh.data_ranks());
        let parallel = Parallel { logical_shards: Some(n_leaves), ..parallel };
        let n = n_leaves.div_ceil(mesh.data_ranks());
        let spec = StepSpec { parallel, ..spec(n, Precision::F32, Recompute::None) };

        for rank in 0..mesh.size() {
            let (step, _) = compile((family, 6, 2, tied), &Objective::Supervised, &spec, MeshRank { mesh, rank }, &target);

            assert_no_live_buffer_is_overwritten(&step);
        }
    }
}
