//! The format of cached tokens.

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use thiserror::Error;

/// Set in a stored token that the model is trained to predict.
pub(crate) const TRAINED: u32 = 1 << 31;

/// Set in the trained tokens of an answer that is labelled undesirable.
pub(crate) const UNDESIRABLE: u32 = 1 << 30;

/// What a stored token has beside its id.
pub(crate) const MARKS: u32 = TRAINED | UNDESIRABLE;

/// Why a token file cannot be written or used.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenCacheError {
    /// A file operation failed.
    #[error("cannot {action} token cache {}: {reason}", path.display())]
    Io { action: &'static str, path: PathBuf, reason: String },
    /// The file differs from what was written.
    #[error("token cache {} is damaged: {reason}", path.display())]
    Damaged { path: PathBuf, reason: &'static str },
}

/// The end of a document in the tokens, and its origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct DocumentEnd {
    /// Index after its last token.
    pub(crate) end: u64,
    /// Line of the data file, or number of the record in a JSON list; from 1.
    pub(crate) line: u64,
}

/// Records of a file that are listed as left out; more are only counted.
pub(crate) const LISTED_MAX: usize = 100_000;

/// A record that was left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SkippedRecord {
    /// Its line, or its number where there are no lines.
    pub(crate) line: u64,
    /// Why it cannot be used.
    pub(crate) error: String,
}
