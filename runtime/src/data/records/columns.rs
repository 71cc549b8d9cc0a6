//! Records in columns: Parquet, and Arrow as a stream or a file.
//!
//! Columns of texts, numbers, truth values, lists and structs become fields. Others (images, dates, decimals) are left out of
//! the record, so that a data set that has some beside its texts can be read.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch, StructArray};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::DataType;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use serde_json::{Map, Value};

use super::{Content, DoneBytes, Numbered, ReadError, Records};

/// Records of a Parquet file that are decoded at a time.
const PARQUET_BATCH: usize = 256;

/// Bytes of an Arrow file that are read at a time.
const ARROW_CHUNK: usize = 1 << 20;

/// The first bytes of an Arrow file with an index of its batches. After them comes the same stream as in a file without.
const ARROW_MAGIC: &[u8] = b"ARROW1\0\0";

/// A Parquet file.
pub(super) struct ParquetFile {
    path: PathBuf,
    reader: ParquetRecordBatchReader,
    next_record: u64,
    n_records: u64,
    total_bytes: u64,
    done: DoneBytes,
}

impl ParquetFile {
    pub(super) fn open(path: &Path, done: &DoneBytes) -> Result<Self, ReadError> {
        let file = File::open(path).map_err(|error| ReadError::file(path, &error))?;
        let total_bytes = file.metadata().map_err(|error| ReadError::file(path, &error))?.len();
        let refuse = |error| columns_error(path, "Parquet", &error);
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).map_err(refuse)?.with_batch_size(PARQUET_BATCH);
        let n_records = u64::try_from(builder.metadata().file_metadata().num_rows()).unwrap_or(0);
        let reader = builder.build().map_err(refuse)?;
        Ok(Self { path: path.to_owned(), reader, next_record: 1, n_records, total_bytes, done: Arc::clone(done) })
    }

    /// The number of records that the file says it has.
    pub(super) fn n_records(&self) -> u64 {
        self.n_records
    }
}

impl Records for ParquetFile {
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        let Some(batch) = self.reader.next() else {
            self.done.store(self.total_bytes, Ordering::Relaxed);
            return Ok(Vec::new());
        };
        let batch = batch.map_err(|error| columns_error(&self.path, "Parquet", &error))?;
        let records = numbered(&batch, &mut self.next_record);
        // Columns are not read in the order of the file, so progress is the share of records.
        let share = (self.next_record - 1) as f64 / self.n_records.max(1) as f64;
        self.done.store((share.min(1.0) * self.total_bytes as f64) as u64, Ordering::Relaxed);
        Ok(records)
    }
}

/// An Arrow stream, with or without the index of a file around it.
pub(super) struct ArrowFile {
    path: PathBuf,
    input: BufReader<Box<dyn Read>>,
    decoder: StreamDecoder,
    chunk: Buffer,
    next_record: u64,
    /// Whether what follows the stream is the index of a file.
    has_index: bool,
}

impl ArrowFile {
    pub(super) fn open(path: &Path, input: Box<dyn Read>) -> Result<Self, ReadError> {
        let mut file = Self {
            path: path.to_owned(),
            input: BufReader::new(input),
            decoder: StreamDecoder::new(),
            chunk: Buffer::from(Vec::<u8>::new()),
            next_record: 1,
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
            if self.chunk.is_empty() {
                self.chunk = self.read_chunk()?;
            }
            if self.chunk.is_empty() {
                let end = self.decoder.finish();
                end.map_err(|error| columns_error(&self.path, "Arrow", &error))?;
                return Ok(Vec::new());
            }
            match self.decoder.decode(&mut self.chunk) {
                Ok(Some(batch)) if batch.num_rows() > 0 => return Ok(numbered(&batch, &mut self.next_record)),
                Ok(_) => {}
                // The stream has ended, as `finish` tells; the index repeats where its batches are.
                Err(_) if self.has_index && self.decoder.finish().is_ok() => return Ok(Vec::new()),
                Err(error) => return Err(columns_error(&self.path, "Arrow", &error)),
            }
        }
    }
}

fn columns_error(path: &Path, format: &'static str, error: &impl std::fmt::Display) -> ReadError {
    ReadError::Columns { path: path.to_owned(), format, reason: error.to_string() }
}

fn numbered(batch: &RecordBatch, next_record: &mut u64) -> Vec<Numbered> {
    let names: Vec<&String> = batch.schema_ref().fields().iter().map(|field| field.name()).collect();
    let record = |row| Content::Fields(Value::Object(fields_of(&names, batch.columns(), row)));
    let first = *next_record;
    *next_record += batch.num_rows() as u64;
    (first..).zip(0..batch.num_rows()).map(|(line, row)| Numbered { line, content: record(row) }).collect()
}

fn fields_of(names: &[&String], columns: &[ArrayRef], row: usize) -> Map<String, Value> {
    let fields = names.iter().zip(columns);
    fields.filter_map(|(name, column)| Some(((*name).clone(), value_of(&**column, row)?))).collect()
}

/// An element of a column as JSON; nothing if JSON has no such type.
fn value_of(column: &dyn Array, row: usize) -> Option<Value> {
    let text = |text: &str| Some(Value::String(text.to_owned()));
    let list =
        |items: ArrayRef| (0..items.len()).map(|i| value_of(&*items, i)).collect::<Option<_>>().map(Value::Array);
    if column.is_null(row) {
        return Some(Value::Null);
    }
    match column.data_type() {
        DataType::Null => Some(Value::Null),
        DataType::Boolean => Some(Value::Bool(column.as_boolean().value(row))),
        DataType::Utf8 => text(column.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => text(column.as_string::<i64>().value(row)),
        DataType::Utf8View => text(column.as_string_view().value(row)),
        DataType::Int8 => number::<Int8Type>(column, row),
        DataType::Int16 => number::<Int16Type>(column, row),
        DataType::Int32 => number::<Int32Type>(column, row),
        DataType::Int64 => number::<Int64Type>(column, row),
        DataType::UInt8 => number::<UInt8Type>(column, row),
        DataType::UInt16 => number::<UInt16Type>(column, row),
        DataType::UInt32 => number::<UInt32Type>(column, row),
        DataType::UInt64 => number::<UInt64Type>(column, row),
        DataType::Float16 => Some(f32::from(column.as_primitive::<Float16Type>().value(row)).into()),
        DataType::Float32 => number::<Float32Type>(column, row),
        DataType::Float64 => number::<Float64Type>(column, row),
        DataType::List(_) => list(column.as_list::<i32>().value(row)),
        DataType::LargeList(_) => list(column.as_list::<i64>().value(row)),
        DataType::FixedSizeList(..) => list(column.as_fixed_size_list().value(row)),
        DataType::Struct(_) => Some(Value::Object(struct_of(column.as_struct(), row))),
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary_opt()?;
            let key = value_of(dictionary.keys(), row)?.as_u64()?;
            value_of(&**dictionary.values(), usize::try_from(key).ok()?)
        }
        _ => None,
    }
}

fn struct_of(array: &StructArray, row: usize) -> Map<String, Value> {
    let names: Vec<&String> = array.fields().iter().map(|field| field.name()).collect();
    fields_of(&names, array.columns(), row)
}

fn number<T: ArrowPrimitiveType<Native: Into<Value>>>(column: &dyn Array, row: usize) -> Option<Value> {
    Some(column.as_primitive::<T>().value(row).into())
}
