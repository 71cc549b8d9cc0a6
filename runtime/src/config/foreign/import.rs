//! Reads the configuration of another tool for `phalanx init --from`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_yaml_ng::{Mapping, Value};

use super::convert::Converted;
use super::{PairsAt, ReadFile, accelerate, axolotl, deepspeed, hugging_face, shown, torchtitan, unknown};
use crate::config::described::describe;
use crate::config::error::{ConfigError, Errors, KeyAt, ValueLocation};
use crate::config::source::{parse, place_in};
use crate::config::yaml_1_1::resolved;
use crate::config::{self, Translated};

/// A configuration of another tool, in keys of Phalanx.
#[derive(Debug)]
pub(crate) struct Imported {
    /// The tool.
    pub(crate) tool: &'static str,
    /// Keys of Phalanx.
    pub(crate) keys: Mapping,
    /// The lines of the file from which they follow.
    lines: BTreeMap<String, usize>,
    /// Whether the file describes a whole job, with model and data.
    pub(crate) is_whole: bool,
    /// Whether it is of a trainer, whose defaults hold for all that it leaves out.
    pub(crate) is_of_trainer: bool,
    /// What has no effect and what was left out, as sentences.
    pub(crate) notes: Vec<String>,
}

impl Imported {
    /// An error of the converted job, with lines of the file that was converted.
    pub(crate) fn located(&self, error: ConfigError) -> ConfigError {
        let top = |key: &str| key.split(['.', '[']).next().unwrap_or_default().to_owned();
        let line = |key: &str| self.lines.get(&top(key)).map_or(ValueLocation::File, |line| ValueLocation::Line(*line));
        error.relocated(&line)
    }
}

/// Reads a file of another tool, known by its ending and its keys, or of Phalanx. `overrides` are keys that go before those of a whole
/// job in the file; `pairs_at` looks at the data sets that it names.
///
/// # Errors
/// When the file cannot be read or parsed; for a whole job also when it has unknown or invalid keys.
pub(crate) fn import(
    path: &Path,
    overrides: &[(String, String)],
    read: &ReadFile<'_>,
    pairs_at: &PairsAt<'_>,
) -> Result<Imported, ConfigError> {
    let unreadable =
        |error: std::io::Error| ConfigError::Unreadable { path: path.to_owned(), reason: error.to_string() };
    let text = read(path).map_err(unreadable)?;
    let syntax = |reason: String| ConfigError::Syntax { reason };
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("toml") => {
            let file: Value = toml::from_str(&text).map_err(|error| syntax(error.message().to_owned()))?;
            Ok(part("torchtitan", "", torchtitan::converted(&mapping(file)?)))
        }
        Some("json") => {
            let file: Value = serde_json::from_str(&text).map_err(|error| syntax(error.to_string()))?;
            let file = mapping(file)?;
            match hugging_face::tool_of(&file) {
                Some(tool) => of_trainer(tool, &file, &text, read, pairs_at),
                None => Ok(part("DeepSpeed", "", deepspeed::alone(&file))),
            }
        }
        _ => {
            let file = parse(&text)?;
            if let Some(tool) = hugging_face::tool_of(&file) {
                return of_trainer(tool, &file, &text, read, pairs_at);
            }
            if accelerate::is_accelerate(&file) {
                let file = mapping(resolved(&Value::Mapping(file)))?;
                return Ok(part("Accelerate", &text, accelerate::converted(&file, read)));
            }
            let Translated { keys, lines, notes } = config::translated(&text, overrides, read)?;
            let (mut keys, mut notes) = (keys, notes);
            axolotl::adapt(&mut keys, &mut notes);
            Ok(Imported { tool: "Axolotl", keys, lines, is_whole: true, is_of_trainer: true, notes })
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
    if has(&["base_model", "model"]) || (has(&["datasets"]) && !has(&["model_name_or_path"])) {
        return None;
    }
    if let Some(tool) = hugging_face::tool_of(&file) {
        return Some(tool);
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
fn part(tool: &'static str, text: &str, converted: Converted) -> Imported {
    let lines = lines(text, &converted);
    let left_out = converted.left_out.into_iter();
    let unknown = converted.unknown.into_iter().map(|(key, value, nearest)| (key, unknown(&value, nearest)));
    let mut notes: Vec<String> = left_out.chain(unknown).map(|(key, why)| format!("left out `{key}`: {why}")).collect();
    notes.extend(converted.notes);
    notes.extend(without_effect(&converted.no_effect));
    Imported { tool, keys: converted.keys, lines, is_whole: false, is_of_trainer: false, notes }
}

/// A job of Hugging Face's trainer. What is not done, and unknown keys, are errors: each changes what is trained.
fn of_trainer(
    tool: &'static str,
    file: &Mapping,
    text: &str,
    read: &ReadFile<'_>,
    pairs_at: &PairsAt<'_>,
) -> Result<Imported, ConfigError> {
    let resolved = mapping(resolved(&Value::Mapping(file.clone())))?;
    let converted = hugging_face::converted(tool, &resolved, read, pairs_at);
    let lines = lines(text, &converted);
    let mut errors = Errors::default();
    for (key, why) in converted.left_out {
        let found = super::convert::at(file, &key).map_or("not accepted".into(), describe);
        let key = KeyAt { location: place_in(text, &key), key };
        errors.keep::<()>(Err(ConfigError::Refused {
            key,
            found,
            instead: format!("{why}; change or remove the line"),
        }));
    }
    for (key, _, nearest) in converted.unknown {
        let hint = nearest.map(|key| format!("did you mean `{key}`?"));
        errors.keep::<()>(Err(ConfigError::UnknownKey { location: place_in(text, &key), key, hint }));
    }
    let mut notes = converted.notes;
    notes.extend(without_effect(&converted.no_effect));
    let has = |key: &str| converted.keys.contains_key(key);
    for (key, missing) in [("base_model", "model"), ("datasets", "data set")] {
        if !has(key) {
            notes.push(format!("the file names no {missing}; set that of the result"));
        }
    }
    let is_whole = has("base_model") && has("datasets");
    errors.end(Imported { tool, keys: converted.keys, lines, is_whole, is_of_trainer: true, notes })
}

fn without_effect(keys: &[String]) -> Option<String> {
    (!keys.is_empty()).then(|| format!("without effect here: {}", keys.join(", ")))
}

/// The lines of a text in YAML from which keys of Phalanx follow.
fn lines(text: &str, converted: &Converted) -> BTreeMap<String, usize> {
    let line = |(key, origin): (&String, &String)| match place_in(text, origin) {
        ValueLocation::Line(line) => Some((key.clone(), line)),
        _ => None,
    };
    converted.origins.iter().filter_map(line).collect()
}
