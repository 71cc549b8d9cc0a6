//! Records in JSON: one object per line, or one list of objects.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{BATCH_BYTES, Content, DECODED_BYTES_MAX, Numbered, RECORD_BYTES_MAX, ReadError, Records, VALUE_BYTES};
use crate::data::exact_json;

const BOM: &[u8] = "\u{feff}".as_bytes();

type Input = BufReader<Box<dyn Read>>;

/// Opens JSON; its first character tells a list from lines.
pub(super) fn open(path: &Path, input: Box<dyn Read>) -> Result<Box<dyn Records>, ReadError> {
    let mut input: Input = BufReader::with_capacity(1 << 20, input);
    let head = input.fill_buf().map_err(|error| ReadError::file(path, &error))?;
    let n_bom = if head.starts_with(BOM) { BOM.len() } else { 0 };
    let blanks = head[n_bom..].iter().take_while(|byte| byte.is_ascii_whitespace());
    let (n_blanks, n_lines) = blanks.fold((0, 0), |(n, lines), byte| (n + 1, lines + u64::from(*byte == b'\n')));
    let is_list = head.get(n_bom + n_blanks) == Some(&b'[');
    let path = path.to_owned();
    if is_list {
        input.consume(n_bom + n_blanks + 1);
        return Ok(Box::new(List { path, input, line: 1 + n_lines, n_items: 0, is_ended: false }));
    }
    Ok(Box::new(Lines { path, input, next_line: 1 }))
}

/// A list after its bracket. It is divided into items by brackets and commas, without parsing them.
struct List {
    path: PathBuf,
    input: Input,
    /// Line of the file, from 1.
    line: u64,
    n_items: u64,
    is_ended: bool,
}

/// Where a byte of JSON is.
#[derive(Default)]
struct Place {
    depth: u64,
    in_string: bool,
    is_escaped: bool,
}

impl Place {
    /// Takes the next byte; whether it ends an item of the list around it.
    fn ends_item(&mut self, byte: u8) -> bool {
        match (self.in_string, byte) {
            (true, _) if self.is_escaped => self.is_escaped = false,
            (true, b'\\') => self.is_escaped = true,
            (_, b'"') => self.in_string = !self.in_string,
            (true, _) => {}
            (false, b',' | b']') if self.depth == 0 => return true,
            (false, b'[' | b'{') => self.depth += 1,
            (false, b']' | b'}') => self.depth = self.depth.saturating_sub(1),
            (false, _) => {}
        }
        false
    }
}

impl List {
    /// The next item and the line that it begins at.
    fn next_item(&mut self) -> Result<Option<(Vec<u8>, u64)>, ReadError> {
        if self.is_ended {
            return Ok(None);
        }
        let (mut item, mut place, first_line) = (Vec::new(), Place::default(), self.line);
        loop {
            let bytes = self.input.fill_buf().map_err(|error| ReadError::file(&self.path, &error))?;
            if bytes.is_empty() {
                return Err(self.refused("the list is not closed"));
            }
            let end = bytes.iter().position(|byte| place.ends_item(*byte));
            let part = &bytes[..end.unwrap_or(bytes.len())];
            let is_last = end.is_some_and(|end| bytes[end] == b']');
            item.extend_from_slice(part);
            self.line += part.iter().filter(|byte| **byte == b'\n').count() as u64;
            let n_read = part.len() + usize::from(end.is_some());
            self.input.consume(n_read);
            if item.len() as u64 > RECORD_BYTES_MAX {
                let (path, line) = (self.path.clone(), self.n_items + 1);
                return Err(ReadError::TooLarge { path, line, limit_mib: RECORD_BYTES_MAX >> 20 });
            }
            if end.is_none() {
                continue;
            }
            let is_blank = item.trim_ascii().is_empty();
            if is_last {
                self.end()?;
            }
            return match is_blank {
                true if is_last && self.n_items == 0 => Ok(None),
                true => Err(self.refused("expected a value between commas")),
                false => {
                    self.n_items += 1;
                    Ok(Some((item, first_line)))
                }
            };
        }
    }

    /// Checks that nothing follows the list.
    fn end(&mut self) -> Result<(), ReadError> {
        self.is_ended = true;
        loop {
            let bytes = self.input.fill_buf().map_err(|error| ReadError::file(&self.path, &error))?;
            if bytes.is_empty() {
                return Ok(());
            }
            if !bytes.trim_ascii().is_empty() {
                return Err(self.refused("there is more after the end of the list"));
            }
            let n_read = bytes.len();
            self.input.consume(n_read);
        }
    }

    fn refused(&self, reason: &str) -> ReadError {
        ReadError::Record { path: self.path.clone(), line: self.line, format: "JSON", reason: reason.to_owned() }
    }
}

impl Records for List {
    fn next_batch(&mut self) -> Result<Vec<Numbered>, ReadError> {
        let (mut items, mut n_bytes) = (Vec::new(), 0);
        while n_bytes < BATCH_BYTES {
            let Some((bytes, first_line)) = self.next_item()? else { break };
            n_bytes += bytes.len() + size_of::<Numbered>();
            items.push(Numbered { line: self.n_items, content: Content::Json { bytes, first_line } });
        }
        Ok(items)
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
            if bytes.ends_with(b"\n") {
                bytes.pop();
            }
            if !bytes.trim_ascii().is_empty() {
                n_bytes += size_of::<Numbered>();
                lines.push(Numbered { line, content: Content::Json { bytes, first_line: line } });
            }
        }
        Ok(lines)
    }
}

impl Numbered {
    /// The fields of the record, which is in the file at `path`.
    pub(crate) fn into_value(self, path: &Path) -> Result<Value, ReadError> {
        let (bytes, first_line) = match self.content {
            Content::Fields(record) => return Ok(record),
            Content::Refused(error) => return Err(error),
            Content::Json { bytes, first_line } => (bytes, first_line),
        };
        if decoded_bytes(&bytes) > DECODED_BYTES_MAX {
            let limit_mib = DECODED_BYTES_MAX >> 20;
            return Err(ReadError::TooLarge { path: path.to_owned(), line: self.line, limit_mib });
        }
        exact_json::from_slice(&bytes).map_err(|error| json_error(path, first_line, &error))
    }
}

/// The bytes that a text in JSON needs at most in memory: every value takes as many as the largest.
pub(super) fn decoded_bytes(bytes: &[u8]) -> u64 {
    let n_values = bytes.iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count() as u64;
    (bytes.len() as u64).saturating_add(n_values.saturating_mul(VALUE_BYTES))
}

/// serde_json ends its message with a position inside the parsed text, which begins at `first_line` of the file.
fn json_error(path: &Path, first_line: u64, error: &serde_json::Error) -> ReadError {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or(&text);
    let reason = format!("{what} at column {}", error.column());
    let line = first_line + (error.line() as u64).saturating_sub(1);
    ReadError::Record { path: path.to_owned(), line, format: "JSON", reason }
}
