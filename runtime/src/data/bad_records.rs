//! Records that cannot be used: as many as a message names, so that a user does not meet them one by one, and the count of the others.

use super::record_error::RecordError;
use super::records::{LeftOut, ReadError};
use super::token_cache_format::SkippedRecord;
use super::tokenize_error::TokenizeError;
use crate::console::printable;
use std::path::Path;

/// Records that are named.
const NAMED_MAX: usize = 10;

/// Characters of a sentence about a record that is left out; it may quote the record.
const SENTENCE_CHARS_MAX: usize = 300;

/// Bytes of a file that are searched for more after the first.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Bytes of further files that are searched for more.
const FILES_BYTES_MAX: u64 = 256 << 20;

/// Records that are counted before the search ends: a small compressed file may expand to millions.
const COUNTED_MAX: u64 = 100_000;

/// Records that cannot be used, of a file or of several.
#[derive(Debug)]
pub(super) struct BadRecords {
    named: Vec<TokenizeError>,
    n_more: u64,
    /// Whether there may be more in what was not read.
    is_open: bool,
    /// Bytes of the file that were read when the first one was met.
    met_at: Option<u64>,
    /// Bytes of further files that may still be searched.
    n_bytes_left: u64,
}

impl Default for BadRecords {
    fn default() -> Self {
        Self { named: Vec::new(), n_more: 0, is_open: false, met_at: None, n_bytes_left: FILES_BYTES_MAX }
    }
}

impl BadRecords {
    pub(super) fn is_empty(&self) -> bool {
        self.named.is_empty()
    }

    /// Adds a record, or those of a file.
    pub(super) fn add(&mut self, error: TokenizeError) {
        let (named, n_more, is_open) = match error {
            TokenizeError::Records { first, n_more, is_all } => (first, n_more, !is_all),
            one => (vec![one], 0, false),
        };
        (self.n_more, self.is_open) = (self.n_more + n_more, self.is_open || is_open);
        for error in named {
            let reason = of_all_records(&error);
            if reason.is_some() && self.named.iter().any(|known| of_all_records(known) == reason) {
                continue;
            }
            if self.named.len() < NAMED_MAX { self.named.push(error) } else { self.n_more += 1 }
        }
    }

    /// Not all of the data is searched.
    pub(super) fn leave_open(&mut self) {
        self.is_open = true;
    }

    /// Whether the search of a file ends here, after `done_bytes` of it.
    pub(super) fn is_enough(&mut self, done_bytes: u64) -> bool {
        let is_far = !self.is_empty() && done_bytes - *self.met_at.get_or_insert(done_bytes) > FILE_BYTES_MAX;
        is_far || self.n_more >= COUNTED_MAX
    }

    /// Whether a further file of this length is searched.
    pub(super) fn has_room_for(&mut self, file_bytes: u64) -> bool {
        let left = self.n_bytes_left.checked_sub(file_bytes).filter(|_| self.n_more < COUNTED_MAX);
        self.n_bytes_left = left.unwrap_or(self.n_bytes_left);
        left.is_some()
    }

    /// The error, if a record cannot be used.
    pub(super) fn refused(mut self) -> Result<(), TokenizeError> {
        match self.named.len() {
            0 => Ok(()),
            1 if self.n_more == 0 => Err(self.named.remove(0)),
            _ => Err(TokenizeError::Records { first: self.named, n_more: self.n_more, is_all: !self.is_open }),
        }
    }

    /// The error, if too many records of a file were left out: that is another kind of data, not some bad records.
    pub(super) fn refused_as_most(self, path: &Path, n_skipped: u64, n_records: u64) -> Result<(), TokenizeError> {
        match n_skipped > n_records / 2 {
            true => Err(TokenizeError::MostSkipped { path: path.to_owned(), n_skipped, n_records, first: self.named }),
            false => Ok(()),
        }
    }
}

/// What all records of a file have in common: their columns, and one tokenizer.
fn of_all_records(error: &TokenizeError) -> Option<(&Path, &str)> {
    match error {
        TokenizeError::Record { reason: RecordError::ColumnType { field, .. }, path, .. } => Some((path, field)),
        TokenizeError::Record { reason: RecordError::NoTemplate { .. }, path, .. } => Some((path, "")),
        TokenizeError::Read(ReadError::Type { field, path, .. }) => Some((path, field)),
        _ => None,
    }
}

/// The error with the type of the column that records lack.
pub(super) fn explained(error: TokenizeError, left_out: &[LeftOut]) -> TokenizeError {
    match error {
        TokenizeError::Record { path, line, reason } => {
            TokenizeError::Record { path, line, reason: reason.with_type_of_column(left_out) }
        }
        other => other,
    }
}

/// What is kept of a record that is left out; none of an error that is about a file.
pub(super) fn skipped(error: &TokenizeError) -> Option<SkippedRecord> {
    let (path, line) = error.record()?;
    let (text, place) = (error.to_string(), format!("{}:{line}: ", path.display()));
    Some(SkippedRecord { line, error: excerpt(text.strip_prefix(&place).unwrap_or(&text)) })
}

/// A sentence on one line, without escape codes, and not longer than a sentence is.
fn excerpt(text: &str) -> String {
    let text = printable(text).replace(['\n', '\t'], " ");
    match text.char_indices().nth(SENTENCE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
#[path = "bad_records_tests.rs"]
mod tests;
