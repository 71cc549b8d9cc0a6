//! The YAML file of a job: read, overridden and checked. Every loaded [`JobConfig`] is valid.
//!
//! The file is flat and uses the keys of Axolotl; a few of Accelerate's spellings are accepted too. The macro in `section`
//! declares each section struct once, with documentation, default and range of every key. The reader, the reference
//! ([`reference()`]) and the starter file ([`starter::starter_yaml`]) are generated from that declaration. `source` is the text as a
//! tree, `at` a position in it, `setting` reads a value there.
//!
//! Deliberately absent: checks of a model's shape (done by the model families) and of a dataset's lines (`data`).

pub mod adapter;
mod at;
pub mod chat_template;
pub mod dataset_type;
pub mod datasets;
mod described;
pub mod elastic;
pub mod error;
pub(crate) mod foreign;
pub mod key_doc;
mod lines;
pub mod model;
pub mod named_templates;
pub mod optimizer;
pub mod output;
pub mod pair_form;
pub mod parallel;
pub mod precision;
pub mod preference;
pub mod prompts;
pub mod reference;
pub mod reward;
pub mod schedule;
pub mod section;
mod setting;
mod source;
pub mod special_tokens;
mod spelling;
pub mod split;
pub mod starter;
pub mod steps;
#[cfg(test)]
mod tests;
mod yaml_1_1;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use phalanx_storage::home;
use serde_yaml_ng::{Mapping, Value};

use adapter::AdapterSection;
use at::At;
use datasets::{DataSection, DatasetConfig};
use elastic::{Elastic, ElasticSection};
use error::{ConfigError, Errors, ValueLocation};
use key_doc::KeyDoc;
use model::ModelSection;
use optimizer::OptimizerSection;
use output::OutputSection;
use parallel::ParallelSection;
use phalanx_strategies::objective::{Objective, Weighted};
use precision::PrecisionSection;
use preference::PreferenceSection;
use reward::RewardSection;
use schedule::ScheduleSection;
use section::Section;
use source::Source;

/// The checked configuration of a job. Each section has the keys that one part of the program reads.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct JobConfig {
    /// The model and its tokenizer.
    pub model: ModelSection,
    /// The data and its division into sequences.
    pub data: DataSection,
    /// Length of the run, batch size and learning rate.
    pub schedule: ScheduleSection,
    /// The optimizer.
    pub optimizer: OptimizerSection,
    /// Number formats, memory and threads.
    pub precision: PrecisionSection,
    /// Low-rank adapters.
    pub adapter: AdapterSection,
    /// What is trained instead of the likelihood of texts.
    pub preference: PreferenceSection,
    /// Scores instead of texts.
    pub reward: RewardSection,
    /// The mesh.
    pub parallel: ParallelSection,
    /// Output, checkpoints and the seed.
    pub output: OutputSection,
    /// Handling of lost and added ranks and machines.
    pub elastic: Elastic,
    /// What became of keys of Axolotl that Phalanx reads differently or not at all, as sentences for the user. They are no part
    /// of what is written.
    pub notes: Vec<String>,
}

impl JobConfig {
    /// Reads and checks a file. `overrides` are pairs of a key (`learning_rate`, `model.hidden_size`, `datasets.0.path`) and
    /// a YAML value, applied in order; the word `none` switches an optional key off.
    ///
    /// # Errors
    /// When the file cannot be read, or for the reasons of [`JobConfig::from_yaml_str`].
    pub fn load(path: &Path, overrides: &[(String, String)]) -> Result<Self, ConfigError> {
        let unreadable =
            |error: std::io::Error| ConfigError::Unreadable { path: path.to_owned(), reason: error.to_string() };
        let text = read_text(path).map_err(unreadable)?;
        if let Some(tool) = foreign::import::tool_of(path, &text) {
            return Err(ConfigError::OtherTool { path: path.to_owned(), tool });
        }
        Self::from_yaml_str(&text, overrides)
    }

    /// Reads and checks the text of a file.
    ///
    /// # Errors
    /// Every fault, each as one sentence that names key and line: an unknown or repeated key, a value of the wrong type or out of
    /// range, or a violated relation between keys; or that the text is no YAML.
    pub fn from_yaml_str(text: &str, overrides: &[(String, String)]) -> Result<Self, ConfigError> {
        let known = reference();
        let (mut source, mut errors) = Source::new(text, overrides, &known, &read_text)?;
        for refused in std::mem::take(&mut source.refused) {
            errors.keep::<()>(Err(refused));
        }
        Self::of_source(&source, errors, &known)
    }

    /// Reads and checks the keys of a file; `errors` are those that it has already.
    fn of_source(source: &Source, mut errors: Errors, known: &[KeyDoc]) -> Result<Self, ConfigError> {
        let at = At::root(source);
        let names: Vec<&str> = known.iter().flat_map(|doc| doc.aliases.iter().copied().chain([doc.key])).collect();
        errors.keep(at.refuse_unknown(&source.keys, &names));
        let keys = &source.keys;
        let mut job = Self {
            model: read(keys, &at, ModelSection::validate, &mut errors),
            data: read(keys, &at, DataSection::validate, &mut errors),
            schedule: read(keys, &at, ScheduleSection::validate, &mut errors),
            optimizer: read(keys, &at, |_| Ok(()), &mut errors),
            precision: read(keys, &at, PrecisionSection::validate, &mut errors),
            adapter: read(keys, &at, AdapterSection::validate, &mut errors),
            preference: read(keys, &at, PreferenceSection::validate, &mut errors),
            reward: read(keys, &at, RewardSection::validate, &mut errors),
            parallel: read(keys, &at, ParallelSection::validate, &mut errors),
            output: read(keys, &at, OutputSection::validate, &mut errors),
            elastic: read(keys, &at, |section: &ElasticSection| section.elastic.validate(), &mut errors).elastic,
            notes: source.notes(),
        };
        job.schedule.end_after_an_epoch();
        if job.objective().rows_per_sample() > 1 && job.adapter.lora_dropout > 0.0 {
            job.adapter.lora_dropout = 0.0;
            let note = "`lora_dropout` is not applied with `rl` or `reward_model`: both answers are compared without noise, as in TRL";
            job.notes.push(note.into());
        }
        let is_rate_set = keys.get("learning_rate").is_some_and(|rate| !rate.is_null());
        job.notes.extend(job.preference.note_of_rate(is_rate_set));
        // Relations between sections are checked only if each section is valid.
        if errors.is_empty() {
            errors.keep(job.validate());
        }
        job.notes.extend(job.schedule.notes().into_iter().chain(job.data.notes()));
        if job.data.streaming && job.schedule.num_epochs.is_some() {
            job.notes.push(
                "a stream ends with `max_steps`; `num_epochs` only says into how many epochs it is divided".into(),
            );
        }
        if job.output.load_best_model_at_end && !job.data.evaluates() {
            job.notes.push("`load_best_model_at_end` changes nothing, because nothing is evaluated".into());
        }
        errors.end(job).map_err(|error| error.located(&|key| source.place_of(key)))
    }

    /// The whole configuration, including defaults, as YAML that reads back equal. It is stored with a run's results.
    pub fn to_yaml(&self) -> String {
        let mut keys = Mapping::new();
        self.model.write_section(&mut keys);
        self.data.write_section(&mut keys);
        self.schedule.write_section(&mut keys);
        self.optimizer.write_section(&mut keys);
        self.precision.write_section(&mut keys);
        self.adapter.write_section(&mut keys);
        self.preference.write_section(&mut keys);
        self.reward.write_section(&mut keys);
        self.parallel.write_section(&mut keys);
        self.output.write_section(&mut keys);
        ElasticSection { elastic: self.elastic.clone() }.write_section(&mut keys);
        serde_yaml_ng::to_string(&Value::Mapping(keys))
            .expect("a tree of strings, numbers and lists always has a YAML form")
    }

    /// What is minimised.
    pub fn objective(&self) -> Objective {
        let objective = self.reward.objective().unwrap_or_else(|| self.preference.objective());
        match objective {
            Objective::Supervised if self.data.loss_weights => Objective::Weighted(Weighted),
            objective => objective,
        }
    }

    /// Sequences per step, over all ranks.
    pub fn sequences_per_step(&self) -> usize {
        self.schedule.micro_batch_size.saturating_mul(self.microbatches_per_step())
    }

    /// Microbatches of a step, over all ranks.
    pub fn microbatches_per_step(&self) -> usize {
        self.schedule.microbatches(self.data_ranks())
    }

    /// Microbatches that a rank runs in a step; if they do not divide evenly, some ranks run an empty one.
    pub fn microbatches_per_rank(&self) -> usize {
        self.microbatches_per_step().div_ceil(self.data_ranks())
    }

    fn data_ranks(&self) -> usize {
        self.parallel.mesh().map_or(1, |mesh| mesh.data_ranks())
    }

    /// Checks relations between keys of several sections.
    fn validate(&self) -> Result<(), ConfigError> {
        self.check_products()?;
        match self.reward.reward_model {
            true => self.reward.check(self)?,
            false => self.preference.check(self)?,
        }
        let (per_step, data_ranks) = (self.microbatches_per_step(), self.data_ranks());
        if self.schedule.microbatches_per_step.is_some() && self.schedule.gradient_accumulation_steps > 1 {
            return Err(ConfigError::TwoBatchSizes);
        }
        let (data, output) = (&self.data, &self.output);
        let by_epochs = data.evals_per_epoch.is_some_and(|n| n > 0);
        let evaluates_often = data.evaluates() && (data.eval_steps.is_some() || by_epochs);
        if output.best_rule().patience.is_some() && !evaluates_often {
            return Err(ConfigError::Conflict {
                first: "early_stopping_patience".into(),
                second: "eval_steps".into(),
                why: "set `eval_steps` or `evals_per_epoch`, and `val_set_size` or `test_datasets`: evaluations decide when the run ends".into(),
            });
        }
        if self.model.reinit_weights && self.adapter.adapter.is_some() {
            return Err(ConfigError::Conflict {
                first: "reinit_weights".into(),
                second: "adapter".into(),
                why: "an adapter belongs to weights that others have too, not to random ones; remove one of the two"
                    .into(),
            });
        }
        if data.streaming && self.schedule.max_steps.is_none() {
            let why = "a stream has no known number of epochs; set `max_steps`, which ends the training, or remove `streaming`";
            return Err(ConfigError::Missing { key: "max_steps".into(), why: why.into() });
        }
        if !per_step.is_multiple_of(data_ranks) && !self.parallel.reproducible {
            let fits = (per_step / data_ranks).max(1) * data_ranks;
            return Err(ConfigError::UnevenBatch { per_step, data_ranks, fits });
        }
        Ok(())
    }
}

/// A job in keys of Phalanx, as another file describes it.
pub(crate) struct Translated {
    /// The keys, in their first spelling.
    pub(crate) keys: Mapping,
    /// The lines of the file at which they are.
    pub(crate) lines: BTreeMap<String, usize>,
    /// What became of keys of Axolotl, and which of them were left out, as sentences.
    pub(crate) notes: Vec<String>,
}

/// Reads and checks the text of a job of Phalanx or Axolotl, but leaves out what is asked for and not done.
///
/// # Errors
/// As [`JobConfig::from_yaml_str`].
pub(crate) fn translated(
    text: &str,
    overrides: &[(String, String)],
    read: &foreign::ReadFile<'_>,
) -> Result<Translated, ConfigError> {
    let known = reference();
    let (source, errors) = Source::new(text, overrides, &known, read)?;
    match JobConfig::of_source(&source, errors, &known) {
        Err(error) if error != ConfigError::AutoAxis => return Err(error),
        _ => {}
    }
    let refused = source.refused.iter().map(|error| error.clone().located(&|key| source.place_of(key)));
    let notes = refused.map(|error| format!("left out {error}")).chain(source.notes()).collect();
    let line = |(key, _): (&Value, &Value)| match source.place_of(key.as_str()?) {
        ValueLocation::Line(line) => Some((key.as_str()?.to_owned(), line)),
        _ => None,
    };
    let lines = source.keys.iter().filter_map(line).collect();
    let set = |(_, value): &(Value, Value)| !value.is_null();
    Ok(Translated { lines, notes, keys: source.keys.into_iter().filter(set).collect() })
}

/// Reads a section and checks the relations between its keys. If it is invalid, the errors are kept, and its defaults returned.
fn read<S: Section + Default>(
    keys: &Mapping,
    at: &At<'_>,
    validate: impl Fn(&S) -> Result<(), ConfigError>,
    errors: &mut Errors,
) -> S {
    let valid = S::read_section(keys, at).and_then(|section| validate(&section).map(|()| section));
    errors.keep(valid).unwrap_or_default()
}

/// The keys of a text in YAML that is no configuration, with the same limits.
pub(crate) fn parse_keys(text: &str) -> Result<Mapping, ConfigError> {
    source::parse(text)
}

/// The text of a file, up to one byte more than a configuration may have: the path may name an endless device.
pub(crate) fn read_text(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(home::expanded(path))?.take(source::TEXT_BYTES_MAX as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

/// Tokens of a microbatch are numbered with 32 bits.
const TOKENS_OF_MICROBATCH_MAX: u64 = i32::MAX as u64;
/// The compiler writes the instructions of each microbatch of a step; for this many it takes seconds.
const MICROBATCHES_OF_RANK_MAX: u64 = 1 << 13;

impl JobConfig {
    /// The same job with one spelling where several have one meaning, such as a default that is written out.
    #[must_use]
    pub(crate) fn as_meant(&self) -> JobConfig {
        JobConfig {
            data: self.data.as_meant(),
            adapter: self.adapter.as_meant(),
            schedule: self.schedule.as_meant(),
            optimizer: OptimizerSection { max_grad_norm: self.optimizer.clip_norm(), ..self.optimizer.clone() },
            ..self.clone()
        }
    }

    /// Checks that products of keys stay within what a rank can number and compile.
    fn check_products(&self) -> Result<(), ConfigError> {
        let n_rows = (self.schedule.micro_batch_size * self.objective().rows_per_sample()) as u64;
        let n_tokens = n_rows * self.data.sequence_len as u64;
        if n_tokens > TOKENS_OF_MICROBATCH_MAX {
            return Err(ConfigError::TooManyTokens { found: n_tokens, max: TOKENS_OF_MICROBATCH_MAX });
        }
        let n_microbatches = self.microbatches_per_rank() as u64;
        if n_microbatches > MICROBATCHES_OF_RANK_MAX {
            return Err(ConfigError::TooManyMicrobatches { found: n_microbatches, max: MICROBATCHES_OF_RANK_MAX });
        }
        Ok(())
    }
}

/// Every top-level key with its meaning, default and accepted values, in the order of the sections.
pub fn reference() -> Vec<KeyDoc> {
    sections().into_iter().flat_map(|(_, keys)| keys).collect()
}

/// Every section with its title and keys, in the order of the starter file.
pub fn sections() -> Vec<(&'static str, Vec<KeyDoc>)> {
    vec![
        ("Model", ModelSection::keys()),
        ("Data", DataSection::keys()),
        ("Batch, length and learning rate", ScheduleSection::keys()),
        ("Optimizer", OptimizerSection::keys()),
        ("Precision and memory", PrecisionSection::keys()),
        ("Adapters", AdapterSection::keys()),
        ("Preference tuning", PreferenceSection::keys()),
        ("Reward models", RewardSection::keys()),
        ("Parallelism", ParallelSection::keys()),
        ("Output and checkpoints", OutputSection::keys()),
        ("Elasticity", ElasticSection::keys()),
    ]
}

/// Every key of the section `elastic`.
pub fn elastic_reference() -> Vec<KeyDoc> {
    Elastic::keys()
}

/// Every key of one entry of `datasets`.
pub fn dataset_reference() -> Vec<KeyDoc> {
    let without_default = |mut doc: KeyDoc| {
        // An entry without a type is refused, whatever its type would be.
        if doc.key == "type" {
            doc.default.clear();
        }
        doc
    };
    DatasetConfig::keys().into_iter().map(without_default).collect()
}
