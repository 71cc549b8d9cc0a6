//! Every model under every policy compiles to a program that verifies and whose buffers never overlap while in use.

#[allow(dead_code)] // ranks share nothing here
mod support;

use phalanx_strategies::compile::{Compiled, Parallel, StepSpec, compile_forward, compile_step};
use phalanx_strategies::cost::program_cost;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, FAMILIES, Family, Head, HfConfig, ModelConfig};
use phalanx_strategies::passes::fuse::fuse;
use phalanx_strategies::passes::lora::{LoraSpec, lora};
use phalanx_strategies::passes::memory::Region;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::{
    Binding, Column, DType, Hyper, Init, Instr, Kind, Op, Param, ParamPart, Phase, Program, Role, Site, ValueId, op,
};
use phalanx_strategies::target::{Nowhere, Target};
use proptest::prelude::*;
use support::{assert_no_live_buffer_is_overwritten, families, model, spec};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_model_compiles_under_every_policy(
        family in families(),
        layers in 1usize..4, kv_heads in prop::sample::select(vec![1usize, 2, 4]), tied: bool,
        n in 1usize..4, rows in 1usize..3,
        precision in prop::sample::select(vec![Precision::F32, Precision::Bf16, Precision::Fp8, Precision::F16]),
        recompute in prop::sample::select(vec![Recompute::None, Recompute::Selective, Recompute::Full]),
        target in support::targets(),
    ) {
        let forward = model(family, layers, kv_heads, tied)
            .forward(BatchShape { n_rows: rows, seq_len: 16 }, Head::Loss).unwrap();

        let step = compile_step(forward.clone(), &spec(n, precision, recompute), &target).unwrap();
        let eval = compile_forward(forward, &spec(n, precision, recompute), &target).unwrap();

        assert_no_live_buffer_is_overwritten(&step);
        assert_no_live_buffer_is_overwritten(&eval);
        prop_assert_eq!(step.program.bound(Role::Column(Column::Ids)).count(), n);
        prop_assert_eq!(step.program.bound(Role::LossSum).count(), 1);
        // Training and evaluation agree on the location of each parameter.
        for (i, v) in eval.program.values.iter().enumerate().filter(|(_, v)| v.kind == Kind::Parameter) {
            let there = step.program.values.iter().position(|w| w.kind == Kind::Parameter && w.name == v.name).unwrap();
            prop_assert_eq!(eval.layout.locations[i], step.layout.locations[there]);
        }
        let updates = step.program.instrs.iter().filter(|i| matches!(i.op, Op::Update(_))).count();
        prop_assert_eq!(updates, step.program.params.len());
    }
}

/// A device whose buffers begin at multiples of this number of bytes.
struct Aligned(usize);

impl Target for Aligned {
    fn scratch_bytes(&self, _: &Program, _: &Instr) -> usize {
        100
    }

    fn align(&self) -> usize {
        self.0
    }
}

#[test]
fn every_buffer_has_the_alignment_of_the_target() {
    let forward = model("llama", 2, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
    let compile = |align| {
        let spec = spec(2, Precision::Bf16, Recompute::Selective);
        compile_step(forward.clone(), &spec, &Aligned(align)).unwrap()
    };

    let (loose, tight) = (compile(64), compile(1024));

    assert_no_live_buffer_is_overwritten(&tight);
    let offsets =
        |c: &Compiled| c.layout.locations.iter().flatten().map(|p| p.offset).chain([c.layout.scratch.0]).collect();
    let at_multiple = |offsets: Vec<usize>| offsets.iter().all(|offset| offset.is_multiple_of(1024));
    assert!(at_multiple(offsets(&tight)) && !at_multiple(offsets(&loose)));
    assert!(tight.layout.total_bytes() > loose.layout.total_bytes());
}

#[test]
fn products_of_a_target_with_half_copies_read_no_f32_values() {
    let target = Nowhere { half_copies: true, ..Nowhere::default() };
    for n_microbatches in [1, 3] {
        let forward = model("llama", 1, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();

        let step = compile_step(forward, &spec(n_microbatches, Precision::Bf16, Recompute::None), &target).unwrap();

        let p = &step.program;
        let products = p.instrs.iter().filter(|i| matches!(i.op, Op::MatMul(_)));
        let factors: Vec<DType> = products.flat_map(|i| i.reads[..2].iter().map(|v| p.value(*v).dtype)).collect();
        assert!(factors.len() > 20 && factors.iter().all(|dtype| *dtype == DType::Bf16), "{factors:?}");
        let casts_of_weights =
            p.instrs.iter().filter(|i| matches!(i.op, Op::Cast(op::Cast)) && p.param_of(i.reads[0]).is_some());
        let n_matrices = p.params.iter().filter(|param| p.value(param.value).shape.len() == 2).count();
        // Each small matrix once, without the embedding, which no product reads.
        assert_eq!(casts_of_weights.count(), n_matrices - 1);
        assert_no_live_buffer_is_overwritten(&step);
    }
}

#[test]
fn logits_of_a_target_with_half_copies_and_their_gradient_are_in_half_width_unless_a_step_computes_in_f32() {
    let target = Nowhere { half_copies: true, ..Nowhere::default() };
    for (precision, expected) in
        [(Precision::F32, DType::F32), (Precision::Bf16, DType::Bf16), (Precision::F16, DType::F16)]
    {
        let forward =
            || model("llama", 1, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
        let types = |c: &Compiled| {
            let loss = c.program.instrs.iter().find(|i| matches!(i.op, Op::CrossEntropy(_))).unwrap();
            let values = loss.reads.iter().take(1).chain(loss.writes.get(1));
            values.map(|v| c.program.value(*v).dtype).collect::<Vec<_>>()
        };
        let spec = spec(1, precision, Recompute::None);

        let step = compile_step(forward(), &spec, &target).unwrap();
        let eval = compile_forward(forward(), &spec, &target).unwrap();

        assert_eq!((types(&step), types(&eval)), (vec![expected; 2], vec![DType::F32]), "{precision:?}");
    }
}

/// Every family, with tied weights or with adapters on its blocks, on one rank and on every axis that cuts the head.
#[test]
fn logits_of_a_target_with_chunks_have_the_tokens_of_a_chunk() {
    let target = Nowhere { head_chunk_tokens: Some(5), ..Nowhere::default() };
    let meshes =
        [Mesh::ONE, Mesh { tp: 2, ..Mesh::ONE }, Mesh { dp_shard: 2, ..Mesh::ONE }, Mesh { pp: 2, ..Mesh::ONE }];
    for (family, tied) in FAMILIES.iter().flat_map(|f| [(f.model_type, false), (f.model_type, true)]) {
        for (mesh, sequence_parallel) in meshes.into_iter().flat_map(|mesh| [(mesh, false), (mesh, true)]) {
            let lora = (!tied).then(|| support::adapters(family, 0.1));
            let parallel = Parallel { sequence_parallel, ..Parallel::default() };
            let spec = StepSpec { lora, parallel, ..spec(2, Precision::Bf16, Recompute::None) };
            let forward = || {
                let batch = BatchShape { n_rows: 2, seq_len: 16 };
                let mut forward = model(family, 2, 4, tied).forward(batch, Head::Loss).unwrap();
                forward.mesh_rank = MeshRank { mesh, rank: mesh.size() - 1 };
                forward
            };

            let step = compile_step(forward(), &spec, &target).unwrap();
            let whole = compile_step(forward(), &spec, &Nowhere::default()).unwrap();
            let eval = compile_forward(forward(), &spec, &target).unwrap();

            // 32 tokens in seven chunks, for each of two microbatches.
            let of_microbatch = [5, 5, 5, 5, 5, 5, 2];
            let what = format!("{family} {mesh:?}, sequence_parallel {sequence_parallel}");
            assert_eq!(rows_of_logits(&step), [of_microbatch; 2].concat(), "{what}");
            assert_eq!(rows_of_logits(&eval), of_microbatch, "{what}");
            assert_eq!(rows_of_logits(&whole), [32, 32], "{what}");
            let flops = |c: &Compiled| program_cost(&c.program).matmul_flops;
            assert_eq!(flops(&step), flops(&whole), "{what}");
        }
    }
}

fn rows_of_logits(c: &Compiled) -> Vec<usize> {
    let losses = c.program.instrs.iter().filter(|i| matches!(i.op, Op::CrossEntropy(_)));
    losses.map(|i| c.program.value(i.reads[0]).n_rows()).collect()
}

#[test]
fn adapter_of_a_scaled_product_takes_over_its_factor() {
    let json = r#"{"model_type": "granite", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 3, "num_attention_heads": 4, "residual_multiplier": 0.25}"#;
    let config = ModelConfig::try_from(&serde_json::from_str::<HfConfig>(json).unwrap()).unwrap();
    let mut program = config.forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
    let target_modules = vec!["q_proj".to_string(), "o_proj".to_string()];

    fuse(&mut program);
    lora(&mut program, &LoraSpec { rank: 2, alpha: 6.0, target_modules, ..LoraSpec::default() }).unwrap();

    let factors = |module: &str| -> Vec<f32> {
        let name = format!("{module}.lora_B.weight");
        let of = |instr: &Instr| match instr.op {
            Op::MatMul(m) if program.value(instr.reads[1]).name.ends_with(&name) => Some(m.alpha),
            _ => None,
        };
        program.instrs.iter().filter_map(of).collect()
    };
    assert_eq!((factors("q_proj"), factors("o_proj")), (vec![3.0; 3], vec![0.75; 3]));
}

#[test]
fn recomputation_trades_instructions_for_memory() {
    let compile = |recompute| {
        let forward = model("llama", 6, 2, false).forward(BatchShape { n_rows: 4, seq_len: 64 }, Head::Loss).unwrap();
        compile_step(forward, &spec(1, Precision::F32, recompute), &Nowhere::default()).unwrap()
    };
    let (none, selective, full) = (compile(Recompute::None), compile(Recompute::Selective), compile(Recompute::Full));
    let bytes = |c: &Compiled| c.layout.bytes(Region::Work);
    assert!(
        bytes(&full) < bytes(&selective) && bytes(&selective) < bytes(&none),
        "{} {} {}",
        bytes(&full),
        bytes(&selective),
        bytes(&none)
    );
    let attentions = |c: &Compiled| {
        c.program.instrs.iter().filter(|i| matches!(i.op, Op::Attention(_)) && i.site.phase == Phase::Backward).count()
    };
    assert_eq!((attentions(&none), attentions(&selective), attentions(&full)), (0, 0, 6));
}

#[test]
fn adjoints_recompute_norms_and_activations() {
    let forward = model("llama", 6, 2, false).forward(BatchShape { n_rows: 4, seq_len: 64 }, Head::Loss).unwrap();
    let step = compile_step(forward, &spec(1, Precision::F32, Recompute::None), &Nowhere::default()).unwrap();

    let instrs = &step.program.instrs;
    let in_backward = |op: fn(&Op) -> bool| -> Vec<usize> {
        let is = |i: &usize| {
            let instr = &instrs[*i];
            instr.site.phase == Phase::Backward && instr.site.block.is_some() && op(&instr.op)
        };
        (0..instrs.len()).filter(is).collect()
    };
    let recomputed =
        in_backward(|op| matches!(op, Op::MatMul(m) if m.trans_b) || matches!(op, Op::Norm(_) | Op::Activation(_)));
    let norms = in_backward(|op| matches!(op, Op::NormBackward(op::NormBackward { again: true, .. })));
    let activations =
        in_backward(|op| matches!(op, Op::ActivationBackward(op::ActivationBackward { again: true, .. })));
    assert_eq!((recomputed.len(), norms.len(), activations.len()), (0, 12, 6));
    for i in norms.into_iter().chain(activations) {
        let y = instrs[i].writes.last().unwrap();
        assert!(instrs[i + 1].reads.contains(y), "{:?} is not used at once", instrs[i]);
    }
}

#[test]
fn half_width_activations_take_less_memory_and_parameters_do_not_change() {
    let compile = |precision| {
        let forward = model("llama", 4, 2, false).forward(BatchShape { n_rows: 4, seq_len: 64 }, Head::Loss).unwrap();
        compile_step(forward, &spec(1, precision, Recompute::None), &Nowhere::default()).unwrap()
    };
    let (f32, bf16) = (compile(Precision::F32), compile(Precision::Bf16));
    assert!(bf16.layout.bytes(Region::Work) < f32.layout.bytes(Region::Work) * 3 / 4);
    assert_eq!(bf16.layout.bytes(Region::Parameters), f32.layout.bytes(Region::Parameters));
}

/// The operands' names of products in FP8 and of all others, of a Llama whose feed-forward layers are 40 wide.
fn products_in_fp8(tp: usize, lora: Option<LoraSpec>) -> (Vec<String>, Vec<String>) {
    let mut forward = model("llama", 1, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
    forward.mesh_rank = MeshRank { mesh: Mesh { tp, ..Mesh::ONE }, rank: 0 };
    let spec = StepSpec { lora, ..spec(1, Precision::Fp8, Recompute::None) };
    let p = compile_step(forward, &spec, &Nowhere::default()).unwrap().program;
    let products = p.instrs.iter().filter(|i| matches!(i.op, Op::MatMul(_)));
    let name = |i: &Instr| i.reads[..2].iter().map(|v| p.value(*v).name.clone()).collect::<Vec<_>>().join(" x ");
    let (fp8, others): (Vec<_>, Vec<_>) = products.partition(|i| i.op.compute() == Some(DType::E4m3));
    (fp8.into_iter().map(name).collect(), others.into_iter().map(name).collect())
}

#[test]
fn fp8_multiplies_linear_layers_of_blocks_with_whole_vectors_forward_and_for_gradients_of_inputs() {
    let (fp8, others) = products_in_fp8(1, None);

    let weights: Vec<&str> = fp8.iter().filter_map(|operands| operands.split(" x ").nth(1)).collect();
    assert_eq!(weights.len(), 4, "{fp8:?}");
    assert_eq!((weights[0], weights[1]), (weights[3], weights[2]), "qkv and o, forward and backward");
    // Gate, up and down are 40 wide: forward, gradients of inputs and of weights; those of qkv and o; the head's three.
    assert_eq!(others.len(), 2 * 3 + 2 + 3, "{others:?}");

    // Two ranks have 32 rows of qkv and 16 columns of o, four have 24 and 8.
    let n_in_fp8 = [2, 4].map(|tp| products_in_fp8(tp, None).0.len());
    assert_eq!(n_in_fp8, [4, 0]);
}

#[test]
fn fp8_stores_frozen_weights_as_its_products_read_them_and_leaves_adapters_in_bf16() {
    let (fp8, others) = products_in_fp8(1, Some(support::adapters("llama", 0.0)));

    // The input of the first layer has no gradient.
    assert_eq!(fp8.iter().filter(|operands| operands.ends_with(" as e4m3")).count(), 3, "{fp8:?}");
    assert_eq!(fp8.len(), 3);
    assert!(others.iter().any(|operands| operands.contains("lora_A")), "{others:?}");
    assert!(others.iter().any(|operands| operands.ends_with(" as bf16")), "feed-forward: {others:?}");
}

#[test]
fn adapter_run_updates_only_adapters_and_computes_no_base_gradient() {
    let forward = model("llama", 2, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
    let targets = ["q_proj", "v_proj", "down_proj"].map(String::from).to_vec();
    let lora = LoraSpec { rank: 4, alpha: 8.0, target_modules: targets, ..LoraSpec::default() };

    let step = compile_step(
        forward,
        &StepSpec { lora: Some(lora), ..spec(2, Precision::F32, Recompute::Full) },
        &Nowhere::default(),
    )
    .unwrap();

    assert_no_live_buffer_is_overwritten(&step);
    let p = &step.program;
    let updated: Vec<&str> =
        p.instrs.iter().filter(|i| matches!(i.op, Op::Update(_))).map(|i| p.value(i.writes[0]).name.as_str()).collect();
    // A of q and v, their two B, and A and B of down.
    assert_eq!(updated.len(), 2 * 5);
    assert!(updated.iter().all(|n| n.contains("lora_")), "{updated:?}");
    let base_grads = p
        .values
        .iter()
        .filter(|v| v.kind == Kind::Gradient && !v.name.contains("lora_") && v.name.starts_with("d."))
        .count();
    assert_eq!(base_grads, 0);
}

/// Adapters on all seven layers of a Llama's blocks.
fn step_with_adapters(dropout: f32, precision: Precision) -> Compiled {
    let forward = model("llama", 3, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
    let target_modules = Family::named("llama").unwrap().linears.iter().map(ToString::to_string).collect();
    let lora = LoraSpec { rank: 4, alpha: 8.0, target_modules, dropout, ..LoraSpec::default() };
    let spec = StepSpec { lora: Some(lora), ..spec(1, precision, Recompute::None) };
    compile_step(forward, &spec, &Nowhere::default()).unwrap()
}

#[test]
fn adapters_of_layers_that_are_computed_together_share_their_products_with_the_input_and_its_gradient() {
    let products = |dropout, phase| {
        let step = step_with_adapters(dropout, Precision::F32);
        let is_counted = |i: &&Instr| i.site.phase == phase && i.site.block == Some(1) && matches!(i.op, Op::MatMul(_));
        step.program.instrs.iter().filter(is_counted).count()
    };

    // The base has 4 products in a block, and as many for gradients of inputs.
    assert_eq!(products(0.0, Phase::Forward), 4 + 4 + 7, "4 of A and 7 of B");
    assert_eq!(products(0.0, Phase::Backward), 4 + 2 * (4 + 7));
    // Inputs with draws of their own share nothing.
    assert_eq!(products(0.1, Phase::Forward), 4 + 2 * 7);
    assert_eq!(products(0.1, Phase::Backward), 4 + 2 * (2 * 7));
}

#[test]
fn gradient_of_what_several_adapters_read_is_written_in_columns_without_a_copy() {
    for precision in [Precision::F32, Precision::Bf16] {
        let step = step_with_adapters(0.0, precision);

        assert_no_live_buffer_is_overwritten(&step);
        let (p, at) = (&step.program, |v: ValueId| step.layout.locations[v.0 as usize]);
        let written = p.instrs.iter().filter_map(|i| match i.op {
            Op::MatMul(m) if p.value(i.writes[0]).name == "d.lora.down" => {
                let in_place = m.residual.then(|| at(i.reads[2]) == at(i.writes[0]));
                m.c_columns.map(|c| (c.start, m.replaces, in_place))
            }
            _ => None,
        });
        let of_gate_up = [(4, false, None), (0, true, Some(true))];
        let of_qkv = [(8, false, None), (4, true, Some(true)), (0, true, Some(true))];
        let of_block = [&of_gate_up[..], &of_qkv].concat();
        assert_eq!(written.collect::<Vec<_>>(), of_block.repeat(3), "{precision:?}");
    }
}

#[test]
fn unknown_adapter_target_lists_the_modules_of_the_model() {
    let forward = model("llama", 1, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
    let lora = LoraSpec { rank: 4, alpha: 8.0, target_modules: vec!["query".into()], ..LoraSpec::default() };
    let err = compile_step(
        forward,
        &StepSpec { lora: Some(lora), ..spec(1, Precision::F32, Recompute::None) },
        &Nowhere::default(),
    )
    .unwrap_err();
    assert_eq!(
        err.to_string(),
        "lora_target_modules names `query`, which this model does not have; it has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"
    );
}

#[test]
fn large_model_compiles_in_milliseconds() {
    let json = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192}"#;
    let config = ModelConfig::try_from(&serde_json::from_str::<HfConfig>(json).unwrap()).unwrap();
    let forward = config.forward(BatchShape { n_rows: 1, seq_len: 8192 }, Head::Loss).unwrap();
    let mut times = Vec::new();
    for _ in 0..5 {
        let started = std::time::Instant::now();
        let step =
            compile_step(forward.clone(), &spec(8, Precision::Bf16, Recompute::Full), &Nowhere::default()).unwrap();
        times.push(started.elapsed());
        assert_eq!(step.program.n_params(), 70_553_706_496);
    }
    // The median: a single run may take long because the machine is busy.
    times.sort();
    println!("{times:?}");
    assert!(times[2] < std::time::Duration::from_millis(500), "{times:?}");
}

/// A user-defined model: one operation over the ids and labels, two trained parameters and a frozen one.
fn user_defined() -> Program {
    let mut p = Program::default();
    let mut input = |role, shape: &[usize], dtype| {
        let value = p.add_value(format!("{role:?}"), shape, dtype, Kind::Input);
        p.bindings.push(Binding::new(role, value));
        value
    };
    let inputs =
        [input(Role::Column(Column::Ids), &[32], DType::I32), input(Role::Column(Column::Labels), &[32], DType::I32)];
    let hyper = input(Role::Hyper, &[Hyper::LEN], DType::F64);
    let mut param = |name: &str, shape: &[usize], trainable| {
        let value = p.add_value(name, shape, DType::F32, Kind::Parameter);
        let parts = vec![ParamPart::whole(name, shape)];
        p.params.push(Param { trainable, ..Param::whole(value, shape, parts, Init::Zeros) });
        value
    };
    let params = [param("weight", &[8, 4], true), param("bias", &[8], true)];
    param("running_mean", &[8], false);
    let loss = p.add_value("loss_sum", &[], DType::F64, Kind::Output);
    let op = Op::Opaque(op::Opaque { model: 0, n_inputs: 2, n_params: 2, residual: false, gradient: false });
    let reads = inputs.into_iter().chain(params).chain([hyper]).collect();
    p.push(op, reads, vec![loss], Site { phase: Phase::Forward, block: None, microbatch: 0 });
    p.bindings.push(Binding::new(Role::LossSum, loss));
    p
}

#[test]
fn user_defined_model_accumulates_clips_and_updates_like_any_other() {
    for n in 1..4 {
        let step =
            compile_step(user_defined(), &spec(n, Precision::F32, Recompute::None), &Nowhere::default()).unwrap();

        assert_no_live_buffer_is_overwritten(&step);
        let p = &step.program;
        let runs: Vec<&Instr> = p.instrs.iter().filter(|i| matches!(i.op, Op::Opaque(_))).collect();
        assert_eq!(runs.len(), n);
        for (k, run) in runs.iter().enumerate() {
            let carries =
                matches!(run.op, Op::Opaque(op::Opaque { residual, gradient: true, .. }) if residual == (k > 0));
            assert!(carries, "run {k} is {}", p.describe_instr(run));
            // It continues the results of the previous run, at the same locations.
            let carried = &run.reads[5..];
            assert_eq!(carried, if k == 0 { &[] } else { runs[k - 1].writes.as_slice() });
            for (from, to) in carried.iter().zip(&run.writes) {
                assert_eq!(step.layout.locations[from.0 as usize], step.layout.locations[to.0 as usize]);
            }
        }
        let last = &runs[n - 1].writes;
        assert_eq!(p.bound(Role::LossSum).collect::<Vec<_>>(), last[..1]);
        let reads_of = |matches: fn(&Op) -> bool, i: usize| {
            p.instrs.iter().filter(|x| matches(&x.op)).map(|x| x.reads[i]).collect::<Vec<_>>()
        };
        assert_eq!(reads_of(|op| matches!(op, Op::SumSquares(_)), 0), last[1..]);
        assert_eq!(reads_of(|op| matches!(op, Op::Update(_)), 3), last[1..]);
        let updated: Vec<&str> =
            reads_of(|op| matches!(op, Op::Update(_)), 0).iter().map(|v| p.value(*v).name.as_str()).collect();
        assert_eq!(updated, ["weight", "bias"]);
    }
}

#[test]
fn evaluating_a_user_defined_model_computes_no_gradients() {
    let eval = compile_forward(user_defined(), &spec(2, Precision::F32, Recompute::None), &Nowhere::default()).unwrap();

    let [instr] = eval.program.instrs.as_slice() else { panic!("{} instructions", eval.program.instrs.len()) };
    assert!(matches!(instr.op, Op::Opaque(op::Opaque { gradient: false, .. })));
    assert_eq!(instr.writes.len(), 1);
}

#[test]
fn dropout_is_part_of_a_training_step_and_not_of_evaluation() {
    let forward = model("llama", 2, 2, false).forward(BatchShape { n_rows: 1, seq_len: 16 }, Head::Loss).unwrap();
    let lora =
        LoraSpec { rank: 4, alpha: 8.0, target_modules: vec!["q_proj".into()], dropout: 0.1, ..LoraSpec::default() };
    let spec = StepSpec { lora: Some(lora), ..spec(1, Precision::F32, Recompute::None) };
    let n_dropouts = |c: &Compiled| c.program.instrs.iter().filter(|i| matches!(i.op, Op::Dropout(_))).count();

    let step = compile_step(forward.clone(), &spec, &Nowhere::default()).unwrap();
    let evaluation = compile_forward(forward, &spec, &Nowhere::default()).unwrap();

    // Forward in both blocks; in the second also backward, and again for the gradient of its adapter. Before the first adapter nothing
    // is trained, so nothing has a gradient or is kept.
    assert_eq!(n_dropouts(&step), 4);
    assert_eq!(n_dropouts(&evaluation), 0);
    assert_eq!(evaluation.program.bound(Role::Column(Column::DropoutKeys)).count(), 0);
}
