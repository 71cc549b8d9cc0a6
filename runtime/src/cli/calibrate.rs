//! This machine as hardware of a plan: rates read off a measured step of a small model.

use crate::config::JobConfig;
use crate::cpu::executor::Timings;
use crate::cpu::{CpuMachine, available_threads, on_device_thread, scratch_bytes};
use crate::groups::Groups;
use crate::train::JobError;
use crate::train::plan::ModelPlan;
use phalanx_strategies::compile::{Compiled, Parallel, StepSpec, compile_step};
use phalanx_strategies::cost::{Cost, instr_cost};
use phalanx_strategies::model::{BatchShape, Family, Head, ModelConfig};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::plan::Hardware;
use phalanx_strategies::plan::hardware::{Link, Rate};

/// Steps of which the fastest counts.
const N_STEPS: usize = 4;

/// Seconds and work of one kind of instruction.
#[derive(Clone, Copy, Default)]
struct Measured {
    seconds: f64,
    cost: Cost,
}

/// What ranks of this machine do: as many threads and as much memory for each as their number leaves.
pub(super) fn this_machine(
    named: Hardware,
    config: &JobConfig,
    plan: &ModelPlan,
    n_ranks: u32,
) -> Result<Hardware, JobError> {
    let n_threads = (config.precision.threads.unwrap_or_else(available_threads) / n_ranks.max(1) as usize).max(1);
    let precision = plan.spec.precision;
    let [products, attention, streams] = on_device_thread(n_threads, || measure(precision))??;
    // Without a peak that can be looked up, the rate that was reached is the peak.
    let peak_flops = products.cost.matmul_flops / products.seconds;
    let rate = Rate { peak_flops, fraction: 1.0, fill_s: 1e-6 };
    let attention_fraction = (attention.cost.attention_flops / attention.seconds / peak_flops).min(1.0);
    let memory_bytes_per_s = streams.cost.streamed_bytes / streams.seconds;
    // What one rank copies another one's core has to read: a link is as fast as memory, and needs a core.
    let intra_node = Link { bytes_per_s: memory_bytes_per_s / 2.0, fraction: 1.0, hop_s: 5e-6 };
    Ok(Hardware {
        matmul_f32: rate,
        matmul_bf16: rate,
        attention_fraction,
        memory_bytes: memory_bytes().unwrap_or(named.memory_bytes) / u64::from(n_ranks.max(1)),
        memory_bytes_per_s,
        memory_fraction: 1.0,
        launch_s: 1e-6,
        devices_per_node: n_ranks,
        intra_node,
        ..named
    })
}

/// Runs a small model and sorts its instructions: products, attention, everything else.
fn measure(precision: Precision) -> Result<[Measured; 3], JobError> {
    let compiled = probe(precision)?;
    let mut machine = CpuMachine::new(&[&compiled])?;
    let mut best: Vec<f64> = vec![f64::INFINITY; compiled.program.instrs.len()];
    let mut timings = Timings::new();
    for _ in 0..N_STEPS {
        machine.run_timed(&compiled, &mut [], &mut Groups::none(), &mut timings)?;
        best.iter_mut().zip(&timings).for_each(|(best, t)| *best = best.min(t.as_secs_f64()));
    }
    let mut kinds = [Measured::default(); 3];
    for (instr, seconds) in compiled.program.instrs.iter().zip(best) {
        let cost = instr_cost(&compiled.program, instr);
        let kind = if cost.matmul_flops > 0.0 {
            0
        } else if cost.attention_flops > 0.0 {
            1
        } else {
            2
        };
        kinds[kind].seconds += seconds;
        kinds[kind].cost = kinds[kind].cost + cost;
    }
    Ok(kinds)
}

/// A step of a model whose operands fill caches, all weights and inputs zero: the time does not depend on them.
fn probe(precision: Precision) -> Result<Compiled, JobError> {
    let model = ModelConfig {
        family: Family::Llama,
        vocab_size: 4096,
        hidden_size: 512,
        intermediate_size: 1408,
        n_layers: 2,
        n_heads: 8,
        n_kv_heads: 8,
        head_dim: 64,
        max_positions: 256,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: phalanx_strategies::model::RopeScaling::None,
        tie_embeddings: false,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        windows: vec![None; 2],
        init_std: 0.02,
    };
    let spec = StepSpec {
        n_microbatches: 1,
        precision,
        recompute: Recompute::None,
        lora: None,
        optimizer: phalanx_strategies::passes::optimizer::OptimizerSpec::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
        },
        max_grad_norm: Some(1.0),
        offload_optimizer: false,
        parallel: Parallel::default(),
    };
    let forward = model.forward(BatchShape { n_rows: 4, seq_len: 256 }, Head::Loss);
    let forward = forward.map_err(|source| JobError::Model { path: "probe".into(), source })?;
    Ok(compile_step(forward, &spec, scratch_bytes)?)
}

/// Memory of this machine; `None` where the system does not tell.
fn memory_bytes() -> Option<u64> {
    let mut system = sysinfo::System::new().ok()?;
    system.refresh_memory();
    Some(system.total_memory())
}
