//! Digests of the pages of a weight file, so that a reader verifies what it reads without reading anything else.
//!
//! The safetensors format has no checksum. An export stores the BLAKE3 of its payload in the header, which only a reader of
//! the whole payload can compare. It therefore also writes `NAME.safetensors.digests` beside `NAME.safetensors`: the BLAKE3
//! of the header, and the first 8 bytes of the BLAKE3 of each page of the payload. A page has 4 KiB and the payload starts
//! at a multiple of 4 KiB, so a rank verifies the pages that the disk reads anyway. The digests are 0.2 % of the payload; a
//! rank reads only those of its pages. If they were in the header, every rank would read all of them.
//!
//! Files of other tools have neither. Exports without the digest file, from earlier builds or incomplete copies, are
//! verified as a whole when they are opened.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::HfError;
use super::layout::Header;
use crate::foreign_file;

/// Bytes of a page.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Bytes of the digest of a page.
const DIGEST_BYTES: usize = 8;
/// Bytes of the digest of the header.
const HEADER_DIGEST_BYTES: u64 = 32;

/// A file that counts the bytes read from it.
#[derive(Debug)]
pub(super) struct CountedFile {
    pub(super) path: PathBuf,
    pub(super) len: u64,
    file: File,
    bytes_read: Arc<AtomicU64>,
}

/// Digests of the pages of one file.
#[derive(Debug)]
pub(super) struct Digests {
    file: CountedFile,
    /// Byte range of the payload in the weight file.
    payload: Range<u64>,
}

/// Hashes what is written to it, as a whole and by page.
pub(super) struct PageHasher {
    payload: blake3::Hasher,
    page: blake3::Hasher,
    page_len: usize,
    digests: Vec<u8>,
}

/// The name of a weight file's digest file.
pub(super) fn digests_name(weights: &str) -> String {
    format!("{weights}.digests")
}

impl CountedFile {
    /// Opens a file; its reads add to `bytes_read`.
    pub(super) fn open(path: &Path, bytes_read: &Arc<AtomicU64>) -> Result<Self, HfError> {
        let opened = foreign_file::open(path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (len, file) = opened.map_err(|error| HfError::io("read", path, &error))?;
        Ok(Self { path: path.to_owned(), len, file, bytes_read: bytes_read.clone() })
    }

    /// Reads all of `out` from byte `start` on.
    pub(super) fn read_exact_at(&self, out: &mut [u8], start: u64) -> io::Result<()> {
        self.file.read_exact_at(out, start)?;
        self.bytes_read.fetch_add(out.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl Digests {
    /// Opens the digest file beside a weight file, if it exists.
    ///
    /// # Errors
    /// When the digests belong to another file, or the header is damaged.
    pub(super) fn open(weights: &CountedFile, header: &Header) -> Result<Option<Self>, HfError> {
        let name = weights.path.file_name().unwrap_or_default().to_string_lossy();
        let path = weights.path.with_file_name(digests_name(&name));
        if !foreign_file::is_there(&path).map_err(|error| HfError::io("read", &path, &error))? {
            return Ok(None);
        }
        let file = CountedFile::open(&path, &weights.bytes_read)?;
        let payload = header.payload_start..weights.len;
        let n_pages = (payload.end - payload.start).div_ceil(PAGE_BYTES);
        let mut of_header = [0; HEADER_DIGEST_BYTES as usize];
        let fits = file.len == HEADER_DIGEST_BYTES + n_pages * DIGEST_BYTES as u64;
        if fits {
            file.read_exact_at(&mut of_header, 0).map_err(|error| HfError::io("read", &path, &error))?;
        }
        if !fits || of_header != *header.blake3.as_bytes() {
            let reason =
                format!("its header does not match {}; if the weights were replaced, remove that file", path.display());
            return Err(HfError::BadFile { path: weights.path.clone(), reason });
        }
        Ok(Some(Self { file, payload }))
    }

    /// The pages that contain these bytes of the file.
    pub(super) fn pages_around(&self, bytes: Range<u64>) -> Range<u64> {
        let Range { start, end } = self.payload;
        let first = bytes.start - (bytes.start - start) % PAGE_BYTES;
        first..(start + (bytes.end - start).next_multiple_of(PAGE_BYTES)).min(end)
    }

    /// Reads the digests of these pages.
    pub(super) fn read(&self, pages: &Range<u64>) -> Result<Vec<u8>, HfError> {
        let first = (pages.start - self.payload.start) / PAGE_BYTES;
        let n_pages = (pages.end - pages.start).div_ceil(PAGE_BYTES);
        let mut digests = vec![0; n_pages as usize * DIGEST_BYTES];
        let start = HEADER_DIGEST_BYTES + first * DIGEST_BYTES as u64;
        let read = self.file.read_exact_at(&mut digests, start);
        read.map_err(|error| HfError::io("read", &self.file.path, &error)).map(|()| digests)
    }
}

impl PageHasher {
    pub(super) fn new() -> Self {
        Self { payload: blake3::Hasher::new(), page: blake3::Hasher::new(), page_len: 0, digests: Vec::new() }
    }

    /// The hash of the payload, and the digests of its pages.
    pub(super) fn finish(mut self) -> (String, Vec<u8>) {
        if self.page_len > 0 {
            self.end_page();
        }
        (self.payload.finalize().to_hex().to_string(), self.digests)
    }

    fn end_page(&mut self) {
        self.digests.extend_from_slice(&self.page.finalize().as_bytes()[..DIGEST_BYTES]);
        self.page.reset();
        self.page_len = 0;
    }
}

impl Write for PageHasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.payload.update(bytes);
        let mut rest = bytes;
        while !rest.is_empty() {
            let (of_page, behind) = rest.split_at(rest.len().min(PAGE_BYTES as usize - self.page_len));
            self.page.update(of_page);
            self.page_len += of_page.len();
            if self.page_len == PAGE_BYTES as usize {
                self.end_page();
            }
            rest = behind;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the digest file of a weight file that begins with `header`.
pub(super) fn write_digests(file: &mut impl Write, header: &[u8], digests: &[u8]) -> io::Result<()> {
    file.write_all(blake3::hash(header).as_bytes())?;
    file.write_all(digests)
}

/// Compares whole pages with their digests. Returns the byte range, within `pages`, of the first page that differs.
pub(super) fn first_damaged(pages: &[u8], digests: &[u8]) -> Option<Range<u64>> {
    let differs = |(page, digest): (&[u8], &[u8])| blake3::hash(page).as_bytes()[..DIGEST_BYTES] != *digest;
    let pages = pages.chunks(PAGE_BYTES as usize);
    let at = pages.clone().zip(digests.chunks(DIGEST_BYTES)).position(differs)?;
    let start = at as u64 * PAGE_BYTES;
    Some(start..start + pages.skip(at).map(<[u8]>::len).next().unwrap_or_default() as u64)
}

/// Skips the digests of the first `bytes_before` bytes of pages.
pub(super) fn digests_from(digests: &[u8], bytes_before: u64) -> &[u8] {
    &digests[(bytes_before / PAGE_BYTES) as usize * DIGEST_BYTES..]
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
