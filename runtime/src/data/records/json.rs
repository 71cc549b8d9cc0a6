//! Records in JSON: one object per line, or one list of objects.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{BATCH_BYTES, Content, Numbered, RECORD_BYTES_MAX, ReadError, Records};

const BOM: &[u8] = "\u{feff}".as_bytes();

/// The largest list, which is held in memory.
const LIST_BYTES_MAX: u64 = 4 << 30;

type Input = BufReader<Box<dyn Read>>;

/// Opens JSON; its first character tells a list from lines.
pub(super) fn open(path: &Path, input: Box<dyn Read>) -> Result<Box<dyn Records>, ReadError> {
    let mut input: Input = BufReader::with_capacity(1 << 20, input);
    let head = input.fill_buf().map_err(|error| ReadError::file(path, &error))?;
    let head = head.strip_prefix(BOM).unwrap_or(head);
    let path = path.to_owned();
    match head.iter().find(|byte| !byte.is_ascii_whitespace()) {
        Some(b'[') => Ok(Box::new(List { path, input: Some(input) })),
        _ => Ok(Box::new(Lines { path, input, next_line: 1 })),
    }
}

struct List {
    path: PathBuf,
    /// Not there any more when the list has been read.
    input: Option<Input>,
}

impl Records for List {
    /// A list cannot be split without parsing it, so it is one batch; large data sets use lines.
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        let Some(input) = self.input.take() else { return Ok(Vec::new()) };
        let mut bytes = Vec::new();
        let read = input.take(LIST_BYTES_MAX + 1).read_to_end(&mut bytes);
        if read.map_err(|error| ReadError::file(&self.path, &error))? as u64 > LIST_BYTES_MAX {
            return Err(ReadError::ListTooLarge { path: self.path.clone(), limit_mib: LIST_BYTES_MAX >> 20 });
        }
        let json = bytes.strip_prefix(BOM).unwrap_or(&bytes);
        let records: Vec<Value> =
            serde_json::from_slice(json).map_err(|error| json_error(&self.path, error.line() as u64, &error))?;
        Ok((1..).zip(records).map(|(line, record)| Numbered { line, content: Content::Fields(record) }).collect())
    }
}

struct Lines {
    path: PathBuf,
    input: Input,
    next_line: u64,
}

impl Records for Lines {
    /// The next lines that are not blank.
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        let (mut lines, mut n_bytes) = (Vec::new(), 0);
        while n_bytes < BATCH_BYTES {
            let mut bytes = Vec::new();
            let mut input = self.input.by_ref().take(RECORD_BYTES_MAX + 1);
            let n_read = input.read_until(b'\n', &mut bytes).map_err(|error| ReadError::file(&self.path, &error))?;
            let line = self.next_line;
            if n_read as u64 > RECORD_BYTES_MAX {
                return Err(ReadError::TooLarge { path: self.path.clone(), line, limit_mib: RECORD_BYTES_MAX >> 20 });
            }
            if n_read == 0 {
                break;
            }
            n_bytes += n_read;
            self.next_line += 1;
            if line == 1 && bytes.starts_with(BOM) {
                bytes.drain(..BOM.len());
            }
            if !bytes.trim_ascii().is_empty() {
                lines.push(Numbered { line, content: Content::Json(bytes) });
            }
        }
        Ok(lines)
    }
}

/// serde_json ends its message with a position inside the parsed line, which is not the line of the file.
pub(crate) fn json_error(path: &Path, line: u64, error: &serde_json::Error) -> ReadError {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or(&text);
    let reason = format!("{what} at column {}", error.column());
    ReadError::Record { path: path.to_owned(), line, format: "JSON", reason }
}
