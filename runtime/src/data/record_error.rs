//! How a record can be unusable.

use crate::data::chat_template::ChatTemplateError;
use crate::data::records::LeftOut;
use crate::data::tokenizer_error::TokenizerError;
use crate::data::{exact_json, prompt_completion};
use serde_json::Value;
use thiserror::Error;

/// Why a record cannot be used; the caller adds file and line.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RecordError {
    /// The record is a list, a number, …
    #[error("a record must be a JSON object with named fields, found {found}")]
    NotAnObject { found: &'static str },
    /// A field is missing.
    #[error("field {wanted:?} is missing; the record has {}{way_out}", listed(present))]
    MissingField { wanted: String, present: Vec<String>, way_out: &'static str },
    /// A field has another type.
    #[error("field {field:?} must be {wanted}, found {found}")]
    WrongType { field: String, wanted: &'static str, found: &'static str },
    /// A conversation in a type of data sets for texts.
    #[error("field {field:?} is a list of messages, not text; set `type: chat_template`{}", key_of_messages(field))]
    Messages { field: String },
    /// A conversation in a data set of pairs, and nothing that renders it.
    #[error("field {field:?} has messages, but the tokenizer has no chat template; set `chat_template`")]
    NoTemplate { field: String },
    /// Whether the model answers in such a turn cannot be told.
    #[error(
        "a message has the role {role:?}, and whether it is trained on is not known: say whose role it is with `roles`, as in \
         `roles: {{assistant: [{role}]}}`, or keep it as it is and untrained with `roles: {{{role}: [{role}]}}`"
    )]
    UnknownRole { role: String },
    /// A turn with calls of functions that cannot be read.
    #[error(
        "a message of the role {role:?} must be a call as JSON, an object with `name` and `arguments`, or a list of such objects"
    )]
    NotCalls { role: String },
    /// An item of a list has another type.
    #[error("field {field:?} must be {wanted}, found {found} in it")]
    WrongItem { field: String, wanted: &'static str, found: String },
    /// The field is there, but no text.
    #[error("column {field:?} has the type {kind}, which is not read; store it as text (string)")]
    ColumnType { field: String, kind: String },
    /// A part of a message is an image, a sound, …
    #[error("a message has a content part of type {kind:?}, but only parts with a `text` can be trained on")]
    NotText { kind: String },
    /// What a conversation is about is beside it.
    #[error(
        "field {field:?} has what only a model that sees or hears can be trained on, and the text would be trained on without it; to \
         train on the text alone, remove the field"
    )]
    Media { field: String },
    /// A message, or a part of one, that counts in part.
    #[error(
        "a message has the weight {weight}, and messages are trained on or not; set `loss_weights: true`, or its `weight` to 1 or 0"
    )]
    Weight { weight: String },
    /// A weight of the loss that is negative, not finite, too large, or no number.
    #[error("{what} is {found}; a weight of the loss must be a number from 0 to {most}")]
    NotAWeight { what: String, found: String, most: u32 },
    /// Weights that nothing reads.
    #[error("column \"loss_weights\" is read with `loss_weights: true` only; set it, or remove the column")]
    WeightsOff,
    /// How much better an answer is.
    #[error("field \"margin\" of a pair is not used by reward models here, while TRL subtracts it; remove the field")]
    Margin,
    /// The offsets of parts to train on refer to the content as it is in the data.
    #[error(
        "the content of message {number} is not in the text that the chat template makes of it, so its parts to train on cannot be located"
    )]
    PartsNotLocated { number: usize },
    /// Lists that describe the same tokens differ in length.
    #[error("{name} has {found} numbers, but input_ids has {wanted}")]
    Lengths { name: &'static str, found: usize, wanted: usize },
    /// Documents that are packed in a row have other lengths than the row.
    #[error("the documents of seq_lengths have {found} tokens together, but input_ids has {wanted}")]
    SumOfLengths { found: i64, wanted: usize },
    /// A position that the model would not give this token.
    #[error(
        "position_ids is {found} at position {position}; it must count up by one, and begin again at 0 with each document"
    )]
    PositionId { position: usize, found: i64 },
    /// Something of the loss, perhaps.
    #[error(
        "column {name:?} has a number for each token of input_ids and is not read; remove it, or say in `labels` or `completion_mask` which tokens are trained on"
    )]
    UnreadPerToken { name: String },
    /// Padding between tokens.
    #[error("attention_mask is 0 at position {position}, between tokens; only padding at the ends can be left out")]
    Hole { position: usize },
    /// No vocabulary has such a token.
    #[error("{id} at position {position} of input_ids is no token id")]
    TokenId { position: usize, id: i64 },
    /// A model is trained to predict the next token, no other one.
    #[error("label {label} at position {position} is neither -100 nor the token there, {id}")]
    OtherLabel { position: usize, label: i64, id: u32 },
    /// The tokenizer refuses a text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template refuses the conversation.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
}

impl RecordError {
    /// The type of the column, if the missing field is one that is not read.
    pub(super) fn with_type_of_column(self, left_out: &[LeftOut]) -> Self {
        match self {
            Self::MissingField { wanted, present, way_out } => {
                match left_out.iter().find(|column| column.name == wanted) {
                    Some(column) => Self::ColumnType { field: wanted, kind: column.kind.clone() },
                    None => Self::MissingField { wanted, present, way_out },
                }
            }
            other => other,
        }
    }
}

pub(super) fn field_of<'a>(record: &'a Value, name: &str) -> Result<&'a Value, RecordError> {
    let fields = record.as_object().ok_or(RecordError::NotAnObject { found: type_name(record) })?;
    fields.get(name).ok_or_else(|| {
        let (wanted, present) = (name.to_owned(), fields.keys().cloned().collect());
        RecordError::MissingField { wanted, present, way_out: way_out(record) }
    })
}

/// A field that should be text.
pub(super) fn not_text(field: &str, found: &Value) -> RecordError {
    match prompt_completion::are_messages(found) {
        true => RecordError::Messages { field: field.to_owned() },
        false => wrong_type(field, "text", found),
    }
}

pub(super) fn wrong_type(field: &str, wanted: &'static str, found: &Value) -> RecordError {
    RecordError::WrongType { field: field.to_owned(), wanted, found: type_name(found) }
}

pub(super) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) if exact_json::number(value).is_some() => "a number",
        Value::Object(_) => "an object",
    }
}

/// The setting for records of the forms that TRL calls preference, unpaired preference and prompt-completion.
pub(super) fn way_out(record: &Value) -> &'static str {
    let has = |names: [&str; 2]| names.iter().all(|name| record.get(name).is_some());
    if has(["chosen", "rejected"]) {
        return "; for pairs in chosen and rejected set `type: preference` and `rl: dpo`";
    }
    if has(["completion", "label"]) {
        return "; for answers that are labelled set `type: preference` and `rl: kto`";
    }
    match prompt_completion::FIELDS.map(|field| record.get(field)) {
        [Some(prompt), Some(completion)] if [prompt, completion].into_iter().any(prompt_completion::are_messages) => {
            "; for conversations in prompt and completion set `type: chat_template`"
        }
        [Some(_), Some(_)] => {
            "; for prompts and completions set `type: {field_instruction: prompt, field_output: completion, format: '{instruction}', no_input_format: '{instruction}'}`"
        }
        _ => "",
    }
}

/// The key for conversations in a field that has another name.
pub(super) fn key_of_messages(field: &str) -> String {
    match field == "messages" || prompt_completion::FIELDS.contains(&field) {
        true => String::new(),
        false => format!(" and `field_messages: {field}`"),
    }
}

pub(super) fn listed(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
