//! The data and tokens of files with the arguments of Hugging Face's trainer.

use std::path::Path;

use serde_yaml_ng::{Mapping, Value};

use super::convert::{Converted, at};
use super::{ReadFile, shown};
use crate::config::named_templates::NamedTemplate;
use crate::config::yaml_1_1::{truth, whole};

/// The parts of a text with commas, or the items of a list.
pub(super) fn names(value: &Value) -> Vec<String> {
    match value {
        Value::Sequence(items) => items.iter().map(shown).collect(),
        text => shown(text).split(',').map(|name| name.trim().to_owned()).collect(),
    }
}

/// The data sets that the file names.
pub(super) fn datasets(tool: &str, file: &Mapping, read: &ReadFile<'_>, to: &mut Converted) {
    if tool == "LLaMA-Factory" {
        for (key, ours) in [("dataset", "datasets"), ("eval_dataset", "test_datasets")] {
            let Some(value) = at(file, key) else { continue };
            let entries: Vec<Value> = names(value).iter().map(|name| of_info(name, file, read, to)).collect();
            to.set_from(key, ours, entries);
        }
        return;
    }
    match at(file, "datasets") {
        Some(Value::Sequence(mixture)) => {
            let entries: Vec<Value> = mixture.iter().map(|entry| of_mixture(entry, file, to)).collect();
            to.set_from("datasets", "datasets", entries);
        }
        Some(_) => to.leave_out("datasets", "it must be a list of entries with `path`"),
        None => {
            let Some(name) = at(file, "dataset_name") else { return };
            let entry = |split: Option<&Value>| {
                let mut entry = Mapping::from_iter([("path".into(), name.clone())]);
                let given = [("name", at(file, "dataset_config")), ("split", split)];
                entry.extend(given.into_iter().filter_map(|(key, value)| Some((key.into(), value?.clone()))));
                record(file, &mut entry);
                Value::Mapping(entry)
            };
            to.set_from("dataset_name", "datasets", vec![entry(at(file, "dataset_train_split"))]);
            if let Some(split) = at(file, "dataset_test_split").filter(|_| to.keys.contains_key("eval_steps")) {
                to.set_from("dataset_test_split", "test_datasets", vec![entry(Some(split))]);
            }
        }
    }
}

/// How records become samples: the file says it by the name of the text field only.
fn record(file: &Mapping, entry: &mut Mapping) {
    match at(file, "dataset_text_field") {
        Some(field) if at(file, "assistant_only_loss").and_then(truth) != Some(true) => {
            entry.insert("type".into(), "completion".into());
            if field != "text" {
                entry.insert("field".into(), field.clone());
            }
        }
        _ => drop(entry.insert("type".into(), "chat_template".into())),
    }
}

/// An entry of TRL's list of data sets.
fn of_mixture(entry: &Value, file: &Mapping, to: &mut Converted) -> Value {
    let mut ours = Mapping::new();
    for (key, value) in entry.as_mapping().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        match shown(key).as_str() {
            "path" | "name" | "split" | "data_files" => drop(ours.insert(key.clone(), value.clone())),
            "fraction" => drop(ours.insert("weight".into(), value.clone())),
            "columns" => {}
            other => to.leave_out(&format!("datasets.{other}"), "an entry has no such key"),
        }
    }
    record(file, &mut ours);
    Value::Mapping(ours)
}

/// The entry for a data set of LLaMA-Factory, which describes them all in `dataset_info.json`.
fn of_info(name: &str, file: &Mapping, read: &ReadFile<'_>, to: &mut Converted) -> Value {
    let dir = at(file, "dataset_dir").map_or("data".into(), shown);
    let info = Path::new(&dir).join("dataset_info.json");
    let known = read(&info).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
    let entry = known.as_ref().and_then(|known| known.get(name)).and_then(Value::as_mapping);
    let mut ours = Mapping::new();
    let Some(entry) = entry else {
        to.notes.push(format!(
            "`dataset`: {} does not describe {name}; set the `path` and the `type` of its entry in the result",
            info.display()
        ));
        ours.insert("path".into(), name.into());
        ours.insert("type".into(), "alpaca".into());
        return limited(ours, file);
    };
    let text = |key: &str| at(entry, key).map(shown);
    let path = text("file_name").map(|file| Path::new(&dir).join(file).to_string_lossy().into_owned());
    ours.insert("path".into(), path.or_else(|| text("hf_hub_url")).unwrap_or_else(|| name.to_owned()).into());
    ours.extend(text("split").map(|split| ("split".into(), split.into())));
    ours.extend(text("subset").map(|subset| ("name".into(), subset.into())));
    if text("ranking").as_deref() == Some("true") {
        to.leave_out("dataset", format!("{name} has pairs of answers, and there is no preference training"));
    }
    match text("formatting").as_deref().unwrap_or("alpaca") {
        "sharegpt" => conversation(entry, &mut ours),
        _ if at(file, "stage").is_some_and(|stage| stage == "pt") => {
            ours.insert("type".into(), "completion".into());
            ours.extend(text("columns.prompt").map(|field| ("field".into(), field.into())));
        }
        _ => {
            if let Some(template) = at(file, "template").map(shown) {
                to.notes.push(format!(
                    "`template`: the instructions of {name} get Alpaca's prompt here instead of the turns of {template}; for those \
                     turns, store the records as messages"
                ));
            }
            instruction(entry, &mut ours);
        }
    }
    limited(ours, file)
}

fn conversation(entry: &Mapping, ours: &mut Mapping) {
    let text = |key: &str, default: &str| at(entry, key).map_or(default.into(), shown);
    ours.insert("type".into(), "chat_template".into());
    ours.insert("field_messages".into(), text("columns.messages", "conversations").into());
    let names = [("role", text("tags.role_tag", "from")), ("content", text("tags.content_tag", "value"))];
    let names: Mapping = names.into_iter().map(|(ours, theirs)| (ours.into(), theirs.into())).collect();
    ours.insert("message_property_mappings".into(), Value::Mapping(names));
    let roles = [
        ("user", text("tags.user_tag", "human")),
        ("assistant", text("tags.assistant_tag", "gpt")),
        ("system", text("tags.system_tag", "system")),
    ];
    let roles: Mapping =
        roles.into_iter().map(|(ours, theirs)| (ours.into(), vec![Value::from(theirs)].into())).collect();
    ours.insert("roles".into(), Value::Mapping(roles));
}

fn instruction(entry: &Mapping, ours: &mut Mapping) {
    let fields = [
        ("field_instruction", "columns.prompt", "instruction"),
        ("field_input", "columns.query", "input"),
        ("field_output", "columns.response", "output"),
    ];
    let other: Mapping = fields
        .iter()
        .filter_map(|(ours, theirs, default)| {
            let name = at(entry, theirs).map(shown).filter(|name| name != default)?;
            Some(((*ours).into(), name.into()))
        })
        .collect();
    let kind = if other.is_empty() { "alpaca".into() } else { Value::Mapping(other) };
    ours.insert("type".into(), kind);
}

/// Only the first records, if the file limits them.
fn limited(mut entry: Mapping, file: &Mapping) -> Value {
    if let Some(n) = at(file, "max_samples").and_then(whole) {
        let split = at(&entry, "split").map_or("train".into(), shown);
        entry.insert("split".into(), format!("{split}[:{n}]").into());
    }
    Value::Mapping(entry)
}

/// LLaMA-Factory's name of a chat template.
pub(super) fn template(value: &Value, _: &Mapping, to: &mut Converted) {
    let name = shown(value);
    let ours = match name.as_str() {
        "qwen" => "qwen_25",
        "qwen3_nothink" => "qwen3",
        "gemma2" => "gemma",
        "phi" => "phi_3",
        "phi4" => "phi_4",
        other => other,
    };
    match NamedTemplate::of(ours) {
        Some(_) => to.set("chat_template", ours),
        None => to.notes.push(format!(
            "`template`: there is no {name} here; the tokenizer's own chat template is used unless you set `chat_template`"
        )),
    }
}

/// The path of a template, or of a directory with a tokenizer that has one.
pub(super) fn chat_template(value: &Value, _: &Mapping, to: &mut Converted) {
    if !shown(value).ends_with(".jinja") {
        return to.leave_out("chat_template_path", "name a file with the template, *.jinja");
    }
    to.set("chat_template", "jinja");
    to.set("chat_template_jinja", value.clone());
}

pub(super) fn eos_token(value: &Value, _: &Mapping, to: &mut Converted) {
    to.set("special_tokens", Value::Mapping(Mapping::from_iter([("eos_token".into(), value.clone())])));
}

pub(super) fn tokens(value: &Value, file: &Mapping, to: &mut Converted) {
    let special = at(file, "add_special_tokens").map(names).unwrap_or_default();
    to.set("tokens", [names(value), special].concat());
}

pub(super) fn special_tokens(value: &Value, file: &Mapping, to: &mut Converted) {
    let plain = at(file, "add_tokens").map(names).unwrap_or_default();
    to.set("tokens", [plain, names(value)].concat());
}

pub(super) fn mix_strategy(value: &Value, _: &Mapping, to: &mut Converted) {
    if value != "concat" {
        to.leave_out("mix_strategy", "set `weight` of the entries of `datasets` in the result");
    }
}
