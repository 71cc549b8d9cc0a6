//! Where a setting was found.

use crate::config::described::{asks_for_nothing, describe};
use crate::config::error::{ConfigError, all};
use crate::config::lines::Segment;
use crate::config::source::Source;
use crate::config::spelling::hint_for;
use serde_yaml_ng::{Mapping, Value};

/// A position in a [`Source`]: a key, a section or an item of a list.
pub(crate) struct At<'a> {
    source: &'a Source,
    path: Vec<Segment>,
}

impl<'a> At<'a> {
    /// The whole file.
    pub(crate) fn root(source: &'a Source) -> At<'a> {
        At { source, path: Vec::new() }
    }

    /// The key with this name in this section.
    pub(crate) fn key(&self, key: &str) -> At<'a> {
        self.below(Segment::Key(key.to_owned()))
    }

    /// The item at this position of this list.
    pub(crate) fn item(&self, index: usize) -> At<'a> {
        self.below(Segment::Item(index))
    }

    fn below(&self, segment: Segment) -> At<'a> {
        let mut path = self.path.clone();
        path.push(segment);
        At { source: self.source, path }
    }

    /// Whether the file sets a key at its top.
    pub(crate) fn file_sets(&self, key: &str) -> bool {
        self.source.keys.get(key).is_some_and(|value| !asks_for_nothing(value))
    }

    /// The error for a value that is not accepted at this position.
    pub(crate) fn mismatch(&self, found: &Value, fits: String) -> ConfigError {
        let location = self.source.location(&self.path);
        ConfigError::Mismatch { key: self.to_string(), location, found: describe(found), fits }
    }

    /// Rejects all keys that are not in `known`, and suggests the nearest known key for each.
    pub(crate) fn refuse_unknown(&self, keys: &Mapping, known: &[&str]) -> Result<(), ConfigError> {
        all(keys.keys().map(|key| match key {
            Value::String(name) if known.contains(&name.as_str()) => Ok(()),
            Value::String(name) => {
                let at = self.key(name);
                let location = self.source.location(&at.path);
                let hint = hint_for(name, known, self.path.is_empty());
                Err(ConfigError::UnknownKey { key: at.to_string(), location, hint })
            }
            other => Err(self.mismatch(other, "a key that is a string".into())),
        }))
    }
}

impl std::fmt::Display for At<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (depth, segment) in self.path.iter().enumerate() {
            match segment {
                Segment::Key(key) if depth == 0 => f.write_str(self.source.spelled.get(key.as_str()).unwrap_or(key))?,
                Segment::Key(key) => write!(f, ".{key}")?,
                Segment::Item(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}
