//! Steps of a model with 8 billion parameters: adapters on weights in bf16, in FP8 and in 4 bits, and all weights with averages in 8
//! bits, in bf16 and in FP8.
//! Rows of whole steps are followed by the operations that take the longest.

use super::Report;
use super::rates::operations;
use crate::measure;
use crate::step::{StepCase, Timed, small_model};
use anyhow::{Context, Result};
use phalanx_cuda::CudaDevice;
use phalanx_device::Device;
use phalanx_strategies::compile::StepSpec;
use phalanx_strategies::cost::instr_cost;
use phalanx_strategies::model::{BatchShape, ModelConfig};
use phalanx_strategies::optimizer::{AdamW, AdamW8bit, OptimizerSpec};
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::Packing;

/// Steps that are measured, and runs by instruction.
const N_STEPS: usize = 7;
const N_RUNS: usize = 2;
/// Operations that are shown of each step.
const N_SHOWN: usize = 24;
/// The part of the memory that a step may plan with: contexts and libraries take the rest.
const USABLE: f64 = 0.97;

/// Llama 3.1 8B.
fn llama_8b() -> ModelConfig {
    ModelConfig {
        vocab_size: 128_256,
        hidden_size: 4096,
        intermediate_size: 14_336,
        n_layers: 32,
        n_heads: 32,
        n_kv_heads: 8,
        head_dim: 128,
        max_positions: 8192,
        rope_theta: 500_000.0,
        windows: vec![None; 32],
        init_std: 0.02,
        ..small_model()
    }
}

/// Adapters of rank 16 on all products of the blocks.
fn adapters(packing: Option<Packing>) -> LoraSpec {
    let modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let target_modules = modules.map(String::from).to_vec();
    LoraSpec { rank: 16, alpha: 32.0, target_modules, packing, ..LoraSpec::default() }
}

const NF4: Option<Packing> = Some(Packing::Nf4 { double: false });

/// How the model is trained.
#[derive(Clone, Copy)]
enum Trained {
    /// Adapters, on frozen weights that are stored like this, or as their products round them.
    Adapters(Option<Packing>),
    /// All weights, by AdamW with averages in 8 bits.
    Whole,
}

const CASES: [(&str, usize, Precision, Trained); 8] = [
    ("adapters on bf16, 1 row", 1, Precision::Bf16, Trained::Adapters(None)),
    ("adapters on fp8, 1 row", 1, Precision::Fp8, Trained::Adapters(None)),
    ("adapters on bf16, 2 rows", 2, Precision::Bf16, Trained::Adapters(None)),
    ("adapters on fp8, 2 rows", 2, Precision::Fp8, Trained::Adapters(None)),
    ("adapters on nf4, 1 row", 1, Precision::Bf16, Trained::Adapters(NF4)),
    ("adapters on nf4, 2 rows", 2, Precision::Bf16, Trained::Adapters(NF4)),
    ("all weights, AdamW in 8 bits, 2 rows", 2, Precision::Bf16, Trained::Whole),
    ("all weights, AdamW in 8 bits, fp8, 2 rows", 2, Precision::Fp8, Trained::Whole),
];

/// Names of the steps.
pub(super) fn names() -> Vec<String> {
    CASES.map(|(name, ..)| name.to_owned()).to_vec()
}

fn case(gpu: &CudaDevice, name: &str, n_rows: usize, precision: Precision, trained: Trained) -> StepCase {
    let is_software = measure::is_software(gpu);
    let model = if is_software { small_model() } else { llama_8b() };
    let batch = BatchShape { n_rows, seq_len: if is_software { 64 } else { 4096 } };
    let averages_in_8_bits = OptimizerSpec::AdamW8bit(AdamW8bit(AdamW { weight_decay: 0.1, ..AdamW::default() }));
    StepCase::new(name, model, batch, precision).trained(|spec| match trained {
        Trained::Adapters(packing) => StepSpec { lora: Some(adapters(packing)), ..spec },
        Trained::Whole => StepSpec { optimizer: averages_in_8_bits, ..spec },
    })
}

/// Measures each step, with the least recomputation that the memory allows.
pub(super) fn run(gpu: &CudaDevice, is_asked: impl Fn(&str) -> bool) -> Result<Report> {
    let columns = ["step", "recomputation", "n", "ms", "tokens/s", "TFLOP/s", "of peak", "TB/s", "GiB", "planned GiB"];
    let mut report = Report::new(&gpu.gpus()[0].name, &columns);
    for (name, n_rows, precision, trained) in CASES.into_iter().filter(|(name, ..)| is_asked(name)) {
        let outcome = step(gpu, &case(gpu, name, n_rows, precision, trained), &mut report);
        report.check(outcome.context(name));
    }
    Ok(report)
}

/// Measures a step, if it fits.
fn step(gpu: &CudaDevice, case: &StepCase, report: &mut Report) -> Result<()> {
    let usable = (gpu.gpus()[0].memory_bytes as f64 * USABLE) as usize;
    let mut needed = 0;
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let case = case.clone().trained(|spec| StepSpec { recompute, ..spec });
        needed = gpu.bytes_for(&[&case.compiled(gpu)?]);
        if needed <= usable {
            let timed = case.time(gpu, N_RUNS, N_STEPS)?;
            rows(gpu, &case, &timed, needed, report);
            return Ok(());
        }
    }
    report.row(&[&case.name, &format!("not measured: it needs {} GiB", gib(needed))]);
    Ok(())
}

fn gib(bytes: usize) -> String {
    format!("{:.2}", bytes as f64 / (1u64 << 30) as f64)
}

fn rows(gpu: &CudaDevice, case: &StepCase, timed: &Timed, planned: usize, report: &mut Report) {
    let (peak, c) = (gpu.peak_flops(true), &timed.compiled);
    let share = |flops: f64| format!("{:.0} %", 100.0 * flops / peak);
    let flops: f64 = c
        .program
        .instrs
        .iter()
        .map(|instr| instr_cost(&c.program, instr))
        .map(|cost| cost.matmul_flops + cost.attention_flops)
        .sum();
    let seconds = timed.median();
    let (n, recompute) = (c.program.instrs.len(), format!("{:?}", case.spec.recompute).to_lowercase());
    let ms = |s: f64| format!("{:.2}", s * 1e3);
    let rate = case.batch.n_tokens() as f64 / seconds;
    report.row(&[
        &case.name,
        &recompute,
        &n,
        &ms(seconds),
        &format!("{rate:.0}"),
        &format!("{:.0}", flops / seconds / 1e12),
        &share(flops / seconds),
        &"",
        &gib(timed.bytes),
        &gib(planned),
    ]);
    let all = operations(c, &timed.instrs);
    for o in all.iter().take(N_SHOWN) {
        let flops = (o.cost.matmul_flops + o.cost.attention_flops) / o.seconds;
        let [tflops, share] =
            if flops > 0.0 { [format!("{:.0}", flops / 1e12), share(flops)] } else { Default::default() };
        let tb = format!("{:.2}", o.cost.streamed_bytes / o.seconds / 1e12);
        report.row(&[&format!("  {}", o.name), &"", &o.n, &ms(o.seconds), &"", &tflops, &share, &tb]);
    }
    report.row(&[&"  sum of all operations", &"", &n, &ms(timed.instrs.iter().sum())]);
}
