//! Every operation of a step of a model with 1 billion parameters: time, rate, share of the ceiling.

use super::Report;
use crate::measure;
use crate::step::{StepCase, Timed, small_model};
use anyhow::Result;
use phalanx_cuda::CudaDevice;
use phalanx_device::Device;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::cost::instr_cost;
use phalanx_strategies::model::{BatchShape, ModelConfig};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::program::{Compute, Cost, DType, Instr, Op, Program};
use std::collections::BTreeMap;

/// Whole steps that are measured.
const N_STEPS: usize = 20;

/// Llama 3.2 1B.
fn llama_1b() -> ModelConfig {
    ModelConfig {
        vocab_size: 128_256,
        hidden_size: 2048,
        intermediate_size: 8192,
        n_layers: 16,
        n_heads: 32,
        n_kv_heads: 8,
        head_dim: 64,
        max_positions: 8192,
        rope_theta: 500_000.0,
        tie_embeddings: true,
        windows: vec![None; 16],
        init_std: 0.02,
        ..small_model()
    }
}

/// The model: a small one on the software GPU.
pub(super) fn model(gpu: &CudaDevice) -> ModelConfig {
    if measure::is_software(gpu) { small_model() } else { llama_1b() }
}

/// The batch of its step.
pub(super) fn batch(gpu: &CudaDevice) -> BatchShape {
    match measure::is_software(gpu) {
        true => BatchShape { n_rows: 1, seq_len: 64 },
        false => BatchShape { n_rows: 2, seq_len: 4096 },
    }
}

/// The operation of an instruction; of a product also its rows, columns and terms, and the types of operands and result.
fn kind(p: &Program, instr: &Instr) -> String {
    let Op::MatMul(m) = &instr.op else { return instr.op.name().to_owned() };
    let [a, c] = [instr.reads[0], instr.writes[0]].map(|v| p.value(v));
    let (n, k) = (c.n_columns(), if m.trans_a { a.n_rows() } else { a.n_columns() });
    let added = if m.residual { " +" } else { "" };
    // Rounding operands to FP8 counts.
    let operands = if m.compute == Compute::Fp8 { DType::E4m3 } else { a.dtype };
    format!("matmul {} x {n} x {k}, {operands} to {}{added}", c.n_rows(), c.dtype)
}

pub(super) fn run(gpu: &CudaDevice) -> Result<Report> {
    let batch = batch(gpu);
    let case = StepCase::new("1B in bf16", model(gpu), batch, Precision::Bf16);
    let (n_runs, n_steps) = if measure::is_software(gpu) { (1, 1) } else { (5, N_STEPS) };
    let timed = case.time(gpu, n_runs, n_steps)?;
    let Timed { compiled: c, instrs: timings, .. } = &timed;
    let mut report = Report::new(&gpu.gpus()[0].name, &["operation", "n", "ms", "TFLOP/s", "of peak", "TB/s"]);
    let peak = gpu.peak_flops(true);
    for Operation { name, n, seconds, cost } in operations(c, timings) {
        let flops = (cost.matmul_flops + cost.attention_flops) / seconds;
        let rate = |text: String| if flops > 0.0 { text } else { String::new() };
        report.row(&[
            &name,
            &n,
            &format!("{:.2}", seconds * 1e3),
            &rate(format!("{:.0}", flops / 1e12)),
            &rate(format!("{:.0} %", 100.0 * flops / peak)),
            &format!("{:.2}", cost.streamed_bytes / seconds / 1e12),
        ]);
    }
    let total: f64 = timings.iter().sum();
    let tokens = format!("{:.0} tokens/s", batch.n_tokens() as f64 / total);
    report.row(&[&"all", &timings.len(), &format!("{:.2}", total * 1e3), &tokens, &"", &""]);
    let tokens = format!("{:.0} tokens/s", batch.n_tokens() as f64 / timed.median());
    let gib = format!("{:.2} GiB", timed.bytes as f64 / f64::from(1 << 30));
    report.row(&[&"whole step, median", &n_steps, &format!("{:.2}", timed.median() * 1e3), &tokens, &gib, &""]);
    Ok(report)
}

/// All instructions of a kind.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) name: String,
    pub(super) n: usize,
    pub(super) seconds: f64,
    pub(super) cost: Cost,
}

/// The instructions of a program by kind, with their times in seconds; the longest first.
pub(super) fn operations(c: &Compiled, timings: &[f64]) -> Vec<Operation> {
    let mut by_name: BTreeMap<String, (usize, f64, Cost)> = BTreeMap::new();
    for (instr, s) in c.program.instrs.iter().zip(timings) {
        let (n, seconds, cost) = by_name.entry(kind(&c.program, instr)).or_default();
        (*n, *seconds, *cost) = (*n + 1, *seconds + s, *cost + instr_cost(&c.program, instr));
    }
    let operation = |(name, (n, seconds, cost))| Operation { name, n, seconds, cost };
    let mut operations: Vec<Operation> = by_name.into_iter().map(operation).collect();
    operations.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    operations
}
