//! `phalanx plan`: searches for the arrangement that trains a job fastest on the given machines. It compiles each
//! candidate's programs, one for each pipeline stage, lays out their memory and runs them in simulated time.

use super::calibrate::this_machine;
use super::forecast::Forecast;
use super::measured::{self, Gpus};
use super::{JobArgs, right, say, say_json};
use crate::config::JobConfig;
use crate::config::precision::DeviceChoice;
use crate::devices;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::train::plan::{self, ModelPlan};
use crate::train::programs::Programs;
use crate::train::step_trace::check_writable;
use crate::units::{human_bytes, human_count};
use comfy_table::{Table, presets};
use phalanx_strategies::mesh::{Axis, Coord, Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, ModelConfig};
use phalanx_strategies::plan::workload::input_bytes;
use phalanx_strategies::plan::{
    self as search, Candidate, Evaluation, Hardware, Options, Overhead, Plan, Reason, Workload, report,
};
use phalanx_strategies::trace::Ranks;
use serde_json::json;
use std::path::PathBuf;

pub(super) const HELP: &str = "Examples:
  phalanx plan my.yaml --nodes 16 --gpus-per-node 8 --gpu h100
  phalanx plan my.yaml --gpu a100-80g --gradient_accumulation_steps 64 --json
  phalanx plan my.yaml --gpu cpu --gpus-per-node 4 --trace best.json

A step has the rows that the file gives it: micro_batch_size x
gradient_accumulation_steps x data-parallel ranks. The search decides how the
ranks share these rows. Predicted times follow from the results of
`phalanx-gpu` on such a GPU, else from its published figures, or with
`--gpu cpu` from measurements on this machine, which are kept for a week
(`--remeasure` replaces them). Predicted memory is the static
layout of each program and, from published figures, what CUDA's context and
the buffers of NCCL take.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Number of machines.
    #[arg(long, default_value_t = 1)]
    nodes: u32,
    /// Devices per machine [default: the usual number for the hardware].
    #[arg(long)]
    gpus_per_node: Option<u32>,
    /// Hardware: a100, h100, h200, b200, l40s, 4090, or cpu for this machine, measured.
    #[arg(long, default_value = "h100")]
    gpu: String,
    /// Results of `phalanx-gpu all`: a summary.json [default: gpu/summary.json in the cache folder of phalanx].
    #[arg(long)]
    measured: Option<PathBuf>,
    /// Number of arrangements to show.
    #[arg(long, default_value_t = 10)]
    top: usize,
    /// Maximum number of arrangements to simulate; a larger number takes longer and may find a faster arrangement.
    #[arg(long, default_value_t = 40)]
    evaluate: usize,
    /// Maximum number of rows in a microbatch.
    #[arg(long, default_value_t = 8)]
    micro_batch_max: usize,
    /// Write the simulated step of the fastest arrangement for chrome://tracing or Perfetto.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Print the plan as a JSON object.
    #[arg(long)]
    json: bool,
    /// Measure this machine, even if an earlier call has done so within a week.
    #[arg(long)]
    remeasure: bool,
    #[command(flatten)]
    job: JobArgs,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let args = args.checked()?;
    args.trace.as_deref().map_or(Ok(()), check_writable)?;
    let config = args.job.load()?;
    let tokenizer = plan::tokenizer(&config)?;
    let choice = if args.gpu == CPU { DeviceChoice::Cpu } else { DeviceChoice::Cuda };
    let plan = plan::model_plan_on(&config, &tokenizer, || devices::planned(choice))?;
    let planner = Planner::new(args, &config, plan)?;
    let options = Options {
        world_size: (args.nodes * planner.gpus.hardware.devices_per_node) as usize,
        micro_batch_max: args.micro_batch_max,
        n_keep: args.top.max(1),
        n_evaluate_max: args.evaluate.max(1),
    };
    let mut found = search::search(&planner.workload, &planner.gpus.hardware, &options, |c| planner.evaluate(c));
    planner.confirm(&mut found);
    let obstacle = planner.obstacle(&found);
    if args.json {
        let json = serde_json::to_value(&found).map_err(CommandError::Encode)?;
        let (hardware, measured) = (&planner.gpus.hardware, &planner.gpus.measured);
        let all = json!({
            "hardware": hardware,
            "measured": measured,
            "obstacle": obstacle,
            "world_size": options.world_size,
            "plan": json,
        });
        say_json(&all, false);
    } else {
        planner.print(&found, &options);
        obstacle.into_iter().for_each(say);
    }
    let Some(best) = found.ranked.first() else {
        let refusal = report::refusals(&found).into_iter().next().map(|(_, why)| why);
        return Err(CommandError::NoArrangement { n_ranks: options.world_size, refusal }.into());
    };
    if let Some(path) = &args.trace {
        let chrome = planner.forecast(&best.candidate, true)?.timeline.chrome();
        let failed = |source| JobError::Io { action: "write", path: path.clone(), source };
        std::fs::write(path, chrome).map_err(failed)?;
    }
    Ok(())
}

impl Args {
    /// Rejects numbers of machines, devices or rows that cannot be planned.
    fn checked(&self) -> Result<&Args, CommandError> {
        let numbers = [
            ("--nodes", self.nodes as usize),
            ("--gpus-per-node", self.gpus_per_node.unwrap_or(1) as usize),
            ("--top", self.top),
            ("--evaluate", self.evaluate),
            ("--micro-batch-max", self.micro_batch_max),
        ];
        if let Some((flag, _)) = numbers.iter().find(|(_, n)| *n == 0) {
            return Err(CommandError::Zero { flag });
        }
        let n_ranks = numbers[0].1 * numbers[1].1;
        if n_ranks > RANKS_MAX {
            return Err(CommandError::TooManyRanks { n_ranks, n_ranks_max: RANKS_MAX });
        }
        Ok(self)
    }
}

/// Hardware that is measured here and now.
const CPU: &str = "cpu";

/// Maximum number of ranks in a search.
const RANKS_MAX: usize = 1 << 16;

/// The job and hardware that candidates are evaluated for.
struct Planner {
    plan: ModelPlan,
    /// Whether the job has validation rows.
    evaluates: bool,
    gpus: Gpus,
    workload: Workload,
}

impl Planner {
    fn new(args: &Args, config: &JobConfig, plan: ModelPlan) -> Result<Planner, JobError> {
        let model = plan.model.known().cloned();
        let model = model.ok_or(CommandError::NothingToArrange)?;
        let gpus = hardware(args, config, &plan, &model)?;
        let workload = Workload::of(&model, &plan.forward()?, plan.batch, &plan.spec, config.sequences_per_step())?;
        let workload = workload.on(plan.device.target());
        let evaluates = config.data.evaluates();
        Ok(Planner { plan, evaluates, gpus, workload })
    }

    /// Why this machine cannot run the fastest arrangement, in one sentence.
    fn obstacle(&self, found: &Plan) -> Option<String> {
        let hardware = &self.gpus.hardware;
        let best = found.ranked.first().filter(|_| hardware.name != CPU)?;
        measured::obstacle(hardware, hardware.devices_per_node, best.evaluation.memory_bytes)
    }

    /// The model plan of a candidate.
    fn plan_of(&self, candidate: &Candidate) -> ModelPlan {
        let n_rows = candidate.micro_batch_size * self.plan.objective.rows_per_sample();
        let batch = BatchShape { n_rows, ..self.plan.batch };
        let spec = candidate.spec(&self.plan.spec);
        let n_microbatches = spec.n_microbatches * Mesh::from(candidate.mesh).data_ranks();
        ModelPlan { batch, n_microbatches, spec, ..self.plan.clone() }
    }

    /// A step of the candidate; one rank of each stage represents the others.
    fn forecast(&self, candidate: &Candidate, spans: bool) -> Result<Forecast, JobError> {
        let plan = self.plan_of(candidate);
        let compile = |mesh_rank| Programs::compile(&plan, mesh_rank, self.evaluates);
        Forecast::of(candidate.mesh.into(), Ranks::OfEachStage, &self.gpus.hardware, spans, compile)
    }

    fn evaluate(&self, candidate: &Candidate) -> Result<Evaluation, Reason> {
        let n = candidate.n_microbatches;
        let Some([a, b]) = candidate.samples() else { return Ok(self.evaluate_step(candidate, n)?.0) };
        let (short, (longer, input_bytes)) = (self.evaluate_step(candidate, a)?.0, self.evaluate_step(candidate, b)?);
        Ok(Evaluation::extrapolated([(a, short), (b, longer)], n, input_bytes))
    }

    /// Evaluates the whole step of the best candidate if it was extrapolated from shorter steps, and removes the candidate if
    /// it does not fit.
    fn confirm(&self, found: &mut Plan) {
        while let Some(best) = found.ranked.first_mut().filter(|best| best.candidate.samples().is_some()) {
            let whole = self.evaluate_step(&best.candidate, best.candidate.n_microbatches);
            match whole.ok().filter(|(e, _)| e.memory_bytes <= self.gpus.hardware.memory_bytes) {
                Some((evaluation, _)) => {
                    best.evaluation = evaluation;
                    break;
                }
                None => drop(found.ranked.remove(0)),
            }
        }
        for (i, ranked) in found.ranked.iter_mut().enumerate() {
            // Other extrapolated steps keep their estimate.
            if (i == 0 || ranked.candidate.samples().is_none())
                && let Some(bytes) = self.fullest(&ranked.candidate)
            {
                ranked.evaluation.memory_bytes = bytes;
            }
        }
    }

    /// Bytes of the rank that needs the most memory. Within a stage, tensor-parallel ranks differ by a few values.
    fn fullest(&self, candidate: &Candidate) -> Option<u64> {
        let (plan, mesh) = (self.plan_of(candidate), Mesh::from(candidate.mesh));
        let places = (0..mesh.pp).flat_map(|stage| (0..mesh.tp).map(move |tp| (stage, tp)));
        let bytes = places.map(|(stage, tp)| {
            let rank = mesh.rank(Coord::default().with(Axis::Pp, stage).with(Axis::Tp, tp));
            Some(self.bytes_of(&Programs::compile(&plan, MeshRank { mesh, rank }, self.evaluates).ok()?))
        });
        bytes.collect::<Option<Vec<u64>>>()?.into_iter().max()
    }

    /// Bytes of a rank's buffers, and of what its driver and NCCL take.
    fn bytes_of(&self, programs: &Programs) -> u64 {
        programs.bytes() + Overhead::of(&self.gpus.hardware, &programs.train.program).bytes()
    }

    /// Evaluates the candidate's step with `n_microbatches`; also returns the input bytes of one microbatch.
    fn evaluate_step(&self, candidate: &Candidate, n_microbatches: usize) -> Result<(Evaluation, u64), Reason> {
        let forecast = self.forecast(&Candidate { n_microbatches, ..*candidate }, false);
        let forecast = forecast.map_err(|e| Reason::Refused { why: e.to_string() })?;
        let evaluation = Evaluation {
            step_seconds: forecast.timeline.makespan.as_secs_f64(),
            memory_bytes: self.bytes_of(&forecast.programs),
            exposed_seconds: forecast.timeline.mean_exposed().as_secs_f64(),
        };
        Ok((evaluation, input_bytes(&forecast.programs.train.program)))
    }

    fn print(&self, found: &Plan, options: &Options) {
        let (w, hw) = (&self.workload, &self.gpus.hardware);
        let n_nodes = options.world_size as u32 / hw.devices_per_node;
        say(format_args!(
            "{} parameters, {} rows of {} tokens per step, on {n_nodes} x {} {} with {} each",
            human_count(w.n_params()),
            w.global_batch_rows,
            w.seq_len,
            hw.devices_per_node,
            hw.name,
            human_bytes(hw.memory_bytes)
        ));
        if let Some(path) = &self.gpus.measured {
            say(format_args!("rates as measured on such a GPU: {}", path.display()));
        }
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY).set_header(report::COLUMNS);
        found.ranked.iter().for_each(|ranked| {
            table.add_row(report::row(ranked));
        });
        right(&mut table, &[5, 6, 7, 8, 9]);
        say(table);
        say(format_args!(
            "{} candidates, {} compiled and simulated; not shown:",
            found.n_candidates, found.n_evaluated
        ));
        report::refusals(found).into_iter().for_each(|(n, why)| say(format_args!("{n:>8}  {why}")));
    }
}

fn hardware(args: &Args, config: &JobConfig, plan: &ModelPlan, model: &ModelConfig) -> Result<Gpus, JobError> {
    if args.gpu == CPU {
        let n_ranks = args.gpus_per_node.unwrap_or(1);
        let named = Hardware::named(CPU).expect("it is shipped");
        let hardware = this_machine(named, config, plan, model, n_ranks as usize, args.remeasure)?;
        return Ok(Gpus { hardware: hardware.validate().map_err(CommandError::Hardware)?, measured: None });
    }
    let Gpus { hardware, measured } = measured::gpus(&args.gpu, args.measured.as_deref())?;
    let devices_per_node = args.gpus_per_node.unwrap_or(hardware.devices_per_node);
    let hardware = Hardware { devices_per_node, ..hardware };
    Ok(Gpus { hardware: hardware.validate().map_err(CommandError::Hardware)?, measured })
}
