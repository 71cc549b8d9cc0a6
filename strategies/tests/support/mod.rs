//! Small models and the replay of a layout.

use phalanx_strategies::compile::{Compiled, Offload, Parallel, StepSpec};
use phalanx_strategies::mesh::Mesh;
use phalanx_strategies::model::{FAMILIES, Family, HfConfig, ModelConfig};
use phalanx_strategies::objective::{Cpo, Dpo, DpoLoss, Kto, Objective, Orpo, Weighted};
use phalanx_strategies::optimizer::{AdamW, OptimizerSpec};
use phalanx_strategies::passes::context_parallel::CpComm;
use phalanx_strategies::passes::fully_sharded::ZeroStage;
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::passes::memory::{BufferLocation, Region};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::pipeline::ScheduleKind;
use phalanx_strategies::program::{Op, ValueId, op};
use phalanx_strategies::target::Nowhere;
use proptest::prelude::*;

pub fn model(family: &str, layers: usize, kv_heads: usize, tied: bool) -> ModelConfig {
    // Every family reads these names; GPT-2 has no shared key/value heads.
    let json = format!(
        r#"{{"model_type": "{family}", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": {layers}, "num_attention_heads": 4, "num_key_value_heads": {kv_heads},
        "max_position_embeddings": 64, "tie_word_embeddings": {tied}}}"#
    );
    ModelConfig::try_from(&serde_json::from_str::<HfConfig>(&json).unwrap()).unwrap()
}

/// Any family, by name.
pub fn families() -> impl Strategy<Value = &'static str> {
    prop::sample::select(FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>())
}

/// Any target: the passes that only some devices ask for, in every combination.
pub fn targets() -> impl Strategy<Value = Nowhere> {
    (any::<[bool; 2]>(), prop::option::of(3usize..12)).prop_map(|([half_copies, split_weights], head_chunk_tokens)| {
        Nowhere { scratch_bytes: 100, half_copies, split_weights, head_chunk_tokens }
    })
}

/// Any optimizer, with its defaults.
pub fn optimizers() -> impl Strategy<Value = OptimizerSpec> {
    prop::sample::select(OptimizerSpec::all())
}

/// The optimizer, or AdamW if its state is in blocks and tensor parallelism would cut these, as it does in such small models.
pub fn fitting(optimizer: OptimizerSpec, meshes: &[Mesh]) -> OptimizerSpec {
    let cuts = optimizer.has_blocks() && meshes.iter().any(|mesh| mesh.tp > 1);
    if cuts { OptimizerSpec::AdamW(AdamW::default()) } else { optimizer }
}

/// Any objective.
pub fn objectives() -> impl Strategy<Value = Objective> {
    let losses = vec![DpoLoss::Sigmoid, DpoLoss::Hinge, DpoLoss::Ipo];
    let dpo = (prop::sample::select(losses), prop::sample::select(vec![0.0, 0.5]), any::<bool>()).prop_map(
        |(loss, alpha, computed_before)| {
            Objective::Dpo(Dpo { beta: 0.1, loss, label_smoothing: 0.2, alpha, computed_before })
        },
    );
    let cpo = prop::option::of(Just(0.5))
        .prop_map(|margin| Objective::Cpo(Cpo { beta: 0.1, margin, alpha: 1.0, label_smoothing: 0.0 }));
    let kto = Just(Objective::Kto(Kto { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 0.5 }));
    prop_oneof![
        Just(Objective::Supervised),
        Just(Objective::Weighted(Weighted)),
        dpo,
        cpo,
        kto,
        Just(Objective::Orpo(Orpo { beta: 0.1 }))
    ]
}

/// Without dropout, adapters of layers that are computed together share products.
pub fn dropouts() -> impl Strategy<Value = f32> {
    prop::sample::select(vec![0.0, 0.1])
}

/// Adapters on the first two linear layers of a family's blocks, which may be parts of one product, and on the last.
pub fn adapters(family: &str, dropout: f32) -> LoraSpec {
    let linears = Family::named(family).unwrap().linears;
    let targets = linears[..2].iter().chain(linears.last());
    let target_modules = targets.map(ToString::to_string).collect();
    LoraSpec { rank: 2, alpha: 4.0, target_modules, dropout, ..LoraSpec::default() }
}

pub fn spec(n_microbatches: usize, precision: Precision, recompute: Recompute) -> StepSpec {
    StepSpec {
        n_microbatches,
        precision,
        recompute,
        lora: None,
        optimizer: OptimizerSpec::AdamW(AdamW { beta2: 0.95, weight_decay: 0.1, ..AdamW::default() }),
        max_grad_norm: Some(1.0),
        offload: Offload::default(),
        parallel: Parallel::default(),
    }
}

/// Replays the program over its layout: no instruction may overwrite a buffer that a later instruction reads.
pub fn assert_no_live_buffer_is_overwritten(compiled: &Compiled) {
    let p = &compiled.program;
    let mut last_read = vec![None; p.values.len()];
    for (i, instr) in p.instrs.iter().enumerate() {
        instr.reads.iter().for_each(|v| last_read[v.0 as usize] = Some(i));
        let Op::Await(op::Await(c)) = instr.op else { continue };
        // Peers may read the operands of a collective until its await, unless a result took over the location.
        let start = p.instrs[..i].iter().find(|s| s.op == Op::Start(op::Start(c))).unwrap();
        for (r, operand) in start.reads.iter().enumerate() {
            let location = location_of(compiled, *operand);
            if start.writes.get(r).is_none_or(|w| location_of(compiled, *w) != location) {
                last_read[operand.0 as usize] = last_read[operand.0 as usize].max(Some(i));
            }
        }
    }
    p.bindings.iter().for_each(|b| last_read[b.value.0 as usize] = Some(usize::MAX));
    let mut live: Vec<(usize, usize, usize)> = Vec::new(); // start, end, value
    for (i, instr) in p.instrs.iter().enumerate() {
        for w in &instr.writes {
            let location = location_of(compiled, *w).unwrap();
            if location.region != Region::Work {
                continue;
            }
            let (start, end) = (location.offset, location.offset + p.value(*w).size_bytes());
            for (s, e, v) in &live {
                let needed = last_read[*v].is_some_and(|l| l > i) && *v != w.0 as usize;
                // A result may overwrite an operand that ends here only where the operation permits it.
                let ends_here = last_read[*v] == Some(i);
                let permitted = instr
                    .op
                    .in_place_pairs(instr.reads.len())
                    .iter()
                    .any(|(r, k)| instr.reads[*r].0 as usize == *v && instr.writes[*k] == *w);
                let overlap = start < *e && *s < end;
                assert!(
                    !(overlap && (needed || (ends_here && !permitted))),
                    "{} overwrites {}",
                    p.describe_instr(instr),
                    p.values[*v].name
                );
            }
            live.push((start, end, w.0 as usize));
        }
        live.retain(|(_, _, v)| last_read[*v].is_some_and(|l| l > i));
    }
}

fn location_of(c: &Compiled, v: ValueId) -> Option<BufferLocation> {
    c.layout.locations[v.0 as usize]
}

/// All parallel settings that a mesh leaves open, except reproducible runs.
pub fn any_parallel() -> impl Strategy<Value = Parallel> {
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
