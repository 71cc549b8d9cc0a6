//! What can be wrong with a job's configuration, each case as one sentence that names the key.

use phalanx_strategies::mesh::MeshError;
use std::fmt;
use std::path::PathBuf;

use thiserror::Error;

/// Where a value was written, so that a message can send the reader there.
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

/// Why a configuration was refused; nothing has been started when it is returned.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration {}: {reason}", path.display())]
    Unreadable {
        /// The file asked for.
        path: PathBuf,
        /// What the operating system said.
        reason: String,
    },
    /// The text is not YAML, or is not a mapping of keys to values.
    #[error("the configuration is not valid YAML: {reason}")]
    Syntax {
        /// What the parser said, with its line.
        reason: String,
    },
    /// A key that no section knows.
    #[error("unknown key `{key}`{location}{}", hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default())]
    UnknownKey {
        /// The key as written, with the path of its section.
        key: String,
        /// Where it was written.
        location: ValueLocation,
        /// The nearest known key, or why this well-known key of other tools does not exist here.
        hint: Option<String>,
    },
    /// A key that is given twice, perhaps under two spellings.
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
    /// A key is needed and absent.
    #[error("`{key}` is missing: {why}")]
    Missing {
        /// The absent key, or the alternatives.
        key: String,
        /// Why it is needed.
        why: String,
    },
    /// Two values that are each fine and together are not.
    #[error("`{first}` and `{second}` do not go together: {why}")]
    Conflict {
        /// One key.
        first: String,
        /// The other.
        second: String,
        /// The relation that fails, and the way out.
        why: String,
    },
    /// Both ways of saying how large a step is.
    #[error("`microbatches_per_step` and `gradient_accumulation_steps` both say how large a step is; remove one")]
    TwoBatchSizes,
    /// Microbatches that do not come out even.
    #[error(
        "{per_step} microbatches a step cannot be shared evenly by {data_ranks} data-parallel ranks; {fits} would fit, or set reproducible: true, which shares them unevenly"
    )]
    UnevenBatch {
        /// Microbatches of a step.
        per_step: usize,
        /// Ranks that share them.
        data_ranks: usize,
        /// A number that comes out even.
        fits: usize,
    },
    /// A mesh that is not one of the ranks that there are.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// Nothing says how many ranks there are.
    #[error("`dp_shard_size` is auto, but nothing says how many ranks there are; set nproc_per_node")]
    AutoAxis,
}
