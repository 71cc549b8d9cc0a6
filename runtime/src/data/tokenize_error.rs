//! Why a data file cannot be tokenised.

use super::record_error::RecordError;
use super::records::ReadError;
use super::token_cache_format::TokenCacheError;
use super::tokenizer_error::TokenizerError;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Why a data file cannot be tokenised.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenizeError {
    /// The run was asked to stop.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A record does not have the fields that its type requires.
    #[error("{}:{line}: {reason}", path.display())]
    Record { path: PathBuf, line: u64, reason: RecordError },
    /// Several records cannot be used.
    #[error("{}", listed(first, *n_more, *is_all))]
    Records { first: Vec<TokenizeError>, n_more: u64, is_all: bool },
    /// Most records of a file cannot be used, although some may be left out.
    #[error(
        "{}: {n_skipped} of {n_records} records cannot be used, more than half, which `skip_bad_records` does not leave out; check \
         the `type` of the data set and its other keys:\n{}",
        path.display(),
        indented(first)
    )]
    MostSkipped { path: PathBuf, n_skipped: u64, n_records: u64, first: Vec<TokenizeError> },
    /// A text file is not UTF-8.
    #[error(
        "{} is not UTF-8 text at byte {offset}; convert it, or train with the byte tokenizer, which takes any file",
        path.display()
    )]
    NotUtf8 { path: PathBuf, offset: u64 },
    /// The tokenizer refuses a text.
    #[error("{}: {reason}", path.display())]
    Tokenizer { path: PathBuf, reason: TokenizerError },
    /// The tokens cannot be stored.
    #[error(transparent)]
    Cache(#[from] TokenCacheError),
}

impl TokenizeError {
    /// The file and the line of the record that cannot be used; none if it is not about one record.
    pub(super) fn record(&self) -> Option<(&Path, u64)> {
        match self {
            Self::Record { path, line, .. }
            | Self::Read(
                ReadError::Record { path, line, .. }
                | ReadError::TooLarge { path, line, .. }
                | ReadError::Type { path, line, .. },
            ) => Some((path, *line)),
            _ => None,
        }
    }

    /// Whether it is about records, so that other files may have more of them.
    pub(super) fn is_of_records(&self) -> bool {
        matches!(self, Self::Records { .. }) || self.record().is_some()
    }
}

/// The work was asked to stop; files that were finished before stay in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("stopped while the data was tokenized")]
pub struct Stopped;

/// A message that names several records.
fn listed(named: &[TokenizeError], n_more: u64, is_all: bool) -> String {
    let at_least = if is_all { "" } else { "at least " };
    let n = named.len() as u64 + n_more;
    let more = if n_more > 0 { format!("\n  and {n_more} more") } else { String::new() };
    format!(
        "{at_least}{n} records cannot be used:\n{}{more}\n`skip_bad_records: true` leaves such records out",
        indented(named)
    )
}

/// The errors, each on a line of its own.
fn indented(errors: &[TokenizeError]) -> String {
    errors.iter().map(|error| format!("  {error}")).collect::<Vec<_>>().join("\n")
}
