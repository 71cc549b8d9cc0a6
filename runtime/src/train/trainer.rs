//! The loop: fill a batch, run the step's program, check the result. Runs on the device thread.

pub(crate) mod catching_up;
mod computing;
mod evaluating;
mod reference;
mod saves;
mod telling;
mod verifying;
mod worlds;

use self::catching_up::{IncomingCatchUp, OutgoingCatchUp};
use self::evaluating::{Ends, Evaluated, Unfinished};
use super::best::Best;
use super::links::{Exchange, Links};
use super::member::Member;
use super::plan::ModelPlan;
use super::planted::{Planted, Where};
use super::programs::Programs;
use super::run_plan::RunPlan;
use super::saving::{Saving, TrainerState};
use super::shadow::Shadow;
use super::staging::{Inputs, Staging, inputs};
use super::step_trace::StepTrace;
use super::team::Team;
use super::utilisation::{Peak, model_flops};
use super::verification::Verification;
use super::{kept_weights, weights};
use crate::control::Control;
use crate::data::rows::Rows;
use crate::error::JobError;
use crate::error::plan::PlanError;
use crate::events::{Event, StepMetrics};
use phalanx_device::groups::Groups;
use phalanx_device::{Machine, OpaqueModel};
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::elastic::identity::{Generation, Step};
use phalanx_strategies::objective::{Counts, Report, Sums};
use phalanx_strategies::sampler::Sampler;
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
    /// The file of the checkpoint that this rank was restored from.
    restored_reference: Option<Vec<u8>>,
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
            restored_reference: None,
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
        if self.plan.objective.has_computed_reference() {
            // Before a file of the run is changed.
            let found = saving.reference_of(path)?;
            self.restored_reference = Some(found.ok_or(PlanError::ReferenceNotComputed { step: self.state.step })?);
        }
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
        if self.stops_before_a_step(data, saving, control, emit)? {
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
            self.tell(step, &outcome, emit)?;
            let last = self.state.step == self.run.total_steps;
            self.conclude(ended_save, data.checkpoint_required, emit)?;
            self.prepare_next_save(data, saving);
            let (stop, asked) = self.asked_alone(control, (requests.stop, asked));
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
            self.verify_if_due(is_best || is_due, outcome.step_s)?;
            if is_best || is_due {
                self.save_due(saving, last || stop, data.checkpoint_required, emit)?;
            }
            if is_best {
                self.wait_for_best(saving, data.checkpoint_required, emit)?;
            }
            if pauses {
                return self.paused(data, saving, emit);
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

    /// What precedes the first step of a world; returns whether a request to stop has ended it.
    fn stops_before_a_step(
        &mut self,
        data: &TrainData<'_>,
        saving: &mut Saving,
        control: &Control,
        emit: &mut dyn FnMut(Event),
    ) -> Result<bool, JobError> {
        Ok(self.know_reference(data, saving, control, emit)?
            || self.make_up_for_evaluation(data, saving, control, emit)?)
    }

    /// Whether the run is to stop, and to save: a single rank acts on requests at once, a member only on those that were voted.
    fn asked_alone(&mut self, control: &Control, (stop, asked): (bool, bool)) -> (bool, bool) {
        if self.team.n_ranks() > 1 || self.member.is_some() {
            return (stop, asked);
        }
        let asked = self.is_asked(control.saves.load(Ordering::Acquire)) || asked;
        (stop || control.stop.load(Ordering::Acquire), asked)
    }

    /// Makes way for the next world once nothing is being written.
    fn paused(
        &mut self,
        data: &TrainData<'_>,
        saving: &mut Saving,
        emit: &mut dyn FnMut(Event),
    ) -> Result<Pause, JobError> {
        let ended_save = saving.wait(&mut self.team)?;
        self.conclude(ended_save, data.checkpoint_required, emit)?;
        Ok(Pause::Paused)
    }

    /// Whether a new checkpoint was requested.
    fn is_asked(&mut self, n_saves: u64) -> bool {
        let is_new = self.n_saves < n_saves;
        self.n_saves = self.n_saves.max(n_saves);
        is_new
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
