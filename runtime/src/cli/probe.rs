//! Measures every instruction in a few steps of a model that is smaller than the job's, on all ranks of the job at once:
//! the times of kernels and collectives on this machine while all of its ranks are busy.

use crate::error::JobError;
use crate::train::architecture::Architecture;
use crate::train::plan::ModelPlan;
use crate::train::programs::Programs;
use crate::train::team::{Team, TeamPlan};
use crate::train::threads::shared_world;
use crate::train::weights;
use crate::train::weights::FirstValues;
use phalanx_device::{Backing, Machine, Run, Timings};
use phalanx_strategies::compile::{Compiled, Offload, Parallel, StepSpec};
use phalanx_strategies::cost::instr_cost;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use phalanx_strategies::model::{BatchShape, ModelConfig};
use phalanx_strategies::passes::lora::LoraSpec;
use phalanx_strategies::program::{Column, Compute, Cost, Hyper, Op, Role};
use phalanx_strategies::trace::Trace;
use phalanx_strategies::world::{Span, What};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The most measured steps, and the steps before them, which touch memory for the first time.
const N_STEPS: usize = 12;
const N_FIRST: usize = 2;
/// The fewest measured steps, and the time after which no further ones are.
const N_STEPS_MIN: usize = 3;
const LONG_ENOUGH: Duration = Duration::from_secs(2);

/// The time of one instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Kernel or collective.
    pub name: &'static str,
    /// The work of the instruction.
    pub work: Work,
    /// Time of one rank.
    pub seconds: f64,
}

/// The work of an instruction.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// Computation.
    Kernel {
        /// Arithmetic and bytes.
        cost: Cost,
        /// The precision, of a matrix product.
        compute: Option<Compute>,
    },
    /// Communication; the bytes are those of whole tensors.
    Collective { bytes: u64 },
}

/// A plan whose step takes a fraction of a second: two blocks of the job's model. Of a large model, the heads, width and
/// vocabulary are reduced.
pub(super) fn small(plan: &ModelPlan, model: &ModelConfig) -> ModelPlan {
    const WIDTH_MAX: usize = 1024;
    const VOCABULARY_MAX: usize = 8192;
    const TOKENS_MAX: usize = 1024;
    let mut small = ModelConfig { n_layers: model.n_layers.min(2), ..model.clone() };
    while small.hidden_size > WIDTH_MAX && small.n_heads.is_multiple_of(2) {
        small.hidden_size /= 2;
        small.intermediate_size = (small.intermediate_size / 2).max(1);
        small.n_heads /= 2;
        small.n_kv_heads = if small.n_kv_heads.is_multiple_of(2) { small.n_kv_heads / 2 } else { 1 };
    }
    small.vocab_size = small.vocab_size.min(VOCABULARY_MAX);
    small.windows.truncate(small.n_layers);
    let seq_len = plan.batch.seq_len.min(TOKENS_MAX);
    let of_sample = plan.objective.rows_per_sample();
    let n_rows = (plan.batch.n_rows.min(TOKENS_MAX / seq_len) / of_sample).max(1) * of_sample;
    let spec = StepSpec { n_microbatches: 1, offload: Offload::default(), ..plan.spec.clone() };
    let lora = spec.lora.as_ref().map(LoraSpec::in_every_block);
    let spec = StepSpec { parallel: Parallel::default(), lora, ..spec };
    ModelPlan {
        model: Architecture::Known(small),
        weights: None,
        adapter: None,
        trained: None,
        batch: BatchShape { n_rows, seq_len },
        n_microbatches: 1,
        spec,
        ..plan.clone()
    }
}

/// Runs the plan on all ranks of a mesh, each with `n_threads` threads, and returns the duration of every instruction.
pub(super) fn samples(plan: &ModelPlan, mesh: Mesh, n_threads: usize) -> Result<Vec<Sample>, JobError> {
    // Each rank runs one microbatch, as a single rank does.
    let plan = &ModelPlan { n_microbatches: mesh.data_ranks(), ..plan.clone() };
    let ranks = (0..mesh.size()).map(|rank| Programs::compile(plan, MeshRank { mesh, rank }, false));
    let ranks = ranks.collect::<Result<Vec<Programs>, _>>()?;
    let team = TeamPlan::new(plan, mesh, false)?;
    let world = shared_world(&team, &ranks)?;
    let measured: Vec<Result<Vec<Timings>, JobError>> = std::thread::scope(|scope| {
        let spawn = |(rank, programs)| {
            let (team, world) = (&team, &world);
            scope.spawn(move || {
                let alone = mesh.size() == 1;
                let join = || if alone { Ok(Team::alone()) } else { team.join(world, rank as u32, &*plan.device) };
                let measure = || measure(plan, programs, join()?);
                let outcome = plan.device.on_device_thread(n_threads, measure).map_err(JobError::from).flatten();
                outcome.inspect_err(|error| world.control().abort(&format!("rank {rank}: {error}")))
            })
        };
        let handles: Vec<_> = ranks.iter().enumerate().map(spawn).collect();
        handles.into_iter().map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let measured = measured.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(typical(&ranks.iter().map(|programs| &programs.train).zip(measured).collect::<Vec<_>>()))
}

/// Runs the steps of one rank.
fn measure(plan: &ModelPlan, programs: &Programs, mut team: Team) -> Result<Vec<Timings>, JobError> {
    let c = &programs.train;
    let mut machine = plan.device.machine(&[c], &Backing { shared: team.memory(), offload_dir: None })?;
    let first = FirstValues { source: None, ..plan.first_values(0)? };
    weights::initialise(&mut *machine, c, &first, |_| true)?;
    fill_inputs(&mut *machine, c, plan);
    let (mut steps, begun) = (Vec::new(), Instant::now());
    for n in 0..N_FIRST + N_STEPS {
        let is_enough = n >= N_FIRST + N_STEPS_MIN && begun.elapsed() > LONG_ENOUGH;
        // All ranks begin the step together, or none does.
        if team.sum(u64::from(is_enough))? > 0 {
            break;
        }
        let mut timings = Timings::with_capacity(c.program.instrs.len());
        let with = &mut Run { timings: Some(&mut timings), ..Run::with(&mut team.groups) };
        machine.run(c, 0..c.program.instrs.len(), with)?;
        machine.settle()?;
        steps.push(timings);
    }
    Ok(steps.split_off(N_FIRST))
}

/// Fills the inputs with tokens from the whole vocabulary, and the scalars of a first step.
fn fill_inputs(machine: &mut dyn Machine, c: &Compiled, plan: &ModelPlan) {
    let (vocabulary, seq_len) = (plan.model.vocab_size(), plan.batch.seq_len);
    for b in &c.program.bindings {
        match b.role {
            Role::Column(column) => {
                let token = |i: usize| match column {
                    Column::Ids | Column::Labels | Column::DesirableLabels | Column::NextIds | Column::LastId => {
                        (i * 7919 % vocabulary) as i32
                    }
                    Column::Positions => (i % seq_len) as i32,
                    Column::LossWeights => 1.0f32.to_bits() as i32,
                    Column::DocStart | Column::DropoutKeys => 0,
                };
                let tokens: Vec<i32> = (0..c.program.value(b.value).n_elements()).map(token).collect();
                machine.write(c, b.value, 0, &tokens);
            }
            Role::Hyper => {
                let mut hyper = [1.0; Hyper::LEN];
                hyper[Hyper::LEARNING_RATE] = 1e-6;
                hyper[Hyper::ADAPTER_LEARNING_RATE] = 1e-6;
                hyper[Hyper::LOSS_GRAD_SCALE] = 1.0 / plan.batch.n_tokens() as f64;
                machine.write(c, b.value, 0, &hyper);
            }
            _ => {}
        }
    }
}

/// Times of instructions, without the fastest and the slowest quarter of the steps.
fn typical(ranks: &[(&Compiled, Vec<Timings>)]) -> Vec<Sample> {
    let total = |step: usize| ranks.iter().flat_map(|(_, steps)| &steps[step]).sum::<Duration>();
    let n_steps = ranks.first().map_or(0, |(_, steps)| steps.len());
    let mut steps: Vec<usize> = (0..n_steps).collect();
    steps.sort_by_key(|step| total(*step));
    let steps = &steps[n_steps / 4..n_steps - n_steps / 4];
    let mut samples = Vec::new();
    // For each collective, the wait of each rank in each step. Programs of ranks differ where parts of a tensor are empty.
    let mut waits: BTreeMap<(&'static str, u32, u64), Vec<Vec<Duration>>> = BTreeMap::new();
    for (c, timings) in ranks {
        let taken = |i: usize| -> Vec<Duration> { steps.iter().map(|step| timings[*step][i]).collect() };
        let all: Vec<Duration> =
            (0..c.program.instrs.len()).map(|i| taken(i).iter().sum::<Duration>() / steps.len() as u32).collect();
        for (i, instr) in c.program.instrs.iter().enumerate().filter(|(_, i)| !is_collective(&i.op)) {
            let compute = if let Op::MatMul(m) = &instr.op { Some(m.compute) } else { None };
            let work = Work::Kernel { cost: instr_cost(&c.program, instr), compute };
            samples.push(Sample { name: instr.op.name(), work, seconds: all[i].as_secs_f64() });
        }
        let at: Vec<usize> =
            (0..c.program.instrs.len()).filter(|i| matches!(c.program.instrs[*i].op, Op::Await(_))).collect();
        for (span, i) in Trace::measured(&c.program, Duration::ZERO, &all).iter().filter(|s| is_wait(s)).zip(at) {
            if let What::Collective { collective, size_bytes, .. } = span.what {
                let key = (collective.kind.name(), collective.sequence, size_bytes);
                waits.entry(key).or_default().push(taken(i));
            }
        }
    }
    for ((name, _, bytes), ranks) in waits {
        // The last rank to arrive waits for no other rank, so the shortest wait is the time of the collective.
        let last = |step: usize| ranks.iter().map(|rank| rank[step]).min().unwrap_or_default();
        let seconds = (0..steps.len()).map(last).sum::<Duration>().as_secs_f64() / steps.len() as f64;
        samples.push(Sample { name, work: Work::Collective { bytes }, seconds });
    }
    samples
}

const fn is_collective(op: &Op) -> bool {
    matches!(op, Op::Start(_) | Op::Await(_))
}

const fn is_wait(span: &Span) -> bool {
    matches!(span.what, What::Collective { .. })
}
