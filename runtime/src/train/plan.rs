//! All parts of a run, resolved from its configuration before a buffer exists.

use super::architecture::{Architecture, User, is_user_defined, parse_model, smallest};
use super::described::completed;
use super::grown_rows::Grown;
use super::step_plan::step_spec;
use super::{frozen, initial_adapter, located as models, new_token_rows, score_head, vocabulary};
use crate::config::JobConfig;
use crate::config::model::{self, ModelSource};
use crate::config::parallel::ParallelSection;
use crate::config::precision::{Bf16, DeviceChoice, GradientCheckpointing, PrecisionSection};
use crate::data::tokenizer::Tokenizer;
use crate::devices::{self, Chosen};
use crate::error::JobError;
use crate::error::plan::PlanError;
use crate::frontend::UserModel;
use crate::train::weights::FirstValues;
use phalanx_device::Device;
use phalanx_storage::hf::source::{TensorSource, read_json};
use phalanx_strategies::compile::StepSpec;
use phalanx_strategies::mesh::Mesh;
use phalanx_strategies::model::{BatchShape, SCORE};
use phalanx_strategies::objective::Objective;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::program::{Param, Program};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The model of a job and how a step computes; needs no data.
#[derive(Clone, Debug)]
pub struct ModelPlan {
    /// The model.
    pub model: Architecture,
    /// Its `config.json`, as an export writes it.
    pub hf_config: Value,
    /// Directory of the initial weights; `None` starts from scratch, or from the values of a user-defined model.
    pub weights: Option<PathBuf>,
    /// Rows that the embedding has more than that of the directory.
    pub(crate) grown: Option<Grown>,
    /// Directory of the adapters with which the run begins; `None` draws them.
    pub adapter: Option<PathBuf>,
    /// Names of the tensors that are trained, if others are frozen without adapters.
    pub(crate) trained: Option<BTreeSet<String>>,
    /// What is minimised.
    pub objective: Objective,
    /// One microbatch.
    pub batch: BatchShape,
    /// Microbatches of a step, over all ranks: the same for every mesh.
    pub n_microbatches: usize,
    /// How a step computes on the mesh of the configuration.
    pub spec: StepSpec,
    /// The device that computes it.
    pub device: Arc<dyn Device>,
    /// Why that is not a GPU, if the configuration leaves the choice open.
    pub no_gpu: Option<String>,
}

impl ModelPlan {
    /// What the user should know about the devices of `n_ranks` ranks of this machine, as sentences.
    ///
    /// # Errors
    /// [`JobError::Exchange`] if the ranks cannot exchange tensors in the configured way.
    pub(crate) fn device_notes(&self, n_ranks: u32) -> Result<Vec<String>, JobError> {
        let no_gpu =
            self.no_gpu.as_ref().map(|reason| format!("training on the CPU, because no GPU can be used: {reason}"));
        let exchange = self.device.exchange(n_ranks).map_err(JobError::Exchange)?;
        Ok(no_gpu.into_iter().chain(exchange).collect())
    }

    /// A note if a reproducible run has tensor-parallel ranks.
    pub(crate) fn bits_note(config: &ParallelSection) -> Option<String> {
        let Ok(mesh) = config.mesh() else { return None };
        (config.reproducible && mesh.tp > 1).then(|| {
            format!(
                "reproducible: the weights have the same bits for every pp, dp_replicate and dp_shard with \
                 tensor_parallel_size {}, and other bits with another tensor_parallel_size",
                mesh.tp
            )
        })
    }

    /// A note if `bf16: auto` means f32 on the device.
    pub(crate) fn format_note(&self, config: &PrecisionSection) -> Option<String> {
        let falls_back = config.bf16 == Bf16::Auto && !config.fp16 && self.spec.precision == Precision::F32;
        falls_back.then(|| match self.model.known() {
            Some(_) => {
                let device = self.device.name();
                format!("`bf16: auto` is f32 here: {device} has no fast bfloat16 products; `bf16: true` uses them all the same")
            }
            None => "`bf16: auto` is f32 here: the model is user-defined".into(),
        })
    }

    /// One microbatch up to its loss.
    pub(crate) fn forward(&self) -> Result<Program, JobError> {
        let forward = self.model.minimised(&self.objective, self.batch);
        let forward = forward.map_err(|source| JobError::Model { path: self.path(), source })?;
        Ok(self.with_frozen(forward))
    }

    /// One microbatch up to the log-probabilities of the reference, if they are computed once.
    pub(crate) fn reference(&self) -> Result<Option<Program>, JobError> {
        let Some(model) = self.model.known() else { return Ok(None) };
        let forward = self.objective.reference(model, self.batch);
        let forward = forward.map_err(|source| JobError::Model { path: self.path(), source })?;
        Ok(forward.map(|forward| self.with_frozen(forward)))
    }

    /// The model in messages.
    fn path(&self) -> String {
        self.weights.as_ref().map_or("model".into(), |path| path.display().to_string())
    }

    fn with_frozen(&self, mut forward: Program) -> Program {
        if let Some(trained) = &self.trained {
            let is_trained = |param: &Param| param.parts.iter().all(|part| trained.contains(&part.name));
            forward.params.iter_mut().for_each(|param| param.trainable = is_trained(param));
        }
        forward
    }

    /// Sources of the initial values of its parameters.
    ///
    /// # Errors
    /// When the directory of the weights cannot be read.
    pub(crate) fn first_values(&self, seed: u64) -> Result<FirstValues<'_>, JobError> {
        let source = self.weights.as_deref().map(TensorSource::open).transpose()?;
        let params = self.model.user().map(UserModel::params).unwrap_or_default();
        let adapter = self.adapter.as_deref().map(initial_adapter::open).transpose()?;
        Ok(FirstValues { model: self.model.known(), params, source, grown: self.grown, adapter, seed })
    }

    /// Samples of a microbatch.
    pub(crate) fn n_samples(&self) -> usize {
        self.batch.n_rows / self.objective.rows_per_sample()
    }

    /// How a step computes on another mesh: the same batch, split between other ranks. If the split is uneven, ranks with
    /// one microbatch less run an extra one that does not count.
    pub(crate) fn spec_on(&self, mesh: Mesh) -> StepSpec {
        StepSpec { n_microbatches: self.n_microbatches.div_ceil(mesh.data_ranks()), ..self.spec.clone() }
    }
}

/// The tokenizer that a configuration names, with the tokens that it adds.
///
/// # Errors
/// When its files cannot be read, or a token does not fit it.
pub fn tokenizer(config: &JobConfig) -> Result<Tokenizer, JobError> {
    let base = match config.model.tokenizer_source() {
        model::Tokenizer::Bytes => Tokenizer::bytes(),
        model::Tokenizer::Path(path) => {
            let path = models::model_of(config, &path)?;
            let dir = if path.is_file() { path.parent().unwrap_or(Path::new(".")).to_owned() } else { path };
            // A model that is described takes it along to a folder with a `config.json` of its own.
            let described =
                config.model.model.as_ref().and_then(|description| description.0.get("model_type")?.as_str());
            described.map_or_else(|| Tokenizer::from_dir(&dir), |family| Tokenizer::for_family(&dir, family))?
        }
    };
    vocabulary::changed(config, &base)
}

/// Resolves the model and the step of a configuration.
///
/// # Errors
/// When the model is not supported or its vocabulary is smaller than the tokenizer's. Compiling reports all other errors
/// (rows longer than the model's positions, adapter targets that do not exist).
pub fn model_plan(config: &JobConfig, tokenizer: &Tokenizer) -> Result<ModelPlan, JobError> {
    let precision = &config.precision;
    model_plan_on(config, tokenizer, || devices::chosen(precision))
}

/// As [`model_plan`], for another device than that of the configuration.
pub(crate) fn model_plan_on(
    config: &JobConfig,
    tokenizer: &Tokenizer,
    device: impl FnOnce() -> Result<Chosen, JobError>,
) -> Result<ModelPlan, JobError> {
    let (mut hf_config, weights, origin) = match config.model.source() {
        ModelSource::Pretrained(dir) => {
            let dir = models::model_of(config, dir)?;
            let path = dir.join("config.json");
            (read_json(&path)?, Some(dir), path.display().to_string())
        }
        ModelSource::Scratch(description) => {
            let described = Value::Object(description.0.clone());
            if is_user_defined(&described) {
                return Err(PlanError::UserDefinedElsewhere.into());
            }
            (completed(described, tokenizer), None, "model".to_string())
        }
    };
    let grown = weights.as_ref().and_then(|_| vocabulary::adjust(config, &mut hf_config, tokenizer));
    // Random weights have a row for every token from the beginning.
    let is_random = config.model.reinit_weights;
    let (weights, grown) = (weights.filter(|_| !is_random), grown.filter(|_| !is_random));
    score_head::adjust(config, &mut hf_config, weights.as_deref(), tokenizer, &origin)?;
    let model = Architecture::Known(parse_model(&hf_config, &origin)?);
    check_vocabulary(&model, tokenizer)?;
    let objective = config.objective();
    let n_rows = config.schedule.micro_batch_size * objective.rows_per_sample();
    let batch = BatchShape { n_rows, seq_len: config.data.sequence_len };
    let (device, no_gpu) = device()?;
    let no_gpu = no_gpu.map(|reason| reason.to_string());
    let spec = step_spec(config, &model, &*device)?;
    let n_microbatches = config.microbatches_per_step();
    let adapter = config.adapter.lora_model_dir.as_deref().map(|dir| models::model_of(config, dir)).transpose()?;
    if let (Some(dir), Some(lora), Some(spec)) = (&adapter, config.adapter.lora(), &spec.lora) {
        initial_adapter::check(dir, &lora, spec, smallest(&model)?, weights.as_deref())?;
    }
    let mut trained = frozen::trained(&config.adapter, &model)?;
    trained.iter_mut().filter(|_| objective.has_scores()).for_each(|trained| {
        trained.insert(SCORE.into());
    });
    let new_tokens = vocabulary::new_tokens(config, tokenizer);
    new_token_rows::check((&new_tokens, grown), &model, spec.lora.as_ref(), trained.as_ref())?;
    Ok(ModelPlan {
        model,
        hf_config,
        weights,
        grown,
        adapter,
        trained,
        objective,
        batch,
        n_microbatches,
        spec,
        device,
        no_gpu,
    })
}

/// Resolves a job whose model the user wrote.
///
/// # Errors
/// When the configuration sets a key that does not apply to it, or its vocabulary is smaller than the tokenizer's.
pub(crate) fn user_plan(
    config: &JobConfig,
    tokenizer: &Tokenizer,
    user: &Arc<UserModel>,
) -> Result<ModelPlan, JobError> {
    check_user_defined(config)?;
    let table = user.table();
    let hf_config = serde_json::to_value(&table).map_err(PlanError::Encode)?;
    let model = Architecture::User(User { table, model: Some(Arc::clone(user)) });
    check_vocabulary(&model, tokenizer)?;
    let batch = BatchShape { n_rows: config.schedule.micro_batch_size, seq_len: config.data.sequence_len };
    // The model's own code runs on the processor.
    let device = devices::host();
    let spec = step_spec(config, &model, &*device)?;
    Ok(ModelPlan {
        model,
        hf_config,
        weights: None,
        grown: None,
        adapter: None,
        trained: None,
        objective: Objective::Supervised,
        batch,
        n_microbatches: config.microbatches_per_step(),
        spec,
        device,
        no_gpu: None,
    })
}

/// Makes the user-defined model of a configuration, in a program that contains it.
pub type MakeModel = dyn Fn(&JobConfig) -> Result<UserModel, Box<dyn std::error::Error + Send + Sync>>;

/// Resolves the job of a rank process whose program makes user-defined models with `make`.
///
/// # Errors
/// As [`model_plan`] and [`user_plan`]; when the model cannot be made.
pub(crate) fn rank_plan(
    config: &JobConfig,
    tokenizer: &Tokenizer,
    make: Option<&MakeModel>,
    device: impl FnOnce() -> Result<Chosen, JobError>,
) -> Result<ModelPlan, JobError> {
    let described = config.model.model.as_ref().map(|d| Value::Object(d.0.clone())).unwrap_or_default();
    match make.filter(|_| is_user_defined(&described)) {
        Some(make) => {
            let user = make(config).map_err(|source| PlanError::Make { source })?;
            user_plan(config, tokenizer, &Arc::new(user))
        }
        None => model_plan_on(config, tokenizer, device),
    }
}

/// Checks that a configuration declares a user-defined model and sets no key that does not apply to one: the model
/// itself defines its computation and precision.
pub(crate) fn check_user_defined(config: &JobConfig) -> Result<(), JobError> {
    let described = config.model.model.as_ref().map(|d| Value::Object(d.0.clone())).unwrap_or_default();
    if !is_user_defined(&described) {
        return Err(PlanError::NotUserDefined.into());
    }
    let other = described.as_object().and_then(|keys| keys.keys().find(|k| *k != "model_type"));
    let keys = [
        (other.map(|key| format!("model.{key}")), true),
        (Some("bf16".into()), matches!(config.precision.bf16, Bf16::On | Bf16::Full)),
        (Some("fp16".into()), config.precision.fp16),
        (Some("device".into()), config.precision.device == DeviceChoice::Cuda),
        (Some("gradient_checkpointing".into()), config.precision.gradient_checkpointing != GradientCheckpointing::Off),
        (Some("adapter".into()), config.adapter.adapter.is_some()),
        (Some("trained_parameters".into()), !config.adapter.trained_parameters.is_empty()),
        (Some("rl".into()), config.preference.rl.is_some()),
        (Some("reward_model".into()), config.reward.reward_model),
        (Some("loss_weights".into()), config.data.loss_weights),
    ];
    match keys.into_iter().find_map(|(key, asked)| key.filter(|_| asked)) {
        None => Ok(()),
        Some(key) => Err(PlanError::NotForUserDefined { key }.into()),
    }
}

/// A note about dropout that a model's configuration sets and this build does not apply.
pub(crate) fn ignored_dropout(hf_config: &Value) -> Option<String> {
    let keys = ["attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"];
    let asked = |key: &&&str| hf_config.get(**key).and_then(Value::as_f64).is_some_and(|p| p > 0.0);
    let asked: Vec<&str> = keys.iter().filter(asked).copied().collect();
    let keys = asked.join(", ");
    (!asked.is_empty()).then(|| format!("the model's {keys} is not applied: training here is without dropout"))
}

fn check_vocabulary(model: &Architecture, tokenizer: &Tokenizer) -> Result<(), JobError> {
    // Models may lack rows for tokens that were added later; data that has such a token is refused.
    let (n_tokens, vocab_size) = (tokenizer.base_vocab_size(), model.vocab_size());
    if n_tokens <= vocab_size {
        return Ok(());
    }
    Err(PlanError::Vocabulary { n_tokens, vocab_size }.into())
}
