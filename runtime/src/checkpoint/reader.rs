//! Reading: a checkpoint is verified from marker to last byte when it is opened, then read box by box.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rayon::prelude::*;

use super::catalog::CheckpointId;
use super::commit::{COMMIT_BYTES_MAX, Commit};
use super::error::CheckpointError;
use super::manifest::{Chunk, FileEntry, HASH_CHUNK_BYTES, MANIFEST_BYTES_MAX, Manifest, ManifestError, TensorEntry};
use super::region::Region;
use super::writer::EXTRA_BYTES_MAX;

/// Runs shorter than this are read through a window of this size, so that a column costs one read per window and not one
/// per row.
const WINDOW_BYTES: u64 = 256 << 10;

/// A checkpoint whose every byte was found to be what was saved.
#[derive(Debug)]
pub struct Checkpoint {
    id: CheckpointId,
    manifest: Manifest,
    files: BTreeMap<String, File>,
}

/// Who computes hashes: every thread when a run waits for its state, only the caller's while training goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hashing {
    AllThreads,
    ThisThread,
}

impl Checkpoint {
    /// Opens and verifies the checkpoint in this directory: marker, manifest, lengths and hashes of all files.
    ///
    /// # Errors
    /// The first thing that is not as it was saved.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        Self::open_hashing(dir, Hashing::AllThreads)
    }

    pub(super) fn open_hashing(dir: &Path, hashing: Hashing) -> Result<Self, CheckpointError> {
        let id = CheckpointId::from_dir(dir).ok_or_else(|| CheckpointError::BadDirectory { path: dir.to_owned() })?;
        let commit_path = dir.join("COMMIT");
        let line = match read_whole(&commit_path, COMMIT_BYTES_MAX) {
            Err(CheckpointError::Io { .. }) if !commit_path.exists() => {
                return Err(CheckpointError::Uncommitted { path: dir.to_owned() });
            }
            line => line?,
        };
        let commit = Commit::decode(&line).ok_or(CheckpointError::BadCommit { path: commit_path })?;
        let manifest_path = dir.join("MANIFEST");
        let encoded = read_whole(&manifest_path, MANIFEST_BYTES_MAX)?;
        let found = blake3::hash(&encoded).to_hex().to_string();
        if found != commit.manifest_blake3 {
            let expected = commit.manifest_blake3;
            return Err(CheckpointError::ManifestHash { path: manifest_path, expected, found });
        }
        let bad = |reason| CheckpointError::BadManifest { path: manifest_path.clone(), reason };
        let manifest = Manifest::decode(&encoded).map_err(bad)?;
        let committed = (commit.step, commit.generation, commit.writers);
        if committed != (manifest.step, manifest.generation, manifest.writers)
            || (id.step, id.generation) != (manifest.step, manifest.generation)
        {
            return Err(bad(ManifestError::Identity));
        }
        let mut files = BTreeMap::new();
        for (name, entry) in &manifest.files {
            files.insert(name.clone(), open_file(&dir.join(name), entry.len)?);
        }
        let checkpoint = Self { id, manifest, files };
        checkpoint.verify_hashes(hashing)?;
        Ok(checkpoint)
    }

    /// Where it lies, its step and generation.
    pub fn id(&self) -> &CheckpointId {
        &self.id
    }

    /// What it contains.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A tensor's type, shape and boxes.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry, CheckpointError> {
        self.manifest.tensors.get(name).ok_or_else(|| self.absent(name))
    }

    /// Reads a box of a tensor, row-major, from however many boxes it was saved in.
    ///
    /// # Errors
    /// When there is no such tensor, the box does not lie in it, `out` has not the bytes of the box, or reading fails.
    pub fn read_into(&self, name: &str, region: &Region, out: &mut [u8]) -> Result<(), CheckpointError> {
        let tensor = self.tensor(name)?;
        if !region.fits_in(&tensor.shape) || tensor.dtype.bytes_of(&region.shape) != Some(out.len() as u64) {
            return Err(CheckpointError::Request {
                name: name.to_owned(),
                global: tensor.shape.clone(),
                offset: region.offset.clone(),
                shape: region.shape.clone(),
                len: out.len(),
            });
        }
        for chunk in &tensor.chunks {
            let file = &self.files[&chunk.file];
            read_shared(file, chunk, region, tensor.dtype.bytes() as u64, out)
                .map_err(|error| CheckpointError::io("read", self.id.path.join(&chunk.file), &error))?;
        }
        Ok(())
    }

    /// Reads a whole tensor, row-major.
    ///
    /// # Errors
    /// As [`Checkpoint::read_into`].
    pub fn read_whole_into(&self, name: &str, out: &mut [u8]) -> Result<(), CheckpointError> {
        self.read_into(name, &Region::whole(&self.tensor(name)?.shape), out)
    }

    /// The names of the extra files.
    pub fn extras(&self) -> impl Iterator<Item = &str> {
        self.manifest.extras.keys().map(String::as_str)
    }

    /// Reads an extra file.
    ///
    /// # Errors
    /// When there is none of this name, it is too long or reading fails.
    pub fn extra(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let file_name = self.manifest.extras.get(name).ok_or_else(|| self.absent(name))?;
        let path = self.id.path.join(file_name);
        let len = self.manifest.files[file_name].len;
        if len > EXTRA_BYTES_MAX {
            return Err(CheckpointError::TooLong { path, max: EXTRA_BYTES_MAX, found: len });
        }
        let mut content = vec![0; len as usize];
        let read = self.files[file_name].read_exact_at(&mut content, 0);
        read.map_err(|error| CheckpointError::io("read", path, &error))?;
        Ok(content)
    }

    fn absent(&self, name: &str) -> CheckpointError {
        CheckpointError::Absent { path: self.id.path.clone(), name: name.to_owned() }
    }

    /// Reads everything once.
    fn verify_hashes(&self, hashing: Hashing) -> Result<(), CheckpointError> {
        let chunks_of = |(name, entry): (&'_ String, &'_ FileEntry)| {
            let name = name.clone();
            (0..entry.blake3.len()).map(move |chunk| (name.clone(), chunk)).collect::<Vec<_>>()
        };
        let all: Vec<(String, usize)> = self.manifest.files.iter().flat_map(chunks_of).collect();
        match hashing {
            Hashing::AllThreads => all
                .par_iter()
                .try_for_each_init(Vec::new, |buffer, (name, chunk)| self.verify_chunk(name, *chunk, buffer)),
            Hashing::ThisThread => {
                let mut buffer = Vec::new();
                all.iter().try_for_each(|(name, chunk)| self.verify_chunk(name, *chunk, &mut buffer))
            }
        }
    }

    fn verify_chunk(&self, name: &str, chunk: usize, buffer: &mut Vec<u8>) -> Result<(), CheckpointError> {
        let entry = &self.manifest.files[name];
        let start = chunk as u64 * HASH_CHUNK_BYTES;
        let end = (start + HASH_CHUNK_BYTES).min(entry.len);
        buffer.resize((end - start) as usize, 0);
        let path = || self.id.path.join(name);
        let read = self.files[name].read_exact_at(buffer, start);
        read.map_err(|error| CheckpointError::io("read", path(), &error))?;
        if blake3::hash(buffer).to_hex().as_str() == entry.blake3[chunk] {
            return Ok(());
        }
        Err(CheckpointError::FileHash { path: path(), start, end })
    }
}

/// Copies what the stored box and the wanted one share.
fn read_shared(file: &File, chunk: &Chunk, wanted: &Region, element_bytes: u64, out: &mut [u8]) -> io::Result<()> {
    let runs = chunk.region.shared_runs(wanted, element_bytes);
    let Some(last) = runs.last().map(|run| run.stored + run.len) else { return Ok(()) };
    let mut window = Vec::new();
    let mut window_start = 0;
    for run in &runs {
        let out = &mut out[run.wanted as usize..(run.wanted + run.len) as usize];
        if run.len >= WINDOW_BYTES || runs.len() == 1 {
            file.read_exact_at(out, chunk.byte_offset + run.stored)?;
            continue;
        }
        if run.stored < window_start || run.stored + run.len > window_start + window.len() as u64 {
            window_start = run.stored;
            window.resize((last - run.stored).min(WINDOW_BYTES) as usize, 0);
            file.read_exact_at(&mut window, chunk.byte_offset + window_start)?;
        }
        let at = (run.stored - window_start) as usize;
        out.copy_from_slice(&window[at..at + out.len()]);
    }
    Ok(())
}

/// Opens a regular file without following a link out of the directory, and checks its length.
fn open_file(path: &Path, expected: u64) -> Result<File, CheckpointError> {
    let (file, found) = open_regular(path)?;
    if found != expected {
        return Err(CheckpointError::FileLength { path: path.to_owned(), expected, found });
    }
    Ok(file)
}

fn open_regular(path: &Path) -> Result<(File, u64), CheckpointError> {
    let io = |error: io::Error| CheckpointError::io("read", path, &error);
    // Asked first, because opening a pipe or a device may block or act.
    if !fs::symlink_metadata(path).map_err(io)?.is_file() {
        return Err(CheckpointError::NotAFile { path: path.to_owned() });
    }
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    Ok((file, len))
}

fn read_whole(path: &Path, max: u64) -> Result<Vec<u8>, CheckpointError> {
    let (file, found) = open_regular(path)?;
    if found > max {
        return Err(CheckpointError::TooLong { path: path.to_owned(), max, found });
    }
    let mut content = Vec::with_capacity(found as usize);
    file.take(max).read_to_end(&mut content).map_err(|error| CheckpointError::io("read", path, &error))?;
    Ok(content)
}
