//! `phalanx estimate`: computed from the compiled programs of the ranks and their static memory layout.

use super::calibrate::this_machine;
use super::forecast::Forecast;
use super::measured::{self, Gpus, gpus};
use super::{JobArgs, report_note, right, say, say_json};
use crate::config::JobConfig;
use crate::config::precision::{DeviceChoice, GpuCollectives};
use crate::devices;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::train::plan::{self, ModelPlan};
use crate::train::programs::Programs;
use crate::train::saving::Contents;
use crate::train::shadow::Shadow;
use crate::train::step_trace::check_writable;
use crate::train::vocabulary;
use crate::units::{human_bytes, human_count, human_duration};
use comfy_table::{Table, presets};
use phalanx_strategies::cost::program_cost;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::passes::memory::Region;
use phalanx_strategies::plan::hardware::Rate;
use phalanx_strategies::plan::{Hardware, Overhead};
use phalanx_strategies::trace::Ranks;
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

pub(super) const HELP: &str = "Examples:
  phalanx estimate my.yaml
  phalanx estimate my.yaml --micro_batch_size 8 --gradient_checkpointing full
  phalanx estimate my.yaml --device cuda --gpu h200 --bf16 true
  phalanx estimate my.yaml --json --trace predicted.json

A job for GPUs (`device: cuda`) needs no GPU here. Its time follows from
measurements of this machine's GPU, or of the GPU that `--gpu` names: from the
results of `phalanx-gpu`, else from published figures. Rates of processors are
measured here, and kept for a week (`--remeasure` replaces them). Memory of
buffers is exact; CUDA's context and the buffers of NCCL follow from published
figures.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Print the estimate as a JSON object.
    #[arg(long)]
    json: bool,
    /// Write the simulated step for chrome://tracing or Perfetto, to compare with a trace of `phalanx train --trace`.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// GPU for which to estimate: a100, h100, h200, b200, l40s or 4090 [default: this machine's, else h100].
    #[arg(long)]
    gpu: Option<String>,
    /// Results of `phalanx-gpu all`: a summary.json [default: gpu/summary.json in the cache folder of phalanx].
    #[arg(long)]
    measured: Option<PathBuf>,
    /// Measure this machine, even if an earlier call has done so within a week.
    #[arg(long)]
    remeasure: bool,
    #[command(flatten)]
    job: JobArgs,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    args.trace.as_deref().map_or(Ok(()), check_writable)?;
    let config = args.job.load()?;
    let tokenizer = plan::tokenizer(&config)?;
    let gpus = args.gpus(&config)?;
    let choice = if gpus.is_some() { DeviceChoice::Cuda } else { config.precision.device };
    let plan = plan::model_plan_on(&config, &tokenizer, || devices::planned(choice))?;
    plan.format_note(&config.precision).iter().for_each(|note| report_note(note));
    vocabulary::notes(&config, &tokenizer).iter().for_each(|note| report_note(note));
    let mesh = config.parallel.mesh()?;
    let model = plan.model.known().ok_or(CommandError::NoEstimate)?;
    let evaluates = config.data.evaluates();
    // Compiled before the measurements, so that a job that cannot train is rejected at once.
    let compile = |mesh_rank| Programs::compile(&plan, mesh_rank, evaluates);
    compile(MeshRank { mesh, rank: 0 })?;
    let hardware = match &gpus {
        Some(gpus) => gpus.hardware.clone(),
        None => this_machine(
            Hardware::named("cpu").expect("it is shipped"),
            &config,
            &plan,
            model,
            mesh.size(),
            args.remeasure,
        )?,
    };
    let forecast = Forecast::of(mesh, Ranks::AtEdges, &hardware, args.trace.is_some(), compile)?;
    // On one machine, a replica makes shadows unnecessary. On several nodes, all replicas of a shard may be on one node.
    let shadows = config.elastic.shadows && mesh.size() > 1 && mesh.dp_replicate == 1;
    let shadow_bytes = if shadows { Shadow::bytes(&*devices::host(), &forecast.programs.train)? } else { 0 };
    let saving_bytes = Contents::of(&config).snapshot_bytes(&forecast.programs.train);
    let mut of_gpu = match &gpus {
        None if plan.device.name() == "cuda" => measured::published(),
        _ => hardware.clone(),
    };
    if config.precision.gpu_collectives == GpuCollectives::Staged {
        of_gpu.channels = 0;
    }
    let overhead = Overhead::of(&of_gpu, &forecast.programs.train.program);
    // The GPU of a rank holds at most this many spares, if each rank has a GPU of its own.
    let spare_bytes = config.elastic.spare_ranks.div_ceil(mesh.size()) as u64 * overhead.context_bytes;
    let estimate = Estimate::of(&plan, mesh, &hardware, &forecast);
    let estimate = Estimate { saving_bytes, shadow_bytes, overhead, spare_bytes, gpus, ..estimate };
    if let Some(path) = &args.trace {
        let failed = |source| JobError::Io { action: "write", path: path.clone(), source };
        std::fs::write(path, forecast.timeline.chrome()).map_err(failed)?;
    }
    if args.json {
        say_json(&estimate.json(), false);
    } else {
        estimate.print();
    }
    Ok(())
}

/// The estimate of a step.
struct Estimate<'a> {
    mesh: Mesh,
    programs: &'a Programs,
    /// The rank that needs the most memory.
    fullest: usize,
    /// Bytes of that rank, by purpose.
    memory: Vec<(&'static str, usize)>,
    peak_bytes: usize,
    /// In addition, outside of buffers.
    overhead: Overhead,
    /// Contexts of spare processes on the device.
    spare_bytes: u64,
    /// The GPUs that are not measured here and now.
    gpus: Option<Gpus>,
    /// In addition, from the first checkpoint that is written during training.
    saving_bytes: usize,
    /// In addition, for a shadow of another rank's state.
    shadow_bytes: usize,
    /// Tokens per step of all ranks.
    tokens: f64,
    flops_per_token: f64,
    /// Rate of one rank's matrix products.
    products: Rate,
    seconds: f64,
}

impl Estimate<'_> {
    fn of<'a>(plan: &ModelPlan, mesh: Mesh, hardware: &Hardware, forecast: &'a Forecast) -> Estimate<'a> {
        let programs = &forecast.programs;
        let c = &programs.train;
        let work = c.layout.work_peak;
        let peak_bytes = programs.bytes() as usize;
        let memory = vec![
            ("parameters", c.layout.bytes(Region::Parameters)),
            ("optimizer state", c.layout.bytes(Region::OptimizerState)),
            ("outside device memory", c.layout.bytes(Region::Offloaded)),
            ("gradients, at the peak", work.gradients),
            ("gathered weights, at the peak", work.gathered_weights),
            ("half-width weights, at the peak", work.half_weights),
            ("logits, at the peak", work.logits),
            ("received from other ranks, at the peak", work.received),
            ("activations, at the peak", work.activations),
            ("inputs and tables", work.inputs + c.layout.bytes(Region::Constants)),
            ("working space of kernels", work.scratch),
            ("lost between buffers", work.fragmentation),
            ("more for evaluation", peak_bytes - c.layout.total_bytes()),
        ];
        let cost = program_cost(&c.program);
        // The peak, which FLOP are counted against, is that of bf16 in FP8 too, as elsewhere.
        let compute = plan.spec.precision.compute().without_fp8();
        let of_rank = (plan.batch.n_tokens() * plan.spec.n_microbatches) as f64;
        let tokens = of_rank * mesh.data_ranks() as f64;
        // Ranks that share rows share their arithmetic.
        let sharing = (mesh.size() / mesh.data_ranks()) as f64;
        Estimate {
            mesh,
            programs,
            fullest: forecast.fullest,
            memory,
            peak_bytes,
            overhead: Overhead::default(),
            spare_bytes: 0,
            gpus: None,
            saving_bytes: 0,
            shadow_bytes: 0,
            tokens,
            flops_per_token: (cost.matmul_flops + cost.attention_flops) * sharing / of_rank,
            products: hardware.matmul(compute),
            seconds: forecast.timeline.makespan.as_secs_f64(),
        }
    }

    fn json(&self) -> serde_json::Value {
        let memory = self.memory.iter().map(|(name, bytes)| ((*name).to_string(), json!(bytes)));
        let figures = self.gpus.as_ref().map(|gpus| json!({"gpu": gpus.hardware.name, "measured": gpus.measured}));
        json!({
            "hardware": figures,
            "parameters": self.programs.n_params.0,
            "trainable_parameters": self.programs.n_params.1,
            "ranks": self.mesh.size(),
            "fullest_rank": self.fullest,
            "memory_bytes": memory.collect::<serde_json::Map<_, _>>(),
            "peak_memory_bytes": self.peak_bytes,
            "context_memory_bytes": self.overhead.context_bytes,
            "communicator_memory_bytes": self.overhead.communicator_bytes,
            "spare_context_memory_bytes": self.spare_bytes,
            "device_memory_bytes": self.device_bytes(),
            "saving_memory_bytes": self.saving_bytes,
            "shadow_memory_bytes": self.shadow_bytes,
            "flops_per_token": self.flops_per_token,
            "tokens_per_step": self.tokens,
            "step_ms": self.seconds * 1e3,
            "tokens_per_s": self.tokens / self.seconds,
            "instructions": self.programs.train.program.instrs.len(),
        })
    }

    /// Bytes of the device in all.
    const fn device_bytes(&self) -> u64 {
        self.peak_bytes as u64 + self.overhead.bytes() + self.spare_bytes
    }

    /// Memory of the device outside of buffers, and the sum.
    fn overhead_rows(&self) -> Vec<(String, u64)> {
        let Overhead { context_bytes, communicator_bytes, n_communicators } = self.overhead;
        let nccl = format!("in addition, buffers of NCCL for {n_communicators} communicators, roughly");
        let rows = [
            ("in addition, CUDA's context and libraries, roughly".to_owned(), context_bytes),
            (nccl, communicator_bytes),
            ("in addition, contexts of spares (elastic.spare_ranks), roughly".to_owned(), self.spare_bytes),
        ];
        let mut rows: Vec<_> = rows.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        if !rows.is_empty() {
            rows.push(("memory of the device in all, roughly".to_owned(), self.device_bytes()));
        }
        rows
    }

    fn print(&self) {
        let whose = format!("memory of rank {}, the largest of {}", self.fullest, self.mesh.size());
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header([whose.as_str(), "bytes", ""]);
        for (name, bytes) in self.memory.iter().filter(|(_, bytes)| *bytes > 0).chain([&("peak", self.peak_bytes)]) {
            let share = format!("{:.1}%", 100.0 * *bytes as f64 / self.peak_bytes as f64);
            table.add_row([(*name).to_string(), human_bytes(*bytes as u64), share]);
        }
        self.overhead_rows().into_iter().for_each(|(what, bytes)| {
            table.add_row([what, human_bytes(bytes), String::new()]);
        });
        let besides = "in addition, during a save in the background";
        table.add_row([besides.to_string(), human_bytes(self.saving_bytes as u64), String::new()]);
        if self.shadow_bytes > 0 {
            let besides = "in addition, for a copy of another rank's state (elastic.shadows)";
            table.add_row([besides.to_string(), human_bytes(self.shadow_bytes as u64), String::new()]);
        }
        right(&mut table, &[1, 2]);
        say(table);
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header(["step", ""]);
        let (all, trained) = self.programs.n_params;
        table.add_row(["parameters", &human_count(all)]);
        table.add_row(["trained parameters", &human_count(trained)]);
        table.add_row(["tokens", &format!("{:.0}", self.tokens)]);
        table.add_row(["arithmetic per token", &format!("{:.1} MFLOP", self.flops_per_token / 1e6)]);
        let products = match &self.gpus {
            None => "matrix products of a rank, measured".to_owned(),
            Some(Gpus { hardware, measured: Some(_) }) => format!("matrix products of {}, measured", hardware.name),
            Some(Gpus { hardware, measured: None }) => {
                format!("matrix products of {}, published figures", hardware.name)
            }
        };
        table.add_row([products.as_str(), &format!("{:.0} GFLOP/s", self.products.best() / 1e9)]);
        table.add_row(["predicted time", &human_duration(Duration::from_secs_f64(self.seconds))]);
        table.add_row(["predicted tokens/s", &format!("{:.0}", self.tokens / self.seconds)]);
        table.add_row(["instructions", &self.programs.train.program.instrs.len().to_string()]);
        right(&mut table, &[1]);
        say(table);
    }
}

impl Args {
    /// The GPUs whose figures decide; `None` if the device of the job is measured here and now.
    fn gpus(&self, config: &JobConfig) -> Result<Option<Gpus>, JobError> {
        let is_absent = || config.precision.device == DeviceChoice::Cuda && devices::gpu().is_err();
        let name = self.gpu.as_deref().or_else(|| (self.measured.is_some() || is_absent()).then_some("h100"));
        name.map(|name| gpus(name, self.measured.as_deref())).transpose()
    }
}
