//! A checkpoint being written: each writer adds its part, then the leader commits.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use super::checkpoint_id::CheckpointId;
use super::checkpoint_meta::CheckpointMeta;
use super::commit::Commit;
use super::contents::Contents;
use super::error::CheckpointError;
use super::fence::Fence;
use super::format::{FORMAT, ManifestError};
use super::index::{FileEntry, INDEX_BYTES_MAX, Index, TensorEntry, file_prefix, index_name};
use super::manifest::{HASH_CHUNK_BYTES, IndexEntry, Manifest, WRITERS_MAX};
use super::piece::Piece;
use super::pieces;
use super::shard::{Written, write_file, write_shards};
use super::store::{Store, absent, read_whole};

/// A directory without a commit marker. After a drop it remains, is never loaded, and the next retention removes it.
#[must_use = "nothing is saved before `commit`"]
pub struct PendingCheckpoint {
    store: Arc<dyn Store>,
    id: CheckpointId,
    meta: CheckpointMeta,
    shard_bytes_max: u64,
    fence: Option<Fence>,
}

impl PendingCheckpoint {
    pub(super) fn new(store: Arc<dyn Store>, id: CheckpointId, meta: &CheckpointMeta, shard_bytes_max: u64) -> Self {
        Self { store, id, meta: meta.clone(), shard_bytes_max, fence: None }
    }

    pub(super) fn behind(self, fence: Option<Fence>) -> Self {
        Self { fence, ..self }
    }

    /// The directory and its generation, which the other writers need to join.
    pub fn id(&self) -> &CheckpointId {
        &self.id
    }

    /// Writes everything that `writer` (0, 1, 2, …; each once) contributes: pieces and extras that no other writer has. When
    /// this returns, the part is durable.
    ///
    /// # Errors
    /// When pieces contradict each other or the store fails. The checkpoint must then not be committed.
    pub fn write_part(
        &self,
        writer: u32,
        pieces: &[Piece<'_>],
        extras: &[(&str, &[u8])],
    ) -> Result<(), CheckpointError> {
        pieces::check(pieces, extras, false)?;
        let store = &*self.store;
        let mut written = write_shards(store, &self.id.path, writer, pieces, self.shard_bytes_max)?;
        // After the hashes: bytes that change later do not have their hash.
        let wrong = |piece: &&Piece<'_>| piece.fingerprint.is_some_and(|state| state != piece.written_fingerprint());
        if let Some(piece) = pieces.iter().find(wrong) {
            return Err(CheckpointError::Corrupt { name: piece.name.to_owned(), step: self.id.step });
        }
        let mut extra_files = BTreeMap::new();
        for (name, content) in extras {
            let file_name = format!("{}extra-{name}", file_prefix(writer));
            let entry = write_file(store, &self.id.path, &file_name, |file| file.write(content))?;
            written.files.insert(file_name.clone(), entry);
            extra_files.insert((*name).to_owned(), file_name);
        }
        let encoded = self.index(writer, pieces, written, extra_files).encode();
        write_file(store, &self.id.path, &index_name(writer), |file| file.write(&encoded))?;
        store.sync_dir(&self.id.path)
    }

    /// Checks that the parts of writers `0 .. n_writers` exist and tile every tensor exactly once, writes the manifest and,
    /// once it is durable, the marker that makes the checkpoint exist. The leader calls it after all writers have written.
    ///
    /// # Errors
    /// When a part is missing, parts contradict each other, the store fails, or a later world has begun; the checkpoint can then
    /// be [abandoned](Self::abandon).
    pub fn commit(&self, n_writers: u32) -> Result<(), CheckpointError> {
        let refused = |reason| CheckpointError::BadManifest { path: self.id.path.clone(), reason };
        if !(1..=WRITERS_MAX).contains(&n_writers) {
            return Err(refused(ManifestError::Number("number of writers")));
        }
        let (entries, indexes) = self.read_indexes(n_writers)?;
        let manifest = Manifest {
            format: FORMAT,
            job: self.meta.job.clone(),
            step: self.id.step,
            generation: self.id.generation,
            mesh: self.meta.mesh.clone(),
            verified: self.meta.verified,
            compared: self.meta.compared,
            hash_chunk_bytes: HASH_CHUNK_BYTES,
            indexes: entries,
        };
        manifest.validate().map_err(refused)?;
        let contents = Contents::join(&manifest, indexes).map_err(refused)?;
        contents.files.iter().try_for_each(|(name, entry)| self.check_length(name, entry))?;
        let encoded = manifest.encode();
        let commit = Commit {
            step: self.id.step,
            generation: self.id.generation,
            writers: n_writers,
            manifest_blake3: blake3::hash(&encoded).to_hex().to_string(),
        };
        let (store, dir) = (&*self.store, self.id.path.as_path());
        write_file(store, dir, "MANIFEST", |file| file.write(&encoded))?;
        store.sync_dir(dir)?;
        self.mark(&commit)?;
        store.sync_dir(dir)
    }

    /// Creates the marker (`CHECKPOINT-8`).
    fn mark(&self, commit: &Commit) -> Result<(), CheckpointError> {
        let path = self.id.path.join("COMMIT");
        let check = || self.fence.as_ref().map_or(Ok(()), Fence::check);
        let failed = |error: io::Error| check().err().unwrap_or_else(|| CheckpointError::io("write", &path, &error));
        let mut file = self.store.create(&path).map_err(failed)?;
        // Not before: a later world seals what it finds, and this marker may be begun after it has looked.
        check()?;
        file.write_all(commit.encode().as_bytes()).and_then(|()| file.finish()).map_err(failed)
    }

    /// Removes what was written, as far as the store allows; remains have no marker and are never loaded.
    pub fn abandon(self) {
        if let Err(error) = self.store.remove(&self.id.path) {
            tracing::debug!(%error, "the next retention removes the remains of a failed save");
        }
    }

    fn index(&self, writer: u32, pieces: &[Piece<'_>], written: Written, extras: BTreeMap<String, String>) -> Index {
        let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
        for (piece, chunk) in pieces.iter().zip(written.chunks) {
            let entry = tensors.entry(piece.name.to_owned()).or_insert_with(|| TensorEntry {
                dtype: piece.dtype,
                shape: piece.global_shape.to_vec(),
                chunks: Vec::new(),
            });
            entry.chunks.extend(chunk);
        }
        Index {
            format: FORMAT,
            job: self.meta.job.clone(),
            step: self.id.step,
            generation: self.id.generation,
            writer,
            tensors,
            files: written.files,
            extras,
        }
    }

    fn read_indexes(&self, n_writers: u32) -> Result<(Vec<IndexEntry>, Vec<Index>), CheckpointError> {
        let mut entries = Vec::new();
        let mut indexes = Vec::new();
        for writer in 0..n_writers {
            let path = self.id.path.join(index_name(writer));
            let missing = || CheckpointError::MissingPart { path: self.id.path.clone(), writer, n_writers };
            let encoded = read_whole(&*self.store, &path, INDEX_BYTES_MAX)?.ok_or_else(missing)?;
            let blake3 = blake3::hash(&encoded).to_hex().to_string();
            entries.push(IndexEntry { len: encoded.len() as u64, blake3 });
            indexes.push(Index::decode(&encoded).map_err(|reason| CheckpointError::BadManifest { path, reason })?);
        }
        Ok((entries, indexes))
    }

    fn check_length(&self, name: &str, entry: &FileEntry) -> Result<(), CheckpointError> {
        let path: PathBuf = self.id.path.join(name);
        let found = self.store.open(&path)?.ok_or_else(|| absent(&path))?.n_bytes();
        if found == entry.len { Ok(()) } else { Err(CheckpointError::FileLength { path, expected: entry.len, found }) }
    }
}
