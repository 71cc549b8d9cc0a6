//! Saving: shards, then the manifest, then the commit marker, each durable before the next.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::catalog::{self, CheckpointId};
use super::commit::Commit;
use super::error::CheckpointError;
use super::manifest::{FORMAT, HASH_CHUNK_BYTES, Manifest, TensorEntry, is_name};
use super::region::{Region, tiles_exactly};
use super::shard::{Written, write_file, write_shards};
use super::volume::{LocalDisk, Volume};
use crate::hf::dtype::Dtype;

/// Bytes of one shard before another is begun.
const SHARD_BYTES_MAX: u64 = 4 << 30;
/// An extra is a small file; tokenizers of large vocabularies have some tens of megabytes.
pub(super) const EXTRA_BYTES_MAX: u64 = 256 << 20;

/// Saves checkpoints below one directory. Cheap to clone and free of state, so that a background thread can save from a
/// snapshot that it owns.
#[derive(Clone)]
pub struct CheckpointWriter {
    volume: Arc<dyn Volume>,
    root: PathBuf,
    shard_bytes_max: u64,
}

/// What a checkpoint is of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointMeta {
    /// The job's name.
    pub job: String,
    /// Steps that were completed.
    pub step: u64,
    /// The generation that saves; where a directory of this step and generation exists, the next free one is taken.
    pub generation: u64,
    /// Sizes of the mesh's axes by name.
    pub mesh: BTreeMap<String, u64>,
}

/// A box of a tensor, or a whole one, to be saved.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The tensor: letters, digits, dots, underscores and hyphens.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub global_shape: &'a [u64],
    /// Where the box starts.
    pub offset: &'a [u64],
    /// The shape of the box.
    pub shape: &'a [u64],
    /// The elements of the box, row-major, little-endian.
    pub bytes: &'a [u8],
}

/// Offsets of a whole tensor: as many zeros as any tensor has dims.
const ORIGIN: [u64; 8] = [0; 8];

impl<'a> Piece<'a> {
    /// A whole tensor.
    ///
    /// # Panics
    /// When it has more than 8 dims.
    pub fn whole(name: &'a str, dtype: Dtype, shape: &'a [u64], bytes: &'a [u8]) -> Self {
        Self { name, dtype, global_shape: shape, offset: &ORIGIN[..shape.len()], shape, bytes }
    }
}

impl CheckpointWriter {
    /// Saves below `root` on the local disk; the directory is made when needed.
    pub fn new(root: &Path) -> Self {
        Self::on(Arc::new(LocalDisk), root)
    }

    /// Saves below `root` on any volume.
    pub fn on(volume: Arc<dyn Volume>, root: &Path) -> Self {
        Self { volume, root: root.to_owned(), shard_bytes_max: SHARD_BYTES_MAX }
    }

    /// The same writer with another limit of bytes per shard.
    #[must_use]
    pub fn with_shard_bytes_max(self, shard_bytes_max: u64) -> Self {
        Self { shard_bytes_max, ..self }
    }

    /// Saves a checkpoint: tensors as pieces that tile them, and small files (`extras`) by name. When this returns, the
    /// checkpoint is durable.
    ///
    /// # Errors
    /// When pieces contradict each other or do not tile, or the volume refuses (disk full). What was written is removed as
    /// far as the volume lets us; earlier checkpoints are untouched, and the remains of a failed save are never loaded.
    pub fn save(
        &self,
        meta: &CheckpointMeta,
        pieces: &[Piece<'_>],
        extras: &[(&str, &[u8])],
    ) -> Result<CheckpointId, CheckpointError> {
        check_pieces(pieces, extras)?;
        let id = self.begin(meta.step, meta.generation)?;
        let saved = self.write_all(&id, meta, pieces, extras);
        if saved.is_err() {
            // The first error is the one to report; what cannot be removed has no COMMIT and is skipped when loading.
            let _ = self.volume.remove_file(&id.path.join("COMMIT"));
            let _ = self.volume.remove_dir_all(&id.path);
        }
        saved.map(|()| id)
    }

    /// Removes old checkpoints; see [`catalog::retain`].
    ///
    /// # Errors
    /// As [`catalog::retain`].
    pub fn retain(&self, keep: usize) -> Result<Vec<PathBuf>, CheckpointError> {
        catalog::retain(&*self.volume, &self.root, keep)
    }

    /// Makes a directory that nobody has written to.
    fn begin(&self, step: u64, generation: u64) -> Result<CheckpointId, CheckpointError> {
        create_dirs(&*self.volume, &self.root)?;
        let mut id = CheckpointId::new(&self.root, step, generation);
        loop {
            match self.volume.create_dir(&id.path) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    id = CheckpointId::new(&self.root, step, id.generation + 1);
                }
                Err(error) => return Err(CheckpointError::io("create", id.path, &error)),
            }
        }
        self.sync_dir(&self.root)?;
        Ok(id)
    }

    fn write_all(
        &self,
        id: &CheckpointId,
        meta: &CheckpointMeta,
        pieces: &[Piece<'_>],
        extras: &[(&str, &[u8])],
    ) -> Result<(), CheckpointError> {
        let volume = &*self.volume;
        let mut written = write_shards(volume, &id.path, 0, pieces, self.shard_bytes_max)?;
        let mut extra_files = BTreeMap::new();
        for (name, content) in extras {
            let file_name = format!("extra-{name}");
            let entry = write_file(volume, &id.path, &file_name, |file| file.write(content))?;
            written.files.insert(file_name.clone(), entry);
            extra_files.insert((*name).to_owned(), file_name);
        }
        self.sync_dir(&id.path)?;
        let manifest = assemble(id, meta, pieces, written, extra_files);
        self.commit(id, &manifest)
    }

    /// Writes the manifest and then, once that is durable, the marker that makes the checkpoint exist.
    fn commit(&self, id: &CheckpointId, manifest: &Manifest) -> Result<(), CheckpointError> {
        let refused = |reason| CheckpointError::BadManifest { path: id.path.clone(), reason };
        manifest.validate().map_err(refused)?;
        let encoded = manifest.encode();
        let commit = Commit {
            step: id.step,
            generation: id.generation,
            writers: manifest.writers,
            manifest_blake3: blake3::hash(&encoded).to_hex().to_string(),
        };
        write_file(&*self.volume, &id.path, "MANIFEST", |file| file.write(&encoded))?;
        self.sync_dir(&id.path)?;
        write_file(&*self.volume, &id.path, "COMMIT", |file| file.write(commit.encode().as_bytes()))?;
        self.sync_dir(&id.path)
    }

    fn sync_dir(&self, path: &Path) -> Result<(), CheckpointError> {
        self.volume.sync_dir(path).map_err(|error| CheckpointError::io("write", path, &error))
    }
}

fn assemble(
    id: &CheckpointId,
    meta: &CheckpointMeta,
    pieces: &[Piece<'_>],
    written: Written,
    extras: BTreeMap<String, String>,
) -> Manifest {
    let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
    for (piece, chunk) in pieces.iter().zip(written.chunks) {
        let entry = tensors.entry(piece.name.to_owned()).or_insert_with(|| TensorEntry {
            dtype: piece.dtype,
            shape: piece.global_shape.to_vec(),
            chunks: Vec::new(),
        });
        entry.chunks.extend(chunk);
    }
    Manifest {
        format: FORMAT,
        job: meta.job.clone(),
        step: id.step,
        generation: id.generation,
        writers: 1,
        mesh: meta.mesh.clone(),
        hash_chunk_bytes: HASH_CHUNK_BYTES,
        tensors,
        files: written.files,
        extras,
    }
}

/// Refuses what would only be found out after gigabytes were written.
fn check_pieces(pieces: &[Piece<'_>], extras: &[(&str, &[u8])]) -> Result<(), CheckpointError> {
    let bad = |name: &str, reason| Err(CheckpointError::BadPiece { name: name.to_owned(), reason });
    let mut tensors: BTreeMap<&str, (&Piece<'_>, Vec<Region>)> = BTreeMap::new();
    for piece in pieces {
        let (first, regions) = tensors.entry(piece.name).or_insert((piece, Vec::new()));
        if !is_name(piece.name) {
            return bad(piece.name, "names have 1 to 128 letters, digits, dots, underscores and hyphens");
        }
        if (first.dtype, first.global_shape) != (piece.dtype, piece.global_shape) {
            return bad(piece.name, "its pieces differ in type or global shape");
        }
        if piece.dtype.bytes_of(piece.shape) != Some(piece.bytes.len() as u64) {
            return bad(piece.name, "the shape of a piece does not hold its bytes");
        }
        if !piece.bytes.is_empty() {
            regions.push(Region { offset: piece.offset.to_vec(), shape: piece.shape.to_vec() });
        }
    }
    for (name, (first, regions)) in &tensors {
        if !tiles_exactly(first.global_shape, regions) {
            return bad(name, "its pieces leave a hole or overlap");
        }
    }
    let mut names = std::collections::BTreeSet::new();
    for (name, content) in extras {
        if !is_name(name) || name.len() > 100 || !names.insert(name) {
            return bad(name, "extras have distinct names of 1 to 100 letters, digits, dots, underscores and hyphens");
        }
        if content.len() as u64 > EXTRA_BYTES_MAX {
            return bad(name, "it is too large for an extra");
        }
    }
    Ok(())
}

/// Makes a directory and its missing parents, durably.
fn create_dirs(volume: &dyn Volume, path: &Path) -> Result<(), CheckpointError> {
    if path.as_os_str().is_empty() || path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(Path::new(""));
    create_dirs(volume, parent)?;
    let io = |error: io::Error| CheckpointError::io("create", path, &error);
    match volume.create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(io(error)),
        _ => {}
    }
    volume.sync_dir(if parent.as_os_str().is_empty() { Path::new(".") } else { parent }).map_err(io)
}

// Saving runs on a background thread; this fails to compile if the writer cannot go there.
const _: fn() = || {
    fn sendable<T: Send + Sync + Clone + 'static>() {}
    sendable::<CheckpointWriter>();
};
