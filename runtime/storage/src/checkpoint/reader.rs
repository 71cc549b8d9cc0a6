//! Reading: opening a checkpoint verifies marker, manifest and indexes; its data is verified then or when it is read.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::checkpoint::location;
use phalanx_strategies::boxes::{Run, TensorBox};
use rayon::prelude::*;

use super::checkpoint_id::CheckpointId;
use super::commit::{COMMIT, COMMIT_BYTES_MAX, Commit, Seal};
use super::contents::Contents;
use super::error::CheckpointError;
use super::format::ManifestError;
use super::index::{Chunk, Index, TensorEntry, index_name};
use super::manifest::{MANIFEST_BYTES_MAX, Manifest, format_of};
use super::pieces::EXTRA_BYTES_MAX;
use super::store::{self, Store, absent};
use super::stored::StoredFiles;

/// Shorter runs are read through a window of whole hash chunks, so that a column takes one read per chunk instead of one
/// per row.
const LONG_RUN_BYTES: usize = 256 << 10;
/// Name of the manifest's file.
const MANIFEST: &str = "MANIFEST";

/// A committed checkpoint. Reads return only data that was verified against its hashes.
#[derive(Debug)]
pub struct Checkpoint {
    id: CheckpointId,
    contents: Contents,
    files: StoredFiles,
    /// For every tensor, the largest end along its first dim of the boxes up to each one.
    reaches: BTreeMap<String, Vec<usize>>,
}

/// Which threads compute hashes: all while a run loads its state, only the caller's during training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hashing {
    AllThreads,
    ThisThread,
}

impl Checkpoint {
    /// Opens and verifies the checkpoint in this directory: marker, manifest, lengths and hashes of all files.
    ///
    /// # Errors
    /// The first difference from what was saved.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        Self::open_in(&location::at(dir)?, dir)
    }

    /// [`Checkpoint::open`] in an open store.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_in(store: &Arc<dyn Store>, dir: &Path) -> Result<Self, CheckpointError> {
        Self::open_hashing(store, dir, Hashing::AllThreads)
    }

    /// Opens the checkpoint in this directory without reading its data, for ranks that need only a part. Each hash chunk is
    /// verified once, when it is first read.
    ///
    /// # Errors
    /// When marker, manifest or an index differs from what was saved. Damaged data fails the read that includes it.
    pub fn open_lazily(dir: &Path) -> Result<Self, CheckpointError> {
        Self::open_lazily_in(&location::at(dir)?, dir)
    }

    /// [`Checkpoint::open_lazily`] in an open store.
    ///
    /// # Errors
    /// As [`Checkpoint::open_lazily`].
    pub fn open_lazily_in(store: &Arc<dyn Store>, dir: &Path) -> Result<Self, CheckpointError> {
        let named = CheckpointId::from_dir(dir);
        if named.is_none() && !is_committed(&**store, dir)? {
            return Err(CheckpointError::BadDirectory { path: dir.to_owned() });
        }
        let (commit, encoded) = read_manifest(&**store, dir)?;
        // A copy of a checkpoint, or a link to one, may have any name.
        let of_commit = || CheckpointId { step: commit.step, generation: commit.generation, path: dir.to_owned() };
        let id = named.unwrap_or_else(of_commit);
        let manifest_path = dir.join(MANIFEST);
        let bad = |reason| CheckpointError::BadManifest { path: manifest_path.clone(), reason };
        let contents = match format_of(&encoded).map_err(bad)? {
            1 => Contents::decode_format_1(&encoded).map_err(bad)?,
            _ => {
                let manifest = Manifest::decode(&encoded).map_err(bad)?;
                let indexes = read_indexes(&**store, dir, &manifest)?;
                Contents::join(&manifest, indexes).map_err(bad)?
            }
        };
        let committed = (commit.step, commit.generation, commit.writers);
        if committed != (contents.step, contents.generation, contents.writers)
            || (id.step, id.generation) != (contents.step, contents.generation)
        {
            return Err(bad(ManifestError::Identity));
        }
        let files = StoredFiles::new(store.clone(), dir, &contents);
        let reaches = contents.tensors.iter().map(|(name, tensor)| (name.clone(), reach(tensor))).collect();
        Ok(Self { id, contents, files, reaches })
    }

    pub(super) fn open_hashing(store: &Arc<dyn Store>, dir: &Path, hashing: Hashing) -> Result<Self, CheckpointError> {
        let checkpoint = Self::open_lazily_in(store, dir)?;
        checkpoint.files.check_lengths()?;
        checkpoint.verify_all(hashing)?;
        Ok(checkpoint)
    }

    /// Its directory, step and generation.
    pub fn id(&self) -> &CheckpointId {
        &self.id
    }

    /// What it contains.
    pub fn contents(&self) -> &Contents {
        &self.contents
    }

    /// A tensor's type, shape and boxes.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn tensor(&self, name: &str) -> Result<&TensorEntry, CheckpointError> {
        self.contents.tensors.get(name).ok_or_else(|| self.absent(name))
    }

    /// Reads a box of a tensor, row-major, independent of the boxes it was saved in. Opens only files that hold a part of the
    /// box, and reads only its bytes or, where they are not verified yet, the hash chunks around them.
    ///
    /// # Errors
    /// When there is no such tensor, the box exceeds it, the length of `out` differs from the box's, reading fails or the
    /// data is damaged; the content of `out` is then unspecified.
    pub fn read_into(&self, name: &str, region: &TensorBox, out: &mut [u8]) -> Result<(), CheckpointError> {
        let tensor = self.tensor(name)?;
        if !region.fits_in(&tensor.shape) || tensor.dtype.bytes_of(&region.extent) != Some(out.len() as u64) {
            return Err(CheckpointError::Request {
                name: name.to_owned(),
                global: tensor.shape.clone(),
                offset: region.offset.clone(),
                shape: region.extent.clone(),
                len: out.len(),
            });
        }
        let element_bytes = tensor.dtype.bytes();
        near(tensor, &self.reaches[name], region)
            .iter()
            .try_for_each(|chunk| self.read_shared(chunk, region, element_bytes, out))
    }

    /// Reads a whole tensor, row-major.
    ///
    /// # Errors
    /// As [`Checkpoint::read_into`].
    pub fn read_whole_into(&self, name: &str, out: &mut [u8]) -> Result<(), CheckpointError> {
        self.read_into(name, &TensorBox::whole(&self.tensor(name)?.shape), out)
    }

    /// The names of the extra files.
    pub fn extras(&self) -> impl Iterator<Item = &str> {
        self.contents.extras.keys().map(String::as_str)
    }

    /// Reads an extra file.
    ///
    /// # Errors
    /// When no extra has this name, it is too long or damaged, or reading fails.
    pub fn extra(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let file_name = self.contents.extras.get(name).ok_or_else(|| self.absent(name))?;
        let len = self.contents.files[file_name].len;
        if len > EXTRA_BYTES_MAX {
            let path = self.id.path.join(file_name);
            return Err(CheckpointError::TooLong { path, max: EXTRA_BYTES_MAX, found: len });
        }
        let mut content = vec![0; len as usize];
        self.files.read(file_name, 0, &mut content)?;
        Ok(content)
    }

    fn absent(&self, name: &str) -> CheckpointError {
        CheckpointError::Absent { path: self.id.path.clone(), name: name.to_owned() }
    }

    /// Reads everything once.
    fn verify_all(&self, hashing: Hashing) -> Result<(), CheckpointError> {
        let all = self.files.all_chunks();
        match hashing {
            Hashing::AllThreads => all
                .par_iter()
                .try_for_each_init(Vec::new, |buffer, (name, chunk)| self.files.verify(name, *chunk, buffer)),
            Hashing::ThisThread => {
                let mut buffer = Vec::new();
                all.iter().try_for_each(|(name, chunk)| self.files.verify(name, *chunk, &mut buffer))
            }
        }
    }

    /// Copies the intersection of the stored box and the wanted one.
    fn read_shared(
        &self,
        chunk: &Chunk,
        wanted: &TensorBox,
        element_bytes: usize,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let Some(common) = chunk.region.intersection(wanted) else { return Ok(()) };
        let runs: Vec<Run> = common.runs(&chunk.region, wanted).collect();
        self.files.with_spare(|window| self.read_runs(chunk, &runs, element_bytes, window, out))
    }

    fn read_runs(
        &self,
        chunk: &Chunk,
        runs: &[Run],
        element_bytes: usize,
        window: &mut Vec<u8>,
        out: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let mut window_bytes = 0..0;
        for run in runs {
            let [stored, wanted, len] = [run.from, run.to, run.len].map(|n| n * element_bytes);
            let out = &mut out[wanted..wanted + len];
            let start = chunk.byte_offset + stored as u64;
            let end = start + len as u64;
            if len >= LONG_RUN_BYTES || runs.len() == 1 {
                self.files.read(&chunk.file, start, out)?;
                continue;
            }
            if start < window_bytes.start || end > window_bytes.end {
                window_bytes = self.files.chunks_around(&chunk.file, start..end);
                window.resize((window_bytes.end - window_bytes.start) as usize, 0);
                self.files.read(&chunk.file, window_bytes.start, window)?;
            }
            let at = (start - window_bytes.start) as usize;
            out.copy_from_slice(&window[at..at + out.len()]);
        }
        Ok(())
    }
}

/// The largest end along the first dim of the boxes up to each one; the boxes are sorted by offset.
fn reach(tensor: &TensorEntry) -> Vec<usize> {
    let mut reach = 0;
    let end = |chunk: &Chunk| Some(chunk.region.offset.first()? + chunk.region.extent[0]);
    let further = |chunk: &Chunk| {
        reach = end(chunk).unwrap_or(1).max(reach);
        reach
    };
    tensor.chunks.iter().map(further).collect()
}

/// The boxes that may intersect the wanted one, by binary search: a tensor split among a thousand ranks has thousands of
/// boxes, and each rank reads its own.
fn near<'a>(tensor: &'a TensorEntry, reaches: &[usize], wanted: &TensorBox) -> &'a [Chunk] {
    let (Some(&start), Some(&len)) = (wanted.offset.first(), wanted.extent.first()) else { return &tensor.chunks };
    let first = reaches.partition_point(|&reach| reach <= start);
    let chunks = &tensor.chunks[first..];
    let n = chunks.partition_point(|chunk| chunk.region.offset[0] < start + len);
    &chunks[..n]
}

/// Reads the marker, and the manifest that it names, undecoded.
pub(super) fn read_manifest(store: &dyn Store, dir: &Path) -> Result<(Commit, Vec<u8>), CheckpointError> {
    let commit_path = dir.join(COMMIT);
    let line = store::read_whole(store, &commit_path, COMMIT_BYTES_MAX)?;
    let line = line.ok_or_else(|| CheckpointError::Uncommitted { path: dir.to_owned() })?;
    if Seal::decode(&line).is_some() {
        return Err(CheckpointError::Uncommitted { path: dir.to_owned() });
    }
    let commit = Commit::decode(&line).ok_or(CheckpointError::BadCommit { path: commit_path })?;
    let encoded = read_hashed(store, &dir.join(MANIFEST), MANIFEST_BYTES_MAX, &commit.manifest_blake3)?;
    Ok((commit, encoded))
}

/// Whether there is a marker.
fn is_committed(store: &dyn Store, dir: &Path) -> Result<bool, CheckpointError> {
    Ok(store.open(&dir.join(COMMIT))?.is_some())
}

fn read_indexes(store: &dyn Store, dir: &Path, manifest: &Manifest) -> Result<Vec<Index>, CheckpointError> {
    let read = |(writer, committed)| {
        let path = dir.join(index_name(writer));
        let entry: &super::manifest::IndexEntry = committed;
        let encoded = read_hashed(store, &path, entry.len, &entry.blake3)?;
        Index::decode(&encoded).map_err(|reason| CheckpointError::BadManifest { path, reason })
    };
    (0..).zip(&manifest.indexes).map(read).collect()
}

/// Reads a file and compares its hash before anything parses it.
fn read_hashed(store: &dyn Store, path: &Path, max: u64, expected: &str) -> Result<Vec<u8>, CheckpointError> {
    let content = store::read_whole(store, path, max)?.ok_or_else(|| absent(path))?;
    let found = blake3::hash(&content).to_hex().to_string();
    if found == expected {
        return Ok(content);
    }
    Err(CheckpointError::ManifestHash { path: path.to_owned(), expected: expected.to_owned(), found })
}
