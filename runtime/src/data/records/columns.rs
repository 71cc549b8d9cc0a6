//! Records in columns: Parquet, and Arrow as a stream or a file.
//!
//! Columns of texts, numbers, truth values, lists and structs become fields. Others (images, dates, decimals) are left out of
//! the record, so that a data set that has some beside its texts can be read.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::Schema;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::basic::{ConvertedType, LogicalType};
use parquet::file::metadata::ParquetMetaData;
use parquet::schema::types::ColumnDescriptor;

use super::column_values::{Rows, as_read, leaves_that_are_read, left_out};
use super::input::Expansion;
use super::{BATCH_BYTES, DECODED_BYTES_MAX, DataFile, DoneBytes, LeftOut, Numbered, ReadError, Records, VALUE_BYTES};

/// Records of a Parquet file that are decoded at a time, if they are small.
const PARQUET_BATCH: u64 = 256;

/// Bytes of an Arrow file that are read at a time.
const ARROW_CHUNK: usize = 1 << 20;

/// The first bytes of an Arrow file with an index of its batches. After them comes the same stream as in a file without.
const ARROW_MAGIC: &[u8] = b"ARROW1\0\0";

/// A Parquet file.
pub(super) struct ParquetFile {
    path: PathBuf,
    reader: ParquetRecordBatchReader,
    rows: Rows,
    n_records: u64,
    total_bytes: u64,
    done: DoneBytes,
    left_out: Vec<LeftOut>,
}

impl ParquetFile {
    pub(super) fn open(file: &DataFile, messages: &[String], done: &DoneBytes) -> Result<Self, ReadError> {
        let path = file.path();
        let refuse = |error| columns_error(path, "Parquet", &error);
        let input = file.try_clone()?;
        let metadata = ArrowReaderMetadata::load(&input, ArrowReaderOptions::new()).map_err(refuse)?;
        let left_out = left_out(metadata.schema().fields());
        let parquet = Arc::clone(metadata.metadata());
        let n_records = u64::try_from(parquet.file_metadata().num_rows()).unwrap_or(0);
        let batch = batch_of(&parquet).ok_or_else(|| ReadError::TooLarge {
            path: path.to_owned(),
            line: 1,
            limit_mib: DECODED_BYTES_MAX >> 20,
        })?;
        let (leaves, n_leaves) = leaves_that_are_read(metadata.schema().fields(), messages);
        let descriptor = parquet.file_metadata().schema_descr();
        let columns = match n_leaves == descriptor.num_columns() {
            true => ProjectionMask::leaves(descriptor, leaves),
            false => ProjectionMask::all(),
        };
        let is_json = |leaf: usize| {
            let says_so = |column: &ColumnDescriptor| {
                column.converted_type() == ConvertedType::JSON || column.logical_type_ref() == Some(&LogicalType::Json)
            };
            n_leaves == descriptor.num_columns() && says_so(&descriptor.column(leaf))
        };
        let fields = as_read(metadata.schema().fields(), &is_json);
        let schema = Schema::new_with_metadata(fields, metadata.schema().metadata().clone());
        let options = ArrowReaderOptions::new().with_schema(Arc::new(schema));
        let metadata = ArrowReaderMetadata::try_new(Arc::clone(&parquet), options).map_err(refuse)?;
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(input, metadata);
        let reader = builder.with_projection(columns).with_batch_size(batch).build().map_err(refuse)?;
        Ok(Self {
            path: path.to_owned(),
            reader,
            rows: Rows::new(messages, Expansion::of_records(file)),
            n_records,
            total_bytes: file.len(),
            done: Arc::clone(done),
            left_out,
        })
    }

    /// The number of records that the file says it has.
    pub(super) fn n_records(&self) -> u64 {
        self.n_records
    }
}

/// How many records of a Parquet file are decoded at a time; none if one record does not fit into memory.
fn batch_of(parquet: &ParquetMetaData) -> Option<usize> {
    let mut batch = PARQUET_BATCH;
    for group in parquet.row_groups() {
        let n_rows = u64::try_from(group.num_rows()).unwrap_or(0).max(1);
        // A list that repeats one value takes hardly any bytes of the file.
        let n_values: u64 = group.columns().iter().map(|column| u64::try_from(column.num_values()).unwrap_or(0)).sum();
        if n_values / n_rows > DECODED_BYTES_MAX / VALUE_BYTES {
            return None;
        }
        let n_bytes = u64::try_from(group.total_byte_size()).unwrap_or(0).max(n_values.saturating_mul(8));
        batch = batch.min((BATCH_BYTES as u64 / (n_bytes / n_rows).max(1)).max(1));
    }
    usize::try_from(batch).ok()
}

impl Records for ParquetFile {
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        loop {
            let records = self.rows.take(&self.path)?;
            if !records.is_empty() {
                // Columns are not read in the order of the file, so progress is the share of records.
                let share = (self.rows.next_record() - 1) as f64 / self.n_records.max(1) as f64;
                self.done.store((share.min(1.0) * self.total_bytes as f64) as u64, Ordering::Relaxed);
                return Ok(records);
            }
            let Some(batch) = self.reader.next() else {
                self.done.store(self.total_bytes, Ordering::Relaxed);
                return Ok(Vec::new());
            };
            self.rows.put(batch.map_err(|error| columns_error(&self.path, "Parquet", &error))?);
        }
    }

    fn left_out(&self) -> Vec<LeftOut> {
        self.left_out.clone()
    }
}

/// An Arrow stream, with or without the index of a file around it.
pub(super) struct ArrowFile {
    path: PathBuf,
    input: BufReader<Box<dyn Read>>,
    decoder: StreamDecoder,
    chunk: Buffer,
    rows: Rows,
    /// Whether what follows the stream is the index of a file.
    has_index: bool,
}

impl ArrowFile {
    pub(super) fn open(data: &DataFile, messages: &[String], input: Box<dyn Read>) -> Result<Self, ReadError> {
        let mut file = Self {
            path: data.path().to_owned(),
            input: BufReader::new(input),
            decoder: StreamDecoder::new(),
            chunk: Buffer::from(Vec::<u8>::new()),
            rows: Rows::new(messages, Expansion::of_records(data)),
            has_index: false,
        };
        file.chunk = file.read_chunk()?;
        if file.chunk.starts_with(ARROW_MAGIC) {
            file.has_index = true;
            file.chunk.advance(ARROW_MAGIC.len());
        }
        Ok(file)
    }

    fn read_chunk(&mut self) -> Result<Buffer, ReadError> {
        let mut bytes = Vec::with_capacity(ARROW_CHUNK);
        let read = self.input.by_ref().take(ARROW_CHUNK as u64).read_to_end(&mut bytes);
        read.map_err(|error| ReadError::file(&self.path, &error))?;
        Ok(Buffer::from(bytes))
    }
}

impl Records for ArrowFile {
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        loop {
            let records = self.rows.take(&self.path)?;
            if !records.is_empty() {
                return Ok(records);
            }
            if self.chunk.is_empty() {
                self.chunk = self.read_chunk()?;
            }
            if self.chunk.is_empty() {
                let end = self.decoder.finish();
                end.map_err(|error| columns_error(&self.path, "Arrow", &error))?;
                return Ok(Vec::new());
            }
            match self.decoder.decode(&mut self.chunk) {
                Ok(Some(batch)) => self.rows.put(batch),
                Ok(None) => {}
                // The stream has ended, as `finish` tells; the index repeats where its batches are.
                Err(_) if self.has_index && self.decoder.finish().is_ok() => return Ok(Vec::new()),
                Err(error) => return Err(columns_error(&self.path, "Arrow", &error)),
            }
        }
    }

    fn left_out(&self) -> Vec<LeftOut> {
        self.decoder.schema().map_or_else(Vec::new, |schema| left_out(schema.fields()))
    }
}

fn columns_error(path: &Path, format: &'static str, error: &impl std::fmt::Display) -> ReadError {
    ReadError::Columns { path: path.to_owned(), format, reason: error.to_string() }
}
