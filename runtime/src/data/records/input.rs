//! The bytes of a data file, decompressed.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{DataFile, DoneBytes, ReadError};

/// The largest factor by which a file may expand; no format expands text that people wrote as much.
const EXPANSION_MAX: u64 = 1000;

/// Bytes of records to which a small file may expand in any case.
const RECORDS_BYTES_MIN: u64 = 64 << 20;

/// Bytes of plain text to which a small file may expand in any case.
const TEXT_BYTES_MIN: u64 = 1 << 20;

/// How a data file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// By the file's name, as `data.jsonl.gz`.
    pub(crate) fn of(path: &Path) -> Self {
        match path.extension().and_then(|e| e.to_str()).map(str::to_ascii_lowercase).as_deref() {
            Some("gz") => Self::Gzip,
            Some("zst" | "zstd") => Self::Zstd,
            _ => Self::None,
        }
    }
}

/// Counts the bytes that are read from a file.
struct Counted<R> {
    input: R,
    done: DoneBytes,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(bytes)?;
        self.done.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// How far a file may still expand.
pub(super) struct Expansion {
    path: PathBuf,
    n_left: u64,
}

impl Expansion {
    /// That of a file whose records are small.
    pub(super) fn of_records(file: &DataFile) -> Self {
        Self::of(file, RECORDS_BYTES_MIN)
    }

    fn of(file: &DataFile, n_bytes_min: u64) -> Self {
        let n_left = file.len().saturating_mul(EXPANSION_MAX).max(n_bytes_min);
        Self { path: file.path().to_owned(), n_left }
    }

    /// Counts what was read: the bytes of texts, and eight for each value.
    pub(super) fn spend(&mut self, n_bytes: u64) -> Result<(), ReadError> {
        let expands = || ReadError::Expands { path: self.path.clone(), ratio: EXPANSION_MAX };
        self.n_left = self.n_left.checked_sub(n_bytes).ok_or_else(expands)?;
        Ok(())
    }
}

/// Ends with an error where a small file becomes bytes that no memory or disk holds.
struct Expanded<R> {
    input: R,
    expansion: Expansion,
}

impl<R: Read> Read for Expanded<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(bytes)?;
        self.expansion.spend(n as u64).map_err(io::Error::other)?;
        Ok(n)
    }
}

/// The decompressed bytes of a file of records; `done` counts those read from the file.
pub(super) fn open(file: &DataFile, done: &DoneBytes) -> Result<Box<dyn Read>, ReadError> {
    decompressed(file, done, RECORDS_BYTES_MIN)
}

fn decompressed(file: &DataFile, done: &DoneBytes, n_bytes_min: u64) -> Result<Box<dyn Read>, ReadError> {
    let input = Counted { input: file.reader(), done: Arc::clone(done) };
    let expansion = Expansion::of(file, n_bytes_min);
    Ok(match Compression::of(file.path()) {
        Compression::None => Box::new(input),
        // Both formats allow several streams after each other, as `cat a.gz b.gz` writes them.
        Compression::Gzip => {
            let input = flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(1 << 18, input));
            Box::new(Expanded { input, expansion })
        }
        Compression::Zstd => {
            let input = zstd::Decoder::new(input).map_err(|error| ReadError::file(file.path(), &error))?;
            Box::new(Expanded { input, expansion })
        }
    })
}

/// A decompressed copy of a plain text in `dir`, without a name, so that nobody else opens it and it ends with the process. Texts
/// are read in pieces by several threads, which a compressed file does not allow. `goes_on` is called now and then.
pub(crate) fn plain_copy(file: &DataFile, dir: &Path, goes_on: impl Fn()) -> Result<File, ReadError> {
    let read_error = |error| ReadError::file(file.path(), &error);
    let write_error = |error| ReadError::file(dir, &error);
    let mut input = decompressed(file, &DoneBytes::default(), TEXT_BYTES_MIN)?;
    std::fs::create_dir_all(dir).map_err(write_error)?;
    let mut copy = tempfile::tempfile_in(dir).map_err(write_error)?;
    let mut bytes = vec![0; 1 << 18];
    loop {
        let n = input.read(&mut bytes).map_err(read_error)?;
        if n == 0 {
            copy.rewind().map_err(write_error)?;
            return Ok(copy);
        }
        copy.write_all(&bytes[..n]).map_err(write_error)?;
        goes_on();
    }
}
