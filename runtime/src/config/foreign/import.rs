//! Reads the configuration of another tool for `phalanx init --from`.

use std::path::Path;

use serde_yaml_ng::{Mapping, Value};

use super::convert::Converted;
use super::{ReadFile, accelerate, deepspeed, sentences, shown, torchtitan, translate};
use crate::config::error::{ConfigError, ValueLocation};
use crate::config::source::parse;

/// A configuration of another tool, in keys of Phalanx.
#[derive(Debug)]
pub(crate) struct Imported {
    /// The tool.
    pub(crate) tool: &'static str,
    /// Keys of Phalanx.
    pub(crate) keys: Mapping,
    /// Whether the file describes a whole job, with model and data.
    pub(crate) is_whole: bool,
    /// What has no effect and what was left out, as sentences.
    pub(crate) notes: Vec<String>,
}

/// Reads a file of Accelerate, DeepSpeed, torchtitan or Axolotl, known by its ending and its keys.
///
/// # Errors
/// When the file cannot be read or parsed.
pub(crate) fn import(path: &Path, read: &ReadFile<'_>) -> Result<Imported, ConfigError> {
    let unreadable =
        |error: std::io::Error| ConfigError::Unreadable { path: path.to_owned(), reason: error.to_string() };
    let text = read(path).map_err(unreadable)?;
    let syntax = |reason: String| ConfigError::Syntax { reason };
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("toml") => {
            let file: Value = toml::from_str(&text).map_err(|error| syntax(error.message().to_owned()))?;
            Ok(part("torchtitan", torchtitan::converted(&mapping(file)?)))
        }
        Some("json") => {
            let file: Value = serde_json::from_str(&text).map_err(|error| syntax(error.to_string()))?;
            Ok(part("DeepSpeed", deepspeed::converted(&mapping(file)?)))
        }
        _ => {
            let file = parse(&text)?;
            if accelerate::is_accelerate(&file) {
                return Ok(part("Accelerate", accelerate::converted(&file, read)));
            }
            whole(&file, read)
        }
    }
}

/// The tool whose configuration a file is, if it cannot be a job of Phalanx or Axolotl.
pub(crate) fn tool_of(path: &Path, text: &str) -> Option<&'static str> {
    if path.extension().is_some_and(|ending| ending == "toml") {
        return Some("torchtitan");
    }
    let file = parse(text).ok()?;
    let has = |keys: &[&str]| keys.iter().any(|key| file.contains_key(*key));
    if has(&["base_model", "model", "datasets"]) {
        return None;
    }
    let is_deepspeed = has(&["zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"]);
    is_deepspeed.then_some("DeepSpeed").or_else(|| accelerate::is_accelerate(&file).then_some("Accelerate"))
}

fn mapping(value: Value) -> Result<Mapping, ConfigError> {
    match value {
        Value::Mapping(keys) => Ok(keys),
        other => Err(ConfigError::Syntax { reason: format!("it is {}, but must have keys", shown(&other)) }),
    }
}

/// What a launcher's file says of a job.
fn part(tool: &'static str, converted: Converted) -> Imported {
    let mut notes: Vec<String> =
        converted.left_out.iter().map(|(key, why)| format!("left out `{key}`: {why}")).collect();
    if !converted.no_effect.is_empty() {
        notes.push(format!("without effect here: {}", converted.no_effect.join(", ")));
    }
    Imported { tool, keys: converted.keys, is_whole: false, notes }
}

/// A job of Axolotl. What is refused is left out, and reported.
fn whole(file: &Mapping, read: &ReadFile<'_>) -> Result<Imported, ConfigError> {
    let translation = translate(file, read);
    let left_out = translation.refused.iter().map(|refused| format!("left out {refused}"));
    let notes = left_out.chain(sentences(&translation.notes, &|_| ValueLocation::File)).collect();
    let set = |(key, value): &(Value, Value)| key.is_string() && !value.is_null();
    let keys = translation.keys.into_iter().filter(set).collect();
    Ok(Imported { tool: "Axolotl", keys, is_whole: true, notes })
}
