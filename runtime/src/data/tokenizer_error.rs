//! How a tokenizer can be unusable.

use std::path::PathBuf;
use thiserror::Error;

/// Why a tokenizer cannot be loaded, used or written.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenizerError {
    /// A file is missing or cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Read { path: PathBuf, reason: String },
    /// A file is malformed.
    #[error("{} is not valid: {reason}", path.display())]
    Invalid { path: PathBuf, reason: String },
    /// The tokenizer refuses a text.
    #[error("text cannot be tokenised: {reason}")]
    Encode { reason: String },
    /// The tokenizer refuses a sequence.
    #[error("token ids cannot be decoded: {reason}")]
    Decode { reason: String },
    /// An exported file cannot be written.
    #[error("cannot write {}: {reason}", path.display())]
    Write { path: PathBuf, reason: String },
}
