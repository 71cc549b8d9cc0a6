//! Every model compiles for every rank of every mesh, to programs that verify and whose buffers never overlap while in
//! use.

mod support;

use phalanx_strategies::compile::{Compiled, Parallel, StepSpec, compile_forward, compile_step};
use phalanx_strategies::mesh::{Mesh, Place};
use phalanx_strategies::model::{BatchShape, Head};
use phalanx_strategies::passes::context_parallel::CpComm;
use phalanx_strategies::passes::fully_sharded::ZeroStage;
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::pipeline::ScheduleKind;
use proptest::prelude::*;
use support::{assert_no_live_buffer_is_overwritten, model, spec};

fn any_mesh() -> impl Strategy<Value = Mesh> {
    (1usize..4, 1usize..3, 1usize..4, 1usize..3, prop::sample::select(vec![1usize, 2, 4]))
        .prop_map(|(pp, dp_replicate, dp_shard, cp, tp)| Mesh { pp, dp_replicate, dp_shard, cp, tp })
        .prop_filter("small", |m| m.size() <= 24)
}

fn any_parallel() -> impl Strategy<Value = Parallel> {
    let schedules = vec![
        ScheduleKind::GPipe,
        ScheduleKind::OneF1B,
        ScheduleKind::Interleaved { chunks: 2 },
        ScheduleKind::ZeroBubble,
    ];
    (
        prop::sample::select(vec![ZeroStage::One, ZeroStage::Two, ZeroStage::Three]),
        0usize..3,
        prop::sample::select(schedules),
        any::<bool>(),
        prop::sample::select(vec![CpComm::Ring, CpComm::AllGather]),
        prop::sample::select(vec![1usize, 4 << 10, 25 << 20]),
    )
        .prop_map(|(zero_stage, prefetch, schedule, sequence_parallel, cp_comm, bucket_bytes)| Parallel {
            zero_stage,
            prefetch,
            schedule,
            sequence_parallel,
            cp_comm,
            bucket_bytes,
            logical_shards: None,
        })
}

fn compile(
    (family, layers, kv_heads, tied): (&str, usize, usize, bool),
    spec: &StepSpec,
    place: Place,
) -> (Compiled, Compiled) {
    let forward = || {
        let batch = BatchShape { n_rows: 1, seq_len: 16 };
        let mut forward = model(family, layers, kv_heads, tied).forward(batch, Head::Loss).unwrap();
        forward.place = place;
        forward
    };
    let step = compile_step(forward(), spec, |_, _| 100).unwrap();
    (step, compile_forward(forward(), spec, |_, _| 0).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_model_compiles_for_every_rank_of_every_mesh(
        family in prop::sample::select(vec!["llama", "qwen2", "qwen3", "gpt2"]),
        kv_heads in prop::sample::select(vec![1usize, 2, 4]), tied: bool, adapters: bool, n in 1usize..4,
        mesh in any_mesh(), parallel in any_parallel(),
        precision in prop::sample::select(vec![Precision::F32, Precision::Bf16]),
        recompute in prop::sample::select(vec![Recompute::None, Recompute::Selective, Recompute::Full]),
    ) {
        let targets = if family == "gpt2" { ["c_attn", "c_proj"] } else { ["k_proj", "down_proj"] };
        let lora = adapters.then(|| LoraSpec { rank: 2, alpha: 4.0, target_modules: targets.map(String::from).to_vec() });
        let spec = StepSpec { parallel, lora, ..spec(n, precision, recompute) };

        for rank in 0..mesh.size() {
            let (step, eval) = compile((family, 6, kv_heads, tied), &spec, Place { mesh, rank });

            assert_no_live_buffer_is_overwritten(&step);
            assert_no_live_buffer_is_overwritten(&eval);
        }
    }
}
