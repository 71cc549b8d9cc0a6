//! A run whose ranks are threads of this process.

use super::event_sink::{EventSink, Fault};
use super::plan::ModelPlan;
use super::run_plan;
use super::saving::Saving;
use super::step_trace::StepTrace;
use super::team::{Team, TeamPlan};
use crate::config::JobConfig;
use crate::control::Control;
use crate::data::prepare::Prepared;
use crate::data::rows::Rows;
use crate::error::JobError;
use crate::events::{Event, Report};
use crate::train::programs::Programs;
use crate::train::trainer::{TrainData, Trainer};
use phalanx_collective::shm::world::ShmWorld;
use phalanx_device::world_id::WorldId;
use phalanx_device::{Backing, CollectiveError};
use std::borrow::Borrow;
use std::sync::Arc;

/// The shared memory of all ranks: for each, the regions that peers read and write.
pub(crate) fn shared_world(plan: &TeamPlan, programs: &[impl Borrow<Programs>]) -> Result<ShmWorld, JobError> {
    let id = WorldId { job: u64::from(std::process::id()), generation: 0, incarnation: 0 };
    let arena_bytes: Vec<u64> = programs.iter().map(|p| p.borrow().shared_bytes() as u64).collect();
    Ok(ShmWorld::create(&plan.world(id)?, &arena_bytes, STAGING_BYTES)?)
}

/// Room for operands outside the shared regions: the few numbers that ranks agree on between steps.
const STAGING_BYTES: u64 = 64 << 10;

/// What all ranks of a run share.
pub(crate) struct Run<'a> {
    pub(crate) config: &'a JobConfig,
    pub(crate) model: &'a ModelPlan,
    pub(crate) data: &'a Prepared,
    pub(crate) extras: Vec<(String, Vec<u8>)>,
    pub(crate) control: &'a Control,
}

impl Run<'_> {
    /// Runs one rank on its own device thread.
    pub(crate) fn rank(
        &self,
        programs: &Arc<Programs>,
        n_threads: usize,
        team: impl FnOnce() -> Result<Team, CollectiveError> + Send,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Report, JobError> {
        let saving = Saving::new(self.config, self.extras.clone());
        let Run { config, model, data, .. } = *self;
        let session = Session { config, model, programs, data, saving, n_threads };
        model.device.on_device_thread(n_threads, || session.run(team()?, self.control, on_event))?
    }

    /// Runs all ranks in this process. The first failing thread aborts the others.
    pub(crate) fn threads(
        &self,
        ranks: &[Arc<Programs>],
        plan: &TeamPlan,
        world: &ShmWorld,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Report, JobError> {
        let available = self.model.device.available_threads();
        let n_threads = self.config.precision.threads.unwrap_or((available / ranks.len()).max(1));
        let outcomes: Vec<Result<Report, JobError>> = std::thread::scope(|scope| {
            let mut handles = Vec::new();
            let mut listener = Some(on_event);
            for (rank, programs) in ranks.iter().enumerate() {
                let leader = listener.take_if(|_| rank == 0);
                handles.push(scope.spawn(move || {
                    let team = || plan.join(world, rank as u32, &*self.model.device);
                    let outcome = match leader {
                        Some(on_event) => self.rank(programs, n_threads, team, on_event),
                        None => self.rank(programs, n_threads, team, &mut |_| {}),
                    };
                    if let Err(error) = &outcome {
                        world.control().abort(&format!("rank {rank}: {error}"));
                    }
                    outcome
                }));
            }
            handles.into_iter().map(|h| h.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        root_cause(outcomes)
    }
}

/// The leader's report, or the error that was not a consequence of another.
fn root_cause(outcomes: Vec<Result<Report, JobError>>) -> Result<Report, JobError> {
    let mut report = None;
    let mut errors = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(of_rank) => report = report.or(Some(of_rank)),
            Err(error) => errors.push(error),
        }
    }
    let first = errors.iter().position(|e| !e.is_consequence()).unwrap_or(0);
    match report.filter(|_| errors.is_empty()) {
        Some(report) => Ok(report),
        None => Err(errors.swap_remove(first)),
    }
}

struct Session<'a> {
    config: &'a JobConfig,
    model: &'a ModelPlan,
    programs: &'a Arc<Programs>,
    data: &'a Prepared,
    saving: Saving,
    n_threads: usize,
}

impl Session<'_> {
    fn run(
        mut self,
        team: Team,
        control: &Control,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Report, JobError> {
        let out = &self.config.output;
        let n_rows = self.data.train.n_of_run();
        let (run, sampler) = run_plan::run_over(self.config, &self.data.train)?;
        let leads = team.leads();
        self.saving = self.saving.of_threads()?;
        let (resume, warnings) = self.saving.find(&out.resume_from_checkpoint, self.config.elastic.verify_steps)?;
        warnings.into_iter().for_each(|w| on_event(&Event::Note(w)));
        // Only the leader reports steps, so only the leader measures the peak.
        let peak = match leads {
            true => self.model.device.peak_flops(self.model.spec.precision.is_bf16()),
            false => f64::INFINITY,
        };
        let programs = Arc::clone(self.programs);
        let machine = programs.machine(None, &Backing { shared: team.memory(), offload_dir: Some(&out.folder()) })?;
        let mut trainer = Trainer::new(self.model, run, programs, machine, sampler, team, peak)?;
        trainer.initialise(out.seed)?;
        if let Some(path) = &resume {
            let changed = trainer.restore(&self.saving, path)?;
            if !changed.is_empty() {
                let note = format!("changed since the checkpoint was saved: {}", changed.join(", "));
                on_event(&Event::Note(note));
            }
            tracing::info!(checkpoint = %path.display(), step = trainer.state.step, "resumed");
        }
        let first_step = trainer.state.step;
        trainer.trace = out.trace.as_deref().map(|path| StepTrace::new(path, first_step, run.total_steps));
        let buffer_bytes = trainer.buffer_bytes()?;
        let n_rows = (n_rows, self.data.validation.as_ref().map_or(0, Rows::len));
        on_event(&Event::Started(trainer.started(n_rows, self.n_threads, buffer_bytes, resume.clone())));
        let mut event_sink =
            EventSink::new(&out.folder(), first_step, leads, &self.saving, resume, Fault::default(), on_event);
        let data = TrainData {
            train: &self.data.train,
            validation: self.data.validation.as_ref(),
            eval_steps: run.eval_steps,
            save_steps: run.save_steps,
            checkpoint_required: out.checkpoint_required,
        };
        // The run has a single world.
        let _over = trainer.train(&data, &mut self.saving, control, &mut |event| event_sink.emit(event))?;
        let mut report = event_sink.report.clone();
        report.finished = report.steps >= run.total_steps || trainer.is_over();
        if report.finished && leads {
            report.model_dir = Some(event_sink.export(&out.folder(), &trainer, &self.saving)?);
        }
        Ok(report)
    }
}
