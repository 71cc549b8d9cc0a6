//! Keys of Axolotl in an entry of `datasets`, and its other lists of data sets.

use serde_yaml_ng::{Mapping, Value};

use super::Outcome::{self, Refused, Said};
use super::{Draft, Fate, Note, shown};
use crate::config::described::{asks_for_nothing, describe};
use crate::config::error::ConfigError;
use crate::config::pair_form::PairForm;
use crate::config::yaml_1_1::whole;

/// The lists of data sets.
const LISTS: [&str; 2] = ["datasets", "test_datasets"];

/// What becomes of a key of an entry.
#[derive(Clone, Copy)]
enum Verdict {
    NoEffect(&'static str),
    Refused(&'static str),
    /// Phalanx has another word for it.
    Renamed(&'static str),
}

use Verdict::{NoEffect as Nothing, Refused as No, Renamed};

const ENTRY_KEYS: &[(&str, Verdict)] = &[
    ("trust_remote_code", Nothing("no code of data sets or models is run")),
    ("preprocess_shards", Nothing("data is tokenized in parallel, cached, and read in random order")),
    ("num_proc", Nothing("data is tokenized in parallel, cached, and read in random order")),
    ("text_column", Renamed("field")),
    ("conversation", No("use `chat_template`, and remove the line")),
    ("input_format", No("describe the text in a section under `type`, and remove the line")),
    ("input_transform", No("transform the data before, and remove the line")),
    ("field_human", No("describe the fields in a section under `type`, and remove the line")),
    ("field_model", No("describe the fields in a section under `type`, and remove the line")),
    ("temperature", No("there is no training with a teacher; remove the line")),
    ("logprobs_field", No("there is no training with a teacher; remove the line")),
];

/// Applies the verdicts to all entries.
pub(super) fn translate(keys: &mut Mapping, notes: &mut Vec<Note>, refused: &mut Vec<ConfigError>) {
    for list in LISTS {
        let Some(Value::Sequence(entries)) = keys.get_mut(list) else { continue };
        for (i, entry) in entries.iter_mut().enumerate() {
            let Value::Mapping(entry) = entry else { continue };
            for (name, verdict) in ENTRY_KEYS {
                let Some(value) = entry.remove(*name).filter(|value| !asks_for_nothing(value)) else { continue };
                let key = format!("{list}[{i}].{name}");
                let fate = match verdict {
                    Nothing(why) => Fate::NoEffect(why),
                    Renamed(other) => {
                        entry.entry((*other).into()).or_insert(value);
                        Fate::Said(format!("it means `{other}` here"))
                    }
                    No(instead) => {
                        let (key, found) = (key.into(), describe(&value));
                        refused.push(ConfigError::Refused { key, found, instead: (*instead).into() });
                        continue;
                    }
                };
                notes.push(Note { key, fate });
            }
        }
    }
}

/// The keys, each with its verdict in words: for the key reference.
pub(super) fn verdicts() -> impl Iterator<Item = (&'static str, &'static str, String)> {
    ENTRY_KEYS.iter().map(|(key, verdict)| match verdict {
        Nothing(why) => (*key, "no effect", (*why).to_owned()),
        No(instead) => (*key, "refused", (*instead).to_owned()),
        Renamed(other) => (*key, "translated", format!("it means `{other}`")),
    })
}

/// Divides the records of every data set into random parts; `dataset_shard_idx` names the one that is read.
pub(super) fn dataset_shard_num(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    in_each_entry("shards", value, draft)
}

/// The index of that part.
pub(super) fn dataset_shard_idx(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    in_each_entry("shards_idx", value, draft)
}

fn in_each_entry(key: &str, value: &Value, draft: &mut Draft<'_>) -> Outcome {
    if value.as_u64().is_none() {
        return Refused("it must be a whole number".into());
    }
    if let Some(Value::Sequence(entries)) = draft.keys.get_mut("datasets") {
        for entry in entries.iter_mut().filter_map(Value::as_mapping_mut) {
            entry.entry(key.into()).or_insert_with(|| value.clone());
        }
    }
    Said(format!("it means `{key}: {}` for each entry of `datasets` here", shown(value)))
}

/// Texts to train on from their first token to their last: the path of a data set, or entries.
pub(super) fn pretraining_dataset(value: &Value, draft: &mut Draft<'_>) -> Outcome {
    if draft.given("datasets").is_some() {
        return Refused("`datasets` says what to train on, too; keep one of them".into());
    }
    let is_of_pairs = |entry: &Value| entry.get("type").is_some_and(|kind| PairForm::of(&shown(kind)).is_some());
    if ["rl", "reward_model"].iter().any(|key| draft.given(key).is_some_and(|value| !asks_for_nothing(value)))
        || value.as_sequence().into_iter().flatten().chain([value]).any(is_of_pairs)
    {
        return Refused(
            "its data are texts; name pairs of answers in `datasets`, with `streaming: true` to read them while the job trains".into(),
        );
    }
    let entries = match value {
        Value::String(path) => Ok(vec![entry(&Mapping::from_iter([("path".into(), path.as_str().into())]))]),
        Value::Mapping(keys) => Ok(vec![entry(keys)]),
        Value::Sequence(items) => items.iter().map(|item| item.as_mapping().map(entry).ok_or(())).collect(),
        _ => Err(()),
    };
    let Ok(entries) = entries.and_then(|entries| entries.into_iter().collect::<Result<Vec<_>, ()>>()) else {
        return Refused("it must be a path or a list of entries with `path`, whose `skip` is a whole number".into());
    };
    draft.keys.insert("datasets".into(), Value::Sequence(entries));
    draft.default("sample_packing", true);
    let means = "it means `datasets` with `type: completion`";
    if draft.given("max_steps").is_none() {
        return Said(format!("{means} here, tokenized before the first step; set `max_steps` to stream it"));
    }
    draft.default("streaming", true);
    Said(format!("{means} and `streaming: true` here"))
}

/// An entry of `datasets` for an entry of `pretraining_dataset`.
fn entry(keys: &Mapping) -> Result<Value, ()> {
    let mut keys = keys.clone();
    let is_pretrain = keys.get("type").is_none_or(|kind| kind.is_null() || shown(kind) == "pretrain");
    if is_pretrain {
        keys.insert("type".into(), "completion".into());
    }
    if let Some(skip) = keys.remove("skip").filter(|skip| !asks_for_nothing(skip)) {
        let (skip, split) = (whole(&skip).ok_or(())?, keys.get("split").map_or("train".into(), shown));
        keys.insert("split".into(), format!("{split}[{skip}:]").into());
    }
    Ok(Value::Mapping(keys))
}
