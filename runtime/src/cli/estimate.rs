//! `phalanx estimate`: everything is read off the compiled program and its static allocation.

use super::{JobArgs, right, say};
use crate::cpu::matmul::peak_flops;
use crate::cpu::{available_threads, on_device_thread};
use crate::train::JobError;
use crate::train::plan;
use crate::train::progress::{human_bytes, human_count, human_duration};
use crate::train::trainer::Programs;
use comfy_table::{Table, presets};
use phalanx_strategies::cost::{Cost, program_cost};
use phalanx_strategies::mesh::Place;
use phalanx_strategies::passes::memory::Region;
use phalanx_strategies::passes::precision::Precision;
use serde_json::json;
use std::time::Duration;

pub(super) const HELP: &str = "Examples:
  phalanx estimate my.yaml
  phalanx estimate my.yaml --micro_batch_size 8 --gradient_checkpointing full
  phalanx estimate my.yaml --json";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// Memory bandwidth that streaming operations reach, bytes a second a thread; a round figure of current servers.
const STREAM_BYTES_PER_S: f64 = 8e9;

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let (json_too, job) = args.json_flag();
    let config = job.load()?;
    let tokenizer = plan::tokenizer(&config)?;
    let model = plan::model_plan(&config, &tokenizer)?;
    let programs = Programs::compile(&model, Place { mesh: config.parallel.mesh()?, rank: 0 }, false)?;
    let c = &programs.train;
    let n_threads = config.precision.threads.unwrap_or_else(available_threads);
    let bf16 = model.spec.precision == Precision::Bf16;
    let peak = on_device_thread(n_threads, || peak_flops(bf16))?;
    let cost = program_cost(&c.program);
    let seconds = predicted_seconds(cost, peak, n_threads);
    let tokens = (model.batch.n_tokens() * model.spec.n_microbatches) as f64;
    let work = c.layout.work_peak;
    let memory = [
        ("parameters", c.layout.bytes(Region::Parameters)),
        ("optimizer state", c.layout.bytes(Region::OptimizerState)),
        ("gradients, at the peak", work.gradients),
        ("activations, at the peak", work.activations),
        ("inputs and tables", work.inputs + c.layout.bytes(Region::Constants)),
        ("working space of kernels", work.scratch),
        ("lost between buffers", work.fragmentation),
    ];
    let flops_per_token = (cost.matmul_flops + cost.attention_flops) / tokens;
    let total = c.layout.total_bytes();
    if json_too {
        say(json!({
            "parameters": c.program.n_params(),
            "trainable_parameters": c.program.n_trainable(),
            "memory_bytes": memory.iter().map(|(k, v)| (k.to_string(), json!(v))).collect::<serde_json::Map<_, _>>(),
            "peak_memory_bytes": total,
            "flops_per_token": flops_per_token,
            "tokens_per_step": tokens,
            "step_ms": seconds * 1e3,
            "tokens_per_s": tokens / seconds,
            "instructions": c.program.instrs.len(),
        }));
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["memory", "bytes", ""]);
    for (name, bytes) in memory.into_iter().chain([("peak", total)]) {
        let share = format!("{:.1}%", 100.0 * bytes as f64 / total as f64);
        table.add_row([name.to_string(), human_bytes(bytes as u64), share]);
    }
    right(&mut table, &[1, 2]);
    say(table);
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["step", ""]);
    let trained = c.program.n_trainable();
    table.add_row(["parameters", &human_count(c.program.n_params())]);
    table.add_row(["trained parameters", &human_count(trained)]);
    table.add_row(["tokens", &format!("{tokens:.0}")]);
    table.add_row(["arithmetic per token", &format!("{:.1} MFLOP", flops_per_token / 1e6)]);
    table.add_row(["measured best of this machine", &format!("{:.0} GFLOP/s", peak / 1e9)]);
    table.add_row(["predicted time", &human_duration(Duration::from_secs_f64(seconds))]);
    table.add_row(["predicted tokens/s", &format!("{:.0}", tokens / seconds)]);
    table.add_row(["instructions", &c.program.instrs.len().to_string()]);
    right(&mut table, &[1]);
    say(table);
    Ok(())
}

impl Args {
    /// `--json` may stand among the overrides, behind the file.
    fn json_flag(&self) -> (bool, JobArgs) {
        let behind = self.job.overrides.iter().any(|w| w == "--json");
        let overrides = self.job.overrides.iter().filter(|w| *w != "--json").cloned().collect();
        (self.json || behind, JobArgs { config: self.job.config.clone(), overrides })
    }
}

/// Products at the measured best, attention at a third of it (its tiles are small), the rest at memory speed.
fn predicted_seconds(cost: Cost, peak_flops: f64, n_threads: usize) -> f64 {
    cost.matmul_flops / (0.8 * peak_flops)
        + cost.attention_flops / (0.3 * peak_flops)
        + cost.streamed_bytes / (STREAM_BYTES_PER_S * n_threads as f64)
}
