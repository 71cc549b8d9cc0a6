//! How an entry of a dataset becomes a sample.

use serde_yaml_ng::{Mapping, Value};

use super::at::At;
use super::described::describe;
use super::error::{ConfigError, Errors};
use super::section::{Section, section};
use super::setting::Setting;
use crate::config::pair_form::{PairForm, PairSection};
use crate::config::prompts::{CustomPrompt, NamedPrompt, names_in};

/// The value of `type` in an entry of `datasets`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatasetType {
    /// Plain text, trained on from its first token to its last.
    Completion,
    /// Instruction, optional input, and answer.
    Alpaca,
    /// Instruction and answer in another format.
    Prompt(NamedPrompt),
    /// Instruction and answer in the format of `prompt`.
    Custom,
    /// A list of messages, rendered by the chat template.
    ChatTemplate,
    /// As chat_template, with the field names of ShareGPT: conversations, from and value.
    Sharegpt,
    /// Segments of text, each trained on or not, without a template.
    InputOutput,
    /// Token ids, perhaps with labels and an attention mask.
    Tokenized,
    /// A preferred and a rejected answer, for `rl`.
    Preference(PairForm),
}

const WORDS: [(&str, DatasetType); 7] = [
    ("completion", DatasetType::Completion),
    ("alpaca", DatasetType::Alpaca),
    ("chat_template", DatasetType::ChatTemplate),
    ("sharegpt", DatasetType::Sharegpt),
    ("input_output", DatasetType::InputOutput),
    ("tokenized", DatasetType::Tokenized),
    ("custom", DatasetType::Custom),
];

impl DatasetType {
    /// The word for this type in a configuration.
    pub fn word(self) -> String {
        match self {
            Self::Prompt(named) => named.word(),
            Self::Preference(form) => form.word(),
            other => {
                WORDS.iter().find(|(_, kind)| *kind == other).map(|(word, _)| (*word).to_owned()).unwrap_or_default()
            }
        }
    }

    /// Whether an entry is a conversation.
    pub(crate) fn is_conversation(self) -> bool {
        matches!(self, Self::ChatTemplate | Self::Sharegpt)
    }

    /// Whether an entry is a pair of answers.
    pub(crate) fn is_pair(self) -> bool {
        matches!(self, Self::Preference(_))
    }

    /// Whether an entry may have lists of messages.
    pub(crate) fn has_messages(self) -> bool {
        self.is_conversation() || self.is_pair()
    }
}

impl Setting for DatasetType {
    fn fits() -> String {
        let words = WORDS.iter().map(|(word, _)| *word).chain(NamedPrompt::names().filter(|name| *name != "alpaca"));
        let words: Vec<&str> = words.collect();
        format!(
            "one of {}; formats of instructions may have :instruct, :chat, :chatml or :phi behind them; with `rl` or `reward_model` one of {}",
            words.join(", "),
            PairForm::words().join(", ")
        )
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let word = value.as_str().unwrap_or_default();
        let known = WORDS.iter().find(|(known, _)| *known == word).map(|(_, kind)| *kind);
        let pair = || PairForm::of(word).map(Self::Preference);
        let is_for_pairs = ["rl", "reward_model"].iter().any(|key| at.file_sets(key));
        match known.or_else(|| NamedPrompt::of(word).map(Self::Prompt)).or_else(pair) {
            Some(kind) => Ok(kind),
            None if is_for_pairs => Err(at.mismatch(
                value,
                format!(
                    "one of {}; for other columns, name them in a section under `type`, with field_prompt, field_chosen and field_rejected",
                    PairForm::words().join(", ")
                ),
            )),
            None => Err(match NamedPrompt::absent(word) {
                Some(instead) => {
                    ConfigError::Refused { key: at.to_string().into(), found: describe(value), instead: instead.into() }
                }
                None => at.mismatch(value, Self::fits()),
            }),
        }
    }

    fn write(&self) -> Value {
        self.word().into()
    }
}

/// An entry in words: its `type` may be Axolotl's section of texts and fields, or empty for rows of tokens; an empty list of
/// `roles_to_train` asks for none, unlike an empty value.
pub(super) fn with_type(entry: &Mapping) -> Mapping {
    let mut entry = entry.clone();
    match entry.get("type") {
        Some(Value::Mapping(pair)) if PairSection::is_of(pair) => {
            let pair = Value::Mapping(pair.clone());
            entry.insert("pair".into(), pair);
            entry.insert("type".into(), PairForm::Formats.word().into());
        }
        Some(Value::Mapping(prompt)) => {
            let prompt = Value::Mapping(prompt.clone());
            entry.insert("prompt".into(), prompt);
            entry.insert("type".into(), "custom".into());
        }
        Some(Value::Null) => {
            entry.insert("type".into(), "tokenized".into());
        }
        _ => {}
    }
    if entry.get("roles_to_train").and_then(Value::as_sequence).is_some_and(Vec::is_empty) {
        entry.insert("roles_to_train".into(), "none".into());
    }
    entry
}

section! {
    /// Texts and fields of instruction data.
    pub struct PromptSection {
        /// System text of records that have none.
        pub system_prompt: Option<String> = None;
        /// Text around it, with {system}.
        pub system_format: String = "{system}".into();
        /// Name of the field with a system text.
        pub field_system: String = "system".into();
        /// Name of the field with the instruction.
        pub field_instruction: String = "instruction".into();
        /// Name of the field with the input, which a record may not have.
        pub field_input: String = "input".into();
        /// Name of the field with the answer.
        pub field_output: String = "output".into();
        /// Text before the answer, with {instruction} and {input}.
        pub format: Option<String> = None;
        /// Text before the answer of records without an input, with {instruction}; if not set, `format` if that has no {input}.
        pub no_input_format: Option<String> = None;
    }
}

const FORMAT: &str = "{instruction} {input} ";
const NO_INPUT_FORMAT: &str = "{instruction} ";

impl PromptSection {
    /// The prompt for the reader of records.
    pub(crate) fn prompt(&self) -> CustomPrompt {
        let without_input = self.format.clone().filter(|format| !names_in(format).contains(&"input"));
        let no_input_format = self.no_input_format.clone().or(without_input);
        CustomPrompt {
            system_prompt: self.system_prompt.clone().unwrap_or_default(),
            system_format: self.system_format.clone(),
            field_system: self.field_system.clone(),
            field_instruction: self.field_instruction.clone(),
            field_input: self.field_input.clone(),
            field_output: self.field_output.clone(),
            format: self.format.clone().unwrap_or_else(|| FORMAT.into()),
            no_input_format: no_input_format.unwrap_or_else(|| NO_INPUT_FORMAT.into()),
        }
    }

    /// Checks the names in braces.
    fn check(&self, at: &At<'_>) -> Result<(), ConfigError> {
        let texts: [(&str, Option<&String>, &[&str]); 3] = [
            ("system_format", Some(&self.system_format), &["system"]),
            ("format", self.format.as_ref(), &["instruction", "input"]),
            ("no_input_format", self.no_input_format.as_ref(), &["instruction"]),
        ];
        let mut errors = Errors::default();
        for (key, text, names) in texts {
            let Some(text) = text else { continue };
            if names_in(text).iter().any(|name| !names.contains(name)) {
                let fits = format!("a text whose only names in braces are {{{}}}", names.join("} and {"));
                errors.keep::<()>(Err(at.key(key).mismatch(&text.as_str().into(), fits)));
            }
        }
        errors.end(())
    }
}

impl Setting for PromptSection {
    fn fits() -> String {
        "a section with keys such as `field_instruction` and `format`".into()
    }

    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        let keys = value.as_mapping().ok_or_else(|| at.mismatch(value, Self::fits()))?;
        let known: Vec<&str> = PromptSection::keys().iter().map(|doc| doc.key).collect();
        let mut errors = Errors::default();
        errors.keep(at.refuse_unknown(keys, &known));
        let read = errors.keep(PromptSection::read_section(keys, at)).unwrap_or_default();
        errors.keep(read.check(at));
        errors.end(read)
    }

    fn write(&self) -> Value {
        let mut keys = Mapping::new();
        self.write_section(&mut keys);
        Value::Mapping(keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::JobConfig;

    fn of(entry: &str) -> Result<JobConfig, ConfigError> {
        let text = format!("base_model: m\nmax_steps: 1\ndatasets:\n  - path: a.jsonl\n    {entry}\n");
        JobConfig::from_yaml_str(&text, &[])
    }

    #[test]
    fn every_type_is_written_as_it_was_read() {
        let words = WORDS.iter().map(|(word, _)| *word).chain(NamedPrompt::names());
        for word in words.chain(["alpaca:chat", "oasst:phi", "preference", "llama3.ultra", "chat_template.default"]) {
            let entry = if word == "custom" {
                "type: custom\n    prompt: {format: \"{instruction}\"}".to_owned()
            } else {
                format!("type: {word}{}", if PairForm::of(word).is_some() { "\nrl: orpo" } else { "" })
            };
            assert_eq!(of(&entry).unwrap().data.datasets[0].r#type.word(), word);
        }
    }

    #[test]
    fn section_under_type_is_a_prompt_of_its_own() {
        let job = of("type:\n      field_instruction: q\n      format: \"[INST] {instruction} [/INST]\"").unwrap();

        let dataset = &job.data.datasets[0];
        assert_eq!(dataset.r#type, DatasetType::Custom);
        let prompt = dataset.prompt.as_ref().unwrap().prompt();
        assert_eq!((&prompt.no_input_format[..], &prompt.field_instruction[..]), ("[INST] {instruction} [/INST]", "q"));
        assert_eq!(JobConfig::from_yaml_str(&job.to_yaml(), &[]).unwrap().data, job.data);
    }

    #[test]
    fn empty_type_means_rows_of_tokens() {
        assert_eq!(of("type:").unwrap().data.datasets[0].r#type, DatasetType::Tokenized);
        assert!(of("ds_type: json").unwrap_err().to_string().contains("datasets[0].type"));
    }

    #[test]
    fn format_that_is_not_here_is_refused_with_a_way_out() {
        for (entry, named) in [
            ("type: reflection", "a section under `type`"),
            ("type: chat_template.argilla", "set `rl: dpo`"),
            ("type: alpaca\n    field_chosen: a", "only pairs have it"),
            ("type: {prompt_format: \"{question}\"}", "{prompt} and {system}"),
            ("type: alpca", "must be one of completion, alpaca"),
            ("type: alpaca:vicuna", "must be one of"),
            ("type: {format: \"{question}\"}", "{instruction} and {input}"),
            ("type: custom", "datasets[0].prompt"),
        ] {
            let error = of(entry).unwrap_err().to_string();
            assert!(error.contains(named), "{entry}: {error}");
        }
    }
}
