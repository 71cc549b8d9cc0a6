//! Starts the ranks of a checked configuration, as threads of this process or as separate processes.

use crate::config::JobConfig;
use crate::config::precision::{DeviceChoice, PrecisionSection};
use crate::control::Control;
use crate::coordinate::head_node::{LocalNode, lead_alone};
use crate::coordinate::held_lease::with_lease;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::host::HostError;
use crate::events::{Event, Report};
use crate::frontend::UserModel;
use crate::launch::executable::Executable;
use crate::train::fit::{check_memory, check_output, check_ranks, create_dir};
use crate::train::inputs::RunInputs;
use crate::train::output_lock::{OutputLock, Preparing};
use crate::train::plan::{self, ModelPlan};
use crate::train::preparation::{extras, prepare_ahead, prepare_data};
use crate::train::programs::Programs;
use crate::train::saving::Saving;
use crate::train::saving::resuming::EarlyEnd;
use crate::train::step_trace::check_writable;
use crate::train::team::{Team, TeamPlan};
use crate::train::threads::{Run, shared_world};
use crate::train::vocabulary;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use std::sync::Arc;

/// How the ranks of a run execute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// Threads of this process.
    Threads,
    /// Separate processes.
    Processes {
        /// The rank program.
        program: Executable,
        /// Whether the rank program makes user-defined models.
        makes_models: bool,
    },
}

/// Runs a job to its end, or until a stop is requested. Nothing is written before all input is checked.
pub(crate) fn run(
    config: &JobConfig,
    user: Option<UserModel>,
    ranks: &Ranks,
    control: &Control,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Report, JobError> {
    Checked::new(config, user, ranks)?.run(control, on_event)
}

/// A job that is checked except for its data.
pub(crate) struct Checked<'a> {
    config: &'a JobConfig,
    /// The rank program, if ranks are processes.
    program: Option<&'a Executable>,
    tokenizer: Tokenizer,
    model: ModelPlan,
    mesh: Mesh,
    programs: Vec<Arc<Programs>>,
    /// What the user should know about the devices.
    notes: Vec<String>,
}

impl<'a> Checked<'a> {
    /// Checks a job without writing files.
    pub(crate) fn new(
        config: &'a JobConfig,
        user: Option<UserModel>,
        ranks: &'a Ranks,
    ) -> Result<Checked<'a>, JobError> {
        let tokenizer = plan::tokenizer(config)?;
        let mut model = match user {
            Some(user) => plan::user_plan(config, &tokenizer, &Arc::new(user))?,
            None => plan::model_plan(config, &tokenizer)?,
        };
        let mesh = config.parallel.mesh()?;
        check_ranks(&model, mesh)?;
        if config.parallel.nnodes > 1 {
            return Err(HostError::SeveralMachines { n_nodes: config.parallel.nnodes }.into());
        }
        let program = match ranks {
            Ranks::Processes { program, .. } => Some(program),
            Ranks::Threads => None,
        };
        if model.model.user().is_some() && matches!(ranks, Ranks::Processes { makes_models: false, .. }) {
            return Err(HostError::RanksWithoutModel.into());
        }
        // Compiled before the data is read, so that a model that cannot train leaves no token files.
        let evaluates = config.data.evaluates();
        let compile = |model: &ModelPlan| {
            let ranks = (0..mesh.size()).map(|rank| MeshRank { mesh, rank });
            ranks.map(|rank| Programs::compile(model, rank, evaluates).map(Arc::new)).collect::<Result<Vec<_>, _>>()
        };
        let mut programs = compile(&model)?;
        let n_spares = if program.is_some() { config.elastic.spare_ranks } else { 0 };
        match check_memory(&*model.device, &programs, n_spares) {
            // A GPU without room is as good as none.
            Err(JobError::NoRoomOnGpu(reason)) if config.precision.device == DeviceChoice::Auto => {
                let precision = PrecisionSection { device: DeviceChoice::Cpu, ..config.precision.clone() };
                let on_host = JobConfig { precision, ..config.clone() };
                model = ModelPlan { no_gpu: Some(reason), ..plan::model_plan(&on_host, &tokenizer)? };
                programs = compile(&model)?;
                check_memory(&*model.device, &programs, n_spares)?;
            }
            checked => checked?,
        }
        let mut notes = model.device_notes(programs.len() as u32)?;
        notes.extend(model.format_note(&config.precision));
        notes.extend(ModelPlan::bits_note(&config.parallel));
        notes.extend(vocabulary::notes(config, &tokenizer));
        check_output(config)?;
        Ok(Checked { config, program, tokenizer, model, mesh, programs, notes })
    }

    /// Prepares the data and runs the job.
    pub(crate) fn run(self, control: &Control, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<Report, JobError> {
        let Checked { config, program, tokenizer, model, mesh, programs, notes } = self;
        if let Some(note) = plan::ignored_dropout(&model.hf_config) {
            on_event(&Event::Note(note));
        }
        notes.into_iter().for_each(|note| on_event(&Event::Note(note)));
        let preparing = Preparing::show(&config.output.folder());
        let data = match prepare_data(config, &model, &tokenizer, &|| control.stops(), on_event) {
            Err(stopped) if stopped.is_stop() => return stopped_before_ranks(config),
            prepared => prepared?,
        };
        let inputs = RunInputs::of(config, &model, &tokenizer, &data)?;
        create_dir(&config.output.folder())?;
        let lock = OutputLock::take(&config.output.folder())?;
        drop(preparing);
        config.output.trace.as_deref().map_or(Ok(()), check_writable)?;
        if let Some(EarlyEnd { report, note }) = Saving::of_run(config, &inputs).early_end(&config.output)? {
            on_event(&Event::Note(note));
            return Ok(report);
        }
        if let Some(program) = program {
            drop((data, programs));
            let n_slots = mesh.size() as u32 + config.elastic.spare_ranks as u32;
            let here = LocalNode { program: program.clone(), n_slots, advertise: None };
            return lead_alone(config, model, inputs, here, &lock, control, on_event);
        }
        prepare_ahead(&data)?;
        let extras = extras(config, &model, &tokenizer, &inputs)?;
        let run = Run { config, model: &model, data: &data, extras, control };
        with_lease(config, &lock, control, || {
            if mesh.size() > 1 {
                let plan = TeamPlan::new(&model, mesh, config.data.evaluates())?;
                let world = shared_world(&plan, &programs)?;
                return run.threads(&programs, &plan, &world, on_event);
            }
            let n_threads = config.precision.threads.unwrap_or_else(|| model.device.available_threads());
            run.rank(&programs[0], n_threads, || Ok(Team::alone()), on_event)
        })
    }
}

/// The report of a run that was stopped before it had ranks: it ends where it would have begun.
fn stopped_before_ranks(config: &JobConfig) -> Result<Report, JobError> {
    let output = &config.output;
    let (checkpoint, _) =
        Saving::new(config, Vec::new()).find(&output.resume_from_checkpoint, config.elastic.verify_steps)?;
    let steps = checkpoint.as_deref().map(Checkpoint::open).transpose()?.map_or(0, |found| found.id().step);
    Ok(Report { steps, finished: false, last: None, checkpoint, model_dir: None })
}

#[cfg(test)]
#[path = "start_tests.rs"]
mod tests;
