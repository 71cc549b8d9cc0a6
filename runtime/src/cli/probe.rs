//! A few steps of a small relative of a job's model, on as many ranks at once as the job has, with every instruction
//! measured: what kernels and collectives take on this machine while all of its ranks are busy.

use crate::cpu::executor::Timings;
use crate::cpu::{Backing, CpuMachine, on_device_thread};
use crate::train::JobError;
use crate::train::architecture::Architecture;
use crate::train::plan::ModelPlan;
use crate::train::session::shared_world;
use crate::train::team::{Team, TeamPlan};
use crate::train::trainer::Programs;
use crate::train::weights;
use phalanx_strategies::compile::{Compiled, Parallel, StepSpec};
use phalanx_strategies::cost::{Cost, instr_cost};
use phalanx_strategies::mesh::{Mesh, Place};
use phalanx_strategies::model::{BatchShape, ModelConfig};
use phalanx_strategies::program::{Compute, Hyper, Op, Role};
use phalanx_strategies::trace::Trace;
use phalanx_strategies::world::Step;

/// Steps that count, and those before them that do not: they touch memory for the first time.
const N_STEPS: usize = 12;
const N_FIRST: usize = 2;

/// What one instruction took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Kernel or collective.
    pub name: &'static str,
    /// Of products, the precision.
    pub compute: Option<Compute>,
    /// Work of a kernel.
    pub cost: Cost,
    /// Bytes of the whole of a collective.
    pub collective_bytes: Option<u64>,
    /// Time of one rank.
    pub seconds: f64,
}

/// A plan whose step takes a fraction of a second: two blocks of the job's model, of a large one's relative with fewer
/// heads, a narrower stream and a smaller vocabulary.
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
    let n_rows = plan.batch.n_rows.min(TOKENS_MAX / seq_len).max(1);
    let spec = StepSpec { n_microbatches: 1, offload_optimizer: false, ..plan.spec.clone() };
    let spec = StepSpec { parallel: Parallel::default(), ..spec };
    ModelPlan { model: Architecture::Known(small), weights: None, batch: BatchShape { n_rows, seq_len }, spec, ..plan.clone() }
}

/// Runs the plan on all ranks of a mesh, each with so many threads, and says what every instruction took.
pub(super) fn samples(plan: &ModelPlan, mesh: Mesh, n_threads: usize) -> Result<Vec<Sample>, JobError> {
    let ranks = (0..mesh.size()).map(|rank| Programs::compile(plan, Place { mesh, rank }, false));
    let ranks = ranks.collect::<Result<Vec<Programs>, _>>()?;
    let team = TeamPlan::new(plan, mesh, false)?;
    let world = shared_world(&team, &ranks)?;
    let measured: Vec<Result<Vec<Timings>, JobError>> = std::thread::scope(|scope| {
        let spawn = |(rank, programs)| {
            let (team, world) = (&team, &world);
            scope.spawn(move || {
                let alone = mesh.size() == 1;
                let join = || if alone { Ok(Team::alone()) } else { team.join(world, rank as u32) };
                let measure = || measure(plan, programs, join()?);
                let outcome = on_device_thread(n_threads, measure).map_err(JobError::from).flatten();
                outcome.inspect_err(|error| world.control().abort(&format!("rank {rank}: {error}")))
            })
        };
        let handles: Vec<_> = ranks.iter().enumerate().map(spawn).collect();
        handles.into_iter().map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    Ok(typical(&ranks[0].train, &measured.into_iter().collect::<Result<Vec<_>, _>>()?))
}

/// Runs the steps of one rank.
fn measure(plan: &ModelPlan, programs: &Programs, mut team: Team) -> Result<Vec<Timings>, JobError> {
    let c = &programs.train;
    let mut machine = CpuMachine::on(&[c], &Backing { shared: team.memory(), offload_dir: None })?;
    weights::initialise(&mut machine, c, plan.model.known(), 0, None)?;
    fill_inputs(&mut machine, c, plan);
    let mut steps = Vec::new();
    for _ in 0..N_FIRST + N_STEPS {
        // All begin together.
        team.sum(0)?;
        let mut timings = Timings::with_capacity(c.program.instrs.len());
        machine.run_timed(c, &mut [], &mut team.groups, &mut timings)?;
        steps.push(timings);
    }
    Ok(steps.split_off(N_FIRST))
}

/// Tokens all over the vocabulary, and the scalars of a first step.
fn fill_inputs(machine: &mut CpuMachine, c: &Compiled, plan: &ModelPlan) {
    let (vocabulary, seq_len) = (plan.model.vocab_size(), plan.batch.seq_len);
    for b in &c.program.bindings {
        let token = |i: usize| match b.role {
            Role::Ids | Role::Labels => (i * 7919 % vocabulary) as i32,
            Role::Positions => (i % seq_len) as i32,
            _ => 0,
        };
        match b.role {
            Role::Ids | Role::Labels | Role::Positions | Role::DocStart => {
                machine.write::<i32>(c, b.value).iter_mut().enumerate().for_each(|(i, x)| *x = token(i));
            }
            Role::Hyper => {
                let hyper = machine.write::<f64>(c, b.value);
                hyper.fill(1.0);
                hyper[Hyper::LEARNING_RATE] = 1e-6;
                hyper[Hyper::LOSS_GRAD_SCALE] = 1.0 / plan.batch.n_tokens() as f64;
            }
            _ => {}
        }
    }
}

/// What an instruction takes in a step that is neither among the fastest nor among the slowest quarter. A collective
/// takes what the last rank to come to it takes; the others wait, too.
fn typical(c: &Compiled, ranks: &[Vec<Timings>]) -> Vec<Sample> {
    let seconds = |rank: &[Timings], step: usize| rank[step].iter().map(|t| t.as_secs_f64()).sum::<f64>();
    let mut steps: Vec<usize> = (0..N_STEPS).collect();
    steps.sort_by(|a, b| seconds(&ranks[0], *a).total_cmp(&seconds(&ranks[0], *b)));
    let steps = &steps[N_STEPS / 4..N_STEPS - N_STEPS / 4];
    let mean = |terms: &mut dyn Iterator<Item = f64>, n: usize| terms.sum::<f64>() / n as f64;
    let mut posts = Trace::of(&c.program).steps.into_iter();
    let mut started = Vec::new();
    let mut samples = Vec::new();
    for (i, instr) in c.program.instrs.iter().enumerate() {
        let of = |rank: &Vec<Timings>, step: usize| rank[step][i].as_secs_f64();
        let all = steps.iter().flat_map(|step| ranks.iter().map(move |rank| of(rank, *step)));
        let last = steps.iter().map(|step| ranks.iter().map(|rank| of(rank, *step)).fold(f64::INFINITY, f64::min));
        let kernel = Sample {
            name: instr.op.name(),
            compute: if let Op::MatMul(m) = &instr.op { Some(m.compute) } else { None },
            cost: instr_cost(&c.program, instr),
            collective_bytes: None,
            seconds: 0.0,
        };
        match &instr.op {
            Op::Start(_) => started.extend(posts.next()),
            Op::Await(_) => {
                let Some(Step::Await(collective)) = posts.next() else { continue };
                let post = started.iter().find_map(|step| match step {
                    Step::Start(post) if post.collective == collective => Some(post.size_bytes()),
                    _ => None,
                });
                let seconds = mean(&mut { last }, steps.len());
                samples.push(Sample { name: collective.kind.name(), collective_bytes: post, seconds, ..kernel });
            }
            _ => samples.push(Sample { seconds: mean(&mut { all }, steps.len() * ranks.len()), ..kernel }),
        }
    }
    samples
}
