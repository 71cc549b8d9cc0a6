//! The loop: fill a batch, run the step's program, look at the result. Runs on the device thread.

use super::error::JobError;
use super::metrics::{EvalMetrics, StepMetrics};
use super::plan::{ModelPlan, RunPlan};
use super::saving::{Saving, TrainerState};
use super::staging::{Inputs, Staging, inputs};
use super::step_trace::StepTrace;
use super::team::Team;
use super::weights;
use crate::collective::shm::world::Arena;
use crate::cpu::{Backing, CpuMachine, OpaqueModel, scratch_bytes};
use crate::data::rows::Rows;
use crate::hf::source::TensorSource;
use crate::job::{Control, Event};
use phalanx_strategies::compile::{Compiled, StepSpec, compile_forward, compile_step};
use phalanx_strategies::cost::{Cost, program_cost};
use phalanx_strategies::loss_scale::{LossScale, Verdict};
use phalanx_strategies::mesh::{Axis, Place};
use phalanx_strategies::model::Head;
use phalanx_strategies::passes::lora::lora;
use phalanx_strategies::program::{Hyper, Phase, Program, Role};
use phalanx_strategies::sampler::Sampler;
use phalanx_strategies::tree::leaves_of;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// The programs of a run.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(crate) train: Compiled,
    /// Forward pass over one microbatch, for validation rows.
    pub(crate) eval: Option<Compiled>,
    /// Elements of all parameters of the model, and of those that are trained, however ranks share them.
    pub(crate) n_params: (usize, usize),
}

impl Programs {
    /// Compiles the programs of the rank at `place`.
    pub(crate) fn compile(plan: &ModelPlan, place: Place, evaluates: bool) -> Result<Programs, JobError> {
        let path = || plan.weights.as_ref().map_or("model".into(), |p| p.display().to_string());
        let mut forward =
            plan.model.forward(plan.batch, Head::Loss).map_err(|source| JobError::Model { path: path(), source })?;
        forward.place = place;
        let eval = evaluates.then(|| compile_forward(forward.clone(), &plan.spec, scratch_bytes)).transpose()?;
        let n_params = whole_model(&forward, &plan.spec);
        Ok(Programs { train: compile_step(forward, &plan.spec, scratch_bytes)?, eval, n_params })
    }

    pub(crate) fn all(&self) -> Vec<&Compiled> {
        [Some(&self.train), self.eval.as_ref()].into_iter().flatten().collect()
    }

    /// Bytes that a machine for them allocates.
    pub(crate) fn bytes(&self) -> u64 {
        CpuMachine::bytes_for(&self.all()) as u64
    }
}

/// A run in progress.
pub(crate) struct Trainer<'a> {
    plan: &'a ModelPlan,
    run: RunPlan,
    programs: &'a Programs,
    machine: CpuMachine,
    models: Vec<Box<dyn OpaqueModel>>,
    team: Team,
    sampler: Sampler,
    /// Rows of the whole step, those of other ranks included.
    rows: Vec<u64>,
    staging: Staging,
    train_inputs: Vec<Inputs>,
    pub(crate) state: TrainerState,
    /// The step that is measured instruction by instruction, if one is.
    pub(crate) trace: Option<StepTrace>,
    /// Arithmetic of a step and the machine's measured best, FLOP/s.
    model_flops: f64,
    peak_flops: f64,
}

/// What the outcome of a step was.
struct Outcome {
    loss_sum: f64,
    grad_norm: f64,
    predicted_tokens: u64,
    data_wait_s: f64,
    collective_s: f64,
    step_s: f64,
}

impl<'a> Trainer<'a> {
    pub(crate) fn new(
        plan: &'a ModelPlan,
        run: RunPlan,
        programs: &'a Programs,
        sampler: Sampler,
        models: Vec<Box<dyn OpaqueModel>>,
        team: Team,
        output_dir: &Path,
        peak_flops: f64,
    ) -> Result<Trainer<'a>, JobError> {
        let machine =
            CpuMachine::on(&programs.all(), &Backing { shared: team.memory(), offload_dir: Some(output_dir) })?;
        let mesh = team.place.mesh;
        let n_leaves = plan.spec.parallel.logical_shards.unwrap_or(plan.spec.n_microbatches * mesh.data_ranks());
        let n_rows = plan.batch.n_rows * n_leaves;
        let state = TrainerState { step: 0, n_updates: 0, loss_scale: run.loss_scale };
        Ok(Trainer {
            plan,
            run,
            programs,
            machine,
            models,
            team,
            sampler,
            rows: vec![0; n_rows],
            staging: Staging::new(plan.batch, mesh.cp),
            train_inputs: inputs(&programs.train),
            state,
            trace: None,
            // Of ranks that share a model each has its part; the first stage's stands for all.
            model_flops: model_flops(&programs.train) * mesh.size() as f64,
            peak_flops: peak_flops * mesh.size() as f64,
        })
    }

    /// Fills the weights with the first values of a user-defined model, one list a parameter.
    pub(crate) fn start_from(&mut self, values: &[Vec<f32>]) {
        let c = &self.programs.train;
        for tensor in weights::parameters(c) {
            // A user's parameter is one tensor, of the same place in both tables.
            let of = |p: &phalanx_strategies::program::Param| p.value == tensor.value;
            let Some(index) = c.program.params.iter().position(of) else { continue };
            weights::unpack_from_whole(&mut self.machine, c, &tensor, &values[index]);
        }
    }

    /// Fills the weights from the base model or from scratch.
    pub(crate) fn initialise(&mut self, seed: u64) -> Result<(), JobError> {
        let source = self.plan.weights.as_deref().map(TensorSource::open).transpose()?;
        weights::initialise(&mut self.machine, &self.programs.train, self.plan.model.known(), seed, source.as_ref())?;
        Ok(())
    }

    /// Fills weights, optimizer state and position from a checkpoint; returns the keys of the configuration that have
    /// changed since.
    pub(crate) fn restore(&mut self, saving: &Saving, path: &std::path::Path) -> Result<Vec<String>, JobError> {
        let (state, changed) = saving.restore(path, &mut self.machine, &self.programs.train)?;
        self.state = state;
        Ok(changed)
    }

    /// Trains to the end or until asked to stop, reporting to `emit`.
    pub(crate) fn train(
        &mut self,
        data: &TrainData<'_>,
        saving: &mut Saving,
        control: &Control,
        emit: &mut dyn FnMut(Event) -> Result<(), JobError>,
    ) -> Result<(), JobError> {
        let mut saved = None;
        while self.state.step < self.run.total_steps {
            let step = self.state.step;
            let outcome = self.step(data.train)?;
            self.judge(step, &outcome)?;
            tracing::debug!(step = step + 1, loss_sum = outcome.loss_sum, grad_norm = outcome.grad_norm, "step");
            emit(Event::Step(self.metrics(step, &outcome)))?;
            let trace = self.trace.take_if(|trace| trace.step == step);
            if let Some(said) = trace.map_or(Ok(None), |t| t.write(&self.programs.train, &mut self.team))? {
                emit(Event::Note(said))?;
            }
            let last = self.state.step == self.run.total_steps;
            let (stop, asked) = self.agree(control)?;
            if let Some(rows) = data.validation.filter(|_| last || due(data.eval_steps, self.state.step)) {
                emit(Event::Eval(self.evaluate(rows)?))?;
            }
            if last || stop || asked || due(data.save_steps, self.state.step) {
                let path = saving.save(&self.machine, &self.programs.train, &self.state, &mut self.team)?;
                saved = Some(self.state.step);
                emit(Event::Saved { step: self.state.step, path })?;
            }
            if stop {
                break;
            }
        }
        if saved.is_none() && self.state.step == self.run.total_steps {
            emit(Event::Note(format!("all {} steps were already done", self.run.total_steps)))?;
        }
        Ok(())
    }

    /// What was asked of any rank since the last step: to stop, to save.
    fn agree(&mut self, control: &Control) -> Result<(bool, bool), JobError> {
        const STOP: u64 = 1 << 32;
        let (stop, save) = (control.stop.load(Ordering::Acquire), control.save.swap(false, Ordering::AcqRel));
        let asked = self.team.sum(u64::from(stop) * STOP + u64::from(save))?;
        Ok((asked >= STOP, asked % STOP > 0))
    }

    fn step(&mut self, rows: &Rows) -> Result<Outcome, JobError> {
        let start = Instant::now();
        self.sampler.fill_step(self.state.step, 0, &mut self.rows);
        let predicted_tokens = rows.n_predicted(&self.rows) as u64;
        // Each data-parallel rank takes a run of the step's microbatches.
        let place = self.team.place;
        let per_microbatch = self.plan.batch.n_rows;
        let data_rank = place.mesh.coord(place.rank).data_rank(&place.mesh);
        let own = leaves_of(self.rows.len() / per_microbatch, place.mesh.data_ranks(), data_rank);
        for (microbatch, inputs) in self.train_inputs.iter().enumerate().filter(|(_, i)| !i.is_empty()) {
            let counts = microbatch < own.len();
            let at = (own.start + if counts { microbatch } else { 0 }) * per_microbatch;
            self.staging.fill(rows, &self.rows[at..at + per_microbatch], place.on(Axis::Cp));
            if !counts {
                // One more than this rank has, to stay in step with ranks that have it.
                self.staging.ignore(0);
            }
            self.staging.copy_to(&mut self.machine, &self.programs.train, inputs);
        }
        let data_wait_s = start.elapsed().as_secs_f64();
        self.write_hyper(predicted_tokens);
        let c = &self.programs.train;
        self.team.groups.take_waited();
        match self.trace.as_mut().filter(|trace| trace.step == self.state.step) {
            None => self.machine.run(c, &mut self.models, &mut self.team.groups)?,
            Some(trace) => self.machine.run_timed(c, &mut self.models, &mut self.team.groups, trace.begin())?,
        }
        Ok(Outcome {
            loss_sum: scalar(&self.machine, c, Role::LossSum),
            grad_norm: scalar(&self.machine, c, Role::GradNorm),
            predicted_tokens,
            data_wait_s,
            collective_s: self.team.groups.take_waited().as_secs_f64(),
            step_s: start.elapsed().as_secs_f64(),
        })
    }

    fn write_hyper(&mut self, predicted_tokens: u64) {
        let c = &self.programs.train;
        let (bc1, bc2) = self.plan.spec.optimizer.bias_corrections(self.state.n_updates + 1);
        let scale = self.state.loss_scale.scale;
        if let Some(value) = c.program.bound(Role::Hyper).next() {
            let hyper = self.machine.write::<f64>(c, value);
            hyper[Hyper::LEARNING_RATE] = self.run.schedule.learning_rate(self.state.step);
            hyper[Hyper::BIAS_CORRECTION_1] = bc1;
            hyper[Hyper::BIAS_CORRECTION_2] = bc2;
            hyper[Hyper::LOSS_GRAD_SCALE] = scale / predicted_tokens.max(1) as f64;
            hyper[Hyper::LOSS_SCALE] = scale;
        }
    }

    /// Moves on to the next step, or says why there is none.
    fn judge(&mut self, step: u64, outcome: &Outcome) -> Result<(), JobError> {
        let non_finite =
            |what| JobError::NonFinite { step: step + 1, what, parameter: self.first_non_finite(), last_good: step };
        if !outcome.loss_sum.is_finite() {
            return Err(non_finite("the loss"));
        }
        let mut scale = self.state.loss_scale;
        match scale.observe(outcome.grad_norm.is_finite()) {
            Verdict::Diverged => return Err(non_finite("the gradient")),
            Verdict::Updated => self.state.n_updates += 1,
            Verdict::Skipped => {}
        }
        self.state = TrainerState { step: step + 1, loss_scale: scale, ..self.state };
        Ok(())
    }

    /// The first parameter, in table order, that is not finite itself; or else the first, in the order of the backward
    /// pass, whose gradient is not.
    fn first_non_finite(&self) -> String {
        let c = &self.programs.train;
        if let Some(name) = weights::first_non_finite(&self.machine, c) {
            return format!("the weights {name}");
        }
        let sums = c.program.bindings.iter().filter(|b| b.role == Role::GradSumSquares);
        let mut bad: Vec<usize> = sums
            .filter(|b| !self.machine.read::<f64>(c, b.value)[0].is_finite())
            .map(|b| b.microbatch as usize)
            .collect();
        bad.sort_by_key(|p| std::cmp::Reverse(first_read(c, *p)));
        bad.first().map_or("the logits".into(), |p| format!("the gradient of {}", c.program.params[*p].parts[0].name))
    }

    fn metrics(&self, step: u64, o: &Outcome) -> StepMetrics {
        let tokens = (self.rows.len() * self.plan.batch.seq_len) as f64;
        StepMetrics {
            step: step + 1,
            loss: o.loss_sum / o.predicted_tokens.max(1) as f64,
            grad_norm: o.grad_norm,
            lr: self.run.schedule.learning_rate(step),
            tokens_per_s: tokens / o.step_s,
            step_ms: o.step_s * 1e3,
            epoch: self.sampler.epochs_after(step + 1),
            predicted_tokens: o.predicted_tokens,
            mfu_pct: 100.0 * self.model_flops / o.step_s / self.peak_flops,
            memory_bytes: resident_bytes(self.team.memory().map(Arena::len)),
            data_wait_pct: 100.0 * o.data_wait_s / o.step_s,
            loss_scale: (self.run.loss_scale != LossScale::OFF).then_some(self.state.loss_scale.scale),
            collective_pct: (self.team.n_ranks() > 1).then(|| 100.0 * o.collective_s / o.step_s),
            slowest_rank: None,
        }
    }

    /// Mean loss over all validation rows; the last microbatch is filled up with rows whose labels do not count.
    fn evaluate(&mut self, rows: &Rows) -> Result<EvalMetrics, JobError> {
        let start = Instant::now();
        let Some(c) = &self.programs.eval else {
            return Err(JobError::Unusable("no program for evaluation was compiled".into()));
        };
        let inputs = inputs(c);
        let n_rows = self.plan.batch.n_rows;
        let place = self.team.place;
        let data_rank = place.mesh.coord(place.rank).data_rank(&place.mesh);
        let (mut loss_sum, mut predicted) = (0.0, 0);
        for first in (0..rows.len()).step_by(n_rows * place.mesh.data_ranks()) {
            let end = rows.len().min(first + n_rows * place.mesh.data_ranks());
            let all: Vec<u64> = (first as u64..end as u64).collect();
            predicted += rows.n_predicted(&all) as u64;
            // Behind the last row, its copies, whose labels do not count.
            let own: Vec<usize> = (0..n_rows).map(|i| first + data_rank * n_rows + i).collect();
            let indices: Vec<u64> = own.iter().map(|i| (*i).min(end - 1) as u64).collect();
            if let Some(inputs) = inputs.first().filter(|i| !i.is_empty()) {
                self.staging.fill(rows, &indices, place.on(Axis::Cp));
                self.staging.ignore(own.iter().filter(|i| **i < end).count());
                self.staging.copy_to(&mut self.machine, c, inputs);
            }
            self.machine.run(c, &mut self.models, &mut self.team.groups)?;
            loss_sum += scalar(&self.machine, c, Role::LossSum);
        }
        let eval_loss = loss_sum / predicted.max(1) as f64;
        Ok(EvalMetrics {
            step: self.state.step,
            eval_loss,
            eval_perplexity: eval_loss.exp(),
            eval_ms: start.elapsed().as_secs_f64() * 1e3,
        })
    }

    /// What the ranks allocated for their programs, by rank.
    pub(crate) fn buffer_bytes(&mut self) -> Result<Vec<u64>, JobError> {
        Ok(self.team.gather(self.machine.allocated_bytes() as u64)?)
    }

    pub(crate) fn machine(&self) -> &CpuMachine {
        &self.machine
    }
}

/// The rows of a run and when they are looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrainData<'a> {
    pub(crate) train: &'a Rows,
    pub(crate) validation: Option<&'a Rows>,
    pub(crate) eval_steps: Option<u64>,
    pub(crate) save_steps: Option<u64>,
}

/// Elements of all parameters and of the trained ones, adapters included.
fn whole_model(forward: &Program, spec: &StepSpec) -> (usize, usize) {
    let mut whole = forward.clone();
    if let Some(adapters) = &spec.lora {
        // What does not fit is reported when the step is compiled.
        let _ = lora(&mut whole, adapters);
    }
    (whole.n_params(), whole.n_trainable())
}

fn due(every: Option<u64>, step: u64) -> bool {
    every.is_some_and(|n| step.is_multiple_of(n))
}

fn scalar(machine: &CpuMachine, c: &Compiled, role: Role) -> f64 {
    c.program.bound(role).next().map_or(f64::NAN, |v| machine.read::<f64>(c, v)[0])
}

/// Index of the first instruction that reads a parameter: the backward pass comes to it in reverse.
fn first_read(c: &Compiled, param: usize) -> usize {
    let value = c.program.params[param].value;
    c.program.instrs.iter().position(|i| i.reads.contains(&value)).unwrap_or(0)
}

/// Arithmetic of the model in a step: what forward and backward need, without what is computed twice to save memory.
fn model_flops(c: &Compiled) -> f64 {
    let flops = |cost: Cost| cost.matmul_flops + cost.attention_flops;
    let forward = c.program.instrs.iter().filter(|i| i.site.phase == Phase::Forward);
    let forward: f64 = forward.map(|i| flops(phalanx_strategies::cost::instr_cost(&c.program, i))).sum();
    // The backward pass costs twice the forward pass when every weight is trained; with adapters less.
    flops(program_cost(&c.program)).min(3.0 * forward)
}

/// Resident memory of this process, from the kernel; 0 where it does not tell. What a rank shares with others counts at
/// the rank to which it belongs, whose `shared` bytes are all in use: the kernel counts it at everyone who touched it.
fn resident_bytes(shared: Option<usize>) -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let mut pages = statm.split_whitespace().skip(1).map(|p| p.parse::<u64>().unwrap_or(0));
    let (resident, of_others) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
    match shared {
        None => resident * 4096,
        Some(own) => resident.saturating_sub(of_others) * 4096 + own as u64,
    }
}
