//! Token ids on disk: written once, verified whole, mapped into memory while a job prepares its data.
//!
//! File, all numbers little-endian: a `Header` of 184 bytes, the tokens (4 bytes each, `TRAINED` marks those to predict, `UNDESIRABLE` those of undesirable answers),
//! how much each of them counts (4 bytes each) if the magic number is that of weighted tokens, else 4 bytes of zero if their number is odd, the ends of the documents (16 bytes each), then the records that were left out, as a list in
//! JSON, if there are any. The digest of the tokens is without these, so that other sentences about them are no other data.
//!
//! Invariants:
//! - `TOKEN-CACHE-1` A file with a final name is complete: it gets the name after everything is on disk.
//! - `TOKEN-CACHE-2` A file is used only if its header, its length, its key and the checksum of every byte agree.
//! - `TOKEN-CACHE-3` A temporary file is locked while its writer lives. The next writer removes those that are not.
#![allow(unsafe_code)] // A memory map of a file is unsafe by nature; see `TokenFile::open`.

use std::fs::{DirEntry, File, TryLockError};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::token_cache_format::{DocumentEnd, LISTED_MAX, MARKS, SkippedRecord, TokenCacheError};
use super::token_reader::TokenReader;
use bytemuck::{Pod, Zeroable};
use memmap2::Mmap;
use phalanx_storage::sync_dir::sync_dir;

/// Part of every key: a change of the format, or of how text becomes tokens, must change it.
pub(crate) const FORMAT_VERSION: u32 = 4;

const MAGIC: [u8; 8] = *b"PHXTOKEN";
/// That of a file in which not all tokens count once.
const MAGIC_WEIGHTED: [u8; 8] = *b"PHXWEIGH";
/// Weights that are copied at a time.
const WEIGHTS_AT_A_TIME: usize = 1 << 14;
const HEADER_BYTES: usize = size_of::<Header>();
const _: () = assert!(HEADER_BYTES == 184 && cfg!(target_endian = "little"));

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: [u8; 8],
    version: u32,
    max_id: u32,
    n_tokens: u64,
    n_documents: u64,
    /// Records that were read, and how many of them were left out.
    n_records: u64,
    n_skipped: u64,
    /// Length of the list of these.
    skipped_bytes: u64,
    key: [u8; 32],
    /// Hash of tokens and documents.
    payload_hash: [u8; 32],
    skipped_hash: [u8; 32],
    /// Hash of the fields before it.
    header_hash: [u8; 32],
}

impl Header {
    fn hash(&self) -> [u8; 32] {
        *blake3::hash(&bytemuck::bytes_of(self)[..HEADER_BYTES - 32]).as_bytes()
    }

    /// Where tokens with their weights end and documents begin, where these end, and where the file does; `None` if no file can be that long.
    fn ends(&self) -> Option<[u64; 3]> {
        let behind = if self.has_weights() { self.n_tokens } else { self.n_tokens % 2 };
        let tokens = self.n_tokens.checked_add(behind)?.checked_mul(4)?.checked_add(HEADER_BYTES as u64)?;
        let documents = self.n_documents.checked_mul(size_of::<DocumentEnd>() as u64)?.checked_add(tokens)?;
        Some([tokens, documents, documents.checked_add(self.skipped_bytes)?])
    }

    fn has_weights(&self) -> bool {
        self.magic == MAGIC_WEIGHTED
    }

    /// The same of a file whose length was checked.
    fn places(&self) -> [usize; 3] {
        self.ends().expect("a file has this length").map(|end| end as usize)
    }
}

/// The path of the tokens with content key `key`.
pub(crate) fn cache_path(dir: &Path, key: &[u8; 32]) -> PathBuf {
    dir.join(format!("{}.tokens", blake3::Hash::from_bytes(*key).to_hex()))
}

/// A checked token file, mapped into memory.
#[derive(Debug)]
pub(crate) struct TokenFile {
    file: File,
    path: PathBuf,
    map: Mmap,
    header: Header,
    skipped: Vec<SkippedRecord>,
}

impl TokenFile {
    /// Maps and checks the file; `Ok(None)` if there is none.
    pub(crate) fn open(dir: &Path, key: &[u8; 32]) -> Result<Option<Self>, TokenCacheError> {
        let path = cache_path(dir, key);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("open", &path, &error)),
        };
        // SAFETY: the map must not change while it is borrowed. Files are complete before they get this name
        // (TOKEN-CACHE-1) and are not written afterwards: rebuilding renames another file over the name, which leaves
        // the mapped file untouched. Editing files of the cache folder in place breaks the contract; the map lives only
        // until the rows are laid out.
        let map = unsafe { Mmap::map(&file) }.map_err(|error| io_error("map", &path, &error))?;
        match Self::check(&map, key) {
            Ok((header, skipped)) => Ok(Some(Self { file, path, map, header, skipped })),
            Err(reason) => Err(TokenCacheError::Damaged { path, reason }),
        }
    }

    /// `TOKEN-CACHE-2`; the error names the mismatch.
    fn check(map: &[u8], key: &[u8; 32]) -> Result<(Header, Vec<SkippedRecord>), &'static str> {
        let bytes = map.get(..HEADER_BYTES).ok_or("it is shorter than its header")?;
        let header: Header = bytemuck::pod_read_unaligned(bytes);
        if ![MAGIC, MAGIC_WEIGHTED].contains(&header.magic) || header.version != FORMAT_VERSION {
            return Err("it is not a token file of this version");
        }
        if header.header_hash != header.hash() {
            return Err("its header does not match its checksum");
        }
        if header.key != *key {
            return Err("it belongs to other data");
        }
        if header.ends().map(|[.., end]| end) != Some(map.len() as u64) {
            return Err("its length is not the one in its header");
        }
        let [_, documents_end, _] = header.places();
        let (payload, skipped) = map[HEADER_BYTES..].split_at(documents_end - HEADER_BYTES);
        if [payload, skipped].map(|bytes| *blake3::hash(bytes).as_bytes()) != [header.payload_hash, header.skipped_hash]
        {
            return Err("its content does not match its checksum");
        }
        let documents = bytes_of_documents(map, &header);
        let ends = documents.chunks_exact(size_of::<DocumentEnd>()).map(bytemuck::pod_read_unaligned::<DocumentEnd>);
        let in_order = ends.map(|document| document.end).try_fold(0, |last, end| (last <= end).then_some(end));
        if in_order.is_none_or(|last| last > header.n_tokens) {
            return Err("its documents are not in order or exceed its tokens");
        }
        let skipped: Vec<SkippedRecord> = match skipped {
            [] => Vec::new(),
            list => serde_json::from_slice(list).map_err(|_| "its list of records left out is not one")?,
        };
        if skipped.len() as u64 > header.n_skipped || header.n_skipped > header.n_records {
            return Err("it counts fewer records than it lists");
        }
        Ok((header, skipped))
    }

    /// The stored tokens, with their [`MARKS`].
    pub(crate) fn tokens(&self) -> &[u32] {
        let n = self.header.n_tokens as usize;
        bytemuck::cast_slice(&self.map[HEADER_BYTES..HEADER_BYTES + 4 * n])
    }

    /// The documents in file order.
    pub(crate) fn documents(&self) -> &[DocumentEnd] {
        bytemuck::cast_slice(bytes_of_documents(&self.map, &self.header))
    }

    /// Digest of the tokens, their marks for prediction, and the documents.
    pub(crate) const fn digest(&self) -> [u8; 32] {
        self.header.payload_hash
    }

    /// Records that were read, of a file that has records.
    pub(crate) const fn n_records(&self) -> u64 {
        self.header.n_records
    }

    /// Records among them that were left out because they cannot be used.
    pub(crate) const fn n_skipped(&self) -> u64 {
        self.header.n_skipped
    }

    /// The first of these.
    pub(crate) fn skipped(&self) -> &[SkippedRecord] {
        &self.skipped
    }

    /// The tokens of document `number`, at most `max` of them.
    pub(crate) fn document(&self, number: u32, max: usize) -> &[u32] {
        let (documents, number) = (self.documents(), number as usize);
        let start = if number == 0 { 0 } else { documents[number - 1].end as usize };
        &self.tokens()[start..(documents[number].end as usize).min(start.saturating_add(max))]
    }

    /// Reads the same file without a map.
    pub(crate) fn into_reader(self) -> TokenReader {
        let [documents_at, ..] = self.header.places();
        let weights_at = HEADER_BYTES as u64 + 4 * self.header.n_tokens;
        let weights_at = self.header.has_weights().then_some(weights_at);
        TokenReader::new(self.file, self.path, HEADER_BYTES as u64, weights_at, documents_at as u64)
    }

    /// The largest id; 0 if there is no token.
    pub(crate) fn max_id(&self) -> u32 {
        self.header.max_id
    }
}

/// The bytes of the documents' ends, in a file of the length in its header.
fn bytes_of_documents<'a>(map: &'a [u8], header: &Header) -> &'a [u8] {
    let [tokens_end, documents_end, _] = header.places();
    &map[tokens_end..documents_end]
}

/// For fuzz targets.
#[cfg(feature = "fuzzing")]
impl TokenFile {
    /// Checks a file; returns its numbers of tokens and documents, and the total length of its documents.
    pub(crate) fn measure(map: &[u8], key: &[u8; 32]) -> Option<(usize, usize, usize)> {
        let (header, _) = Self::check(map, key).ok()?;
        let ends = bytes_of_documents(map, &header).chunks_exact(size_of::<DocumentEnd>());
        let ends: Vec<u64> = ends.map(|bytes| bytemuck::pod_read_unaligned::<DocumentEnd>(bytes).end).collect();
        let starts = std::iter::once(&0).chain(&ends);
        let lens = starts.zip(&ends).map(|(start, end)| (end - start) as usize);
        Some((header.n_tokens as usize, ends.len(), lens.sum()))
    }

    /// A token file with these contents and valid checksums.
    pub(crate) fn bytes_of(key: &[u8; 32], tokens: &[u32], ends: &[u64]) -> Vec<u8> {
        let padding = vec![0u32; tokens.len() % 2];
        let documents: Vec<DocumentEnd> = ends.iter().zip(1..).map(|(&end, line)| DocumentEnd { end, line }).collect();
        let payload =
            [bytemuck::cast_slice(tokens), bytemuck::cast_slice(&padding), bytemuck::cast_slice(&documents)].concat();
        let mut header = Header {
            magic: MAGIC,
            version: FORMAT_VERSION,
            key: *key,
            n_tokens: tokens.len() as u64,
            n_documents: ends.len() as u64,
            payload_hash: *blake3::hash(&payload).as_bytes(),
            skipped_hash: *blake3::hash(&[]).as_bytes(),
            ..Header::zeroed()
        };
        header.header_hash = header.hash();
        [bytemuck::bytes_of(&header), &payload].concat()
    }
}

/// Writes a token file from front to back; memory does not grow with the number of tokens.
#[must_use = "nothing is kept unless the writer is finished"]
#[derive(Debug)]
pub(crate) struct TokenWriter {
    file: BufWriter<File>,
    temporary: PathBuf,
    dir: PathBuf,
    header: Header,
    hasher: blake3::Hasher,
    /// How much the tokens count, once one does not count once: a file without a name, as the tokens come first.
    weights: Option<BufWriter<File>>,
    documents: Vec<DocumentEnd>,
    skipped: Vec<SkippedRecord>,
    finished: bool,
}

impl TokenWriter {
    pub(crate) fn create(dir: &Path, key: &[u8; 32]) -> Result<Self, TokenCacheError> {
        std::fs::create_dir_all(dir).map_err(|error| io_error("create the folder of", dir, &error))?;
        remove_abandoned(dir);
        let (temporary, file) = create_temporary(&cache_path(dir, key))?;
        let header = Header { magic: MAGIC, version: FORMAT_VERSION, key: *key, ..Header::zeroed() };
        let mut writer = Self {
            file: BufWriter::new(file),
            temporary,
            dir: dir.to_owned(),
            header,
            hasher: blake3::Hasher::new(),
            weights: None,
            documents: Vec::new(),
            skipped: Vec::new(),
            finished: false,
        };
        writer.file.write_all(&[0; HEADER_BYTES]).map_err(|error| writer.error(&error))?;
        Ok(writer)
    }

    /// Appends tokens to the current document, and how much each counts, as bits of f32; without weights, each counts once.
    pub(crate) fn push(&mut self, tokens: &[u32], weights: &[u32]) -> Result<(), TokenCacheError> {
        assert!(weights.is_empty() || weights.len() == tokens.len(), "a weight for each token");
        self.push_weights(tokens.len(), weights).map_err(|error| self.error(&error))?;
        let largest = tokens.iter().map(|token| token & !MARKS).max().unwrap_or(0);
        self.header.max_id = self.header.max_id.max(largest);
        self.header.n_tokens += tokens.len() as u64;
        self.write(bytemuck::cast_slice(tokens))
    }

    fn push_weights(&mut self, n_tokens: usize, weights: &[u32]) -> std::io::Result<()> {
        if self.weights.is_none() && weights.is_empty() {
            return Ok(());
        }
        if self.weights.is_none() {
            let file = self.weights.insert(BufWriter::new(tempfile::tempfile_in(&self.dir)?));
            write_ones(file, self.header.n_tokens)?;
            self.header.magic = MAGIC_WEIGHTED;
        }
        let file = self.weights.as_mut().expect("it is there by now");
        match weights {
            [] => write_ones(file, n_tokens as u64),
            weights => file.write_all(bytemuck::cast_slice(weights)),
        }
    }

    /// Appends the weights to the tokens.
    fn take_weights(&mut self, weights: BufWriter<File>) -> Result<(), TokenCacheError> {
        let mut file = weights.into_inner().map_err(|error| self.error(error.error()))?;
        file.rewind().map_err(|error| self.error(&error))?;
        let mut bytes = vec![0; 4 * WEIGHTS_AT_A_TIME];
        let mut left = 4 * self.header.n_tokens;
        while left > 0 {
            let some = &mut bytes[..left.min(4 * WEIGHTS_AT_A_TIME as u64) as usize];
            file.read_exact(some).map_err(|error| self.error(&error))?;
            left -= some.len() as u64;
            self.write(some)?;
        }
        Ok(())
    }

    /// Ends the current document, which came from `line`.
    pub(crate) fn end_document(&mut self, line: u64) {
        self.documents.push(DocumentEnd { end: self.header.n_tokens, line });
    }

    /// Counts records that were read.
    pub(crate) fn count_records(&mut self, n: u64) {
        self.header.n_records += n;
    }

    /// Leaves out a record.
    pub(crate) fn skip(&mut self, record: SkippedRecord) {
        self.header.n_skipped += 1;
        if self.skipped.len() < LISTED_MAX {
            self.skipped.push(record);
        }
    }

    pub(crate) const fn n_records(&self) -> u64 {
        self.header.n_records
    }

    pub(crate) const fn n_skipped(&self) -> u64 {
        self.header.n_skipped
    }

    /// Stores the file under its final name and opens it.
    pub(crate) fn finish(mut self) -> Result<TokenFile, TokenCacheError> {
        match self.weights.take() {
            Some(weights) => self.take_weights(weights)?,
            None if self.header.n_tokens % 2 == 1 => self.write(&[0; 4])?,
            None => {}
        }
        let documents = std::mem::take(&mut self.documents);
        self.write(bytemuck::cast_slice(&documents))?;
        self.header.n_documents = documents.len() as u64;
        self.header.payload_hash = *self.hasher.finalize().as_bytes();
        let skipped = match &self.skipped[..] {
            [] => Vec::new(),
            some => serde_json::to_vec(some).expect("numbers and texts are JSON"),
        };
        self.header.skipped_bytes = skipped.len() as u64;
        self.header.skipped_hash = *blake3::hash(&skipped).as_bytes();
        self.file.write_all(&skipped).map_err(|error| self.error(&error))?;
        self.header.header_hash = self.header.hash();
        self.put_on_disk().map_err(|error| self.error(&error))?;
        self.finished = true;
        let key = self.header.key;
        TokenFile::open(&self.dir, &key)?.ok_or_else(|| TokenCacheError::Io {
            action: "open",
            path: cache_path(&self.dir, &key),
            reason: "it was removed as soon as it was written".to_owned(),
        })
    }

    fn put_on_disk(&mut self) -> std::io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(bytemuck::bytes_of(&self.header))?;
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        std::fs::rename(&self.temporary, cache_path(&self.dir, &self.header.key))?;
        // The new name is durable only once the folder is synced.
        sync_dir(&self.dir)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), TokenCacheError> {
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(|error| self.error(&error))
    }

    fn error(&self, error: &std::io::Error) -> TokenCacheError {
        io_error("write", &self.temporary, error)
    }
}

impl Drop for TokenWriter {
    fn drop(&mut self) {
        if !self.finished {
            // Best effort: a leftover file is never read, it only takes space.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Appends as many weights of 1.
fn write_ones(file: &mut BufWriter<File>, n: u64) -> std::io::Result<()> {
    let ones = [1.0f32; 256];
    for first in (0..n).step_by(ones.len()) {
        file.write_all(bytemuck::cast_slice(&ones[..ones.len().min((n - first) as usize)]))?;
    }
    Ok(())
}

/// A new file beside `path`, never one of another writer, which may run on another machine with the same process id. It is locked
/// until it is closed (TOKEN-CACHE-3).
pub(super) fn create_temporary(path: &Path) -> Result<(PathBuf, File), TokenCacheError> {
    for attempt in 0u64.. {
        let temporary = path.with_extension(format!("tmp-{}-{attempt}", std::process::id()));
        match File::create_new(&temporary) {
            // Another process may have taken it for abandoned before it was locked.
            Ok(file) => match file.try_lock() {
                Err(TryLockError::WouldBlock) => {}
                Ok(()) if !temporary.exists() => {}
                Ok(()) | Err(TryLockError::Error(_)) => return Ok((temporary, file)),
            },
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(io_error("create", &temporary, &error)),
        }
    }
    unreachable!("a folder holds fewer than 2^64 files")
}

/// Removes the temporary files of processes that were killed: those that nobody has locked. Where the system has no locks of files,
/// they stay.
fn remove_abandoned(dir: &Path) {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let is_temporary = |entry: &DirEntry| entry.file_name().to_string_lossy().contains(".tmp-");
    for path in entries.filter(is_temporary).map(|entry| entry.path()) {
        let Ok(file) = File::open(&path) else { continue };
        if file.try_lock().is_ok() {
            tracing::info!(path = %path.display(), "removing what a killed process has left");
            // It is never read, it only takes space.
            let _ = std::fs::remove_file(&path);
        }
    }
}

pub(super) fn io_error(action: &'static str, path: &Path, error: &std::io::Error) -> TokenCacheError {
    TokenCacheError::Io { action, path: path.to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::token_cache_format::TRAINED;

    const KEY: [u8; 32] = [7; 32];

    fn written(dir: &Path) -> TokenFile {
        let mut writer = TokenWriter::create(dir, &KEY).unwrap();
        writer.push(&[1, 2 | TRAINED], &[]).unwrap();
        writer.end_document(1);
        writer.push(&[900 | TRAINED], &[]).unwrap();
        writer.end_document(4);
        writer.count_records(3);
        writer.skip(SkippedRecord { line: 2, error: "why".to_owned() });
        writer.finish().unwrap()
    }

    #[test]
    fn tokens_and_documents_come_back_as_written() {
        let dir = tempfile::tempdir().unwrap();
        written(dir.path());

        let file = TokenFile::open(dir.path(), &KEY).unwrap().unwrap();

        assert_eq!(file.tokens(), [1, 2 | TRAINED, 900 | TRAINED]);
        assert_eq!(file.documents(), [DocumentEnd { end: 2, line: 1 }, DocumentEnd { end: 3, line: 4 }]);
        assert_eq!(file.max_id(), 900);
        assert_eq!((file.n_records(), file.n_skipped()), (3, 1));
        assert_eq!(file.skipped(), [SkippedRecord { line: 2, error: "why".to_owned() }]);
        let reader = file.into_reader();
        assert_eq!(reader.document(1, 9), Ok(2..3));
    }

    #[test]
    fn weights_come_back_as_written_and_are_ones_where_there_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let written = |weights: &[f32]| {
            let mut writer = TokenWriter::create(dir.path(), &KEY).unwrap();
            writer.push(&vec![1 | TRAINED; 700], &[]).unwrap();
            writer.push(&[2, 3], &weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>()).unwrap();
            writer.push(&[4 | TRAINED], &[]).unwrap();
            writer.end_document(1);
            drop(writer.finish().unwrap());
            let (file, n_files) = (TokenFile::open(dir.path(), &KEY).unwrap().unwrap(), std::fs::read_dir(dir.path()));
            assert_eq!((file.tokens().len(), file.documents()[0].end, n_files.unwrap().count()), (703, 703, 1));
            let (digest, reader, mut weights) = (file.digest(), file.into_reader(), [f32::NAN; 5]);
            reader.read_weights(698, &mut weights).unwrap();
            (weights, digest)
        };

        let [(weights, digest), (ones, of_ones), (none, of_none)] = [&[0.5, 3.0][..], &[1.0, 1.0], &[]].map(written);

        assert_eq!((weights, ones, none), ([1.0, 1.0, 0.5, 3.0, 1.0], [1.0; 5], [1.0; 5]));
        assert!(digest != of_ones && digest != of_none);
    }

    #[test]
    fn digest_is_that_of_the_tokens_whatever_the_sentences_about_records_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let digest = |error: Option<&str>| {
            let mut writer = TokenWriter::create(dir.path(), &KEY).unwrap();
            writer.push(&[1, 2], &[]).unwrap();
            writer.end_document(2);
            writer.count_records(2);
            error.into_iter().for_each(|error| writer.skip(SkippedRecord { line: 1, error: error.to_owned() }));
            writer.finish().unwrap().digest()
        };

        assert_eq!(digest(Some("a")), digest(Some("b")));
        assert_eq!(digest(Some("a")), digest(None));
    }

    #[test]
    fn absent_file_is_no_error() {
        let dir = tempfile::tempdir().unwrap();

        assert!(TokenFile::open(dir.path(), &KEY).unwrap().is_none());
    }

    // TOKEN-CACHE-2
    #[test]
    fn flipped_byte_or_truncation_is_detected() {
        let weighted = |dir: &Path| {
            let mut writer = TokenWriter::create(dir, &KEY).unwrap();
            writer.push(&[1, 2, 3], &[0.5f32, 1.0, 2.0].map(f32::to_bits)).unwrap();
            writer.end_document(1);
            writer.finish().unwrap()
        };
        for write in [&written as &dyn Fn(&Path) -> TokenFile, &weighted] {
            let dir = tempfile::tempdir().unwrap();
            drop(write(dir.path()));
            let path = cache_path(dir.path(), &KEY);
            let good = std::fs::read(&path).unwrap();

            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                std::fs::write(&path, &bad).unwrap();
                assert!(matches!(TokenFile::open(dir.path(), &KEY), Err(TokenCacheError::Damaged { .. })), "byte {at}");
                std::fs::write(&path, &good[..at]).unwrap();
                assert!(TokenFile::open(dir.path(), &KEY).is_err(), "cut at {at}");
            }
        }
    }

    // TOKEN-CACHE-2
    #[test]
    fn documents_outside_their_tokens_are_detected_despite_valid_checksums() {
        let dir = tempfile::tempdir().unwrap();
        for (n_tokens, ends) in [(3, [2, 9]), (3, [3, 2]), (0, [u64::MAX, 0])] {
            let mut writer = TokenWriter::create(dir.path(), &KEY).unwrap();
            writer.push(&vec![1; n_tokens], &[]).unwrap();
            writer.documents = ends.map(|end| DocumentEnd { end, line: 1 }).to_vec();

            let written = writer.finish();

            assert!(matches!(written, Err(TokenCacheError::Damaged { .. })), "{ends:?}");
        }
    }

    // TOKEN-CACHE-3
    #[test]
    fn next_writer_removes_the_temporary_files_of_killed_writers_only() {
        let dir = tempfile::tempdir().unwrap();
        let left = cache_path(dir.path(), &KEY).with_extension("tmp-1-0");
        std::fs::write(&left, "half").unwrap();
        let alive = TokenWriter::create(dir.path(), &[8; 32]).unwrap();

        written(dir.path());

        assert!(!left.exists());
        assert!(alive.temporary.exists() && alive.finish().is_ok());
    }

    #[test]
    fn two_writers_of_one_key_do_not_disturb_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = TokenWriter::create(dir.path(), &KEY).unwrap();
        let second = written(dir.path());

        first.push(&[5], &[]).unwrap();
        first.end_document(1);
        let first = first.finish().unwrap();

        assert_eq!((first.tokens(), second.tokens().len()), (&[5][..], 3));
    }

    #[test]
    fn file_of_other_data_under_this_name_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        drop(written(dir.path()));
        let other = [8; 32];
        std::fs::rename(cache_path(dir.path(), &KEY), cache_path(dir.path(), &other)).unwrap();

        let error = TokenFile::open(dir.path(), &other).unwrap_err();

        assert!(error.to_string().contains("other data"), "{error}");
    }

    // TOKEN-CACHE-1
    #[test]
    fn abandoned_writer_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = TokenWriter::create(dir.path(), &KEY).unwrap();
        writer.push(&[1, 2, 3], &[]).unwrap();

        drop(writer);

        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
