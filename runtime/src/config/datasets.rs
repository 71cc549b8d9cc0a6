//! Training data: the files, how an entry becomes a sample, and how samples become sequences.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_yaml_ng::{Mapping, Value};

use super::at::At;
use super::chat_template::{ChatTemplateChoice, TemplateVariables};
pub use super::dataset_type::DatasetType;
use super::dataset_type::{PromptSection, with_type};
use super::error::{ConfigError, Errors};
use super::pair_form::PairSection;
use super::section::{Section, choices, section};
use super::setting::{AT_LEAST_ONE, Setting, TOKENS, VISITS, read_items};
use super::split::{NoSplit, Split};
use super::steps::Steps;

section! {
    /// The data and its division into sequences.
    pub struct DataSection {
        /// Files to train on: a list of entries with at least `path` and `type`.
        pub datasets: Vec<DatasetConfig> = Vec::new();
        /// Files to evaluate on instead of held-out samples, as a list of entries like those of `datasets`.
        pub test_datasets: Vec<DatasetConfig> = Vec::new();
        /// Folder for tokenized data, kept between runs; if not set, a folder in `output_dir`.
        pub dataset_prepared_path: Option<PathBuf> = None;
        /// Tokens per sequence.
        pub sequence_len: usize = 512 => TOKENS;
        /// Pack several short samples into one sequence; attention does not cross the boundaries of samples.
        pub sample_packing: bool = false;
        /// Pack samples in their order, each into the row of the one before it if there is room; else the longest first, into
        /// the fullest row with room.
        pub sample_packing_sequentially: bool = false;
        /// Handling of samples longer than `sequence_len`: drop, truncate, or error. Texts of `completion` are cut into several
        /// samples instead.
        pub excess_length_strategy: ExcessLength = ExcessLength::Drop;
        /// Fewest tokens of a sample; shorter ones are dropped.
        pub min_sample_len: usize = 2 => TOKENS;
        /// Keep only one of several samples with the same tokens.
        pub dataset_exact_deduplication: bool = false;
        /// Leave out records that cannot be used, count them, and list them in a file beside the tokenized data, instead of ending
        /// the run. It ends all the same if more than half of the records of a file cannot be used.
        pub skip_bad_records: bool = false;
        /// The loss is the mean over the weights of predicted tokens: `weight` of messages and content parts, the column `loss_weights` of
        /// tokenized data, 1 elsewhere.
        pub loss_weights: bool = false;
        /// Chat template of conversations: that of the tokenizer, a named one, or jinja for `chat_template_jinja`.
        pub chat_template: ChatTemplateChoice = ChatTemplateChoice::TokenizerDefault;
        /// Text of the template or path of a file with it, for `chat_template: jinja`.
        pub chat_template_jinja: Option<String> = None;
        /// Values of further variables of the chat template, such as {enable_thinking: false}.
        pub chat_template_kwargs: TemplateVariables = TemplateVariables::default();
        /// Tokens other than EOS that end a turn of a conversation.
        pub eot_tokens: Vec<String> = Vec::new();
        /// Also train on the prompts of instruction and chat samples, not only on the answers.
        pub train_on_inputs: bool = false;
        /// Samples held out for evaluation: a share of all samples if below 1, else a number of samples; 0 disables
        /// evaluation.
        pub val_set_size: ValSetSize = ValSetSize::Nothing;
        /// Steps between evaluations on the held-out samples, or their share of all steps; if not set, one evaluation at
        /// the end.
        pub eval_steps: Option<Steps> = None;
        /// Evaluations in each epoch, instead of `eval_steps`; 0 or none: as `eval_steps`.
        pub evals_per_epoch: Option<u64> = None;
        /// Visit the samples in a new random order in every epoch, derived from `seed`.
        pub shuffle: bool = true;
        /// Train as soon as the first file is tokenized, and tokenize the next ones meanwhile, as many as `max_steps` needs. The
        /// files are visited in a random order, and the samples of each file in a random order, instead of all samples.
        pub streaming: bool = false;
    }
}

section! {
    /// One entry of `datasets`.
    pub struct DatasetConfig {
        /// File (.jsonl, .json, .csv, .tsv, .parquet, .arrow or plain text; all but Parquet also as .gz or .zst), pattern
        /// such as `src/**/*.rs` for all matching files, in order of name, folder as `datasets.save_to_disk` writes it or as
        /// the Hub lays it out, or name of a data set that is in the Hub's cache of this machine.
        pub path: PathBuf = PathBuf::new();
        /// How an entry of the file becomes a sample. `tokenized` reads `input_ids` and, where they are there, `labels`,
        /// `attention_mask`, `completion_mask`, `assistant_masks`, `loss_mask`, `position_ids` and `seq_lengths`.
        pub r#type: DatasetType = DatasetType::Completion;
        /// Format of the file; if not set, that of its extension, which is text for unknown ones.
        pub ds_type: Option<FileFormat> = None;
        /// Split or slice of it, as in `train[:10%]`, `train[100:200]` or `train+validation`; if not set, train.
        pub split: Option<Split> = None;
        /// Visits of each sample in an epoch: 2 for every sample twice, 0.5 for a random half of them.
        pub weight: f64 = 1.0 => VISITS;
        /// Branch, tag or commit of a data set that is named as on the Hub; if not set, main.
        pub revision: Option<String> = None;
        /// Name of the part to read from a folder whose README.md lists several.
        pub name: Option<String> = None;
        /// File names or patterns of files in the folder, which make up the split train.
        pub data_files: Option<FileNames> = None;
        /// Divides the records into this many random parts; `shards_idx` names the one that is read.
        pub shards: Option<u64> = None => AT_LEAST_ONE;
        /// Index of the part of `shards` that is read, counted from 0.
        pub shards_idx: u64 = 0;
        /// Name of the text field of `completion` entries; if not set, text.
        pub field: Option<String> = None;
        /// Texts and fields of `custom` entries; a section under `type` is the same.
        pub prompt: Option<PromptSection> = None;
        /// Texts and fields of `user_defined.default` entries; a section under `type` is the same.
        pub pair: Option<PairSection> = None;
        /// Chat template of this data set; if not set, that of the job.
        pub chat_template: Option<ChatTemplateChoice> = None;
        /// Text of the template of this data set or path of a file with it, for `chat_template: jinja`.
        pub chat_template_jinja: Option<String> = None;
        /// Name of the field of conversations that lists the messages; if not set, messages, and conversations for
        /// sharegpt.
        pub field_messages: Option<String> = None;
        /// Name of the field with the prompt of a pair; if not set, prompt.
        pub field_prompt: Option<String> = None;
        /// Name of the field with the preferred answer of a pair; if not set, chosen.
        pub field_chosen: Option<String> = None;
        /// Name of the field with the rejected answer of a pair; if not set, rejected.
        pub field_rejected: Option<String> = None;
        /// Name of the field of conversations that lists the tools; if not set, tools.
        pub field_tools: Option<String> = None;
        /// Names of the fields of a message in the data, by their names in chat templates, as in
        /// {role: from, content: value}; other fields keep their names.
        pub message_property_mappings: Names = Names::default();
        /// Name of the role field of a message; the older way to map it.
        pub message_field_role: Option<String> = None;
        /// Name of the text field of a message; the older way to map it.
        pub message_field_content: Option<String> = None;
        /// Names of the roles in the data, by their names in chat templates, as in `{user: [human]}`; human is user and gpt is
        /// assistant unless named here.
        pub roles: RoleNames = RoleNames::default();
        /// Name of the field of a message with the thought before the answer; if not set, reasoning_content.
        pub field_thinking: Option<String> = None;
        /// The chat template's name of that field; if not set, reasoning_content.
        pub template_thinking_key: Option<String> = None;
        /// Split a thought in tags such as `<think>` from the text of an answer.
        pub split_thinking: bool = false;
        /// Roles whose messages are trained on when `train_on_inputs` is off; answers: those of assistant, and of a prompt with
        /// a completion all of the completion; all: every role, but not prompts that have a completion; none: messages with a
        /// flag only.
        pub roles_to_train: TrainedRoles = TrainedRoles::Answers;
        /// Name of the field of a message that is true if it is trained on, false if not.
        pub message_field_training: Option<String> = None;
        /// Name of the field of a message that lists parts of its text with begin_offset, end_offset and train.
        pub message_field_training_detail: Option<String> = None;
        /// Leave out a system message at the beginning of a conversation.
        pub drop_system_message: bool = false;
        /// The tokens EOS in conversations that are trained on.
        pub train_on_eos: EndTraining = EndTraining::Turn;
        /// The tokens of `eot_tokens` that are trained on.
        pub train_on_eot: EotTraining = EotTraining::AsEos;
    }
}

choices! {
    /// Which marks at the end of a turn are trained on.
    pub enum EndTraining {
        /// Those of trained turns.
        Turn = "turn";
        /// All of the conversation.
        All = "all";
        /// The last of the conversation.
        Last = "last";
        /// No mark.
        Never = "none" | "never";
    }
}

#[allow(
    clippy::derivable_impls,
    reason = "the macro that declares choices has no place for the attribute of a default"
)]
impl Default for EndTraining {
    fn default() -> Self {
        Self::Turn
    }
}

choices! {
    /// Which tokens of `eot_tokens` are trained on.
    pub enum EotTraining {
        /// As `train_on_eos` says of EOS.
        AsEos = "as_eos";
        /// Those of trained turns.
        Turn = "turn";
        /// All of the conversation.
        All = "all";
        /// The last of the conversation.
        Last = "last";
        /// No token.
        Never = "none" | "never";
    }
}

impl EotTraining {
    /// When they are trained on, unless as EOS.
    pub(crate) fn of_its_own(self) -> Option<EndTraining> {
        match self {
            Self::AsEos => None,
            Self::Turn => Some(EndTraining::Turn),
            Self::All => Some(EndTraining::All),
            Self::Last => Some(EndTraining::Last),
            Self::Never => Some(EndTraining::Never),
        }
    }
}

/// The value of `roles_to_train`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrainedRoles {
    /// Assistant, and of a prompt with a completion all of the completion.
    Answers,
    /// Every role, but no prompt that has a completion.
    All,
    /// These.
    Named(Vec<String>),
}

const ANSWERS: &str = "answers";
const ALL: &str = "all";

impl Setting for TrainedRoles {
    fn fits() -> String {
        format!("{ANSWERS}, {ALL}, a list of roles, or none")
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value.as_str() {
            Some(ANSWERS) => Ok(Self::Answers),
            Some(ALL) => Ok(Self::All),
            Some("none") => Ok(Self::Named(Vec::new())),
            _ => read_items(value, at, Self::fits(), String::read).map(Self::Named),
        }
    }
    fn write(&self) -> Value {
        match self {
            Self::Answers => ANSWERS.into(),
            Self::All => ALL.into(),
            Self::Named(roles) if roles.is_empty() => "none".into(),
            Self::Named(roles) => roles.write(),
        }
    }
}

choices! {
    /// The format of a dataset file.
    pub enum FileFormat {
        /// One JSON object per line, or one JSON list of objects.
        Json = "json";
        /// One record per line, values separated by commas; the first line names the fields.
        Csv = "csv";
        /// One record per line, values separated by tabs; the first line names the fields.
        Tsv = "tsv";
        /// Columns in Parquet.
        Parquet = "parquet";
        /// Columns in Arrow, as a stream or a file.
        Arrow = "arrow";
        /// One document of plain text.
        Text = "text";
    }
}

choices! {
    /// Handling of a sample that does not fit into one sequence.
    pub enum ExcessLength {
        /// Training stops before it starts, naming the sample.
        Error = "error" | "raise";
        /// The sample is dropped.
        Drop = "drop";
        /// The beginning of the sample is kept.
        Truncate = "truncate";
    }
}

/// How much of the data is held out for evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValSetSize {
    /// Nothing.
    Nothing,
    /// This share of the samples, strictly between 0 and 1.
    Share(f64),
    /// This many samples, at least one.
    Samples(usize),
}

impl DataSection {
    /// What the run does and the user may not expect.
    pub(super) fn notes(&self) -> Vec<String> {
        let is_asked = self.evals_per_epoch.is_some_and(|n| n > 0);
        let nothing = (is_asked && !self.evaluates())
            .then(|| "`evals_per_epoch` evaluates nothing, because `val_set_size` is 0".into());
        let of_sets = self.datasets.iter().filter(|entry| entry.r#type.is_conversation());
        let choices: BTreeSet<&str> = of_sets
            .filter_map(|entry| match entry.chat_template.unwrap_or(self.chat_template) {
                ChatTemplateChoice::Named(template) if template.lacks_system_of_axolotl() => Some(template.name()),
                _ => None,
            })
            .collect();
        let lacks = choices.into_iter().map(|name| {
            format!(
                "`chat_template: {name}` adds no system message to a conversation that has none; Axolotl's template of this name does"
            )
        });
        nothing.into_iter().chain(lacks).collect()
    }

    /// The same data with one spelling of what is trained on, of records that have no completion.
    pub(super) fn as_meant(&self) -> DataSection {
        let mut section = self.clone();
        for entry in section.datasets.iter_mut().chain(&mut section.test_datasets) {
            if matches!(&entry.roles_to_train, TrainedRoles::Named(roles) if roles == &["assistant"]) {
                entry.roles_to_train = TrainedRoles::Answers;
            }
        }
        section
    }

    /// Whether there is data to evaluate on.
    pub(crate) fn evaluates(&self) -> bool {
        self.val_set_size != ValSetSize::Nothing || !self.test_datasets.is_empty()
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.datasets.is_empty() {
            let why = "list at least one entry with `path` and `type`";
            return Err(ConfigError::Missing { key: "datasets".into(), why: why.into() });
        }
        let (by_steps, by_epochs) = (self.eval_steps.is_some(), self.evals_per_epoch.is_some_and(|n| n > 0));
        if by_steps && by_epochs {
            return Err(ConfigError::Conflict {
                first: "evals_per_epoch".into(),
                second: "eval_steps".into(),
                why: "both say when to evaluate; keep one".into(),
            });
        }
        if self.val_set_size != ValSetSize::Nothing && !self.test_datasets.is_empty() {
            return Err(ConfigError::Conflict {
                first: "test_datasets".into(),
                second: "val_set_size".into(),
                why: "both say what to evaluate on; keep one".into(),
            });
        }
        if by_steps && !self.evaluates() {
            return Err(ConfigError::Conflict {
                first: "eval_steps".into(),
                second: "val_set_size".into(),
                why: "there is nothing to evaluate on; set `val_set_size` above 0 or remove `eval_steps`".into(),
            });
        }
        let weighted = self.datasets.iter().any(|dataset| dataset.weight != 1.0);
        let unknown = "the number of samples of a stream is not known";
        for (is_set, key, instead) in [
            (self.val_set_size != ValSetSize::Nothing, "val_set_size", "use `test_datasets` instead"),
            (weighted, "weight", "remove the weights"),
        ] {
            if self.streaming && is_set {
                let why = format!("{unknown}; {instead}, or remove `streaming`");
                return Err(ConfigError::Conflict { first: key.into(), second: "streaming".into(), why });
            }
        }
        Ok(())
    }
}

impl Setting for ValSetSize {
    fn fits() -> String {
        "0, a share between 0 and 1, or a whole number of samples".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match f64::read(value, at).map_err(|_| at.mismatch(value, Self::fits()))? {
            0.0 => Ok(Self::Nothing),
            share if share > 0.0 && share < 1.0 => Ok(Self::Share(share)),
            samples if samples >= 1.0 && samples.fract() == 0.0 && samples < 2f64.powi(53) => {
                Ok(Self::Samples(samples as usize))
            }
            _ => Err(at.mismatch(value, Self::fits())),
        }
    }
    fn write(&self) -> Value {
        match self {
            Self::Nothing => 0usize.write(),
            Self::Share(share) => share.write(),
            Self::Samples(samples) => samples.write(),
        }
    }
}

/// The value of `data_files`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileNames(pub Vec<String>);

impl Setting for FileNames {
    fn fits() -> String {
        "a file name or a list of file names".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::String(name) if !name.is_empty() => Ok(Self(vec![name.clone()])),
            _ => read_items(value, at, Self::fits(), String::read).map(Self),
        }
    }
    fn write(&self) -> Value {
        self.0.write()
    }
}

impl Setting for Split {
    fn fits() -> String {
        NoSplit.to_string()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let split = value.as_str().and_then(|text| Split::parse(text).ok());
        split.ok_or_else(|| at.mismatch(value, Self::fits()))
    }
    fn write(&self) -> Value {
        self.text().into()
    }
}

/// Names of the data by names that chat templates use.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Names(pub BTreeMap<String, String>);

/// Names of roles in the data by names that chat templates use.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct RoleNames(pub BTreeMap<String, Vec<String>>);

fn read_map<T: Setting>(value: &Value, at: &At<'_>, fits: String) -> Result<BTreeMap<String, T>, ConfigError> {
    let keys = value.as_mapping().ok_or_else(|| at.mismatch(value, fits.clone()))?;
    let entry = |(key, value): (&Value, &Value)| {
        let key = key.as_str().ok_or_else(|| at.mismatch(key, fits.clone()))?;
        Ok((key.to_owned(), T::read(value, &at.key(key))?))
    };
    keys.iter().map(entry).collect()
}

fn write_map<T: Setting>(map: &BTreeMap<String, T>) -> Value {
    Value::Mapping(map.iter().map(|(key, value)| (key.as_str().into(), value.write())).collect())
}

impl Setting for Names {
    fn fits() -> String {
        "a section of names, as in {role: from}".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        read_map(value, at, Self::fits()).map(Self)
    }
    fn write(&self) -> Value {
        write_map(&self.0)
    }
}

impl Setting for RoleNames {
    fn fits() -> String {
        "a section of lists of names, as in {user: [human]}".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        read_map(value, at, Self::fits()).map(Self)
    }
    fn write(&self) -> Value {
        write_map(&self.0)
    }
}

impl Setting for Vec<DatasetConfig> {
    fn fits() -> String {
        "a list of entries with `path` and `type`".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        read_items(value, at, Self::fits(), read_entry)
    }
    fn write(&self) -> Value {
        let write_entry = |entry: &DatasetConfig| {
            let mut keys = Mapping::new();
            entry.write_section(&mut keys);
            Value::Mapping(keys)
        };
        Value::Sequence(self.iter().map(write_entry).collect())
    }
}

fn read_entry(entry: &Value, at: &At<'_>) -> Result<DatasetConfig, ConfigError> {
    let keys = entry.as_mapping().ok_or_else(|| at.mismatch(entry, "an entry with `path` and `type`".into()))?;
    let known: Vec<&str> = DatasetConfig::keys().iter().map(|doc| doc.key).collect();
    let mut errors = Errors::default();
    errors.keep(at.refuse_unknown(keys, &known));
    // An empty type is one; see `with_type`.
    for (needed, is_absent) in
        [("path", keys.get("path").is_none_or(Value::is_null)), ("type", !keys.contains_key("type"))]
    {
        if is_absent {
            let why = "every data set needs a `path` and a `type`";
            errors.keep::<()>(Err(ConfigError::Missing { key: format!("{at}.{needed}").into(), why: why.into() }));
        }
    }
    let keys = &with_type(keys);
    let entry = errors.keep(DatasetConfig::read_section(keys, at)).unwrap_or_default();
    if errors.is_empty() && entry.r#type == DatasetType::Custom && entry.prompt.is_none() {
        let why = "entries of type `custom` need the texts and fields of the prompt";
        errors.keep::<()>(Err(ConfigError::Missing { key: format!("{at}.prompt").into(), why: why.into() }));
    }
    let of_pairs = [
        ("field_prompt", entry.field_prompt.is_some()),
        ("field_chosen", entry.field_chosen.is_some()),
        ("field_rejected", entry.field_rejected.is_some()),
        ("pair", entry.pair.is_some()),
    ];
    if let Some((key, _)) = of_pairs.iter().find(|(_, given)| *given && !entry.r#type.is_pair()) {
        errors.keep::<()>(Err(ConfigError::Conflict {
            first: format!("{at}.{key}").into(),
            second: format!("{at}.type").into(),
            why: "only pairs have it; use a type of pairs, as `preference`, or remove the key".into(),
        }));
    }
    if let Some(shards) = entry.shards.filter(|shards| entry.shards_idx >= *shards) {
        let fits = format!("a whole number from 0 to {}, because `shards` is {shards}", shards - 1);
        errors.keep::<()>(Err(at.key("shards_idx").mismatch(&entry.shards_idx.write(), fits)));
    }
    errors.end(entry)
}
