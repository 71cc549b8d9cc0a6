//! The file that `phalanx init` writes: the keys to begin with, or all keys with their meaning and default.

use std::fmt::Write;
use std::path::Path;

use super::datasets::DatasetType;
use super::key_doc::KeyDoc;
use super::section::show;
use super::{elastic_reference, sections};
use serde_yaml_ng::{Mapping, Value};

/// Columns at which the explanations wrap.
const WRAP_COLUMNS: usize = 100;

/// The text of a starter file for a model directory and a text dataset.
///
/// Without `base_model`, the file describes a small new Llama over bytes, which trains without any other file.
pub fn starter_yaml(base_model: Option<&Path>, dataset: &Path, dataset_type: DatasetType) -> String {
    let start = Start { base_model, dataset, dataset_type, names_only: false };
    file("A training job.", &Mapping::new(), Some(&start), Extent::All)
}

/// The keys of the model and the data.
const NAMES: [&str; 4] = ["base_model", "model", "tokenizer", "datasets"];

/// How much a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The keys that are set.
    Set,
    /// All keys, explained; those that are not set are comments with their defaults.
    All,
}

/// What a user chooses first.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// The Hugging Face directory to start from; without it, a small new model.
    pub base_model: Option<&'a Path>,
    /// The data set.
    pub dataset: &'a Path,
    /// Its type.
    pub dataset_type: DatasetType,
    /// Only the model and the data are missing: the given keys say all else.
    pub names_only: bool,
}

/// The text of a file with the keys in `given`; with `start`, keys that are not given have values to start from.
pub fn file(title: &str, given: &Mapping, start: Option<&Start<'_>>, extent: Extent) -> String {
    let mut text = match extent {
        Extent::Set => format!("# {title} `phalanx init --reference` explains every key.\n"),
        Extent::All => format!("# {title} Commented keys show their defaults; remove the `#` to change one.\n"),
    };
    for (title, keys) in sections() {
        let set = |doc: &KeyDoc| {
            let is_wanted = |start: &&Start<'_>| !start.names_only || NAMES.contains(&doc.key);
            let suggested = start.filter(|_| !is_settled(doc.key, given)).filter(is_wanted);
            let suggested = suggested.and_then(|start| set_value(doc.key, start, given));
            given.get(doc.key).map(|value| as_given(doc.key, value)).or(suggested)
        };
        if extent == Extent::All || keys.iter().any(|doc| set(doc).is_some_and(|text| !text.starts_with('#'))) {
            let _ = write!(text, "\n# ---- {title} ----\n");
        }
        for doc in keys {
            match (set(&doc), extent) {
                (Some(value), Extent::Set) if !value.starts_with('#') => text.push_str(&value),
                (_, Extent::Set) => {}
                (value, Extent::All) => {
                    text.push('\n');
                    comment(&mut text, &format!("{} ({})", doc.doc, doc.fits));
                    text.push_str(&value.unwrap_or_else(|| format!("# {}: {}\n", doc.key, doc.default)));
                }
            }
        }
    }
    text
}

/// Whether a given key says what another key would.
fn is_settled(key: &str, given: &Mapping) -> bool {
    let has = |others: &[&str]| others.iter().any(|other| given.contains_key(*other));
    match key {
        "base_model" | "model" => has(&["base_model", "model"]),
        "tokenizer" => has(&["base_model"]),
        "num_epochs" => has(&["max_steps"]),
        "warmup_ratio" => has(&["warmup_steps"]),
        _ => false,
    }
}

/// The lines of a key with a given value.
fn as_given(key: &str, value: &Value) -> String {
    let keys = Mapping::from_iter([(key.into(), value.clone())]);
    match value {
        // The shortest form: the emitter would write 1e-8 as 0.00000001.
        Value::Number(_) => format!("{key}: {}\n", show(value)),
        _ => serde_yaml_ng::to_string(&keys).unwrap_or_default(),
    }
}

/// The lines of a key that the starter file sets, or `None` for a key that keeps its default.
fn set_value(key: &str, start: &Start<'_>, given: &Mapping) -> Option<String> {
    let (dataset, kind) = (start.dataset, start.dataset_type);
    Some(match (key, start.base_model) {
        ("base_model", Some(path)) => format!("base_model: {}\n", quoted(path)),
        ("model", None) => {
            let keys = "model_type: llama, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, num_attention_heads: 4";
            let lines: String = keys.split(", ").map(|line| format!("  {line}\n")).collect();
            format!("model:\n{lines}")
        }
        ("tokenizer", None) => "tokenizer: bytes\n".into(),
        ("datasets", _) => format!("datasets:\n  - path: {}\n    type: {}\n", quoted(dataset), kind.word()),
        ("sequence_len", _) => "sequence_len: 256\n".into(),
        // Each answer has a row of its own.
        ("sample_packing", _) if is_of_pairs(given) => return None,
        ("sample_packing", _) => "sample_packing: true\n".into(),
        ("micro_batch_size", _) => "micro_batch_size: 8\n".into(),
        ("num_epochs", _) => "num_epochs: 1\n".into(),
        ("learning_rate", base_model) => format!("learning_rate: {}\n", rate(base_model.is_some(), given)),
        ("warmup_ratio", _) => "warmup_ratio: 0.03\n".into(),
        ("output_dir", _) => "output_dir: ./outputs\n".into(),
        ("elastic", _) => elastic(),
        _ => return None,
    })
}

/// Whether answers are compared.
fn is_of_pairs(given: &Mapping) -> bool {
    given.contains_key("rl")
}

/// Adapters begin at zero and have few weights: they learn at rates that would ruin a whole model. Pairs take lower rates than texts,
/// because answers become unlikely faster than likely.
fn rate(has_base_model: bool, given: &Mapping) -> &'static str {
    match (has_base_model, is_of_pairs(given), given.contains_key("adapter")) {
        (false, ..) => "1e-3",
        (true, true, true) => "5e-6",
        (true, true, false) => "1e-6",
        (true, false, true) => "2e-4",
        (true, false, false) => "5e-5",
    }
}

/// The section as a comment, followed by the effect of each of its keys.
fn elastic() -> String {
    let keys = elastic_reference();
    let some: Vec<String> = keys[..3].iter().map(|doc| format!("{}: {}", doc.key, doc.default)).collect();
    let mut text = format!("# elastic: {{{}}}\n", some.join(", "));
    for doc in keys {
        comment(&mut text, &format!("- {}, default {}: {} ({})", doc.key, doc.default, doc.doc, doc.fits));
    }
    text
}

/// A path as a YAML string, quoted if necessary.
fn quoted(path: &Path) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
    let text = path.to_string_lossy();
    let needs_no_quotes =
        text.chars().all(plain) && text.starts_with(|c: char| c.is_ascii_alphabetic() || "/._".contains(c));
    if needs_no_quotes { text.into_owned() } else { format!("'{}'", text.replace('\'', "''")) }
}

/// Adds `sentence` as comment lines of at most [`WRAP_COLUMNS`] columns.
fn comment(text: &mut String, sentence: &str) {
    let mut column = 0;
    for word in sentence.split_whitespace() {
        if column == 0 || column + 1 + word.len() > WRAP_COLUMNS {
            text.push_str(if column == 0 { "#" } else { "\n#" });
            column = 1;
        }
        text.push(' ');
        text.push_str(word);
        column += 1 + word.len();
    }
    text.push('\n');
}
