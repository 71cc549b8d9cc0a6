//! The data section of the user's YAML file: Axolotl's keys, checked before a file is opened.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::config::chat_template::ChatTemplateChoice;
use crate::config::datasets::{DatasetType, EndTraining, ExcessLength, FileFormat, TrainedRoles};
use crate::config::pair_form::{PairForm, PairSection};
use crate::config::prompts::CustomPrompt;
use crate::config::split::Split;
use phalanx_strategies::objective::SecondRow;
use serde_json::{Map, Value};
use thiserror::Error;

/// Why a data section cannot be used.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Error)]
pub enum DataConfigError {
    /// Nothing to train on.
    #[error("datasets is empty; name at least one, as in: datasets: [{{ path: text.txt, type: completion }}]")]
    NoDatasets,
    /// A row must hold a token and the one that follows it.
    #[error("sequence_len must be at least 2, found {0}")]
    SequenceTooShort(usize),
    /// Token and row numbers inside a batch are 32-bit.
    #[error("sequence_len must be at most {max}, found {found}")]
    SequenceTooLong { found: usize, max: usize },
    /// Neither a fraction nor a count of rows.
    #[error("val_set_size must be a fraction from 0 to below 1 or a whole number of rows, found {0}")]
    ValSetSize(f64),
    /// A key of another type of data set.
    #[error("dataset {}: {key} does not apply to type {}, only to type {}", path.display(), found.word(), fits.word())]
    KeyOfOtherType { path: PathBuf, key: &'static str, found: DatasetType, fits: DatasetType },
}

/// The longest row: far beyond any model's context, and safely inside 32-bit positions.
const SEQUENCE_LEN_MAX: usize = 1 << 24;

/// The training data of a job, and how it is divided into rows.
#[derive(Debug, Clone, PartialEq)]
pub struct DataConfig {
    /// The files, read one after the other.
    pub datasets: Vec<DatasetConfig>,
    /// Files to evaluate on, instead of rows that are held out.
    pub test_datasets: Vec<DatasetConfig>,
    /// Tokens per row.
    pub sequence_len: usize,
    /// Pack several documents into one row, isolated from each other; default false: one document per row, padded.
    pub sample_packing: bool,
    /// Pack documents in their order instead of by length; default false.
    pub sample_packing_sequentially: bool,
    /// Take the rows in a new random order in each epoch; default true.
    pub shuffle: bool,
    /// Seed of the order of rows and of the choice of validation rows; default 42.
    pub seed: u64,
    /// Rows held out for validation: a fraction below 1 or a count; default 0.
    pub val_set_size: f64,
    /// Train on instructions, too, not only on the answers; default false.
    pub train_on_inputs: bool,
    /// What to do with a document longer than a row; default: leave it out.
    pub excess_length_strategy: ExcessLength,
    /// Fewest tokens of a document; default 2.
    pub min_sample_len: usize,
    /// Keep only one of documents with the same tokens; default false.
    pub deduplicate: bool,
    /// Leave out records that cannot be used, and list them; default false: they end the run.
    pub skip_bad_records: bool,
    /// What the second row of a batch is that a sample becomes; default: there is none.
    pub second_row: Option<SecondRow>,
    /// Prepare only the first file at once, the next ones when asked, and no more than this many rows; default: all rows of all
    /// files.
    pub stream_rows: Option<u64>,
}

impl DataConfig {
    /// A section of `datasets` in rows of `sequence_len`, everything else at its default.
    pub fn new(datasets: Vec<DatasetConfig>, sequence_len: usize) -> Self {
        Self {
            datasets,
            test_datasets: Vec::new(),
            sequence_len,
            sample_packing: false,
            sample_packing_sequentially: false,
            shuffle: true,
            seed: 42,
            val_set_size: 0.0,
            train_on_inputs: false,
            excess_length_strategy: ExcessLength::Drop,
            min_sample_len: 2,
            deduplicate: false,
            skip_bad_records: false,
            second_row: None,
            stream_rows: None,
        }
    }

    /// Documents of a sample, which are kept or left out together.
    pub(crate) fn documents_per_row(&self) -> usize {
        if self.second_row == Some(SecondRow::Rejected) { 2 } else { 1 }
    }

    /// Checks what can be checked without opening a file.
    ///
    /// # Errors
    /// When a value is out of range or two keys do not go together.
    pub fn validate(&self) -> Result<(), DataConfigError> {
        if self.datasets.is_empty() {
            return Err(DataConfigError::NoDatasets);
        }
        if self.sequence_len < 2 {
            return Err(DataConfigError::SequenceTooShort(self.sequence_len));
        }
        if self.sequence_len > SEQUENCE_LEN_MAX {
            return Err(DataConfigError::SequenceTooLong { found: self.sequence_len, max: SEQUENCE_LEN_MAX });
        }
        let size = self.val_set_size;
        if !(size.is_finite() && size >= 0.0 && (size < 1.0 || size.fract() == 0.0)) {
            return Err(DataConfigError::ValSetSize(size));
        }
        self.datasets.iter().chain(&self.test_datasets).try_for_each(DatasetConfig::validate)
    }
}

/// A data set to train on.
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetConfig {
    /// The file, a folder with files of one or several splits, or a pattern of files.
    pub path: PathBuf,
    /// The files that match, if the path is a pattern.
    pub files: Vec<PathBuf>,
    /// The type of its records.
    pub kind: DatasetType,
    /// Its format; default: JSON for `.json` and `.jsonl`, otherwise plain text.
    pub ds_type: Option<FileFormat>,
    /// Which records; default: all of the split train, or test for evaluation.
    pub split: Option<Split>,
    /// Which part of a folder whose README.md describes several.
    pub name: Option<String>,
    /// Files of a folder, instead of those of its splits.
    pub data_files: Vec<String>,
    /// Read only one of several random parts of the records: their number, and the index of that one.
    pub shards: Option<(u64, u64)>,
    /// How often its rows are visited in an epoch; default 1.
    pub weight: f64,
    /// `completion`: the field with the text; default `text`.
    pub field: Option<String>,
    /// The texts and fields of [`DatasetType::Custom`].
    pub prompt: Option<CustomPrompt>,
    /// The columns of pairs, for [`DatasetType::Preference`].
    pub(crate) pair: Option<PairFields>,
    /// How conversations are read and trained on.
    pub conversation: ConversationConfig,
    /// What renders them.
    pub template: TemplateConfig,
    /// Whether messages and tokens have weights of the loss; default false.
    pub loss_weights: bool,
}

/// The columns of a pair, by the data set's names, and how they are read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PairFields {
    /// The form.
    pub(crate) form: PairForm,
    /// Texts and fields of [`PairForm::Formats`].
    pub(crate) formats: PairSection,
    /// The prompt; a record may lack it.
    pub(crate) prompt: String,
    /// The preferred answer.
    pub(crate) chosen: String,
    /// The other answer.
    pub(crate) rejected: String,
    /// Whether answers are labelled one by one.
    pub(crate) labelled: bool,
    /// Whether BOS and EOS are added to conversations too, as TRL's trainers without a reference and Axolotl's types do.
    pub(crate) bounds_conversations: bool,
    /// Whether the answers of a pair begin at the same token, as TRL's trainers with a reference see to.
    pub(crate) aligned: bool,
    /// Prompts count as much as answers: the whole text has a score.
    pub(crate) whole: bool,
}

impl Default for PairFields {
    fn default() -> Self {
        let [prompt, chosen, rejected] = ["prompt", "chosen", "rejected"].map(str::to_owned);
        let (form, formats, labelled) = (PairForm::Columns, PairSection::default(), false);
        let (bounds_conversations, aligned, whole) = (false, true, false);
        Self { form, formats, prompt, chosen, rejected, labelled, bounds_conversations, aligned, whole }
    }
}

/// Which template renders conversations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateConfig {
    /// The choice; default: the tokenizer's template.
    pub choice: ChatTemplateChoice,
    /// The template's text or the path of a file with it, for [`ChatTemplateChoice::Jinja`].
    pub jinja: Option<String>,
    /// Values of further variables of the template.
    pub variables: Map<String, Value>,
}

impl Default for TemplateConfig {
    fn default() -> Self {
        Self { choice: ChatTemplateChoice::TokenizerDefault, jinja: None, variables: Map::new() }
    }
}

impl DatasetConfig {
    /// The data set at `path` with everything else at its default.
    pub fn new(path: impl Into<PathBuf>, kind: DatasetType) -> Self {
        Self {
            path: path.into(),
            files: Vec::new(),
            kind,
            ds_type: None,
            split: None,
            name: None,
            data_files: Vec::new(),
            shards: None,
            weight: 1.0,
            field: None,
            prompt: None,
            pair: None,
            conversation: ConversationConfig::default(),
            template: TemplateConfig::default(),
            loss_weights: false,
        }
    }

    fn validate(&self) -> Result<(), DataConfigError> {
        let set = self.conversation.differing_key();
        let keys = [
            ("field", self.field.is_some(), self.kind == DatasetType::Completion, DatasetType::Completion),
            (set.unwrap_or_default(), set.is_some(), self.kind.has_messages(), DatasetType::ChatTemplate),
        ];
        match keys.into_iter().find(|&(_, set, fits, _)| set && !fits) {
            Some((key, _, _, fits)) => {
                Err(DataConfigError::KeyOfOtherType { path: self.path.clone(), key, found: self.kind, fits })
            }
            None => Ok(()),
        }
    }
}

/// How the conversations of a data set are read, and what of them is trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConversationConfig {
    /// The field with the list of turns; default `messages`.
    pub field_messages: String,
    /// The field with descriptions of functions that the model may call; default `tools`.
    pub field_tools: String,
    /// The data set's names of fields of a message, by the names that templates use: `role`, `content`, …
    pub properties: BTreeMap<String, String>,
    /// The data set's names of roles, by the names that templates use; human is user and gpt is assistant unless named here.
    pub roles: BTreeMap<String, Vec<String>>,
    /// The roles whose turns are trained on; default `assistant`, and of a prompt with a completion all of the completion.
    pub roles_to_train: TrainedRoles,
    /// The field of a message that says whether it is trained on.
    pub field_training: Option<String>,
    /// The field of a message that lists which of its characters are trained on.
    pub field_training_detail: Option<String>,
    /// Split the thought of an answer from its content; default false.
    pub split_thinking: bool,
    /// The templates' name of the field with the thought; default `reasoning_content`.
    pub thinking_key: String,
    /// Leave out a system message at the beginning; default false.
    pub drop_system_message: bool,
    /// When the marks that end a turn are trained on.
    pub markers: MarkerConfig,
}

impl Default for ConversationConfig {
    fn default() -> Self {
        Self {
            field_messages: "messages".to_owned(),
            field_tools: "tools".to_owned(),
            properties: BTreeMap::new(),
            roles: BTreeMap::new(),
            roles_to_train: TrainedRoles::Answers,
            field_training: None,
            field_training_detail: None,
            split_thinking: false,
            thinking_key: "reasoning_content".to_owned(),
            drop_system_message: false,
            markers: MarkerConfig::default(),
        }
    }
}

impl ConversationConfig {
    /// The names of ShareGPT's files.
    pub fn sharegpt() -> Self {
        let names = [("role", "from"), ("content", "value")];
        Self {
            field_messages: "conversations".to_owned(),
            properties: names.map(|(property, field)| (property.to_owned(), field.to_owned())).into(),
            ..Self::default()
        }
    }

    /// The role that templates know, for a role of the data set.
    pub(crate) fn role<'a>(&'a self, found: &'a str) -> &'a str {
        let named = self.roles.iter().find(|(_, names)| names.iter().any(|name| name == found));
        match (named, found) {
            (Some((role, _)), _) => role,
            (None, "human") => "user",
            (None, "gpt") => "assistant",
            (None, other) => other,
        }
    }

    /// Whether messages have the names of ShareGPT's files.
    pub(crate) fn has_names_of_sharegpt(&self) -> bool {
        self.properties.get("role").is_some_and(|field| field == "from")
    }

    /// A key of the file that is not at its default.
    fn differing_key(&self) -> Option<&'static str> {
        let default = Self::default();
        let keys = [
            ("field_messages", self.field_messages != default.field_messages),
            ("field_tools", self.field_tools != default.field_tools),
            ("message_property_mappings", self.properties != default.properties),
            ("roles", self.roles != default.roles),
            ("roles_to_train", self.roles_to_train != default.roles_to_train),
            ("message_field_training", self.field_training.is_some()),
            ("message_field_training_detail", self.field_training_detail.is_some()),
            ("split_thinking", self.split_thinking),
            ("template_thinking_key", self.thinking_key != default.thinking_key),
            ("drop_system_message", self.drop_system_message),
            ("train_on_eos", self.markers.train_on_eos != default.markers.train_on_eos),
            ("train_on_eot", self.markers.train_on_eot.is_some()),
        ];
        keys.into_iter().find_map(|(key, differs)| differs.then_some(key))
    }
}

/// The marks that end a turn, and when they are trained on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MarkerConfig {
    /// The text of the tokenizer's EOS.
    pub eos: Option<String>,
    /// Other tokens that end a turn.
    pub eot: Vec<String>,
    /// When EOS is trained on.
    pub train_on_eos: EndTraining,
    /// When the other tokens are trained on; as `train_on_eos` if not set.
    pub train_on_eot: Option<EndTraining>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_of_another_type_is_refused() {
        let field = Some("x".to_owned());
        let dataset = DatasetConfig { field, ..DatasetConfig::new("a", DatasetType::Alpaca) };
        let config = DataConfig::new(vec![dataset], 64);

        assert!(matches!(config.validate(), Err(DataConfigError::KeyOfOtherType { key: "field", .. })));
    }

    #[test]
    fn validation_size_is_a_fraction_or_a_whole_count() {
        let with = |size| DataConfig {
            val_set_size: size,
            ..DataConfig::new(vec![DatasetConfig::new("a", DatasetType::Alpaca)], 8)
        };

        for size in [0.0, 0.25, 1.0, 40.0] {
            assert_eq!(with(size).validate(), Ok(()), "{size}");
        }
        for size in [-0.1, 1.5, f64::INFINITY] {
            assert_eq!(with(size).validate(), Err(DataConfigError::ValSetSize(size)));
        }
    }
}
