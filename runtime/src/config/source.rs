//! The text of a configuration as a tree of keys: parsing, overrides, other spellings, unknown keys, and the line of each
//! key.

use std::collections::{BTreeMap, BTreeSet};

use serde_yaml_ng::{Mapping, Value};

use super::described::{describe, is_empty};
use super::error::{ConfigError, Errors, ValueLocation};
use super::foreign::{self, Note, ReadFile};
use super::key_doc::KeyDoc;
use super::lines::{Segment, line_of, repeated_key};

/// Bounds the tree that the parser may build; no hand-written configuration comes near a megabyte.
pub(super) const TEXT_BYTES_MAX: usize = 1 << 20;

/// Most brackets that may be open at a time. The parser's time grows with the square of that number.
const OPEN_BRACKETS_MAX: usize = 256;

/// A parsed configuration whose top-level keys have their first spelling.
pub(crate) struct Source {
    text: String,
    pub(crate) keys: Mapping,
    /// First spelling → the spelling in the file, where they differ.
    pub(super) spelled: BTreeMap<&'static str, String>,
    /// Dotted paths that came from the command line.
    overridden: BTreeSet<String>,
    /// What became of keys of Axolotl.
    notes: Vec<Note>,
    /// Keys of Axolotl that ask for something that Phalanx does not do.
    pub(super) refused: Vec<ConfigError>,
}

impl Source {
    /// Parses the text, applies the overrides in order, and translates keys of Axolotl. The errors are those of keys with two
    /// values and of overrides.
    pub(super) fn new(
        text: &str,
        overrides: &[(String, String)],
        known: &[KeyDoc],
        read: &ReadFile<'_>,
    ) -> Result<(Self, Errors), ConfigError> {
        // The mark that some editors put before UTF-8 is no part of the text.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut source = Self {
            text: text.to_owned(),
            keys: parse(text)?,
            spelled: BTreeMap::new(),
            overridden: BTreeSet::new(),
            notes: Vec::new(),
            refused: Vec::new(),
        };
        let mut errors = Errors::default();
        source.use_first_spellings(known, &mut errors);
        for (key, value) in overrides {
            errors.keep(source.apply_override(key, value, known));
        }
        let translation = foreign::translate(&source.keys, read);
        (source.keys, source.notes, source.refused) = (translation.keys, translation.notes, translation.refused);
        Ok((source, errors))
    }

    /// What became of keys of Axolotl, as sentences: one for each translated key, and one for all keys without effect.
    pub(crate) fn notes(&self) -> Vec<String> {
        foreign::sentences(&self.notes, &|key| self.place_of(key))
    }

    fn use_first_spellings(&mut self, known: &[KeyDoc], errors: &mut Errors) {
        for doc in known {
            for alias in doc.aliases {
                let Some(value) = self.keys.remove(*alias).filter(|value| !is_empty(value)) else { continue };
                if self.keys.get(doc.key).is_some_and(|value| !is_empty(value)) {
                    let first = self.spelled.get(doc.key).cloned().unwrap_or_else(|| doc.key.to_owned());
                    let location = line_of(&self.text, &[Segment::Key((*alias).into())])
                        .map_or(ValueLocation::File, ValueLocation::Line);
                    errors.keep::<()>(Err(ConfigError::Duplicate { first, second: (*alias).into(), location }));
                    continue;
                }
                self.keys.insert(doc.key.into(), value);
                self.spelled.insert(doc.key, (*alias).into());
            }
        }
    }

    fn apply_override(&mut self, key: &str, value: &str, known: &[KeyDoc]) -> Result<(), ConfigError> {
        let written = key.trim_start_matches('-').replace('-', "_");
        let mut segments: Vec<&str> = written.split('.').collect();
        if let Some(doc) = known.iter().find(|doc| doc.aliases.contains(&segments[0])) {
            segments[0] = doc.key;
        }
        check_depth(value).map_err(|reason| ConfigError::Syntax { reason })?;
        // A value that is not YAML by itself, such as `@data`, is a string. An empty one is a variable that the shell does not have.
        let text = || Value::String(value.to_owned());
        let value = if value.is_empty() { text() } else { serde_yaml_ng::from_str(value).unwrap_or_else(|_| text()) };
        set(&mut self.keys, &segments, value).map_err(|why| ConfigError::UnknownKey {
            key: written.clone(),
            location: ValueLocation::CommandLine,
            hint: Some(why),
        })?;
        self.overridden.insert(segments.join("."));
        Ok(())
    }

    /// The place of a key in dotted notation, such as `datasets[0].type`, or of the section that lacks it.
    pub(crate) fn place_of(&self, key: &str) -> ValueLocation {
        self.location(&segments(key))
    }

    /// The place of the value at a path, or of the innermost section around it whose line is known.
    pub(super) fn location(&self, path: &[Segment]) -> ValueLocation {
        let dotted: Vec<String> = path.iter().map(Segment::to_string).collect();
        if (1..=dotted.len()).any(|n| self.overridden.contains(&dotted[..n].join("."))) {
            return ValueLocation::CommandLine;
        }
        let mut written = path.to_vec();
        if let Some(Segment::Key(first)) = written.first_mut()
            && let Some(spelling) = self.spelled.get(first.as_str())
        {
            first.clone_from(spelling);
        }
        let line = (1..=written.len()).rev().find_map(|n| line_of(&self.text, &written[..n]));
        line.map_or(ValueLocation::File, ValueLocation::Line)
    }
}

/// The place of the key at a path in the notation of messages.
pub(super) fn place_in(text: &str, key: &str) -> ValueLocation {
    line_of(text, &segments(key)).map_or(ValueLocation::File, ValueLocation::Line)
}

/// The steps of a path in the notation of messages: `datasets[0].type`.
fn segments(key: &str) -> Vec<Segment> {
    let of_name = |name: &str| {
        let (name, items) = name.split_once('[').unwrap_or((name, ""));
        let items: Vec<Segment> = items.split(['[', ']']).filter_map(|n| n.parse().ok()).map(Segment::Item).collect();
        std::iter::once(Segment::Key(name.to_owned())).chain(items).collect::<Vec<_>>()
    };
    key.split('.').flat_map(of_name).collect()
}

pub(super) fn parse(text: &str) -> Result<Mapping, ConfigError> {
    let syntax = |reason: String| ConfigError::Syntax { reason };
    if text.len() > TEXT_BYTES_MAX {
        return Err(syntax(format!("it has {} bytes, more than the {TEXT_BYTES_MAX} allowed", text.len())));
    }
    check_depth(text).map_err(syntax)?;
    if let Some((key, line)) = repeated_key(text) {
        return Err(ConfigError::Duplicate { first: key.clone(), second: key, location: ValueLocation::Line(line) });
    }
    let mut value: Value = serde_yaml_ng::from_str(text).map_err(|error| syntax(said(&error.to_string())))?;
    value.apply_merge().map_err(|error| syntax(error.to_string()))?;
    match value {
        Value::Mapping(keys) => Ok(keys),
        Value::Null => Ok(Mapping::new()),
        other => Err(syntax(format!("it is {}, but must be lines of `key: value`", describe(&other)))),
    }
}

/// An error of the parser in words for users: its numbers have 64 bits.
fn said(error: &str) -> String {
    let wide = |kind: &str| {
        let (place, rest) = error.split_once("invalid type: integer `")?;
        let (number, end) = rest.split_once(&format!("` as {kind}, expected any YAML value"))?;
        Some(format!("{place}the whole number {number} has more than 64 bits{end}"))
    };
    wide("u128").or_else(|| wide("i128")).unwrap_or_else(|| error.to_owned())
}

/// Rejects text with too many open brackets or lists within lists on a line. Brackets in strings and comments count too:
/// texts have few that stay open.
fn check_depth(text: &str) -> Result<(), String> {
    let mut depth = 0usize;
    for (number, line) in text.lines().enumerate() {
        let inline = line.trim_start().split("- ").take_while(|before| before.trim().is_empty()).count();
        for byte in line.bytes() {
            match byte {
                b'[' | b'{' => depth += 1,
                b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth.max(inline) > OPEN_BRACKETS_MAX {
                return Err(format!("line {} is more than {OPEN_BRACKETS_MAX} lists or sections deep", number + 1));
            }
        }
    }
    Ok(())
}

/// Sets the value at a dotted path. Absent sections are created, and lists grow by one item at a time.
fn set(keys: &mut Mapping, path: &[&str], value: Value) -> Result<(), String> {
    let (first, rest) = path.split_first().ok_or("the key is empty")?;
    if rest.is_empty() {
        keys.insert((*first).into(), value);
        return Ok(());
    }
    let child = keys.entry((*first).into()).or_insert(Value::Null);
    if child.is_null() {
        let list = rest[0] == "0";
        *child = if list { Value::Sequence(Vec::new()) } else { Value::Mapping(Mapping::new()) };
    }
    match child {
        Value::Mapping(below) => set(below, rest, value),
        Value::Sequence(items) => {
            let n_items = items.len();
            let missing = format!("`{first}` has {n_items} entries, counted from 0");
            let index = rest[0].parse::<usize>().ok().filter(|index| *index <= n_items).ok_or(missing)?;
            if index == n_items {
                items.push(Value::Mapping(Mapping::new()));
            }
            let item = &mut items[index];
            match (item, &rest[1..]) {
                (item, []) => *item = value,
                (Value::Mapping(below), rest) => set(below, rest, value)?,
                (other, _) => return Err(format!("`{first}.{}` is {}", rest[0], describe(other))),
            }
            Ok(())
        }
        other => Err(format!("`{first}` is {} and has no keys below it", describe(other))),
    }
}
