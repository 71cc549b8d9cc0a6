//! The data and tokens of files with the arguments of Hugging Face's trainer.

use serde_yaml_ng::{Mapping, Value};

use super::convert::{Converted, at};
use super::hugging_face_preference::Method;
use super::{ReadFile, dataset_info, shown};
use crate::config::named_templates::NamedTemplate;
use crate::config::yaml_1_1::truth;

/// The parts of a text with commas, or the items of a list.
pub(super) fn names(value: &Value) -> Vec<String> {
    match value {
        Value::Sequence(items) => items.iter().map(shown).collect(),
        text => shown(text).split(',').map(|name| name.trim().to_owned()).collect(),
    }
}

/// The data sets that the file names.
pub(super) fn datasets(tool: &str, method: Option<Method>, file: &Mapping, read: &ReadFile<'_>, to: &mut Converted) {
    if tool == "LLaMA-Factory" {
        for (key, ours) in [("dataset", "datasets"), ("eval_dataset", "test_datasets")] {
            let Some(value) = at(file, key) else { continue };
            let entries: Vec<Value> =
                names(value).iter().map(|name| dataset_info::entry(name, key, method, file, read, to)).collect();
            to.set_from(key, ours, entries);
        }
        return;
    }
    let records = if method.is_some() { Records::Pairs } else { Records::of(file) };
    match at(file, "datasets") {
        Some(Value::Sequence(mixture)) => {
            let entries: Vec<Value> = mixture.iter().map(|entry| of_mixture(entry, records, file, to)).collect();
            to.set_from("datasets", "datasets", entries);
        }
        Some(_) => to.leave_out("datasets", "it must be a list of entries with `path`"),
        None => {
            let Some(name) = at(file, "dataset_name") else { return };
            let entry = |split: Option<&Value>| {
                let mut entry = Mapping::from_iter([("path".into(), name.clone())]);
                let given = [("name", at(file, "dataset_config")), ("split", split.filter(|split| *split != "train"))];
                entry.extend(given.into_iter().filter_map(|(key, value)| Some((key.into(), value?.clone()))));
                entry.extend(records.entry(file));
                Value::Mapping(entry)
            };
            to.set_from("dataset_name", "datasets", vec![entry(at(file, "dataset_train_split"))]);
            if ["eval_steps", "evals_per_epoch"].iter().any(|key| to.keys.contains_key(*key)) {
                let split = at(file, "dataset_test_split").cloned().unwrap_or("test".into());
                to.set_from("dataset_test_split", "test_datasets", vec![entry(Some(&split))]);
            }
        }
    }
    records.explain(file, to);
}

/// What the records of a data set of TRL are. TRL looks at the names of the columns; a file says it by keys for one of the kinds only.
#[derive(Clone, Copy, PartialEq)]
enum Records {
    Text,
    Conversation,
    PromptAndCompletion,
    Pairs,
}

impl Records {
    fn of(file: &Mapping) -> Self {
        let is_given = |key: &str| at(file, key).is_some();
        if trains_on_answers_only(file) {
            Self::Conversation
        } else if is_given("completion_only_loss") {
            Self::PromptAndCompletion
        } else if is_given("dataset_text_field") {
            Self::Text
        } else {
            Self::Conversation
        }
    }

    /// The keys of an entry that say how records become samples.
    fn entry(self, file: &Mapping) -> Mapping {
        let field = at(file, "dataset_text_field").map_or("text".into(), shown);
        let texts = [("field_instruction", "prompt"), ("field_output", "completion"), ("format", "{instruction}")];
        let texts: Mapping = texts.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        match self {
            Self::Text if field == "text" => Mapping::from_iter([("type".into(), "completion".into())]),
            Self::Text => Mapping::from_iter([("type".into(), "completion".into()), ("field".into(), field.into())]),
            Self::Conversation => {
                let all = (!trains_on_answers_only(file)).then(|| ("roles_to_train".into(), "all".into()));
                std::iter::once(("type".into(), "chat_template".into())).chain(all).collect()
            }
            Self::PromptAndCompletion => Mapping::from_iter([("type".into(), Value::Mapping(texts))]),
            Self::Pairs => Mapping::from_iter([("type".into(), "preference".into())]),
        }
    }

    /// Sets what is trained on, and notes what differs from TRL.
    fn explain(self, file: &Mapping, to: &mut Converted) {
        match self {
            Self::Text => to.notes.push(
                "texts of more than `sequence_len` tokens are cut into several samples here; TRL trains on the first \
                 `max_length` tokens only"
                    .into(),
            ),
            Self::Conversation => {
                if !trains_on_answers_only(file) {
                    to.notes.push(
                        "`assistant_only_loss` is false, TRL's default: the messages of all roles are trained on \
                         (`roles_to_train: all`), but not the headers of turns, on which TRL trains too; to train on answers \
                         only, remove the line"
                            .into(),
                    );
                }
                if !["assistant_only_loss", "chat_template_path"].iter().any(|key| at(file, key).is_some()) {
                    to.notes.push(
                        "the file does not say what the records are: they are taken for conversations with `messages`, or with \
                         `prompt` and `completion`, of which the completion is trained on; for texts, set `type: completion`, \
                         without `roles_to_train`, and for pairs of answers `type: preference` and `rl: dpo`"
                            .into(),
                    );
                }
            }
            Self::PromptAndCompletion => {
                if at(file, "completion_only_loss").and_then(truth) == Some(false) {
                    to.set("train_on_inputs", true);
                }
                to.notes
                    .push("`completion_only_loss`: the records are taken for texts `prompt` and `completion`".into());
            }
            Self::Pairs => {}
        }
    }
}

fn trains_on_answers_only(file: &Mapping) -> bool {
    at(file, "assistant_only_loss").and_then(truth) == Some(true)
}

/// An entry of TRL's list of data sets.
fn of_mixture(entry: &Value, records: Records, file: &Mapping, to: &mut Converted) -> Value {
    let mut ours = Mapping::new();
    for (key, value) in entry.as_mapping().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let why = match shown(key).as_str() {
            "path" | "name" | "split" | "data_files" => {
                ours.insert(key.clone(), value.clone());
                continue;
            }
            "columns" => {
                to.no_effect.push("datasets.columns (the type of an entry says which columns are read)".into());
                continue;
            }
            "fraction" => {
                "it is a share of the mixture; set `weight`, the visits of each sample in an epoch, in the result"
            }
            "data_dir" => "name the files of the folder in `data_files`",
            _ => "an entry has no such key",
        };
        to.leave_out(&format!("datasets.{}", shown(key)), why);
    }
    ours.extend(records.entry(file));
    Value::Mapping(ours)
}

/// LLaMA-Factory's name of a chat template.
pub(super) fn template(value: &Value, _: &Mapping, to: &mut Converted) {
    let name = shown(value);
    let ours = match name.as_str() {
        "qwen" => "qwen_25",
        // Turns between `<|im_start|>` and `<|im_end|>` and nothing else.
        "qwen3_nothink" => "chatml",
        "gemma2" => "gemma",
        "phi" => "phi_3",
        "phi4" => "phi_4",
        other => other,
    };
    let difference = match name.as_str() {
        "qwen3" => {
            "thoughts of earlier answers are left out here, as by the model's own template; LLaMA-Factory trains on them, and writes empty \
             thoughts into earlier answers that have none"
        }
        "alpaca" => {
            "a conversation without a system message gets none here; LLaMA-Factory begins it with \"Below is an instruction\" …"
        }
        _ => "",
    };
    if !difference.is_empty() {
        to.notes.push(format!("`template`: {difference}"));
    }
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

/// Rows of several samples; in LLaMA-Factory with attention between them unless `neat_packing` is set.
pub(super) fn packing(value: &Value, file: &Mapping, to: &mut Converted) {
    let is_neat = at(file, "neat_packing").and_then(truth) == Some(true);
    to.set("sample_packing", if is_neat { true.into() } else { value.clone() });
    if super::hugging_face::tool_of(file) == Some("LLaMA-Factory") && truth(value) == Some(true) && !is_neat {
        to.notes.push("`packing`: attention does not cross samples here, as with `neat_packing: true`".into());
    }
}

pub(super) fn packing_strategy(value: &Value, _: &Mapping, to: &mut Converted) {
    if value != "bfd" {
        to.notes.push(format!(
            "`packing_strategy`: {} cuts long samples into several; here only texts are, and of conversations the beginning is kept",
            shown(value)
        ));
    }
}

/// The variable of chat templates; templates think by default, as LLaMA-Factory does.
pub(super) fn enable_thinking(value: &Value, _: &Mapping, to: &mut Converted) {
    if truth(value) == Some(false) {
        let off = Mapping::from_iter([("enable_thinking".into(), false.into())]);
        to.set("chat_template_kwargs", Value::Mapping(off));
    }
}
