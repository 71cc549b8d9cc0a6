//! The loop: fill a batch, run the step's program, check the result. Runs on the device thread.

pub(crate) mod catching_up;
mod evaluating;
mod saves;
mod verifying;

use self::catching_up::{IncomingCatchUp, OutgoingCatchUp};
use self::evaluating::{Ends, Evaluated, Unfinished};
use super::best::Best;
use super::kept_weights;
use super::links::{Exchange, Links, STAGED, WHOLE};
use super::member::Member;
use super::plan::{ModelPlan, RunPlan};
use super::planted::{Planted, Where};
use super::programs::Programs;
use super::saving::{SaveOutcome, Saving, TrainerState};
use super::shadow::{self, Shadow};
use super::staging::{Inputs, Staging, inputs};
use super::step_trace::StepTrace;
use super::team::Team;
use super::utilisation::Peak;
use super::verification::Verification;
use super::vote::Vote;
use super::weights;
use crate::control::Control;
use crate::data::prepare::PrepareError;
use crate::data::rows::Rows;
use crate::error::JobError;
use crate::events::{Event, Started, StepMetrics};
use phalanx_device::groups::Groups;
use phalanx_device::shared_memory::Arena;
use phalanx_device::span::{SpanMut, SpanRef};
use phalanx_device::{ExecError, Machine, OpaqueModel, Run};
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::cost::program_cost;
use phalanx_strategies::elastic::identity::{Generation, Step};
use phalanx_strategies::elastic::message::Requests;
use phalanx_strategies::elastic::progress::At;
use phalanx_strategies::loss_scale::{LossScale, Verdict};
use phalanx_strategies::mesh::Axis;
use phalanx_strategies::objective::{Counts, Report, Sums, Unit};
use phalanx_strategies::passes::shadow::log;
use phalanx_strategies::program::{Cost, Hyper, Phase, Role, ValueId};
use phalanx_strategies::sampler::Sampler;
use phalanx_strategies::tree::leaves_of;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time between two looks for the next file of a stream.
const STREAM_POLL: Duration = Duration::from_millis(10);

/// A run in progress.
pub(crate) struct Trainer<'a> {
    plan: &'a ModelPlan,
    run: RunPlan,
    /// What the sums of the loss mean.
    report: Report,
    programs: Arc<Programs>,
    machine: Box<dyn Machine>,
    models: Vec<Box<dyn OpaqueModel>>,
    team: Team,
    /// For programs that need no other rank.
    alone: Groups,
    /// This rank's control plane, if it has one.
    member: Option<Box<dyn Member>>,
    unfinished: Unfinished,
    /// Copies of other ranks' state.
    shadows: Vec<Shadow>,
    /// Ranks that hold copies of this rank's state.
    shadow_holders: Vec<u32>,
    links: Links,
    /// The exchange of gradients with shadow holders and shadowed ranks, after its first run.
    gradients: Option<Exchange>,
    outgoing_catch_up: OutgoingCatchUp,
    incoming_catch_up: IncomingCatchUp,
    /// A computed step that is neither applied nor discarded: the position after it, and its outcome.
    open: Option<(TrainerState, Outcome)>,
    /// Metrics of the last step, in case the leader died before reporting it.
    settled: Option<StepMetrics>,
    verification: Verification,
    /// Faults of tests.
    pub(crate) planted: Planted,
    /// The generation of the current world, in a run of several worlds.
    generation: Generation,
    /// Number of requested checkpoints that are written or being written.
    n_saves: u64,
    sampler: Sampler,
    /// Rows of the whole step, those of other ranks included.
    rows: Vec<u64>,
    staging: Staging,
    train_inputs: Vec<Inputs>,
    pub(crate) state: TrainerState,
    /// The trace of a step measured instruction by instruction, if requested.
    pub(crate) trace: Option<StepTrace>,
    /// Arithmetic of a step and the machine's measured best, FLOP/s.
    model_flops: f64,
    peak: Peak,
}

/// Why training has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Pause {
    /// The run is complete, or was asked to stop.
    Over,
    /// The world makes way for the next one, which continues from here.
    Paused,
}

/// The outcome of a step.
struct Outcome {
    /// Sums of the parts of the loss, and of what the objective reports beside it.
    sums: Sums,
    grad_norm: f64,
    counts: Counts,
    data_wait_s: f64,
    /// Waits for other ranks in collectives, including the vote.
    collective_s: f64,
    /// The comparison of copies after the previous step, if there was one.
    verify_s: Option<f64>,
    /// This rank's part of the loss, as bits.
    own_loss: u64,
    /// Time since the previous step, or since this step began if other work came between.
    step_s: f64,
}

impl<'a> Trainer<'a> {
    pub(crate) fn new(
        plan: &'a ModelPlan,
        run: RunPlan,
        programs: Arc<Programs>,
        machine: Box<dyn Machine>,
        sampler: Sampler,
        team: Team,
        peak_flops: f64,
    ) -> Result<Trainer<'a>, JobError> {
        let mesh = team.mesh_rank.mesh;
        let n_rows = plan.n_samples() * plan.n_microbatches;
        let state = TrainerState { step: 0, n_updates: 0, loss_scale: run.loss_scale, best: Best::default() };
        Ok(Trainer {
            train_inputs: inputs(&programs.train),
            staging: Staging::of(&programs.all(), plan.batch, mesh.cp),
            // Each rank has a part of the model; the part of the first stage stands for all.
            model_flops: model_flops(&programs.train) * mesh.size() as f64,
            report: plan.objective.report(),
            plan,
            run,
            programs,
            machine,
            models: plan.model.operations(plan.batch)?,
            alone: alone(&team),
            team,
            member: None,
            unfinished: Unfinished::default(),
            shadows: Vec::new(),
            shadow_holders: Vec::new(),
            links: Links::default(),
            gradients: None,
            outgoing_catch_up: OutgoingCatchUp::default(),
            incoming_catch_up: IncomingCatchUp::default(),
            open: None,
            settled: None,
            verification: Verification::new(run.verify_steps),
            planted: Planted::default(),
            generation: Generation(0),
            n_saves: 0,
            sampler,
            rows: vec![0; n_rows],
            state,
            trace: None,
            peak: Peak::measured(peak_flops * mesh.size() as f64),
        })
    }

    /// Fills the weights with their initial values.
    pub(crate) fn initialise(&mut self, seed: u64) -> Result<(), JobError> {
        let first = self.plan.first_values(seed)?;
        Ok(weights::initialise(&mut *self.machine, &self.programs.train, &first, |_| true)?)
    }

    /// Fills weights, optimizer state and position from a checkpoint; returns the keys of the configuration that have
    /// changed since.
    pub(crate) fn restore(&mut self, saving: &Saving, path: &std::path::Path) -> Result<Vec<String>, JobError> {
        let (state, changed) = saving.restore(path, &mut *self.machine, &self.programs.train)?;
        if !changed.is_empty() {
            kept_weights::check(self.plan, &Checkpoint::open_lazily(path)?)?;
        }
        let last = self.run.total_steps;
        if state.step > last {
            return Err(JobError::BeyondTheEnd { path: path.to_owned(), step: state.step, last });
        }
        if state.best.is_over(self.run.best) {
            return Err(JobError::EndedEarly { path: path.to_owned(), step: state.step, n_worse: state.best.n_worse });
        }
        self.state = state;
        Ok(changed)
    }

    /// Trains to the end or until asked to stop, reporting to `emit`.
    pub(crate) fn train(
        &mut self,
        data: &TrainData<'_>,
        saving: &mut Saving,
        control: &Control,
        emit: &mut dyn FnMut(Event),
    ) -> Result<Pause, JobError> {
        let first_step = self.state.step;
        if self.make_up_for_evaluation(data, saving, control, emit)? {
            return Ok(Pause::Over);
        }
        let mut began = Instant::now();
        while self.state.step < self.run.total_steps {
            let step = self.state.step;
            self.open_step(data.train)?;
            // Nothing has changed yet. All ranks vote here, so that no rank applies a step that another could not compute.
            let is_due = due(data.save_steps, step + 1);
            let (requests, asked, ended_save) = self.vote(control, saving, is_due)?;
            self.plant(Where::Gradient);
            let mut outcome = self.update()?;
            self.verification.memory.note_loss(Step(self.state.step), outcome.own_loss);
            self.notify_followers()?;
            let ended = Instant::now();
            outcome.step_s = ended.duration_since(std::mem::replace(&mut began, ended)).as_secs_f64();
            tracing::debug!(step = step + 1, loss_sum = outcome.sums[0], grad_norm = outcome.grad_norm, "step");
            emit(Event::Step(self.metrics(step, &outcome)));
            let trace = self.trace.take_if(|trace| trace.step == step);
            if let Some(note) = trace.map_or(Ok(None), |t| t.write(&self.programs.train, &mut self.team))? {
                emit(Event::Note(note));
            }
            let last = self.state.step == self.run.total_steps;
            self.conclude(ended_save, data.checkpoint_required, emit)?;
            self.prepare_next_save(data, saving);
            // A single rank acts on requests at once; a member acts only on requests that were voted.
            let alone = self.team.n_ranks() == 1 && self.member.is_none();
            let stop = requests.stop || alone && control.stop.load(Ordering::Acquire);
            let asked = self.is_asked(if alone { control.saves.load(Ordering::Acquire) } else { 0 }) || asked;
            let pauses = requests.pause == self.generation && self.member.is_some() && !(last || stop || asked);
            [Where::Weights, Where::Optimizer, Where::Shadow].into_iter().for_each(|place| self.plant(place));
            // A run that ends early stops by itself, and is to evaluate its last step.
            let ends = if pauses { Ends::Never } else { Ends::on(stop && !self.is_over(), control) };
            let evaluated = self.evaluate_if_due(data, last, ends, &mut began, emit)?;
            // The commit of the last step has told it already.
            if evaluated == Evaluated::Ended && !stop && !last {
                self.member.as_mut().map_or(Ok(()), |member| member.stopped(self.state.step))?;
            }
            let (is_best, stop) = (evaluated == Evaluated::Best, stop || evaluated == Evaluated::Ended);
            let is_due = last || stop || asked || is_due && !pauses;
            let saves = is_best || is_due;
            self.verify_if_due(saves, outcome.step_s)?;
            if saves {
                self.save_due(saving, last || stop, data.checkpoint_required, emit)?;
            }
            if is_best {
                self.wait_for_best(saving, data.checkpoint_required, emit)?;
            }
            if pauses {
                let ended_save = saving.wait(&mut self.team)?;
                self.conclude(ended_save, data.checkpoint_required, emit)?;
                return Ok(Pause::Paused);
            }
            if stop {
                break;
            }
        }
        if first_step == self.run.total_steps {
            emit(Event::Note(format!("all {} steps were already done", self.run.total_steps)));
        }
        Ok(Pause::Over)
    }

    /// Computes the gradients of the next step, which is open once they are finite.
    fn open_step(&mut self, rows: &Rows) -> Result<(), JobError> {
        let outcome = self.prepare_with_faults(rows)?;
        let judged = self.judge(&outcome);
        if let Err(JobError::NonFinite { what, .. }) = judged {
            // All ranks have the same loss and gradient norm. A broken copy of the state is not a diverged model.
            self.verify_if_due(true, outcome.step_s)?;
            self.repeat_once(what)?;
        }
        self.open = Some((judged?, outcome));
        Ok(())
    }

    /// Agrees with all other ranks that the open step counts. Returns the requests, whether a checkpoint was newly
    /// requested, and the background save that has ended, if any: a rank applies a committed step even if the save failed.
    fn vote(
        &mut self,
        control: &Control,
        saving: &mut Saving,
        is_due: bool,
    ) -> Result<(Requests, bool, Option<SaveOutcome>), JobError> {
        let step = self.state.step + 1;
        self.member.as_mut().map_or(Ok(()), |member| member.computed(step))?;
        // A running save finishes first. A step after which another is due would wait for it in any case.
        let pauses = self.member.is_some() && control.pause.load(Ordering::Acquire) == self.generation.0;
        // Any rank may be asked to stop; the leader passes requests to save on to all ranks.
        let own = Vote {
            n_stop: u64::from(control.stop.load(Ordering::Acquire) || self.is_over()),
            n_saves: if self.team.leads() { control.saves.load(Ordering::Acquire) } else { 0 },
            n_pause: u64::from(pauses && (saving.is_idle() || is_due)),
            save: saving.ballot(),
        };
        let start = Instant::now();
        let all = own.counted(&mut self.team)?;
        let waited_s = start.elapsed().as_secs_f64();
        if let Some((_, outcome)) = &mut self.open {
            (outcome.collective_s, outcome.step_s) = (outcome.collective_s + waited_s, outcome.step_s + waited_s);
        }
        let requests = all.requests(self.generation);
        self.member.as_mut().map_or(Ok(()), |member| member.committed(step, requests))?;
        Ok((requests, self.is_asked(all.n_saves), saving.count(all.save, &self.team)))
    }

    /// Sends this step's gradients to shadow holders and followers of this rank, and receives those of other ranks.
    #[allow(unsafe_code)] // Repeats an exchange whose gradients are no longer borrowed.
    fn share_gradients(&mut self, outcome: &Outcome) -> Result<(), JobError> {
        let followers = &self.outgoing_catch_up.followers;
        if self.shadow_holders.is_empty() && self.shadows.is_empty() && followers.is_empty() {
            return Ok(());
        }
        if let Some(gradients) = self.gradients.as_mut().filter(|_| followers.is_empty()) {
            // SAFETY: it points to gradients of this machine and of the shadows, which have not moved: every method that
            // maps or replaces a machine resets it. No program runs on these machines before this returns.
            return Ok(unsafe { self.links.repeat(gradients) }?);
        }
        let known = if followers.is_empty() { Vec::new() } else { self.known_of_step(outcome) };
        let c = &self.programs.train;
        let bytes_max = self.exchanged_at_once();
        let whole = |grad: ValueId| self.machine.source(c, grad, 0..c.program.value(grad).n_elements());
        let own: Vec<SpanRef<'_>> = log(&c.program, &c.phases).into_iter().map(whole).collect();
        let to_shadow_holders = self.shadow_holders.iter().map(|shadow_holder| (*shadow_holder, own.clone()));
        let to_followers = followers.iter().map(|follower| {
            let known = follower.leads.then(|| SpanRef::from(bytemuck::cast_slice::<f64, f32>(&known)));
            (follower.member, known.into_iter().chain(own.iter().cloned()).collect())
        });
        let sends: Vec<(u32, Vec<SpanRef<'_>>)> = to_shadow_holders.chain(to_followers).collect();
        let receives: Vec<(u32, Vec<SpanMut<'_>>)> =
            self.shadows.iter_mut().map(|shadow| (shadow.of, shadow.gradients())).collect();
        let mut exchange = Exchange::new(&sends, &receives, bytes_max);
        // SAFETY: the tensors are borrowed until this returns.
        unsafe { self.links.repeat(&mut exchange) }?;
        // The scalars for followers belong to this step alone.
        self.gradients = followers.is_empty().then_some(exchange);
        Ok(())
    }

    /// Bytes of gradients per operation; the ranks of a world have devices of the same kind.
    pub(crate) fn exchanged_at_once(&self) -> usize {
        if self.machine.memory().is_none() { WHOLE } else { STAGED }
    }

    /// Whether a new checkpoint was requested.
    fn is_asked(&mut self, n_saves: u64) -> bool {
        let is_new = self.n_saves < n_saves;
        self.n_saves = self.n_saves.max(n_saves);
        is_new
    }

    /// Computes all that the update of the next step needs.
    fn prepare(&mut self, rows: &Rows) -> Result<Outcome, JobError> {
        let start = Instant::now();
        self.sampler.fill_step(self.state.step, 0, &mut self.rows);
        self.await_rows(rows)?;
        let counts = rows.counts(&self.rows).map_err(PrepareError::from)?;
        // Each data-parallel rank takes a run of the step's microbatches.
        let mesh_rank = self.team.mesh_rank;
        let per_microbatch = self.plan.n_samples();
        let data_rank = mesh_rank.mesh.coord(mesh_rank.rank).data_rank(&mesh_rank.mesh);
        let own = leaves_of(self.rows.len() / per_microbatch, mesh_rank.mesh.data_ranks(), data_rank);
        let dropout = self.sampler.dropout_of(self.state.step);
        for (microbatch, inputs) in self.train_inputs.iter().enumerate().filter(|(_, i)| !i.is_empty()) {
            let counts = microbatch < own.len();
            let at = (own.start + if counts { microbatch } else { 0 }) * per_microbatch;
            let own_rows = &self.rows[at..at + per_microbatch];
            self.staging.fill(rows, own_rows, mesh_rank.on(Axis::Cp), dropout)?;
            if !counts {
                // This rank has one microbatch less than others and repeats its first to stay in step with them.
                self.staging.ignore(0);
            }
            self.staging.copy_to(&mut *self.machine, &self.programs.train, inputs);
        }
        let data_wait_s = start.elapsed().as_secs_f64();
        self.write_hyper(&counts);
        let c = &self.programs.train;
        self.team.groups.take_waited();
        let (machine, models, groups) = (&mut self.machine, &mut self.models, &mut self.team.groups);
        let trace = self.trace.as_mut().filter(|trace| trace.step == self.state.step);
        // The compute phase does not touch the state that updates change, so it can be sent meanwhile.
        let (ran, sent) = self.links.send_pages(&mut self.outgoing_catch_up.catch_up_transfers, || {
            let timings = trace.map(StepTrace::begin);
            machine.run(c, c.phases.compute(), &mut Run { groups, models, timings })?;
            // A rank votes for a step only after it has computed the step.
            machine.settle()
        });
        ran?;
        sent?;
        let outcome = Outcome {
            sums: sums_of_loss(&*self.machine, c, self.report.n_sums()),
            grad_norm: scalar(&*self.machine, c, Role::GradNorm),
            own_loss: if self.team.n_ranks() > 1 && self.verification.is_on() { self.own_loss() } else { 0 },
            counts,
            data_wait_s,
            collective_s: self.team.groups.take_waited().as_secs_f64(),
            verify_s: self.verification.spent_s.take(),
            step_s: start.elapsed().as_secs_f64(),
        };
        self.share_gradients(&outcome)?;
        self.await_followers()?;
        Ok(Outcome { step_s: start.elapsed().as_secs_f64(), ..outcome })
    }

    /// Waits until the rows of the step are prepared, which can take a while if they are of the next file of a stream.
    fn await_rows(&self, rows: &Rows) -> Result<(), JobError> {
        let last = self.rows.iter().copied().max().unwrap_or(0);
        if rows.are_ready(last)? {
            return Ok(());
        }
        tracing::info!(step = self.state.step + 1, "waiting until the next file of the stream is tokenised");
        let counter = self.team.groups.progress_counter();
        let _reads = counter.during(At::Stores);
        while !rows.are_ready(last)? {
            if counter.is_left() {
                return Err(ExecError::Left.into());
            }
            counter.tick();
            std::thread::sleep(STREAM_POLL);
        }
        Ok(())
    }

    /// A digest of this rank's part of the loss, of any number of terms.
    fn own_loss(&self) -> u64 {
        let c = &self.programs.train;
        let mut digest = 0u64;
        for value in c.program.bound(Role::OwnLoss) {
            self.machine.elements::<f64>(c, value, 0..c.program.value(value).n_elements()).iter().for_each(|term| {
                digest = digest.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ term.to_bits();
            });
        }
        digest
    }

    /// Makes the open step part of the state.
    fn update(&mut self) -> Result<Outcome, JobError> {
        let programs = Arc::clone(&self.programs);
        let c = &programs.train;
        let step = self.state.step;
        let mut outcome = self.update_alone()?;
        if self.member.is_some() {
            self.settled = Some(self.metrics(step, &outcome));
        }
        let groups = &mut self.team.groups;
        let timings = self.trace.as_mut().filter(|trace| trace.step == step).map(StepTrace::go_on);
        self.machine.run(c, c.phases.gather(), &mut Run { groups, models: &mut self.models, timings })?;
        outcome.collective_s += self.team.groups.take_waited().as_secs_f64();
        Ok(outcome)
    }

    /// The part of [`Trainer::update`] that needs no other rank: the outcome of a step may become known only after its world
    /// has ended.
    ///
    /// # Panics
    /// If no step is open.
    fn update_alone(&mut self) -> Result<Outcome, JobError> {
        let (next, outcome) = self.open.take().expect("a step is prepared before it is applied");
        let c = &self.programs.train;
        let (groups, models) = (&mut self.alone, &mut self.models[..]);
        let timings = self.trace.as_mut().filter(|trace| trace.step == self.state.step).map(StepTrace::go_on);
        shadow::update(&mut *self.machine, c, &mut self.shadows, &mut Run { groups, models, timings })?;
        self.state = next;
        Ok(outcome)
    }

    fn write_hyper(&mut self, counts: &Counts) {
        let c = &self.programs.train;
        let of_rule = self.plan.spec.optimizer.scalars(self.state.n_updates + 1);
        let scale = self.state.loss_scale.scale;
        if let Some(value) = c.program.bound(Role::Hyper).next() {
            let mut hyper = [0.0; Hyper::LEN];
            hyper[Hyper::LEARNING_RATE] = self.run.schedule.learning_rate(self.state.step);
            let ratio = self.plan.spec.lora.as_ref().and_then(|lora| lora.rate_ratio).unwrap_or(1.0);
            hyper[Hyper::ADAPTER_LEARNING_RATE] = ratio * hyper[Hyper::LEARNING_RATE];
            hyper[Hyper::RULE..][..of_rule.len()].copy_from_slice(&of_rule);
            for unit in &self.report.units {
                hyper[unit.hyper()] = scale / counts.of(*unit);
            }
            hyper[Hyper::LOSS_SCALE] = scale;
            self.machine.write(c, value, 0, &hyper);
        }
    }

    /// The position after the step, or why the step failed.
    fn judge(&self, outcome: &Outcome) -> Result<TrainerState, JobError> {
        let step = self.state.step;
        let non_finite =
            |what| JobError::NonFinite { step: step + 1, what, parameter: self.first_non_finite(), last_good: step };
        if !outcome.sums.iter().take(self.report.units.len()).all(|sum| sum.is_finite()) {
            return Err(non_finite("the loss"));
        }
        let TrainerState { mut loss_scale, mut n_updates, .. } = self.state;
        match loss_scale.observe(outcome.grad_norm.is_finite()) {
            Verdict::Diverged => return Err(non_finite("the gradient")),
            Verdict::Updated => n_updates += 1,
            Verdict::Skipped => {}
        }
        Ok(TrainerState { step: step + 1, n_updates, loss_scale, ..self.state })
    }

    /// The first parameter, in table order, that is not finite; otherwise the first, in the order of the backward pass,
    /// with a gradient that is not finite.
    fn first_non_finite(&self) -> String {
        let c = &self.programs.train;
        if let Some(name) = weights::first_non_finite(&*self.machine, c) {
            return format!("the weights {name}");
        }
        let sums = c.program.bindings.iter().filter(|b| b.role == Role::GradSumSquares);
        let mut bad: Vec<usize> = sums
            .filter(|b| !self.machine.first::<f64>(c, b.value).is_finite())
            .map(|b| b.microbatch as usize)
            .collect();
        bad.sort_by_key(|p| std::cmp::Reverse(first_read(c, *p)));
        bad.first().map_or("the logits".into(), |p| format!("the gradient of {}", c.program.params[*p].parts[0].name))
    }

    fn metrics(&mut self, step: u64, o: &Outcome) -> StepMetrics {
        let n_batch_rows = self.rows.len() * self.plan.objective.rows_per_sample();
        let tokens = (n_batch_rows * self.plan.batch.seq_len) as f64;
        StepMetrics {
            step: step + 1,
            total_steps: self.run.total_steps,
            loss: self.report.loss(&o.sums, &o.counts),
            grad_norm: o.grad_norm,
            lr: self.run.schedule.learning_rate(step),
            tokens_per_s: tokens / o.step_s,
            step_ms: o.step_s * 1e3,
            epoch: self.sampler.epochs_after(step + 1),
            predicted_tokens: o.counts.number(Unit::Token),
            mfu_pct: self.peak.share_pct(self.model_flops / o.step_s),
            // A device's own memory is what limits a job on it.
            memory_bytes: match self.machine.memory() {
                Some(_) => self.machine.allocated_bytes() as u64,
                None => resident_bytes(self.team.memory().map(|_| self.bytes_in_shared())),
            },
            data_wait_pct: 100.0 * o.data_wait_s / o.step_s,
            scalars: self.report.scalars(&o.sums, &o.counts),
            loss_scale: (self.run.loss_scale != LossScale::OFF).then_some(self.state.loss_scale.scale),
            collective_pct: (self.team.n_ranks() > 1).then(|| 100.0 * o.collective_s / o.step_s),
            verify_pct: o.verify_s.map(|verify_s| 100.0 * verify_s / o.step_s),
            stalled_steps: None,
            slowest_rank: None,
        }
    }

    /// Steps so far, and how many of them updated the weights: in fp16, a step whose gradient overflows does not.
    pub(crate) fn n_steps_and_updates(&self) -> (u64, u64) {
        (self.state.step, self.state.n_updates)
    }

    /// Bytes that the ranks allocated for their programs, by rank.
    pub(crate) fn buffer_bytes(&mut self) -> Result<Vec<u64>, JobError> {
        Ok(self.team.gather(self.machine.allocated_bytes() as u64)?)
    }

    /// The same trainer with room for copies of other ranks' state.
    pub(crate) fn with_shadows(self, shadows: Vec<Shadow>) -> Trainer<'a> {
        Trainer { shadows, ..self }
    }

    /// Whether its state is in this memory.
    pub(crate) fn is_in(&self, memory: Option<&Arena>) -> bool {
        memory.zip(self.arena()).is_some_and(|(a, b)| a.is_same(b))
    }

    /// The memory that it shares with its peers, if any.
    pub(crate) const fn arena(&self) -> Option<&Arena> {
        self.team.memory()
    }

    /// Joins the next world with the same rank.
    ///
    /// # Panics
    /// If the rank or its memory differs.
    pub(crate) fn rejoin(&mut self, team: Team) {
        assert!(
            team.mesh_rank == self.team.mesh_rank && self.is_in(team.memory()),
            "a trainer keeps its rank and its memory"
        );
        self.gradients = None;
        if let Some(memory) = team.memory() {
            self.machine.remap(memory);
            self.shadows.iter_mut().for_each(|shadow| shadow.machine.remap(memory));
        }
        self.alone = alone(&team);
        self.team = team;
    }

    /// Ends it: its machine, its position, and the metrics of its last step.
    pub(crate) fn into_parts(self) -> (Box<dyn Machine>, TrainerState, Option<StepMetrics>) {
        (self.machine, self.state, self.settled)
    }

    /// The metrics of its last step, in case they are unreported.
    pub(crate) const fn settled(&self) -> Option<&StepMetrics> {
        self.settled.as_ref()
    }

    /// The same trainer, with the metrics of the last step of an earlier one.
    #[must_use]
    pub(crate) fn with_settled(self, settled: Option<StepMetrics>) -> Trainer<'a> {
        Trainer { settled, ..self }
    }

    /// Sets the links for gradients outside the program, and the followers of this rank.
    pub(crate) fn link(&mut self, links: Links, shadow_holders: Vec<u32>, outgoing_catch_up: OutgoingCatchUp) {
        (self.links, self.shadow_holders, self.outgoing_catch_up) = (links, shadow_holders, outgoing_catch_up);
        (self.gradients, self.incoming_catch_up) = (None, IncomingCatchUp::default());
    }

    fn bytes_in_shared(&self) -> usize {
        let machines = std::iter::once(&self.machine).chain(self.shadows.iter().map(|shadow| &shadow.machine));
        machines.map(|machine| machine.bytes_in_shared()).sum()
    }

    /// The program and the machine that hold its state.
    pub(crate) fn memory(&self) -> (&Compiled, &dyn Machine) {
        (&self.programs.train, &*self.machine)
    }

    /// As [`Trainer::memory`], mutable.
    pub(crate) fn memory_mut(&mut self) -> (&Compiled, &mut dyn Machine) {
        (&self.programs.train, &mut *self.machine)
    }

    /// As [`Trainer::memory_mut`], with its shadows.
    pub(crate) fn memories_mut(&mut self) -> ((&Compiled, &mut dyn Machine), &mut [Shadow]) {
        ((&self.programs.train, &mut *self.machine), &mut self.shadows)
    }

    pub(crate) fn shadows(&self) -> &[Shadow] {
        &self.shadows
    }

    pub(crate) fn shadows_mut(&mut self) -> &mut [Shadow] {
        &mut self.shadows
    }

    /// Applies the open step, whose commit became known after its world had ended.
    pub(crate) fn settle(&mut self) -> Result<(), JobError> {
        let step = self.state.step;
        let outcome = self.update_alone()?;
        self.settled = Some(self.metrics(step, &outcome));
        Ok(())
    }

    /// Discards the open step, if there is one.
    pub(crate) fn give_up(&mut self) {
        self.open = None;
    }

    /// Metrics of the previous world's last step, if any rank has them: the leader may have died before reporting them.
    pub(crate) fn take_settled(&mut self) -> Result<Option<StepMetrics>, JobError> {
        let own = self.settled.take().filter(|metrics| metrics.step == self.state.step);
        let own = own.and_then(|metrics| serde_json::to_string(&metrics).ok()).unwrap_or_default();
        let texts = self.team.gather_texts(own)?;
        Ok(texts.iter().find_map(|text| serde_json::from_str(text).ok()))
    }

    /// Begins to train as a member of a world; gathers the weights that other ranks update, which may be outdated here.
    pub(crate) fn begin(
        &mut self,
        generation: Generation,
        n_saves: u64,
        member: Box<dyn Member>,
    ) -> Result<(), JobError> {
        let c = &self.programs.train;
        (self.generation, self.n_saves, self.member) = (generation, n_saves, Some(member));
        let with = &mut Run { groups: &mut self.team.groups, models: &mut self.models, timings: None };
        Ok(self.machine.run(c, c.phases.gather(), with)?)
    }

    /// Describes the run as it starts or resumes.
    pub(crate) fn started(
        &self,
        n_rows: (usize, usize),
        n_threads: usize,
        buffer_bytes: Vec<u64>,
        resumed_from: Option<PathBuf>,
    ) -> Started {
        Started {
            mesh: self.team.mesh_rank.mesh,
            first_step: self.state.step,
            total_steps: self.run.total_steps,
            n_trainable: self.programs.n_params.1,
            n_params: self.programs.n_params.0,
            n_rows,
            buffer_bytes,
            n_threads,
            resumed_from,
        }
    }

    /// Checks that no weight is NaN or infinite, for a state that no later step will check.
    ///
    /// # Errors
    /// Names the first such parameter.
    pub(crate) fn check_weights(&self) -> Result<(), JobError> {
        let found = weights::first_non_finite(&*self.machine, &self.programs.train);
        found.map_or(Ok(()), |parameter| Err(JobError::UnfitState { step: self.state.step, parameter }))
    }

    pub(crate) const fn n_ranks(&self) -> usize {
        self.team.n_ranks()
    }
}

/// No groups, on the device of this team. A committed update completes even if the world ends.
fn alone(team: &Team) -> Groups {
    Groups::none().with_progress_counter(team.groups.progress_counter().of_any_world())
}

/// The rows of a run, and when it evaluates and saves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrainData<'a> {
    pub(crate) train: &'a Rows,
    pub(crate) validation: Option<&'a Rows>,
    pub(crate) eval_steps: Option<u64>,
    pub(crate) save_steps: Option<u64>,
    /// Whether a failed save ends the run.
    pub(crate) checkpoint_required: bool,
}

fn due(every: Option<u64>, step: u64) -> bool {
    every.is_some_and(|n| step.is_multiple_of(n))
}

/// The sums of the loss of the last run of a program; not a number if it has none.
fn sums_of_loss(machine: &dyn Machine, c: &Compiled, n: usize) -> Sums {
    match c.program.bound(Role::LossSum).next() {
        None => Sums::filled(f64::NAN, n),
        Some(v) if n == 1 => Sums::filled(machine.first(c, v), n),
        Some(v) => Sums::of(&machine.elements(c, v, 0..n)),
    }
}

fn scalar(machine: &dyn Machine, c: &Compiled, role: Role) -> f64 {
    c.program.bound(role).next().map_or(f64::NAN, |v| machine.first::<f64>(c, v))
}

/// Index of the first instruction that reads a parameter; the backward pass reaches it in reverse order.
fn first_read(c: &Compiled, param: usize) -> usize {
    let value = c.program.params[param].value;
    c.program.instrs.iter().position(|i| i.reads.contains(&value)).unwrap_or(0)
}

/// Arithmetic of the model in a step: the forward and backward pass, without recomputation.
fn model_flops(c: &Compiled) -> f64 {
    let flops = |cost: Cost| cost.matmul_flops + cost.attention_flops;
    let forward = c.program.instrs.iter().filter(|i| i.site.phase <= Phase::Forward);
    let forward: f64 = forward.map(|i| flops(phalanx_strategies::cost::instr_cost(&c.program, i))).sum();
    // The backward pass costs twice the forward pass when every weight is trained; with adapters less.
    flops(program_cost(&c.program)).min(3.0 * forward)
}

/// Resident memory of this process, from the kernel; 0 if unknown. Shared memory counts for the rank that owns it, whose
/// `shared` bytes are all in use; the kernel counts it for every process that touched it.
fn resident_bytes(shared: Option<usize>) -> u64 {
    // Read in place, so that a step allocates nothing.
    let mut bytes = [0; 256];
    let n = std::fs::File::open("/proc/self/statm").and_then(|mut file| file.read(&mut bytes)).unwrap_or(0);
    let statm = str::from_utf8(&bytes[..n]).unwrap_or_default();
    let mut pages = statm.split_whitespace().skip(1).map(|p| p.parse::<u64>().unwrap_or(0));
    let (resident, of_others) = (pages.next().unwrap_or(0), pages.next().unwrap_or(0));
    match shared {
        None => resident * 4096,
        Some(own) => resident.saturating_sub(of_others) * 4096 + own as u64,
    }
}
