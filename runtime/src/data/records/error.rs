//! Why the records of a data file cannot be read.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why the records of a data file cannot be read.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ReadError {
    /// The file cannot be read, is no regular file, or is not compressed as its name says.
    #[error("cannot read {}: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    /// The content is not what its tokens would be stored for.
    #[error("{} changed while it was read; start again when it is complete", path.display())]
    Changed { path: PathBuf },
    /// A record is not valid JSON, CSV or TSV.
    #[error("{}:{line}: this is not valid {format}: {reason}", path.display())]
    Record { path: PathBuf, line: u64, format: &'static str, reason: String },
    /// The file is not valid Arrow or Parquet.
    #[error("{} is not a valid {format} file: {reason}", path.display())]
    Columns { path: PathBuf, format: &'static str, reason: String },
    /// A record does not fit into memory.
    #[error(
        "{}:{line}: this record is larger than {limit_mib} MiB; check that quotes are closed, or split the record",
        path.display()
    )]
    TooLarge { path: PathBuf, line: u64, limit_mib: u64 },
    /// A value inside a message has a type that JSON does not have.
    #[error(
        "{}:{line}: field {field:?} of a message has the type {kind}, which is not read; store it as text (string), or remove it",
        path.display()
    )]
    Type { path: PathBuf, line: u64, field: String, kind: String },
    /// A small file becomes records that no disk holds.
    #[error(
        "{} expands to more than {ratio} times its size, which no text does; if it is intact, convert it to .jsonl",
        path.display()
    )]
    Expands { path: PathBuf, ratio: u64 },
}

impl ReadError {
    pub(crate) fn file(path: &Path, error: &std::io::Error) -> Self {
        Self::File { path: path.to_owned(), reason: error.to_string() }
    }
}
