//! Training data: the files, how an entry becomes a sample, and how samples become sequences.

use std::path::PathBuf;

use serde_yaml_ng::{Mapping, Value};

use super::error::ConfigError;
use super::section::{Section, choices, section};
use super::setting::{AT_LEAST_ONE, Setting, TOKENS};
use super::source::At;

section! {
    /// The data and its division into sequences.
    pub struct DataSection {
        /// Files to train on: a list of entries with at least `path` and `type`.
        pub datasets: Vec<DatasetConfig> = Vec::new();
        /// Folder for tokenized data, kept between runs; if not set, a folder in `output_dir`.
        pub dataset_prepared_path: Option<PathBuf> = None;
        /// Tokens per sequence.
        pub sequence_len: usize = 512 => TOKENS;
        /// Pack several short samples into one sequence; attention does not cross the boundaries of samples.
        pub sample_packing: bool = false;
        /// Handling of samples longer than `sequence_len`: error, drop or truncate.
        pub excess_length_strategy: ExcessLength = ExcessLength::Error;
        /// Chat template of `chat_template` entries: tokenizer_default (ChatML if the tokenizer has none), chatml or
        /// jinja.
        pub chat_template: ChatTemplateChoice = ChatTemplateChoice::TokenizerDefault;
        /// Text of the template, for `chat_template: jinja`.
        pub chat_template_jinja: Option<String> = None;
        /// Also train on the prompts of instruction and chat samples, not only on the answers.
        pub train_on_inputs: bool = false;
        /// Samples held out for evaluation: a share of all samples if below 1, else a number of samples; 0 disables
        /// evaluation.
        pub val_set_size: ValSetSize = ValSetSize::Nothing;
        /// Steps between evaluations on the held-out samples; if not set, one evaluation at the end.
        pub eval_steps: Option<usize> = None => AT_LEAST_ONE;
        /// Visit the samples in a new random order in every epoch, derived from `seed`.
        pub shuffle: bool = true;
    }
}

section! {
    /// One entry of `datasets`.
    pub struct DatasetConfig {
        /// File (.jsonl, .json, .csv, .tsv, .parquet, .arrow or plain text; all but Parquet also as .gz or .zst), or a
        /// pattern such as `src/**/*.rs` for all matching files, in order of name.
        pub path: PathBuf = PathBuf::new();
        /// How an entry of the file becomes a sample.
        pub r#type: DatasetType = DatasetType::Completion;
        /// Format of the file; if not set, that of its extension, which is text for unknown ones.
        pub ds_type: Option<FileFormat> = None;
        /// Name of the split to read from a folder; if not set, train.
        pub split: Option<String> = None;
        /// Name of the text field of `completion` entries; if not set, text.
        pub field: Option<String> = None;
        /// Name of the field of `chat_template` entries that lists the messages; if not set, messages.
        pub field_messages: Option<String> = None;
        /// Name of the role field of a message.
        pub message_field_role: String = "role".into();
        /// Name of the text field of a message.
        pub message_field_content: String = "content".into();
        /// Roles whose messages are trained on when `train_on_inputs` is off; if empty, only the assistant's.
        pub roles_to_train: Vec<String> = Vec::new();
    }
}

choices! {
    /// How an entry of a dataset becomes a sample.
    pub enum DatasetType {
        /// Plain text, trained on from its first token to its last.
        Completion = "completion";
        /// Instruction, optional input, and answer.
        Alpaca = "alpaca";
        /// A list of messages, rendered by the chat template.
        ChatTemplate = "chat_template";
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

choices! {
    /// Which template renders conversations.
    pub enum ChatTemplateChoice {
        /// The tokenizer's template, or ChatML if the tokenizer has none.
        TokenizerDefault = "tokenizer_default" | "tokenizer_default_fallback_chatml";
        /// ChatML, regardless of the tokenizer.
        Chatml = "chatml";
        /// The template in `chat_template_jinja`.
        Jinja = "jinja";
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
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if self.datasets.is_empty() {
            let why = "list at least one entry with `path` and `type`";
            return Err(ConfigError::Missing { key: "datasets".into(), why: why.into() });
        }
        if self.eval_steps.is_some() && self.val_set_size == ValSetSize::Nothing {
            return Err(ConfigError::Conflict {
                first: "eval_steps".into(),
                second: "val_set_size".into(),
                why: "there is nothing to evaluate on; set `val_set_size` above 0 or remove `eval_steps`".into(),
            });
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

impl Setting for Vec<DatasetConfig> {
    fn fits() -> String {
        "a list of entries with `path` and `type`".into()
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let entries = value.as_sequence().ok_or_else(|| at.mismatch(value, Self::fits()))?;
        entries.iter().enumerate().map(|(i, entry)| read_entry(entry, &at.item(i))).collect()
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
    at.refuse_unknown(keys, &known)?;
    for needed in ["path", "type"] {
        if keys.get(needed).is_none_or(Value::is_null) {
            let why = "every entry of `datasets` needs a `path` and a `type`";
            return Err(ConfigError::Missing { key: format!("{at}.{needed}"), why: why.into() });
        }
    }
    DatasetConfig::read_section(keys, at)
}
