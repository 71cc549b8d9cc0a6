//! The result of preparing a file.

use std::path::PathBuf;

/// The result of preparing a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The file.
    pub path: PathBuf,
    /// Whether its tokens came from the cache.
    pub from_cache: bool,
    /// Tokens of all its documents.
    pub n_tokens: usize,
    /// Tokens of the documents in its rows.
    pub n_kept_tokens: usize,
    /// Documents in the file; a plain text is one.
    pub n_documents: usize,
    /// Documents left out because they have no token to predict.
    pub n_empty: usize,
    /// Documents left out as too long.
    pub n_dropped: usize,
    /// Tokens of the shortest and the longest of these.
    pub dropped_lens: Option<(usize, usize)>,
    /// Documents left out as too short.
    pub n_short: usize,
    /// Documents left out because the same one was there before.
    pub n_repeated: usize,
    /// Documents truncated to a row.
    pub n_truncated: usize,
    /// Documents cut into several rows.
    pub n_cut: usize,
    /// Records that were read; 0 of a plain text, which has none.
    pub n_records: usize,
    /// Records among them that were left out because they cannot be used.
    pub n_skipped: usize,
    /// The file that lists these.
    pub skipped_list: Option<PathBuf>,
    /// Rows of the data set.
    pub n_rows: usize,
}
