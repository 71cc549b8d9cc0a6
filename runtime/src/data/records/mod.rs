//! The records of a data file, whatever its format, in batches of bounded size.

mod column_values;
mod columns;
mod delimited;
mod error;
mod input;
mod json;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;

use super::data_file::DataFile;
use crate::config::datasets::FileFormat;

pub(crate) use error::ReadError;
pub(crate) use input::{Compression, plain_copy};

/// Bytes of records that are in memory at a time; enough to keep many cores busy between two writes.
const BATCH_BYTES: usize = 8 << 20;

/// The largest record. A compressed file of a few kilobytes, or one quote that is never closed, could fill any memory.
const RECORD_BYTES_MAX: u64 = 256 << 20;

/// Bytes of one value in a file, without its text.
const STORED_BYTES: u64 = 8;

/// Bytes of one value in memory, without its text, fields or items.
const VALUE_BYTES: u64 = size_of::<Value>() as u64;

/// The largest record in memory. Small texts become large there: a list of digits has a value for every second byte.
const DECODED_BYTES_MAX: u64 = 1 << 30;

/// A record and its number in the file: the line that it begins at, or the count of records where there are no lines.
pub(crate) struct Numbered {
    pub(crate) line: u64,
    pub(crate) content: Content,
}

/// A record as its format gives it.
pub(crate) enum Content {
    /// The text of one JSON value, so that threads can share the parsing, and the line of the file that it begins at.
    Json { bytes: Vec<u8>, first_line: u64 },
    /// Named fields.
    Fields(Value),
    /// Nothing: the format cannot give the record, but those after it.
    Refused(ReadError),
}

/// A column, or a field of a struct, that records lack because no value of theirs has its type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftOut {
    pub(crate) name: String,
    /// Its type in the file.
    pub(crate) kind: String,
}

/// Bytes of a file that have been read, before decompression.
pub(crate) type DoneBytes = Arc<AtomicU64>;

/// The records of one file, in its order.
pub(crate) trait Records {
    /// The next records; none at the end of the file.
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError>;

    /// The columns that records lack.
    fn left_out(&self) -> Vec<LeftOut> {
        Vec::new()
    }
}

/// A file of records that is being read.
pub(crate) struct RecordFile {
    records: Box<dyn Records>,
    done: DoneBytes,
}

impl RecordFile {
    /// Opens a file of records, which is not plain text. `messages` are the fields with the messages of conversations.
    pub(crate) fn open(file: &DataFile, format: FileFormat, messages: &[String]) -> Result<Self, ReadError> {
        let done = DoneBytes::default();
        let path = file.path();
        let input = || input::open(file, &done);
        let records: Box<dyn Records> = match format {
            FileFormat::Json => json::open(path, input()?)?,
            FileFormat::Csv => Box::new(delimited::Delimited::open(file, b',', input()?)?),
            FileFormat::Tsv => Box::new(delimited::Delimited::open(file, b'\t', input()?)?),
            FileFormat::Arrow => Box::new(columns::ArrowFile::open(file, messages, input()?)?),
            FileFormat::Parquet => Box::new(columns::ParquetFile::open(file, messages, &done)?),
            FileFormat::Text => unreachable!("plain text has no records; `prepare` cuts it into rows"),
        };
        Ok(Self { records, done })
    }

    /// The next records; none at the end of the file.
    pub(crate) fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        self.records.next_batch()
    }

    /// The columns that records lack.
    pub(crate) fn left_out(&self) -> Vec<LeftOut> {
        self.records.left_out()
    }

    /// Bytes of the file that have been read.
    pub(crate) fn done_bytes(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

/// The number of records of a file, which is not plain text.
pub(crate) fn count(file: &DataFile, format: FileFormat) -> Result<u64, ReadError> {
    if format == FileFormat::Parquet {
        return Ok(columns::ParquetFile::open(file, &[], &DoneBytes::default())?.n_records());
    }
    let mut records = RecordFile::open(file, format, &[])?;
    let mut n_records = 0;
    loop {
        match records.next_batch()?.len() {
            0 => return Ok(n_records),
            n => n_records += n as u64,
        }
    }
}

#[cfg(test)]
mod tests;
