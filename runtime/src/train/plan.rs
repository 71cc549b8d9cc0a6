//! All parts of a run, resolved from its configuration before a buffer exists.

use super::architecture::{Architecture, User, is_user_defined, parse_model, smallest};
use super::frozen;
use super::frozen::path_beside_images;
use super::grown_rows::Grown;
use super::initial_adapter;
use super::located as models;
use super::new_token_rows;
use super::pattern::matching;
use super::score_head;
use super::vocabulary;
use super::vocabulary::template_config;
use crate::config::JobConfig;
use crate::config::adapter::{Lora, whole};
use crate::config::dataset_type::PromptSection;
use crate::config::datasets::{self, DatasetType, ValSetSize};
use crate::config::elastic::VerifySteps;
use crate::config::model::{self, ModelSource};
use crate::config::output::BestRule;
use crate::config::pair_form::PairForm;
use crate::config::parallel::ParallelSection;
use crate::config::precision::{
    Bf16, DeviceChoice, GradientCheckpointing, Precision as ConfigPrecision, PrecisionSection,
};
use crate::config::schedule::LrScheduler;
use crate::config::steps::interval;
use crate::data::config as data;
use crate::data::config::{DataConfig, PairFields};
use crate::data::rows::Rows;
use crate::data::sources;
use crate::data::tokenizer::Tokenizer;
use crate::devices::{self, Chosen};
use crate::error::JobError;
use crate::error::plan::PlanError;
use crate::frontend::UserModel;
use crate::train::weights::FirstValues;
use phalanx_device::Device;
use phalanx_storage::hf::source::{TensorSource, read_json};
use phalanx_storage::home::expanded;
use phalanx_storage::hub::cache::HubCache;
use phalanx_strategies::compile::StepSpec;
use phalanx_strategies::loss_scale::LossScale;
use phalanx_strategies::mesh::Mesh;
use phalanx_strategies::model::{BatchShape, Family, HfConfig, ModelConfig, SCORE};
use phalanx_strategies::objective::{Objective, SecondRow};
use phalanx_strategies::passes::lora::{LoraSpec, linear_modules};
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::{Packing, Param, Program};
use phalanx_strategies::sampler::Sampler;
use phalanx_strategies::schedule::{Schedule, Shape};
use serde_json::{Value, json};
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
        let path = || self.weights.as_ref().map_or("model".into(), |p| p.display().to_string());
        let forward = self.model.minimised(&self.objective, self.batch);
        let mut forward = forward.map_err(|source| JobError::Model { path: path(), source })?;
        if let Some(trained) = &self.trained {
            let is_trained = |param: &Param| param.parts.iter().all(|part| trained.contains(&part.name));
            forward.params.iter_mut().for_each(|param| param.trainable = is_trained(param));
        }
        Ok(forward)
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

/// Learning rate, length, times of saving and evaluating, and loss scale of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunPlan {
    /// Learning rate by step.
    pub schedule: Schedule,
    /// Steps of the run.
    pub total_steps: u64,
    /// Steps between two checkpoints; if absent, there is one at the end.
    pub save_steps: Option<u64>,
    /// Steps between two evaluations; if absent, there is one at the end.
    pub eval_steps: Option<u64>,
    /// Loss scale at the start.
    pub loss_scale: LossScale,
    /// How often all copies of the state are compared.
    pub verify_steps: VerifySteps,
    /// What evaluations decide.
    pub best: BestRule,
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

/// Converts the data section to the types of the data module and expands patterns.
pub(crate) fn data_config(config: &JobConfig) -> Result<DataConfig, JobError> {
    let d = &config.data;
    let expanded = |entries: &[datasets::DatasetConfig]| {
        let entry = |dataset| {
            let path = located(dataset)?;
            Ok(data::DatasetConfig { files: matching(&path)?, path, ..dataset_config(dataset, config) })
        };
        entries.iter().map(entry).collect::<Result<Vec<_>, JobError>>()
    };
    Ok(DataConfig {
        datasets: expanded(&d.datasets)?,
        test_datasets: expanded(&d.test_datasets)?,
        sequence_len: d.sequence_len,
        sample_packing: d.sample_packing,
        sample_packing_sequentially: d.sample_packing_sequentially,
        shuffle: d.shuffle,
        seed: config.output.seed,
        val_set_size: match d.val_set_size {
            ValSetSize::Nothing => 0.0,
            ValSetSize::Share(share) => share,
            ValSetSize::Samples(n) => n as f64,
        },
        train_on_inputs: d.train_on_inputs,
        excess_length_strategy: d.excess_length_strategy,
        min_sample_len: d.min_sample_len,
        deduplicate: d.dataset_exact_deduplication,
        second_row: config.objective().second_row(),
        stream_rows: config
            .schedule
            .max_steps
            .filter(|_| d.streaming)
            .map(|steps| steps.saturating_mul(config.sequences_per_step() as u64)),
    })
}

/// Where a data set is: at its path, or in the cache of the Hub.
fn located(dataset: &datasets::DatasetConfig) -> Result<PathBuf, JobError> {
    let is_loader = dataset.data_files.is_some();
    Ok(sources::located(&dataset.path, dataset.revision.as_deref(), is_loader, &HubCache::of_user())?)
}

fn dataset_config(d: &datasets::DatasetConfig, config: &JobConfig) -> data::DatasetConfig {
    let job = &config.data;
    data::DatasetConfig {
        path: d.path.clone(),
        files: Vec::new(),
        kind: d.r#type,
        ds_type: d.ds_type,
        split: d.split.clone(),
        name: d.name.clone(),
        data_files: d
            .data_files
            .iter()
            .flat_map(|files| &files.0)
            .map(|name| expanded(name).to_string_lossy().into_owned())
            .collect(),
        shards: d.shards.map(|count| (count, d.shards_idx)),
        weight: d.weight,
        field: d.field.clone(),
        prompt: d.prompt.as_ref().map(PromptSection::prompt),
        pair: pair_fields(d, &config.preference.objective()),
        conversation: conversation_config(d, &job.eot_tokens),
        template: template_config(d, job),
    }
}

fn pair_fields(d: &datasets::DatasetConfig, objective: &Objective) -> Option<PairFields> {
    let DatasetType::Preference(form) = d.r#type else { return None };
    let default = PairFields::default();
    let prompt = match form {
        PairForm::Messages => d.field_messages.clone().unwrap_or_else(|| "messages".into()),
        PairForm::Answers => d.field_prompt.clone().unwrap_or_else(|| "input".into()),
        _ => d.field_prompt.clone().unwrap_or(default.prompt),
    };
    let chosen = d.field_chosen.clone().unwrap_or(default.chosen);
    let rejected = d.field_rejected.clone().unwrap_or(default.rejected);
    Some(PairFields {
        form,
        formats: d.pair.clone().unwrap_or_default(),
        prompt,
        chosen,
        rejected,
        labelled: objective.second_row() == Some(SecondRow::Mismatched),
        bounds_conversations: !(objective.has_reference() || objective.has_scores()) || form != PairForm::Columns,
        aligned: objective.has_reference(),
        whole: objective.has_scores(),
    })
}

fn conversation_config(d: &datasets::DatasetConfig, eot_tokens: &[String]) -> data::ConversationConfig {
    let default = match d.r#type {
        DatasetType::Sharegpt => data::ConversationConfig::sharegpt(),
        _ => data::ConversationConfig::default(),
    };
    let mut properties = default.properties;
    let older = [("role", &d.message_field_role), ("content", &d.message_field_content)];
    properties.extend(older.into_iter().filter_map(|(name, field)| Some((name.to_owned(), field.clone()?))));
    let thinking_key = d.template_thinking_key.clone().unwrap_or(default.thinking_key);
    if let Some(field) = d.field_thinking.clone().filter(|field| *field != thinking_key) {
        properties.insert(thinking_key.clone(), field);
    }
    properties.extend(d.message_property_mappings.0.clone());
    data::ConversationConfig {
        field_messages: d.field_messages.clone().unwrap_or(default.field_messages),
        field_tools: d.field_tools.clone().unwrap_or(default.field_tools),
        properties,
        roles: d.roles.0.clone(),
        roles_to_train: d.roles_to_train.clone(),
        field_training: d.message_field_training.clone(),
        field_training_detail: d.message_field_training_detail.clone(),
        split_thinking: d.split_thinking,
        thinking_key,
        drop_system_message: d.drop_system_message,
        markers: data::MarkerConfig {
            eos: None,
            eot: eot_tokens.to_vec(),
            train_on_eos: d.train_on_eos,
            train_on_eot: d.train_on_eot.of_its_own(),
        },
    }
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

/// Learning rate, length, times of saving and evaluating, and loss scale of a run over `n_rows` rows.
pub fn run_plan(config: &JobConfig, n_rows: u64) -> RunPlan {
    let s = &config.schedule;
    let batch_rows = config.sequences_per_step();
    let by_epochs = s
        .num_epochs
        .filter(|_| !config.data.streaming)
        .map(|epochs| (epochs * n_rows as f64 / batch_rows as f64).ceil() as u64);
    let total_steps = [s.max_steps, by_epochs].into_iter().flatten().min().unwrap_or(1).max(1);
    let shape = match s.lr_scheduler {
        LrScheduler::Constant => Shape::Constant,
        LrScheduler::Linear => Shape::Linear,
        LrScheduler::Cosine => Shape::Cosine,
        LrScheduler::WarmupStableDecay => {
            Shape::Wsd { decay_steps: (total_steps as f64 * s.decay_share()).ceil() as u64 }
        }
    };
    let min_ratio = if shape == Shape::Cosine { s.cosine_min_lr_ratio } else { 0.0 };
    let schedule = Schedule {
        peak: s.peak_learning_rate(batch_rows),
        min_ratio,
        warmup_steps: s.warmup_steps_of(total_steps),
        total_steps,
        shape,
    };
    // As `transformers` does, an epoch of a stream is a share of `max_steps`.
    let epoch_steps = match config.data.streaming {
        true => total_steps as f64 / s.num_epochs.unwrap_or(1.0),
        false => n_rows as f64 / batch_rows as f64,
    };
    let (output, data) = (&config.output, &config.data);
    RunPlan {
        schedule,
        total_steps,
        save_steps: interval(output.save_steps, output.saves_per_epoch, epoch_steps, total_steps),
        eval_steps: interval(data.eval_steps, data.evals_per_epoch, epoch_steps, total_steps),
        loss_scale: loss_scale(config),
        verify_steps: config.elastic.verify_steps,
        best: output.best_rule(),
    }
}

/// Length and schedule of a run over these rows, and the rows of each step.
pub(crate) fn run_over(config: &JobConfig, rows: &Rows) -> Result<(RunPlan, Sampler), JobError> {
    // A stream has its own order, and no last row.
    let (n_rows, shuffle) = match rows.stream() {
        Some(_) => (u64::MAX, false),
        None => (rows.len() as u64, config.data.shuffle),
    };
    let sampler = Sampler::new(config.output.seed, n_rows, config.sequences_per_step() as u64, shuffle)?;
    Ok((run_plan(config, n_rows), sampler))
}

fn loss_scale(config: &JobConfig) -> LossScale {
    let p = &config.precision;
    match (p.fp16, p.loss_scale) {
        (false, _) => LossScale::OFF,
        (true, Some(scale)) => LossScale { scale, ..LossScale::OFF },
        (true, None) => LossScale {
            scale: p.initial_loss_scale,
            good_steps: 0,
            window: Some(p.loss_scale_window),
            min: p.min_loss_scale,
        },
    }
}

pub(crate) fn step_spec(config: &JobConfig, model: &Architecture, device: &dyn Device) -> Result<StepSpec, JobError> {
    let o = &config.optimizer;
    let mut lora = config.adapter.lora().map(|lora| lora_spec(&lora, model)).transpose()?;
    if let Some(lora) = lora.as_mut().filter(|_| config.reward.reward_model) {
        // As PEFT does for the task of classification.
        lora.modules_to_save.push(score_head::MODULE.into());
    }
    if let Some(lora) = lora.as_mut().filter(|_| config.precision.bf16 == Bf16::Full) {
        lora.packing = lora.packing.or(Some(Packing::Bf16));
    }
    Ok(StepSpec {
        n_microbatches: config.microbatches_per_rank(),
        precision: precision(config, model, device),
        recompute: match config.precision.gradient_checkpointing {
            GradientCheckpointing::Off => Recompute::None,
            GradientCheckpointing::Selective => Recompute::Selective,
            GradientCheckpointing::Full => Recompute::Full,
        },
        lora,
        optimizer: o.rule,
        max_grad_norm: o.clip_norm(),
        offload_optimizer: o.offload_optimizer,
        parallel: config.parallel.parallel(config.microbatches_per_step()),
    })
}

/// The number format of products.
pub(crate) fn precision(config: &JobConfig, model: &Architecture, device: &dyn Device) -> Precision {
    // `bf16: auto` keeps the precision of a user-defined model.
    match config.precision.precision(device.has_fast_bf16() && model.known().is_some()) {
        ConfigPrecision::F32 => Precision::F32,
        ConfigPrecision::Bf16 => Precision::Bf16,
        ConfigPrecision::Fp8 => Precision::Fp8,
        ConfigPrecision::Fp16 => Precision::F16,
    }
}

fn lora_spec(lora: &Lora<'_>, model: &Architecture) -> Result<LoraSpec, JobError> {
    let mut target_modules = lora.targets.named.to_vec();
    if lora.targets.all_linear {
        target_modules.extend(model.known().map(block_linears).unwrap_or_default());
    }
    if let Some(pattern) = lora.targets.matching {
        target_modules.extend(matching_modules(pattern, model)?);
    }
    Ok(LoraSpec {
        rank: lora.rank,
        alpha: lora.alpha as f32,
        rank_stabilised: lora.section.peft_use_rslora,
        target_modules,
        blocks: lora.section.peft_layers_to_transform.clone(),
        modules_to_save: lora.section.lora_modules_to_save.clone(),
        dropout: lora.section.lora_dropout as f32,
        in_evaluation: false,
        magnitudes: lora.section.peft_use_dora,
        rate_ratio: lora.section.loraplus_lr_ratio,
        packing: lora.section.packing(),
    })
}

/// Paths of the linear layers that a regular expression matches, also if it is written for a model that also reads images.
fn matching_modules(pattern: &str, model: &Architecture) -> Result<Vec<String>, JobError> {
    let regex = whole(pattern).map_err(PlanError::Targets)?;
    let paths = linear_modules(&smallest(model)?);
    let example = paths.first().cloned().unwrap_or_default();
    let mut found = Vec::new();
    for path in paths {
        let matches = |path: &str| regex.is_match(path).map_err(|error| PlanError::Targets(Box::new(error)));
        if matches(&path)? || matches(&path_beside_images(&path))? {
            found.push(path);
        }
    }
    match found.is_empty() {
        false => Ok(found),
        true => Err(PlanError::NoTarget { pattern: pattern.into(), example }.into()),
    }
}

/// Names of the linear layers of a block.
fn block_linears(model: &ModelConfig) -> Vec<String> {
    model.family.linears.iter().map(|name| (*name).to_string()).collect()
}

/// A described model, completed from its tokenizer and with the keys that readers of an export expect.
fn completed(mut described: Value, tokenizer: &Tokenizer) -> Value {
    if let Some(keys) = described.as_object_mut() {
        let mut default = |key: &str, value: Option<Value>| {
            if let (false, Some(value)) = (keys.contains_key(key), value) {
                keys.insert(key.into(), value);
            }
        };
        default("vocab_size", Some(json!(tokenizer.vocab_size())));
        default("bos_token_id", tokenizer.bos_id().map(|id| json!(id)));
        default("eos_token_id", tokenizer.eos_id().map(|id| json!(id)));
        default("torch_dtype", Some(json!("float32")));
        // A model from scratch has no padding token; the one that transformers assumes for a family may be outside a
        // smaller vocabulary.
        default("pad_token_id", Some(Value::Null));
    }
    let hf = serde_json::from_value::<HfConfig>(described.clone()).ok();
    let family = hf.as_ref().and_then(|hf| Family::of(hf).ok());
    if let (Some(family), Some(keys)) = (family, described.as_object_mut()) {
        keys.entry("architectures").or_insert_with(|| json!([family.architecture]));
        // Of some families, transformers assumes another number, whatever that of all heads is.
        const KV_HEADS: &str = "num_key_value_heads";
        let model = hf.and_then(|hf| ModelConfig::try_from(&hf).ok());
        if let Some(model) = model.filter(|_| family.keys.iter().any(|keys| keys.contains(&KV_HEADS))) {
            keys.entry(KV_HEADS).or_insert_with(|| json!(model.n_kv_heads));
        }
    }
    described
}

fn check_vocabulary(model: &Architecture, tokenizer: &Tokenizer) -> Result<(), JobError> {
    // Models may lack rows for tokens that were added later; data that has such a token is refused.
    let (n_tokens, vocab_size) = (tokenizer.base_vocab_size(), model.vocab_size());
    if n_tokens <= vocab_size {
        return Ok(());
    }
    Err(PlanError::Vocabulary { n_tokens, vocab_size }.into())
}
