//! A trained model to evaluate: a model directory, an adapter with its base model, or a checkpoint.

use super::architecture::Architecture;
use super::checkpoint_weights::{CheckpointWeights, Packed, base_directory};
use super::evaluation::{Evaluation, evaluated_alone};
use super::export::{packed_tensors, parse_job};
use super::model_source::{ModelSource, forward_spec};
use super::run_files::{CONFIG_JSON, JOB_YAML};
use super::run_folder::{best_instead_of, note_of_older_model};
use super::saving::places::{Places, newest_in, newest_of_run};
use super::{score_head, step_plan};
use crate::config::JobConfig;
use crate::config::output::{folder_of, is_url};
use crate::data::rows::Rows;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::export::ExportError;
use crate::error::plan::PlanError;
use phalanx_device::{Backing, Device};
use phalanx_storage::checkpoint::catalog::{Skipped, list};
use phalanx_storage::checkpoint::checkpoint_id::CheckpointId;
use phalanx_storage::checkpoint::reader::Checkpoint;
use phalanx_storage::hf::adapter::ADAPTER_CONFIG;
use phalanx_strategies::compile::{Offload, Parallel, StepSpec, compile_forward};
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::objective::Objective;
use phalanx_strategies::program::Packing;
use std::path::{Path, PathBuf};

/// The configuration of a run, given its folder, its model or one of its checkpoints; `None` if no checkpoint has it.
///
/// # Errors
/// When the folder cannot be read.
pub(crate) fn yaml_of_run(dir: &Path) -> Result<Option<String>, JobError> {
    let mut found = vec![dir.to_owned()];
    for root in std::iter::once(dir).chain(dir.parent()) {
        found.extend(list(&root.join("checkpoints"))?.into_iter().map(|id| id.path));
    }
    let yaml = |path: &PathBuf| Checkpoint::open_lazily(path).ok()?.extra(JOB_YAML).ok();
    Ok(found.iter().find_map(yaml).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
}

/// A trained model to evaluate: a model directory, an adapter with its base model, or a checkpoint.
pub(crate) enum Subject {
    Model(ModelSource),
    Checkpoint {
        checkpoint: Box<Checkpoint>,
        /// The job that saved it.
        job: Box<JobConfig>,
        config: serde_json::Value,
    },
}

impl Subject {
    /// The model at `path`, or the newest valid checkpoint of the run there, with a line for each newer one that is skipped.
    /// An adapter whose own base model is not there is for `base_model`.
    ///
    /// # Errors
    /// When there is no model, or its files cannot be read.
    pub(crate) fn find(
        path: &Path,
        base_model: Option<&Path>,
        objective: &Objective,
    ) -> Result<(Subject, Vec<String>), JobError> {
        if CheckpointId::is_at(path) {
            return Ok((Subject::of(Checkpoint::open(path)?)?, Vec::new()));
        }
        let is_model = |dir: &Path| ["config.json", ADAPTER_CONFIG].iter().any(|name| dir.join(name).is_file());
        let has = |name: &str| path.join(name).is_file();
        if (path.is_dir() || is_url(path)) && !is_model(path) {
            // As for `chat` and `serve`, a run means the model that it has written; only a checkpoint knows what that began with.
            let written = folder_of(path).join("model");
            if is_model(&written) && !objective.has_reference() {
                return Subject::find(&written, base_model, objective);
            }
            if let Some(found) = Subject::of_newest(newest_of_run(path)?)? {
                return Ok(found);
            }
            return Err(JobError::NoCheckpoint { path: path.to_owned(), why: ", and no model".into() });
        }
        let own = ModelSource::find(path, None);
        let source = match base_model.filter(|_| own.is_err() && has(ADAPTER_CONFIG)) {
            Some(base) => ModelSource::find(path, Some(base))?,
            None => own?,
        };
        Ok((Subject::Model(source), note_of_older_model(path).into_iter().collect()))
    }

    /// The model that a job has trained: the exported one, or its newest valid checkpoint.
    ///
    /// # Errors
    /// When there is none yet.
    pub(crate) fn trained_by(job: &JobConfig) -> Result<(Subject, Vec<String>), JobError> {
        let (exported, objective) = (job.output.folder().join("model"), job.objective());
        if !objective.has_reference()
            && ["config.json", ADAPTER_CONFIG].iter().any(|name| exported.join(name).symlink_metadata().is_ok())
        {
            return Subject::find(&exported, job.model.base_model.as_deref(), &objective);
        }
        let Places { root, own, .. } = Places::of(&job.output);
        let found = Subject::of_newest(newest_in([Some(root), own].into_iter().flatten())?)?;
        found.ok_or_else(|| PlanError::NothingTrained { dir: job.output.output_dir.clone() }.into())
    }

    /// The best checkpoint of the run whose newest one this is, or else this one, and a line for each newer one that is skipped.
    fn of_newest(
        (newest, skipped): (Option<Checkpoint>, Vec<Skipped>),
    ) -> Result<Option<(Subject, Vec<String>)>, JobError> {
        let Some((checkpoint, note)) = newest.map(best_instead_of) else { return Ok(None) };
        let skipped = skipped.iter().map(|s| format!("skipped {}: {}", s.path.display(), s.reason));
        let lines = skipped.chain(note).collect();
        Ok(Some((Subject::of(checkpoint)?, lines)))
    }

    fn of(checkpoint: Checkpoint) -> Result<Subject, JobError> {
        let extra = |name: &'static str| Ok::<_, JobError>((name.to_owned(), checkpoint.extra(name)?));
        let job = Box::new(parse_job(&[extra(crate::train::run_files::JOB_YAML)?])?);
        let config = serde_json::from_slice(&extra(CONFIG_JSON)?.1)
            .map_err(|source| ExportError::Json { file: CONFIG_JSON.into(), source })?;
        Ok(Subject::Checkpoint { checkpoint: Box::new(checkpoint), job, config })
    }

    /// What it is, for people.
    pub(crate) fn describe(&self) -> String {
        match self {
            Subject::Model(ModelSource { base, adapter: None }) => format!("model {}", base.display()),
            Subject::Model(ModelSource { base, adapter: Some(adapter) }) => {
                format!("adapter {} on {}", adapter.display(), base.display())
            }
            Subject::Checkpoint { checkpoint, .. } => {
                let id = checkpoint.id();
                format!("checkpoint {} (step {})", id.path.display(), id.step)
            }
        }
    }

    /// The kind of model and its place, for programs.
    pub(crate) fn kind(&self) -> (&'static str, &Path) {
        match self {
            Subject::Model(ModelSource { base, adapter: None }) => ("model", base),
            Subject::Model(ModelSource { adapter: Some(adapter), .. }) => ("adapter", adapter),
            Subject::Checkpoint { checkpoint, .. } => ("checkpoint", &checkpoint.id().path),
        }
    }

    /// How the weights beside an adapter are stored, if not as numbers: as in the training by `config` or by the job of a checkpoint.
    pub(crate) fn packing(&self, config: &JobConfig) -> Option<Packing> {
        match self {
            Subject::Model(ModelSource { adapter: None, .. }) => None,
            Subject::Model(_) => config.adapter.packing(),
            Subject::Checkpoint { job, .. } => job.adapter.packing(),
        }
    }

    /// The tokenizer that belongs to it.
    ///
    /// # Errors
    /// When its files cannot be read.
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, JobError> {
        match self {
            Subject::Model(source) => source.tokenizer(),
            Subject::Checkpoint { checkpoint, .. } => {
                let files = checkpoint.extras().map(|name| Ok((name.to_owned(), checkpoint.extra(name)?)));
                let files = files.collect::<Result<Vec<_>, JobError>>()?;
                Ok(Tokenizer::from_named_files(&checkpoint.id().path, files)?)
            }
        }
    }

    /// The architecture.
    ///
    /// # Errors
    /// When it is not supported, or exists only in the program that trained it.
    pub(crate) fn architecture(&self) -> Result<Architecture, JobError> {
        let model = match self {
            Subject::Model(source) => Architecture::Known(source.model()?),
            Subject::Checkpoint { config, .. } => Architecture::parse(config, CONFIG_JSON)?,
        };
        match model.known() {
            Some(_) => Ok(model),
            None => Err(PlanError::UserDefinedElsewhere.into()),
        }
    }

    /// The loss over `rows` on this thread, computed as the evaluations of `config` are, on one rank.
    ///
    /// # Errors
    /// When the model does not fit its files or the device.
    pub(crate) fn evaluate(
        &self,
        config: &JobConfig,
        rows: &Rows,
        device: &dyn Device,
        mut done: impl FnMut(usize),
    ) -> Result<Evaluation, JobError> {
        let model = self.architecture()?;
        let (objective, n_samples) = (config.objective().with_reference_in_passes(), config.schedule.micro_batch_size);
        let batch = BatchShape { n_rows: n_samples * objective.rows_per_sample(), seq_len: rows.row_len() };
        let path = || self.kind().1.display().to_string();
        // The base of an adapter is what it began with.
        if matches!(self, Subject::Model(ModelSource { adapter: None, .. })) && objective.has_reference() {
            return Err(PlanError::NoReference { path: path().into() }.into());
        }
        if let Some(model) = model.known() {
            score_head::check(&objective, model, &path())?;
        }
        let forward = model.minimised(&objective, batch).map_err(|source| JobError::Model { path: path(), source })?;
        let precision = step_plan::precision(config, &model, device);
        let spec = match self {
            Subject::Model(_) => StepSpec { precision, ..forward_spec() },
            Subject::Checkpoint { job, .. } => {
                StepSpec { precision, n_microbatches: 1, ..alone(step_plan::step_spec(job, &model, device)?) }
            }
        };
        let packed = match (self, self.packing(config)) {
            (Subject::Model(_), Some(_)) => {
                let trained = alone(step_plan::step_spec(config, &model, device)?);
                packed_tensors(&forward, &trained, device.target())?
            }
            _ => Packed::new(),
        };
        let compiled = compile_forward(forward, &spec, device.target())?;
        let mut machine = device.machine(&[&compiled], &Backing::default())?;
        match self {
            Subject::Model(source) => source.load_beside(&mut *machine, &compiled, &source.model()?, &packed)?,
            Subject::Checkpoint { checkpoint, job, .. } => {
                let base_model = config.model.base_model.as_deref().filter(|_| base_directory(job).is_none());
                let weights = CheckpointWeights { checkpoint, job, model: &model, base_model };
                weights.load(&mut *machine, &compiled, &Packed::new())?;
            }
        }
        evaluated_alone(&compiled, &mut *machine, (&objective, batch), rows, &mut done)
    }
}

/// A step on one rank.
fn alone(spec: StepSpec) -> StepSpec {
    StepSpec { offload: Offload::default(), parallel: Parallel::default(), ..spec }
}
