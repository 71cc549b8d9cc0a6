//! Why a model cannot be built.

use std::fmt;

/// Why a `config.json` cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// An unsupported architecture.
    #[error("architecture `{found}` is not supported; supported are {supported}")]
    Unsupported {
        /// Its `model_type`.
        found: String,
        /// The names of all families.
        supported: String,
    },
    /// A required field is absent.
    #[error("`{field}` is missing from the model configuration of a {family}")]
    Missing {
        /// Name of the field.
        field: &'static str,
        /// Family that needs it.
        family: &'static str,
    },
    /// A field with an unsupported value.
    #[error("`{field}: {found}` is not supported; {expected}")]
    Value {
        /// Name of the field.
        field: &'static str,
        /// What was found.
        found: String,
        /// What is supported.
        expected: String,
    },
    /// Two keys that say different things of the same.
    #[error("`{first}` and `{second}` contradict each other; remove the wrong one")]
    Conflict {
        /// A key, with its value if that is short.
        first: String,
        /// The other one.
        second: String,
    },
    /// More elements than any machine can hold.
    #[error("the model and its batch have {n} {what}, but at most {max} can be planned")]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// Their number, which may exceed 64 bits.
        n: String,
        /// The largest number.
        max: u64,
    },
    /// Rows longer than the model's positions.
    #[error("sequence_len {seq_len} exceeds the model's max_position_embeddings {max_positions}")]
    TooLong {
        /// Tokens of a row.
        seq_len: usize,
        /// Positions of the model.
        max_positions: usize,
    },
}

impl ModelError {
    pub(super) fn value(field: &'static str, found: impl fmt::Display, expected: impl Into<String>) -> ModelError {
        ModelError::Value { field, found: found.to_string(), expected: expected.into() }
    }
}
