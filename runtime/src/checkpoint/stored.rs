//! The files of a checkpoint: opened when they are needed, verified chunk by chunk when they are first read.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::CheckpointError;
use super::index::FileEntry;
use super::manifest::HASH_CHUNK_BYTES;

/// Files held open at a time. Thousands of ranks write as many files, and a process may have 1024 open by default.
const OPEN_MAX: usize = 128;

/// Files by name, with what is known about each.
#[derive(Debug)]
pub(super) struct StoredFiles {
    dir: PathBuf,
    files: BTreeMap<String, StoredFile>,
    /// Names of open files, the longest open first.
    open: Mutex<VecDeque<String>>,
}

#[derive(Debug)]
struct StoredFile {
    entry: FileEntry,
    handle: Mutex<Handle>,
    /// For each hash chunk whether it was found to be what was saved.
    verified: Vec<AtomicBool>,
}

#[derive(Debug, Default)]
struct Handle {
    file: Option<Arc<File>>,
    /// Device, inode, and time of the last change when the file was opened last.
    identity: Option<(u64, u64, i64, i64)>,
}

impl StoredFiles {
    pub(super) fn new(dir: &Path, entries: &BTreeMap<String, FileEntry>) -> Self {
        let stored = |entry: &FileEntry| StoredFile {
            entry: entry.clone(),
            handle: Mutex::default(),
            verified: entry.blake3.iter().map(|_| AtomicBool::new(false)).collect(),
        };
        let files = entries.iter().map(|(name, entry)| (name.clone(), stored(entry))).collect();
        Self { dir: dir.to_owned(), files, open: Mutex::default() }
    }

    /// Reads bytes of a file that must exist in the checkpoint, verifying those hash chunks that were not verified yet.
    pub(super) fn read(&self, name: &str, start: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        if out.is_empty() {
            return Ok(());
        }
        let file = self.file(name)?;
        let stored = &self.files[name];
        let path = || self.dir.join(name);
        let mut at = start;
        let mut rest = out;
        while !rest.is_empty() {
            let chunk = at / HASH_CHUNK_BYTES;
            let bounds = chunk * HASH_CHUNK_BYTES..((chunk + 1) * HASH_CHUNK_BYTES).min(stored.entry.len);
            let n = (rest.len() as u64).min(bounds.end - at) as usize;
            let (part, later) = rest.split_at_mut(n);
            if stored.verified[chunk as usize].load(Ordering::Acquire) {
                file.read_exact_at(part, at).map_err(|error| CheckpointError::io("read", path(), &error))?;
            } else if n as u64 == bounds.end - bounds.start {
                self.read_verified(name, &file, chunk, part)?;
            } else {
                let mut whole = vec![0; (bounds.end - bounds.start) as usize];
                self.read_verified(name, &file, chunk, &mut whole)?;
                let from = (at - bounds.start) as usize;
                part.copy_from_slice(&whole[from..from + n]);
            }
            at += n as u64;
            rest = later;
        }
        Ok(())
    }

    /// Every hash chunk of every file.
    pub(super) fn all_chunks(&self) -> Vec<(&str, u64)> {
        self.files
            .iter()
            .flat_map(|(name, stored)| (0..stored.verified.len() as u64).map(|c| (name.as_str(), c)))
            .collect()
    }

    /// Reads and verifies one hash chunk, whether it was verified before or not.
    pub(super) fn verify(&self, name: &str, chunk: u64, buffer: &mut Vec<u8>) -> Result<(), CheckpointError> {
        let file = self.file(name)?;
        let start = chunk * HASH_CHUNK_BYTES;
        buffer.resize((self.files[name].entry.len - start).min(HASH_CHUNK_BYTES) as usize, 0);
        self.read_verified(name, &file, chunk, buffer)
    }

    /// Opens every file once, to see that it is there and as long as it was.
    pub(super) fn check_lengths(&self) -> Result<(), CheckpointError> {
        self.files.keys().try_for_each(|name| self.file(name).map(drop))
    }

    /// Reads a whole hash chunk into `out`, which has its length.
    fn read_verified(&self, name: &str, file: &File, chunk: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        let stored = &self.files[name];
        let start = chunk * HASH_CHUNK_BYTES;
        let path = || self.dir.join(name);
        file.read_exact_at(out, start).map_err(|error| CheckpointError::io("read", path(), &error))?;
        if blake3::hash(out).to_hex().as_str() != stored.entry.blake3[chunk as usize] {
            return Err(CheckpointError::FileHash { path: path(), start, end: start + out.len() as u64 });
        }
        stored.verified[chunk as usize].store(true, Ordering::Release);
        Ok(())
    }

    /// The open file; opens it, and closes the one that has been open longest, when needed.
    fn file(&self, name: &str) -> Result<Arc<File>, CheckpointError> {
        let stored = &self.files[name];
        let mut handle = locked(&stored.handle);
        if let Some(file) = &handle.file {
            return Ok(file.clone());
        }
        let path = self.dir.join(name);
        let (file, metadata) = open_regular(&path)?;
        let (expected, found) = (stored.entry.len, metadata.len());
        if found != expected {
            return Err(CheckpointError::FileLength { path, expected, found });
        }
        // What was verified was another file if this one has been put in its place since.
        let identity = Some((metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec()));
        if handle.identity != identity {
            stored.verified.iter().for_each(|flag| flag.store(false, Ordering::Release));
            handle.identity = identity;
        }
        let file = Arc::new(file);
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

/// Opens a regular file without following a link out of the directory.
pub(super) fn open_regular(path: &Path) -> Result<(File, fs::Metadata), CheckpointError> {
    let io = |error: io::Error| CheckpointError::io("read", path, &error);
    // Asked first, because opening a pipe or a device may block or act.
    if !fs::symlink_metadata(path).map_err(io)?.is_file() {
        return Err(CheckpointError::NotAFile { path: path.to_owned() });
    }
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    Ok((file, metadata))
}

/// Reads a small file whole.
pub(super) fn read_whole(path: &Path, max: u64) -> Result<Vec<u8>, CheckpointError> {
    let (file, metadata) = open_regular(path)?;
    let found = metadata.len();
    if found > max {
        return Err(CheckpointError::TooLong { path: path.to_owned(), max, found });
    }
    let mut content = Vec::with_capacity(found as usize);
    file.take(max).read_to_end(&mut content).map_err(|error| CheckpointError::io("read", path, &error))?;
    Ok(content)
}

/// Nothing under these locks is left half-changed by a panic, so a poisoned lock is as good as another.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
