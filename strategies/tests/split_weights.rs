//! Split weights: programs over the same weights store them alike, and steps in bf16 convert no weight.

#[allow(dead_code)] // ranks share nothing here
mod support;

use phalanx_strategies::compile::{Compiled, StepSpec, compile_forward, compile_step};
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, Head};
use phalanx_strategies::passes::fully_sharded::ZeroStage;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::{Kind, Op, op};
use phalanx_strategies::target::Nowhere;
use proptest::prelude::*;
use support::{any_parallel, assert_no_live_buffer_is_overwritten, families, model, spec};

const TARGET: Nowhere =
    Nowhere { scratch_bytes: 0, half_copies: true, split_weights: true, head_chunk_tokens: Some(5) };

/// The names of the split weights.
fn split(c: &Compiled) -> Vec<&str> {
    let params = c.program.params.iter().filter(|param| c.program.is_split(param.value));
    params.map(|param| c.program.value(param.value).name.as_str()).collect()
}

fn meshes() -> impl Strategy<Value = Mesh> {
    let one = Mesh::ONE;
    prop::sample::select(vec![
        one,
        Mesh { dp_replicate: 2, ..one },
        Mesh { dp_shard: 2, ..one },
        Mesh { tp: 2, ..one },
        Mesh { cp: 2, ..one },
        Mesh { pp: 2, dp_shard: 2, ..one },
        Mesh { dp_shard: 2, tp: 2, ..one },
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn training_and_evaluation_split_the_same_weights(
        family in families(), tied: bool, mesh in meshes(), parallel in any_parallel(), head_logits: bool,
        precision in prop::sample::select(vec![Precision::F32, Precision::Bf16, Precision::F16]),
        dropout in prop::option::of(support::dropouts()), magnitudes: bool, optimizer in support::optimizers(),
    ) {
        let lora = dropout.map(|dropout| phalanx_strategies::passes::lora::LoraSpec {
            magnitudes,
            ..support::adapters(family, dropout)
        });
        let optimizer = support::fitting(optimizer, &[mesh]);
        let spec = StepSpec { lora, optimizer, parallel, ..spec(2, precision, Recompute::Selective) };
        let batch = BatchShape { n_rows: 1, seq_len: 16 };
        for rank in 0..mesh.size() {
            let forward = |head| {
                let mut forward = model(family, 4, 2, tied).forward(batch, head).unwrap();
                forward.mesh_rank = MeshRank { mesh, rank };
                forward
            };
            let head = if head_logits { Head::Logits } else { Head::Loss };

            let step = compile_step(forward(Head::Loss), &spec, &TARGET);
            let evaluation = compile_forward(forward(head), &spec, &TARGET);

            let (Ok(step), Ok(evaluation)) = (step, evaluation) else { return Ok(()) };
            prop_assert_eq!(split(&step), split(&evaluation));
            assert_no_live_buffer_is_overwritten(&step);
        }
    }
}

#[test]
fn step_in_bf16_converts_no_weight_unless_ranks_gather_updated_ones() {
    for (tied, stage, shards, expected) in [
        (false, ZeroStage::Three, 1, 0),
        (true, ZeroStage::Three, 1, 0),
        (false, ZeroStage::One, 1, 0),
        (false, ZeroStage::Three, 2, 0),
        (false, ZeroStage::Two, 2, 0),
        // The ranks gather updated weights in f32: four matrices of each of two blocks, and the head.
        (false, ZeroStage::One, 2, 9),
    ] {
        let mut forward =
            model("llama", 2, 2, tied).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
        forward.mesh_rank = MeshRank { mesh: Mesh { dp_shard: shards, ..Mesh::ONE }, rank: 0 };
        let mut spec = spec(1, Precision::Bf16, Recompute::None);
        spec.parallel.zero_stage = stage;

        let step = compile_step(forward, &spec, &TARGET).unwrap();

        let is_weight =
            |v| step.program.value(v).kind == Kind::Parameter || step.program.value(v).name.contains("embed");
        let casts = step.program.instrs.iter().filter(|i| i.op == Op::Cast(op::Cast) && is_weight(i.reads[0]));
        assert_eq!(casts.count(), expected, "{tied} {stage:?} {shards}");
    }
}

#[test]
fn reproducible_step_splits_no_weight() {
    let forward = model("llama", 2, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
    let step = |logical_shards| {
        let mut spec = spec(2, Precision::Bf16, Recompute::None);
        spec.parallel.logical_shards = logical_shards;
        compile_step(forward.clone(), &spec, &TARGET).unwrap()
    };

    assert_eq!([None, Some(2)].map(|shards| split(&step(shards)).len()), [9, 0]);
}
