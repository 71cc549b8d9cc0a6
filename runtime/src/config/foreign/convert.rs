//! Converts files of other launchers and trainers by a table of rules, one for each key that the tool documents.
//!
//! A rule names a key by its path, `zero_optimization.stage`; `fp16.*` stands for all keys of a section that have no rule of their
//! own. What a file asks for and Phalanx cannot do, and every key without a rule, is reported.

use std::collections::BTreeMap;

use serde_yaml_ng::{Mapping, Value};

use super::{is_written, shown};
use crate::config::described::asks_for_nothing;
use crate::config::spelling::nearest;

/// What becomes of a key of another tool.
#[derive(Clone, Copy)]
pub(super) enum Then {
    /// Phalanx has the same key under this name.
    Key(&'static str),
    /// It sets keys of Phalanx; the whole file is given too.
    Do(fn(&Value, &Mapping, &mut Converted)),
    /// It is read together with another key.
    Part,
    /// It changes nothing that Phalanx computes or promises.
    NoEffect,
    /// Phalanx does not do this; why.
    LeftOut(&'static str),
    /// Phalanx only does what this value, the tool's default, asks for; why other values cannot be met.
    Only(&'static str, &'static str),
}

/// A key of another tool, and what becomes of it.
pub(super) type Rule = (&'static str, Then);

/// What a file of another tool says, in keys of Phalanx.
#[derive(Debug, Default)]
pub(crate) struct Converted {
    /// Keys of Phalanx.
    pub(crate) keys: Mapping,
    /// Keys of the tool that have no effect here.
    pub(crate) no_effect: Vec<String>,
    /// What could not be converted, and why.
    pub(crate) left_out: Vec<(String, String)>,
    /// Keys that the tool does not have, with their values, and the nearest key that it has.
    pub(crate) unknown: Vec<(String, Value, Option<&'static str>)>,
    /// What the user should know about the result, as sentences.
    pub(crate) notes: Vec<String>,
    /// The key of the tool from which a key of Phalanx follows, where one key does.
    pub(crate) origins: BTreeMap<String, String>,
}

impl Converted {
    pub(super) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.keys.insert(key.into(), value.into());
    }

    /// Sets a key that follows from `origin`.
    pub(super) fn set_from(&mut self, origin: &str, key: &str, value: impl Into<Value>) {
        self.set(key, value);
        self.origins.insert(key.to_owned(), origin.to_owned());
    }

    pub(super) fn leave_out(&mut self, key: &str, why: impl Into<String>) {
        self.left_out.push((key.to_owned(), why.into()));
    }

    /// Adds what a part of the file says; its keys are reported under `prefix`.
    pub(super) fn add(&mut self, prefix: &str, part: Converted) {
        let named = |key: String| if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
        self.keys.extend(part.keys);
        self.no_effect.extend(part.no_effect.into_iter().map(named));
        self.left_out.extend(part.left_out.into_iter().map(|(key, why)| (named(key), why)));
        self.unknown.extend(part.unknown.into_iter().map(|(key, value, hint)| (named(key), value, hint)));
        self.notes.extend(part.notes);
        self.origins.extend(part.origins.into_iter().map(|(key, origin)| (key, named(origin))));
    }
}

/// Applies the rules to every value of a file.
pub(super) fn convert(rules: &[Rule], file: &Mapping) -> Converted {
    let mut converted = Converted::default();
    for (path, value) in leaves(file) {
        if is_unset(&value) {
            continue;
        }
        match rule_for(rules, &path) {
            Some(Then::Key(key)) => converted.set_from(&path, key, value),
            Some(Then::Do(apply)) => {
                let before = converted.keys.clone();
                apply(&value, file, &mut converted);
                let is_new = |(key, value): &(&Value, &Value)| before.get(key) != Some(value);
                let new: Vec<String> = converted.keys.iter().filter(is_new).map(|(key, _)| shown(key)).collect();
                converted.origins.extend(new.into_iter().map(|key| (key, path.clone())));
            }
            Some(Then::Part) => {}
            Some(Then::Only(default, why)) => {
                if !is_written(&value, default) {
                    converted.leave_out(&path, why);
                }
            }
            Some(Then::NoEffect | Then::LeftOut(_)) if asks_for_nothing(&value) => {}
            Some(Then::NoEffect) => converted.no_effect.push(path),
            Some(Then::LeftOut(why)) => converted.leave_out(&path, why),
            // What a key asks for is not known without the key: false may switch off what is on by default.
            None => {
                let names: Vec<&'static str> = rules.iter().map(|(name, _)| *name).collect();
                let hint = nearest(&path, &names);
                converted.unknown.push((path, value, hint));
            }
        }
    }
    converted
}

/// The value at a dotted path; `None` if it is empty or `auto`.
pub(super) fn at<'a>(file: &'a Mapping, path: &str) -> Option<&'a Value> {
    let (section, key) = path.rsplit_once('.').unwrap_or(("", path));
    let mut keys = file;
    for name in section.split('.').filter(|name| !name.is_empty()) {
        keys = keys.get(name)?.as_mapping()?;
    }
    keys.get(key).filter(|value| !is_unset(value))
}

/// Whether a value leaves the choice to others.
fn is_unset(value: &Value) -> bool {
    value.is_null() || matches!(value.as_str(), Some("auto" | ""))
}

/// The rule of a path, else that of the innermost section around it.
fn rule_for(rules: &[Rule], path: &str) -> Option<Then> {
    let find = |wanted: &str| rules.iter().find(|(path, _)| *path == wanted).map(|(_, then)| *then);
    let of_all = |section: &str| {
        let of_key = find(section).filter(|then| !matches!(then, Then::Key(_) | Then::Do(_)));
        find(&format!("{section}.*")).or(of_key)
    };
    let mut sections = std::iter::successors(path.rsplit_once('.'), |(section, _)| section.rsplit_once('.'));
    find(path).or_else(|| sections.find_map(|(section, _)| of_all(section)))
}

/// Every value that is no section, with its path.
fn leaves(file: &Mapping) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for (key, value) in file {
        let key = shown(key);
        match value.as_mapping() {
            Some(section) => found.extend(leaves(section).into_iter().map(|(path, x)| (format!("{key}.{path}"), x))),
            None => found.push((key, value.clone())),
        }
    }
    found
}
