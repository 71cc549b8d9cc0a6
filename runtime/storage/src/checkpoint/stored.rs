//! The files of a checkpoint: opened on demand, verified chunk by chunk when they are first read.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use super::contents::Contents;
use super::error::CheckpointError;
use super::index::FileEntry;
use super::store::{Store, StoredFile, absent};

/// Files held open at a time. Thousands of ranks write thousands of files; by default a process may have 1024 open.
const OPEN_MAX: usize = 128;

/// Files by name, with what is known about each.
#[derive(Debug)]
pub(super) struct StoredFiles {
    store: Arc<dyn Store>,
    dir: PathBuf,
    hash_chunk_bytes: u64,
    files: BTreeMap<String, KnownFile>,
    /// Names of open files, the longest open first.
    open: Mutex<VecDeque<String>>,
    /// Buffers for chunks that are needed only in part. Faulting in new pages takes longer than reading into them.
    spare: Mutex<Vec<Vec<u8>>>,
}

#[derive(Debug)]
struct KnownFile {
    entry: FileEntry,
    handle: Mutex<Handle>,
    /// Whether each hash chunk has been verified.
    verified: Vec<AtomicBool>,
}

#[derive(Debug, Default)]
struct Handle {
    file: Option<Arc<dyn StoredFile>>,
    /// Identity of the file at its last opening.
    identity: String,
}

impl StoredFiles {
    pub(super) fn new(store: Arc<dyn Store>, dir: &Path, contents: &Contents) -> Self {
        let known = |entry: &FileEntry| KnownFile {
            entry: entry.clone(),
            handle: Mutex::default(),
            verified: entry.blake3.iter().map(|_| AtomicBool::new(false)).collect(),
        };
        let files = contents.files.iter().map(|(name, entry)| (name.clone(), known(entry))).collect();
        let hash_chunk_bytes = contents.hash_chunk_bytes;
        Self { store, dir: dir.to_owned(), hash_chunk_bytes, files, open: Mutex::default(), spare: Mutex::default() }
    }

    /// Reads bytes of a file that must exist in the checkpoint and verifies hash chunks that are not verified yet; long reads
    /// use all threads.
    pub(super) fn read(&self, name: &str, start: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        if out.is_empty() {
            return Ok(());
        }
        let file = self.file(name)?;
        let first = (self.hash_chunk_bytes - start % self.hash_chunk_bytes).min(out.len() as u64);
        let (first, others) = out.split_at_mut(first as usize);
        self.read_part(name, &*file, start, first)?;
        let after = start + first.len() as u64;
        let others = others.par_chunks_mut(self.hash_chunk_bytes as usize).enumerate();
        others.try_for_each(|(i, part)| self.read_part(name, &*file, after + i as u64 * self.hash_chunk_bytes, part))
    }

    /// The whole hash chunks that contain these bytes of a file.
    pub(super) fn chunks_around(&self, name: &str, bytes: Range<u64>) -> Range<u64> {
        let start = bytes.start - bytes.start % self.hash_chunk_bytes;
        start..bytes.end.next_multiple_of(self.hash_chunk_bytes).min(self.files[name].entry.len)
    }

    /// Every hash chunk of every file.
    pub(super) fn all_chunks(&self) -> Vec<(&str, u64)> {
        self.files
            .iter()
            .flat_map(|(name, known)| (0..known.verified.len() as u64).map(|c| (name.as_str(), c)))
            .collect()
    }

    /// Reads and verifies one hash chunk, whether it was verified before or not.
    pub(super) fn verify(&self, name: &str, chunk: u64, buffer: &mut Vec<u8>) -> Result<(), CheckpointError> {
        let file = self.file(name)?;
        buffer.resize(self.chunk_len(name, chunk), 0);
        self.read_verified(name, &*file, chunk, buffer)
    }

    /// Opens every file once to check that it exists with its saved length.
    pub(super) fn check_lengths(&self) -> Result<(), CheckpointError> {
        self.files.keys().try_for_each(|name| self.file(name).map(drop))
    }

    fn chunk_len(&self, name: &str, chunk: u64) -> usize {
        (self.files[name].entry.len - chunk * self.hash_chunk_bytes).min(self.hash_chunk_bytes) as usize
    }

    /// Reads bytes of one hash chunk.
    fn read_part(&self, name: &str, file: &dyn StoredFile, start: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        let (chunk, from) = (start / self.hash_chunk_bytes, (start % self.hash_chunk_bytes) as usize);
        let chunk_len = self.chunk_len(name, chunk);
        if self.files[name].verified[chunk as usize].load(Ordering::Acquire) {
            let read = file.read_exact_at(out, start);
            return read.map_err(|error| CheckpointError::io("read", self.dir.join(name), &error));
        }
        if out.len() == chunk_len {
            return self.read_verified(name, file, chunk, out);
        }
        self.with_spare(|whole| {
            whole.resize(chunk_len, 0);
            self.read_verified(name, file, chunk, whole)?;
            out.copy_from_slice(&whole[from..from + out.len()]);
            Ok(())
        })
    }

    /// Runs `act` with a spare buffer, which keeps its length between uses.
    pub(super) fn with_spare<T>(&self, act: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut spare = locked(&self.spare).pop().unwrap_or_default();
        let done = act(&mut spare);
        locked(&self.spare).push(spare);
        done
    }

    /// Reads a whole hash chunk into `out`, which has its length.
    fn read_verified(
        &self,
        name: &str,
        file: &dyn StoredFile,
        chunk: u64,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let known = &self.files[name];
        let start = chunk * self.hash_chunk_bytes;
        let path = || self.dir.join(name);
        file.read_exact_at(out, start).map_err(|error| CheckpointError::io("read", path(), &error))?;
        if blake3::hash(out).to_hex().as_str() != known.entry.blake3[chunk as usize] {
            return Err(CheckpointError::FileHash { path: path(), start, end: start + out.len() as u64 });
        }
        known.verified[chunk as usize].store(true, Ordering::Release);
        Ok(())
    }

    /// The open file; opens it, and closes the longest-open file, when needed.
    fn file(&self, name: &str) -> Result<Arc<dyn StoredFile>, CheckpointError> {
        let known = &self.files[name];
        let mut handle = locked(&known.handle);
        if let Some(file) = &handle.file {
            return Ok(file.clone());
        }
        let path = self.dir.join(name);
        let file = self.store.open(&path)?.ok_or_else(|| absent(&path))?;
        let (expected, found) = (known.entry.len, file.n_bytes());
        if found != expected {
            return Err(CheckpointError::FileLength { path, expected, found });
        }
        // The file was replaced since its chunks were verified.
        if handle.identity != file.identity() {
            known.verified.iter().for_each(|flag| flag.store(false, Ordering::Release));
            handle.identity = file.identity().to_owned();
        }
        handle.file = Some(file.clone());
        drop(handle);
        let mut open = locked(&self.open);
        open.push_back(name.to_owned());
        let oldest = if open.len() > OPEN_MAX { open.pop_front() } else { None };
        drop(open);
        if let Some(oldest) = oldest {
            locked(&self.files[&oldest].handle).file = None;
        }
        Ok(file)
    }
}

/// No panic leaves data under these locks half-changed, so poisoning is ignored.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
