//! Errors of a job's configuration. The text of each is one sentence that names the key.

use phalanx_strategies::mesh::MeshError;
use std::fmt;
use std::path::PathBuf;

use crate::shell::quoted;
use thiserror::Error;

/// Where a value was written, for error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueLocation {
    /// On this line of the file, counted from 1.
    Line(usize),
    /// In an override on the command line.
    CommandLine,
    /// Somewhere in the file; the line is not known (flow style, anchors).
    File,
}

impl fmt::Display for ValueLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, " (line {line})"),
            Self::CommandLine => f.write_str(" (from the command line)"),
            Self::File => Ok(()),
        }
    }
}

/// A key in a message, with the place of its value where that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyAt {
    /// The key, with the path of its section.
    pub key: String,
    /// Where its value was written.
    pub location: ValueLocation,
}

impl From<String> for KeyAt {
    fn from(key: String) -> Self {
        Self { key, location: ValueLocation::File }
    }
}

impl From<&str> for KeyAt {
    fn from(key: &str) -> Self {
        key.to_owned().into()
    }
}

impl fmt::Display for KeyAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`{}", self.key, self.location)
    }
}

/// Why a configuration was rejected. Nothing has been started when this error is returned.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration {}: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        reason: String,
    },
    /// A file of a launcher or trainer that has no job of Phalanx in it.
    #[error("{} is a configuration of {tool}; convert it with `phalanx init --from {}`", path.display(), quoted(path))]
    OtherTool {
        /// The file.
        path: PathBuf,
        /// The tool.
        tool: &'static str,
    },
    /// The text is not YAML, or is not a mapping of keys to values.
    #[error("the configuration is not valid YAML: {reason}")]
    Syntax {
        /// The parser's message, with its line.
        reason: String,
    },
    /// An unknown key.
    #[error("unknown key `{key}`{location}{}", hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default())]
    UnknownKey {
        /// The key as written, with the path of its section.
        key: String,
        /// Where it was written.
        location: ValueLocation,
        /// The nearest known key, or why a well-known key of other tools does not exist here.
        hint: Option<String>,
    },
    /// A key of Axolotl that asks for something that Phalanx does not do.
    #[error("{key} is {found}: {instead}")]
    Refused {
        /// The key.
        key: KeyAt,
        /// The value, described.
        found: String,
        /// Why it is refused, and what to do instead.
        instead: String,
    },
    /// A key is given twice, perhaps under two spellings.
    #[error("`{first}` and `{second}`{location} set the same thing; keep one of them")]
    Duplicate {
        /// The spelling found first.
        first: String,
        /// The spelling found second.
        second: String,
        /// Where the second was written.
        location: ValueLocation,
    },
    /// A value of the wrong type or outside its range.
    #[error("`{key}`{location} is {found}, but must be {fits}")]
    Mismatch {
        /// The key, with the path of its section.
        key: String,
        /// Where the value was written.
        location: ValueLocation,
        /// The value, described.
        found: String,
        /// The values that are accepted.
        fits: String,
    },
    /// A required key is absent.
    #[error("{key} is missing: {why}")]
    Missing {
        /// The absent key, or the alternatives; its location is that of the section that lacks it.
        key: KeyAt,
        /// Why the key is required.
        why: String,
    },
    /// Two values that are valid on their own contradict each other.
    #[error("{first} conflicts with {second}: {why}")]
    Conflict {
        /// One key.
        first: KeyAt,
        /// The other.
        second: KeyAt,
        /// The violated relation, and how to fix it.
        why: String,
    },
    /// Two keys set the size of a step.
    #[error("`microbatches_per_step` and `gradient_accumulation_steps` both set the size of a step; remove one")]
    TwoBatchSizes,
    /// The microbatches of a step cannot be divided evenly.
    #[error(
        "{per_step} microbatches per step cannot be divided evenly among {data_ranks} data-parallel ranks; use {fits}, or set `reproducible: true`, which divides them unevenly"
    )]
    UnevenBatch {
        /// Microbatches of a step.
        per_step: usize,
        /// Ranks that share them.
        data_ranks: usize,
        /// A number of microbatches that can be divided evenly.
        fits: usize,
    },
    /// The mesh has more ranks than any cluster.
    #[error(
        "the mesh pp x dp_replicate x dp_shard x cp x tp = {axes} has too many ranks; their product must be {fits}"
    )]
    TooManyRanks {
        /// The sizes of the axes.
        axes: String,
        /// The number of ranks that a mesh can have.
        fits: &'static str,
    },
    /// A microbatch has more tokens than can be numbered.
    #[error(
        "`micro_batch_size` x `sequence_len` is {found} tokens, but must be at most {max}; use more microbatches instead"
    )]
    TooManyTokens {
        /// Tokens of a microbatch.
        found: u64,
        /// The most that a microbatch can have.
        max: u64,
    },
    /// A rank runs more microbatches in a step than can be compiled within seconds.
    #[error(
        "each rank runs {found} microbatches in a step, but must run at most {max}; use a larger `micro_batch_size` or more data-parallel ranks"
    )]
    TooManyMicrobatches {
        /// Microbatches of a rank.
        found: u64,
        /// The most that a rank can run.
        max: u64,
    },
    /// The mesh does not match the number of ranks.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// `dp_shard_size: auto` without a number of ranks.
    #[error("`dp_shard_size` is auto, but the number of ranks is unknown; set `nproc_per_node`")]
    AutoAxis,
    /// More than one error.
    #[error("the configuration has {} errors:{}", errors.len(), errors.iter().map(|e| format!("\n  {e}")).collect::<String>())]
    Several {
        /// Each error, in the order of the file's sections.
        errors: Vec<ConfigError>,
    },
}

impl ConfigError {
    /// Whether the number of ranks is missing, perhaps among other errors.
    pub(crate) fn lacks_ranks(&self) -> bool {
        match self {
            Self::Several { errors } => errors.iter().any(Self::lacks_ranks),
            error => *error == Self::AutoAxis,
        }
    }

    /// Each single error.
    fn each(self) -> Vec<ConfigError> {
        match self {
            Self::Several { errors } => errors,
            error => vec![error],
        }
    }

    /// The same error with the places of the keys that it names.
    pub(super) fn located(self, place_of: &dyn Fn(&str) -> ValueLocation) -> ConfigError {
        let at = |at: KeyAt| match at.location {
            ValueLocation::File => KeyAt { location: place_of(&at.key), ..at },
            _ => at,
        };
        match self {
            Self::Missing { key, why } => Self::Missing { key: at(key), why },
            Self::Conflict { first, second, why } => Self::Conflict { first: at(first), second: at(second), why },
            Self::Refused { key, found, instead } => Self::Refused { key: at(key), found, instead },
            Self::Several { errors } => {
                Self::Several { errors: errors.into_iter().map(|error| error.located(place_of)).collect() }
            }
            other => other,
        }
    }
}

impl ConfigError {
    /// The same error with other places for the keys that it names.
    pub(crate) fn relocated(self, place_of: &dyn Fn(&str) -> ValueLocation) -> ConfigError {
        let at = |at: KeyAt| KeyAt { location: place_of(&at.key), ..at };
        match self {
            Self::UnknownKey { key, hint, .. } => Self::UnknownKey { location: place_of(&key), key, hint },
            Self::Duplicate { first, second, .. } => Self::Duplicate { location: place_of(&second), first, second },
            Self::Mismatch { key, found, fits, .. } => Self::Mismatch { location: place_of(&key), key, found, fits },
            Self::Missing { key, why } => Self::Missing { key: at(key), why },
            Self::Conflict { first, second, why } => Self::Conflict { first: at(first), second: at(second), why },
            Self::Refused { key, found, instead } => Self::Refused { key: at(key), found, instead },
            Self::Several { errors } => {
                Self::Several { errors: errors.into_iter().map(|error| error.relocated(place_of)).collect() }
            }
            other => other,
        }
    }
}

/// Collects the errors of checks that do not depend on each other.
#[derive(Debug, Default)]
pub(crate) struct Errors(Vec<ConfigError>);

impl Errors {
    /// The result of a check, or `None` if it failed.
    pub(crate) fn keep<T>(&mut self, result: Result<T, ConfigError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.0.extend(error.each());
                None
            }
        }
    }

    /// Whether no check has failed.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The value, if no check has failed; otherwise all errors.
    pub(crate) fn end<T>(mut self, value: T) -> Result<T, ConfigError> {
        match self.0.len() {
            0 => Ok(value),
            1 => Err(self.0.remove(0)),
            _ => Err(ConfigError::Several { errors: self.0 }),
        }
    }
}

/// The result of several checks: all their errors.
pub(crate) fn all(results: impl IntoIterator<Item = Result<(), ConfigError>>) -> Result<(), ConfigError> {
    let mut errors = Errors::default();
    for result in results {
        errors.keep(result);
    }
    errors.end(())
}
