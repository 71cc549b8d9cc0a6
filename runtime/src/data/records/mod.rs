//! The records of a data file, whatever its format, in batches of bounded size.

mod columns;
mod delimited;
mod error;
mod input;
mod json;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;

use crate::config::datasets::FileFormat;

pub(crate) use error::ReadError;
pub(crate) use input::{Compression, plain_copy};
pub(crate) use json::json_error;

/// Bytes of records that are in memory at a time; enough to keep many cores busy between two writes.
const BATCH_BYTES: usize = 8 << 20;

/// The largest record. A compressed file of a few kilobytes, or one quote that is never closed, could fill any memory.
const RECORD_BYTES_MAX: u64 = 256 << 20;

/// A record and its number in the file: the line that it begins at, or the count of records where there are no lines.
pub(crate) struct Numbered {
    pub(crate) line: u64,
    pub(crate) content: Content,
}

/// A record as its format gives it.
pub(crate) enum Content {
    /// The text of one JSON value, so that threads can share the parsing.
    Json(Vec<u8>),
    /// Named fields.
    Fields(Value),
}

/// Bytes of a file that have been read, before decompression.
pub(crate) type DoneBytes = Arc<AtomicU64>;

/// The records of one file, in its order.
pub(crate) trait Records {
    /// The next records; none at the end of the file.
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError>;
}

/// A file of records that is being read.
pub(crate) struct RecordFile {
    records: Box<dyn Records>,
    done: DoneBytes,
}

impl RecordFile {
    /// Opens the file of records at `path`, which is not plain text.
    pub(crate) fn open(path: &Path, format: FileFormat) -> Result<Self, ReadError> {
        let done = DoneBytes::default();
        let input = || input::open(path, Compression::of(path), &done);
        let records: Box<dyn Records> = match format {
            FileFormat::Json => json::open(path, input()?)?,
            FileFormat::Csv => Box::new(delimited::Delimited::open(path, b',', input()?)?),
            FileFormat::Tsv => Box::new(delimited::Delimited::open(path, b'\t', input()?)?),
            FileFormat::Arrow => Box::new(columns::ArrowFile::open(path, input()?)?),
            FileFormat::Parquet => Box::new(columns::ParquetFile::open(path, &done)?),
            FileFormat::Text => unreachable!("plain text has no records; `prepare` cuts it into rows"),
        };
        Ok(Self { records, done })
    }

    /// The next records; none at the end of the file.
    pub(crate) fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        self.records.next_batch()
    }

    /// Bytes of the file that have been read.
    pub(crate) fn done_bytes(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

/// The number of records of the file at `path`, which is not plain text.
pub(crate) fn count(path: &Path, format: FileFormat) -> Result<u64, ReadError> {
    if format == FileFormat::Parquet {
        return Ok(columns::ParquetFile::open(path, &DoneBytes::default())?.n_records());
    }
    let mut file = RecordFile::open(path, format)?;
    let mut n_records = 0;
    loop {
        match file.next_batch()?.len() {
            0 => return Ok(n_records),
            n => n_records += n as u64,
        }
    }
}

#[cfg(test)]
mod tests;
