//! Keys of Axolotl that Phalanx does not read under the same name and with the same meaning.
//!
//! [`table::TABLE`] has one verdict for each of them: it has no effect here, it is said with another key, or it is refused.
//! [`translate`] applies the verdicts before the sections are read, so no section knows another tool's words. A value that asks
//! for nothing (empty, false, 0) is accepted whatever the verdict.

mod accelerate;
mod axolotl;
mod convert;
mod dataset_info;
mod deepspeed;
mod entries;
mod fsdp;
mod hugging_face;
mod hugging_face_data;
mod hugging_face_defaults;
mod hugging_face_preference;
#[cfg(test)]
mod hugging_face_preference_tests;
#[cfg(test)]
mod hugging_face_tests;
pub(crate) mod import;
mod losses;
mod reasons;
mod table;
#[cfg(test)]
mod tests;
mod torchtitan;
mod translations;

use std::path::Path;

use serde_yaml_ng::{Mapping, Value};

use super::described::{asks_for_nothing, describe, is_empty};
use super::error::{ConfigError, KeyAt, ValueLocation};
use super::yaml_1_1::{number, resolved, truth};
use convert::Converted;
pub(crate) use hugging_face_preference::PairsAt;
use table::{TABLE, VALUES};

/// What becomes of a key.
#[derive(Clone, Copy)]
enum Verdict {
    /// It changes nothing that Phalanx computes or promises; the reason, as a main clause.
    NoEffect(&'static str),
    /// Phalanx does not do what it asks for; why, and what to do instead.
    Refused(&'static str),
    /// Phalanx only does what this value, Axolotl's default, asks for; why other values are refused, and what to do instead.
    Only(&'static str, &'static str),
    /// Phalanx says it with other keys.
    Translated(fn(&Value, &mut Draft<'_>) -> Outcome),
    /// The same for a key whose values are words; the word `no` asks for something.
    Word(fn(&str, &mut Draft<'_>) -> Outcome),
}

/// Keys with the same verdict.
struct Row {
    keys: &'static [&'static str],
    verdict: Verdict,
}

/// Words of another tool for the value of a key that Phalanx reads.
struct Words {
    key: &'static str,
    words: &'static [&'static str],
    /// The word of Phalanx for all of them.
    means: &'static str,
    /// What is different from what the word asks for, as a main clause.
    note: &'static str,
}

/// What a translation did with a value.
enum Outcome {
    /// What happens instead, as a main clause.
    Said(String),
    /// This value has no effect; the reason, as a main clause.
    NoEffect(&'static str),
    /// This value is refused; why, and what to do instead.
    Refused(String),
}

/// The keys of a file while they are translated.
struct Draft<'a> {
    keys: Mapping,
    /// Reads a file that a key names.
    read: &'a ReadFile<'a>,
}

/// Reads the text of a file that a configuration names; the error is a sentence.
pub(crate) type ReadFile<'a> = dyn Fn(&Path) -> std::io::Result<String> + 'a;

impl Draft<'_> {
    /// The value that the file gives a key.
    fn given(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !is_empty(value))
    }

    /// Gives the keys that a part of the file stands for their values, unless the file has its own. The number format is one
    /// choice of several keys.
    fn defaults(&mut self, converted: Converted) -> Outcome {
        let unknown = converted.unknown.iter().map(|(key, value, hint)| (key, unknown(value, *hint)));
        let left_out = converted.left_out.iter().map(|(key, why)| (key, why.clone()));
        if let Some((key, why)) = left_out.chain(unknown).next() {
            return Outcome::Refused(format!("`{key}` cannot be met: {why}"));
        }
        let has_format = ["bf16", "fp16"].iter().any(|key| self.given(key).is_some());
        // Other words and switches than the file's own say how something is computed, not what.
        let differs = |(key, value): &(&Value, &Value)| {
            let key = key.as_str().unwrap_or_default();
            let own = self.given(key).and_then(number).filter(|_| key != "zero_stage");
            own.zip(number(value)).is_some_and(|(own, value)| own != value)
        };
        if let Some((key, value)) = converted.keys.iter().find(|pair| differs(pair)) {
            let own = self.given(key.as_str().unwrap_or_default()).map_or(String::new(), shown);
            let (key, value) = (shown(key), shown(value));
            return Outcome::Refused(format!(
                "it means `{key}: {value}`, and the file has `{key}: {own}`; keep one of them"
            ));
        }
        let is_new = |draft: &Self, key: &Value| {
            let key = key.as_str().unwrap_or_default();
            draft.given(key).is_none() && !(has_format && FORMAT_KEYS.contains(&key))
        };
        let new: Vec<(Value, Value)> = converted.keys.into_iter().filter(|(key, _)| is_new(self, key)).collect();
        let said: Vec<String> = new.iter().map(|(key, value)| format!("`{}: {}`", shown(key), shown(value))).collect();
        self.keys.extend(new);
        let means = if said.is_empty() {
            "the other keys say it already".into()
        } else {
            format!("it means {} here", said.join(", "))
        };
        match converted.no_effect.as_slice() {
            [] => Outcome::Said(means),
            keys => Outcome::Said(format!("{means}; without effect: {}", keys.join(", "))),
        }
    }

    /// Gives a key a value, unless the file has one.
    fn default(&mut self, key: &str, value: impl Into<Value>) {
        if self.given(key).is_none() {
            self.keys.insert(key.into(), value.into());
        }
    }
}

/// Whether two values say the same; numbers and truth values may be written as texts.
fn is_equal(a: &Value, b: &Value) -> bool {
    let numbers = number(a).zip(number(b)).is_some_and(|(a, b)| a == b);
    a == b || numbers || truth(a).zip(truth(b)).is_some_and(|(a, b)| a == b)
}

/// Whether a value is what `text` writes in YAML.
fn is_written(value: &Value, text: &str) -> bool {
    serde_yaml_ng::from_str::<Value>(text).is_ok_and(|written| is_equal(&written, value))
}

/// Keys of the number format.
const FORMAT_KEYS: [&str; 7] =
    ["bf16", "fp8", "fp16", "loss_scale", "initial_loss_scale", "loss_scale_window", "min_loss_scale"];

/// What became of a key.
pub(crate) struct Note {
    key: String,
    fate: Fate,
}

enum Fate {
    Said(String),
    NoEffect(&'static str),
}

/// A configuration in which only keys of Phalanx are left, and unknown ones.
pub(crate) struct Translation {
    pub(crate) keys: Mapping,
    pub(crate) notes: Vec<Note>,
    pub(crate) refused: Vec<ConfigError>,
}

/// Replaces the keys and words of Axolotl by those of Phalanx. `read` reads DeepSpeed's configuration, which Axolotl keeps in a
/// file of its own.
pub(crate) fn translate(file: &Mapping, read: &ReadFile<'_>) -> Translation {
    let mut draft = Draft { keys: file.clone(), read };
    let (mut notes, mut refused) = (Vec::new(), Vec::new());
    for (name, value) in file {
        let Some(name) = name.as_str() else { continue };
        let outcome = match verdict_of(name) {
            Some(verdict) => {
                draft.keys.remove(name);
                match (verdict, value.as_str()) {
                    (Verdict::Word(translated), Some(word)) if !word.is_empty() => translated(word, &mut draft),
                    (Verdict::Only(default, _), _) if is_empty(value) || is_written(value, default) => continue,
                    // False switches off what is on by default.
                    (Verdict::Only(_, instead), _) => Outcome::Refused(instead.into()),
                    _ if asks_for_nothing(value) => continue,
                    (Verdict::NoEffect(why), _) => Outcome::NoEffect(why),
                    (Verdict::Refused(instead), _) => Outcome::Refused(instead.into()),
                    (Verdict::Translated(translated), _) => translated(&resolved(value), &mut draft),
                    (Verdict::Word(_), _) => Outcome::Refused("it must be a word".into()),
                }
            }
            None => match words_of(name, value) {
                Some(words) => {
                    draft.keys.insert(name.into(), words.means.into());
                    Outcome::Said(format!("{} means {} here: {}", shown(value), words.means, words.note))
                }
                None => continue,
            },
        };
        let key = name.to_owned();
        match outcome {
            Outcome::Said(text) => notes.push(Note { key, fate: Fate::Said(text) }),
            Outcome::NoEffect(why) => notes.push(Note { key, fate: Fate::NoEffect(why) }),
            Outcome::Refused(instead) => {
                refused.push(ConfigError::Refused { key: key.into(), found: describe(value), instead });
            }
        }
    }
    entries::translate(&mut draft.keys, &mut notes, &mut refused);
    losses::translate(&mut draft.keys, &mut notes, &mut refused);
    Translation { keys: draft.keys, notes, refused }
}

/// The notes as sentences: one for each translated key, and one for all keys without effect, by reason.
pub(crate) fn sentences(notes: &[Note], place_of: &dyn Fn(&str) -> ValueLocation) -> Vec<String> {
    let mut lines = Vec::new();
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for note in notes {
        let key = KeyAt { key: note.key.clone(), location: place_of(&note.key) };
        match &note.fate {
            Fate::Said(text) => lines.push(format!("{key}: {text}")),
            Fate::NoEffect(why) => match reasons.iter_mut().find(|(reason, _)| reason == why) {
                Some((_, keys)) => keys.push(note.key.clone()),
                None => reasons.push((why, vec![note.key.clone()])),
            },
        }
    }
    let reasons: Vec<String> = reasons.iter().map(|(why, keys)| format!("{} ({why})", keys.join(", "))).collect();
    if !reasons.is_empty() {
        lines.push(format!("keys without effect here: {}", reasons.join("; ")));
    }
    lines
}

/// The keys of the table, each with its verdict in words: for the key reference.
pub(crate) fn verdicts() -> Vec<(&'static [&'static str], &'static str, &'static str)> {
    let in_words = |row: &Row| match row.verdict {
        Verdict::NoEffect(why) => (row.keys, "no effect", why),
        Verdict::Refused(instead) | Verdict::Only(_, instead) => (row.keys, "refused", instead),
        Verdict::Translated(_) | Verdict::Word(_) => {
            (row.keys, "translated", "the run reports with which keys of Phalanx")
        }
    };
    TABLE.iter().map(in_words).collect()
}

/// The keys of entries of `datasets`, each with its verdict in words: for the key reference.
pub(crate) fn entry_verdicts() -> impl Iterator<Item = (&'static str, &'static str, String)> {
    entries::verdicts()
}

/// Words for values of keys that Phalanx reads: the key, its words, their meaning here, and the difference.
pub(crate) fn words() -> Vec<(&'static str, &'static [&'static str], &'static str, &'static str)> {
    VALUES.iter().map(|row| (row.key, row.words, row.means, row.note)).collect()
}

/// All keys of the table.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().flat_map(|row| row.keys.iter().copied())
}

fn verdict_of(key: &str) -> Option<Verdict> {
    TABLE.iter().find(|row| row.keys.contains(&key)).map(|row| row.verdict)
}

fn words_of(key: &str, value: &Value) -> Option<&'static Words> {
    let word = value.as_str()?;
    VALUES.iter().find(|row| row.key == key && row.words.contains(&word))
}

/// Why a key without a rule is reported.
fn unknown(value: &Value, nearest: Option<&str>) -> String {
    let hint = nearest.map(|key| format!("; did you mean `{key}`?")).unwrap_or_default();
    format!("Phalanx does not know this key, {}{hint}", shown(value))
}

/// The name here of a key of another tool, if it means the same.
pub(super) fn synonym(key: &str) -> Option<&'static str> {
    hugging_face::synonym(key)
}

/// A value in a message.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => describe(other),
    }
}
