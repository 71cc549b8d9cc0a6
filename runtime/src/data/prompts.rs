//! The text before the answer, and the answer, of a record of instruction data.

use std::borrow::Cow;

use serde_json::Value;

use super::record_error::{RecordError, field_of, not_text};
use crate::config::prompts::{Prompt, PromptSystem, filled};

impl Prompt {
    /// The text before the answer, and the answer; `None` if the answer is null. `record` has the instruction, `instance` its
    /// input and answer; they are often the same.
    pub(super) fn texts(&self, record: &Value, instance: &Value) -> Result<Option<(String, String)>, RecordError> {
        // A record of another shape is an error even if its answer is null.
        let instruction = filled(&self.instruction, |name| text_of(record, name))?;
        let Some(answer) = self.answer(instance)? else { return Ok(None) };
        let input = match &self.input {
            Some(name) => optional_text(instance, name)?,
            None => "",
        };
        let system = match &self.system {
            PromptSystem::None => "",
            PromptSystem::Text { with_input, .. } if !input.is_empty() => with_input,
            PromptSystem::Text { without_input, .. } => without_input,
            PromptSystem::Field { name, default } => match optional_text(record, name)? {
                "" => default,
                system => system,
            },
        };
        let value = |name: &str| {
            Ok::<_, RecordError>(Cow::Borrowed(match name {
                "instruction" => instruction.as_str(),
                "input" => input,
                "system" => system,
                _ => "",
            }))
        };
        let mut text = if system.is_empty() { String::new() } else { filled(&self.system_format, value)? };
        text += &filled(if input.is_empty() { &self.without_input } else { &self.with_input }, value)?;
        Ok(Some((text, answer)))
    }

    fn answer(&self, instance: &Value) -> Result<Option<String>, RecordError> {
        let mut is_null = false;
        let answer = filled(&self.answer, |name| match field_of(instance, name)? {
            Value::Null => {
                is_null = true;
                Ok("".into())
            }
            _ => text_of(instance, name),
        })?;
        Ok((!is_null).then_some(answer))
    }
}

fn text_of<'a>(record: &'a Value, name: &str) -> Result<Cow<'a, str>, RecordError> {
    let value = field_of(record, name)?;
    value.as_str().map(Cow::Borrowed).ok_or_else(|| not_text(name, value))
}

/// A field that may be absent, or null.
fn optional_text<'a>(record: &'a Value, name: &str) -> Result<&'a str, RecordError> {
    match record.get(name) {
        None | Some(Value::Null) => Ok(""),
        Some(value) => value.as_str().ok_or_else(|| not_text(name, value)),
    }
}

#[cfg(test)]
#[path = "prompts_tests.rs"]
mod tests;
