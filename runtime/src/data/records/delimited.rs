//! Records in CSV and TSV: the first line names the fields, every value is text.

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, Read};
use std::path::PathBuf;
use std::rc::Rc;

use csv::{ErrorKind, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

use super::input::Expansion;
use super::{
    BATCH_BYTES, Content, DataFile, Numbered, RECORD_BYTES_MAX, ReadError, Records, STORED_BYTES, VALUE_BYTES,
};

/// Columns of a table. Every record has a field for each, however few characters it has.
const COLUMNS_MAX: usize = 1 << 14;

/// Bytes of the names of all columns.
const NAMES_BYTES_MAX: usize = 1 << 20;

/// Bytes that may still be read for the current record.
type Allowance = Rc<Cell<u64>>;

/// An input that ends with an error where a record exceeds its allowance.
struct Bounded {
    input: Box<dyn Read>,
    allowance: Allowance,
}

impl Read for Bounded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.allowance.get();
        if left == 0 {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let n = self.input.read(bytes)?;
        self.allowance.set(left.saturating_sub(n as u64));
        Ok(n)
    }
}

/// A file whose lines are records.
pub(super) struct Delimited {
    path: PathBuf,
    reader: csv::Reader<Bounded>,
    allowance: Allowance,
    fields: Vec<String>,
    format: &'static str,
    /// 1 if lines end with CR LF: the reader counts a line there only when it reads the next one.
    late: u64,
    expansion: Expansion,
}

impl Delimited {
    /// Reads the names of the fields from the first line.
    pub(super) fn open(file: &DataFile, delimiter: u8, input: Box<dyn Read>) -> Result<Self, ReadError> {
        let (path, expansion) = (file.path(), Expansion::of_records(file));
        let allowance = Allowance::new(Cell::new(RECORD_BYTES_MAX));
        let input = Bounded { input, allowance: Rc::clone(&allowance) };
        let reader = ReaderBuilder::new().delimiter(delimiter).has_headers(true).from_reader(input);
        let format = if delimiter == b'\t' { "TSV" } else { "CSV" };
        let mut file =
            Self { path: path.to_owned(), reader, allowance, fields: Vec::new(), format, late: 0, expansion };
        let fields = file.reader.headers().cloned().map_err(|error| file.error(1, &error))?;
        file.fields = fields.iter().map(str::to_owned).collect();
        let n_lines = 1 + file.fields.concat().matches('\n').count() as u64;
        file.late = (1 + n_lines).saturating_sub(file.reader.position().line());
        let n_bytes: usize = file.fields.iter().map(String::len).sum();
        if file.fields.len() > COLUMNS_MAX || n_bytes > NAMES_BYTES_MAX {
            let (n, limit) = (file.fields.len(), NAMES_BYTES_MAX >> 20);
            let reason = format!(
                "the first line names {n} fields in {n_bytes} bytes; at most {COLUMNS_MAX} in {limit} MiB are read"
            );
            return Err(file.refused(1, reason));
        }
        let mut names = HashSet::new();
        match file.fields.iter().find(|field| !names.insert(field.as_str())) {
            Some(field) => Err(file.refused(1, format!("two columns have the name {field:?}"))),
            None => Ok(file),
        }
    }

    fn error(&self, line: u64, error: &csv::Error) -> ReadError {
        match error.kind() {
            ErrorKind::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                ReadError::TooLarge { path: self.path.clone(), line, limit_mib: RECORD_BYTES_MAX >> 20 }
            }
            ErrorKind::Io(error) => ReadError::file(&self.path, error),
            ErrorKind::UnequalLengths { expected_len, len, .. } => {
                self.refused(line, format!("the first line names {expected_len} fields, but this record has {len}"))
            }
            ErrorKind::Utf8 { err, .. } => {
                self.refused(line, format!("field {} is not UTF-8 text", self.name(err.field())))
            }
            _ => self.refused(line, error.to_string()),
        }
    }

    fn refused(&self, line: u64, reason: String) -> ReadError {
        ReadError::Record { path: self.path.clone(), line, format: self.format, reason }
    }

    fn name(&self, field: usize) -> String {
        self.fields.get(field).map_or_else(|| (field + 1).to_string(), |name| format!("{name:?}"))
    }
}

impl Records for Delimited {
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        let (mut records, mut n_bytes, mut record) = (Vec::new(), 0, StringRecord::new());
        // A record without a character has its fields, too.
        let n_bytes_of_fields: usize = self.fields.iter().map(|name| name.len() + VALUE_BYTES as usize).sum();
        while n_bytes < BATCH_BYTES {
            self.allowance.set(RECORD_BYTES_MAX);
            let line = |position: &csv::Position| position.line() + self.late;
            let next = line(self.reader.position());
            let n_bytes_before = self.reader.position().byte();
            match self.reader.read_record(&mut record) {
                Ok(false) => break,
                Ok(true) => {}
                Err(error) => {
                    let is_of_record =
                        matches!(error.kind(), ErrorKind::UnequalLengths { .. } | ErrorKind::Utf8 { .. });
                    let line = error.position().map_or(next, line);
                    let refused = self.error(line, &error);
                    if !is_of_record {
                        return Err(refused);
                    }
                    let n_bytes_of_record = self.reader.position().byte().saturating_sub(n_bytes_before);
                    self.expansion.spend(n_bytes_of_record)?;
                    n_bytes += n_bytes_of_record as usize + size_of::<Numbered>();
                    records.push(Numbered { line, content: Content::Refused(refused) });
                    continue;
                }
            }
            self.expansion.spend(record.as_slice().len() as u64 + STORED_BYTES * self.fields.len() as u64)?;
            n_bytes += record.as_slice().len() + n_bytes_of_fields + size_of::<Numbered>();
            // As in the peers, a cell without a character has no value.
            let value = |cell: &str| if cell.is_empty() { Value::Null } else { Value::String(cell.to_owned()) };
            let fields: Map<String, Value> = self.fields.iter().cloned().zip(record.iter().map(value)).collect();
            let line = record.position().map_or(next, line);
            records.push(Numbered { line, content: Content::Fields(Value::Object(fields)) });
        }
        Ok(records)
    }
}
