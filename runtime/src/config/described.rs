//! Values of a configuration in words, and whether they ask for anything.

use crate::config::yaml_1_1::{number, truth};
use serde_yaml_ng::Value;

/// Whether a value is written, but empty.
pub(crate) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Sequence(items) => items.is_empty(),
        Value::Mapping(keys) => keys.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::Tagged(_) => false,
    }
}

/// Whether a value of a key of another tool asks for nothing: empty, false, none or 0.
pub(crate) fn asks_for_nothing(value: &Value) -> bool {
    is_empty(value) || truth(value) == Some(false) || number(value) == Some(0.0) || value == "none"
}

/// Describes a value for a message: its kind, and the value if it is short.
pub(crate) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "empty".into(),
        Value::Bool(x) => format!("{x}"),
        Value::Number(x) => format!("{x}"),
        Value::String(text) if text.chars().count() <= 60 => format!("the string {text:?}"),
        Value::String(text) => format!("a string of {} characters", text.chars().count()),
        Value::Sequence(items) => format!("a list of {}", items.len()),
        Value::Mapping(keys) => format!("a section of {} keys", keys.len()),
        Value::Tagged(tagged) => format!("a value tagged {}", tagged.tag),
    }
}
