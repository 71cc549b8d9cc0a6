//! The bytes of a data file, decompressed.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{DoneBytes, ReadError};

/// The largest factor by which a plain text may expand; no format expands text that people wrote as much.
const EXPANSION_MAX: u64 = 1000;

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
struct Counted {
    file: File,
    done: DoneBytes,
}

impl Read for Counted {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read(bytes)?;
        self.done.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// The decompressed bytes of a file; `done` counts those read from the file.
pub(super) fn open(path: &Path, compression: Compression, done: &DoneBytes) -> Result<Box<dyn Read>, ReadError> {
    let read_error = |error| ReadError::file(path, &error);
    let file = Counted { file: File::open(path).map_err(read_error)?, done: Arc::clone(done) };
    Ok(match compression {
        Compression::None => Box::new(file),
        // Both formats allow several streams after each other, as `cat a.gz b.gz` writes them.
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file))),
        Compression::Zstd => Box::new(zstd::Decoder::new(file).map_err(read_error)?),
    })
}

/// A decompressed copy of a plain text in `dir`, without a name, so that it ends with the process. Texts are read in pieces
/// by several threads, which a compressed file does not allow.
pub(crate) fn plain_copy(path: &Path, dir: &Path) -> Result<File, ReadError> {
    let read_error = |error| ReadError::file(path, &error);
    let mut input = open(path, Compression::of(path), &DoneBytes::default())?;
    let limit = path.metadata().map_err(read_error)?.len().saturating_mul(EXPANSION_MAX).max(1 << 20);
    let copy_path = dir.join(format!("decompressed-{}", std::process::id()));
    let write_error = |error| ReadError::file(&copy_path, &error);
    std::fs::create_dir_all(dir).map_err(write_error)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    let mut copy = options.open(&copy_path).map_err(write_error)?;
    std::fs::remove_file(&copy_path).map_err(write_error)?;
    let (mut bytes, mut n_copied) = (vec![0; 1 << 18], 0);
    loop {
        let n = input.read(&mut bytes).map_err(read_error)?;
        if n == 0 {
            copy.rewind().map_err(write_error)?;
            return Ok(copy);
        }
        n_copied += n as u64;
        if n_copied > limit {
            return Err(ReadError::Expands { path: path.to_owned(), ratio: EXPANSION_MAX });
        }
        copy.write_all(&bytes[..n]).map_err(write_error)?;
    }
}
