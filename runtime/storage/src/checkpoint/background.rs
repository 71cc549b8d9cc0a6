//! Saving while training continues: the step stalls only for a copy, which a thread writes.
//!
//! Source: Mohan et al. 2021, CheckFreq, §4 (FAST '21): a snapshot in memory, then persisting it beside the next steps. We
//! differ in that the caller waits for one save before it starts the next, so that there is one snapshot at a time.

use std::fmt::Display;
use std::ops::Range;
use std::thread::{Builder, JoinHandle};

use super::catalog::Keep;
use super::checkpoint_id::CheckpointId;
use super::checkpoint_meta::CheckpointMeta;
use super::error::CheckpointError;
use super::piece::Piece;
use super::writer::{CheckpointWriter, WriterRank};
use crate::hf::dtype::Dtype;
use phalanx_strategies::boxes::TensorBox;

/// Pieces and extras that own their bytes, all in one reusable buffer.
#[derive(Debug, Default)]
pub struct Snapshot {
    bytes: Vec<u8>,
    pieces: Vec<OwnedPiece>,
    extras: Vec<(String, Vec<u8>)>,
}

#[derive(Debug)]
struct OwnedPiece {
    name: String,
    dtype: Dtype,
    global_shape: Vec<usize>,
    region: TensorBox,
    bytes: Range<usize>,
    fingerprint: Option<u64>,
}

/// A running background save, which continues after a drop.
#[must_use = "whether it was saved is only known after `wait`"]
#[derive(Debug)]
pub struct BackgroundSave {
    thread: JoinHandle<EndedSave>,
}

/// A background save that has ended.
#[derive(Debug)]
pub struct EndedSave {
    /// The snapshot, for reuse.
    pub snapshot: Snapshot,
    /// The durable checkpoint, or why there is none.
    pub saved: Result<CheckpointId, CheckpointError>,
    /// Why older checkpoints could not be removed, if so; the next save tries again.
    pub retained: Result<(), CheckpointError>,
}

impl Snapshot {
    /// An empty snapshot with mapped memory for `n_bytes` bytes of tensors: a copy into new memory, for which training
    /// waits, takes several times as long.
    pub fn with_memory(n_bytes: usize) -> Snapshot {
        let mut snapshot = Snapshot::default();
        snapshot.reserve(n_bytes);
        // Writing to a page maps it.
        snapshot.bytes.resize(n_bytes, 0);
        snapshot.clear();
        snapshot
    }

    /// Makes room for `n_bytes` bytes of tensors.
    pub fn reserve(&mut self, n_bytes: usize) {
        super::snapshot_memory::reserve(&mut self.bytes, n_bytes);
    }

    /// Adds a copy of a box of a tensor.
    pub fn add(&mut self, piece: &Piece<'_>) {
        self.add_from(piece, |append| append(piece.bytes));
    }

    /// As [`Snapshot::add`], for a box whose bytes come run by run; `piece.bytes` is ignored.
    pub fn add_from(&mut self, piece: &Piece<'_>, copy: impl FnOnce(&mut dyn FnMut(&[u8]))) {
        let start = self.bytes.len();
        copy(&mut |run| super::snapshot_memory::append(&mut self.bytes, run));
        self.push(piece, start..self.bytes.len());
    }

    fn push(&mut self, piece: &Piece<'_>, bytes: Range<usize>) {
        self.pieces.push(OwnedPiece {
            name: piece.name.to_owned(),
            dtype: piece.dtype,
            global_shape: piece.global_shape.to_vec(),
            region: TensorBox { offset: piece.offset.to_vec(), extent: piece.shape.to_vec() },
            bytes,
            fingerprint: piece.fingerprint,
        });
    }

    /// Adds a box whose `n_bytes` bytes come later, through [`Snapshot::append`]; `piece.bytes` is ignored. All pieces of a
    /// snapshot are added in one of the two ways.
    pub fn add_later(&mut self, piece: &Piece<'_>, n_bytes: usize) {
        let start = self.pieces.last().map_or(0, |piece| piece.bytes.end);
        self.push(piece, start..start + n_bytes);
    }

    /// Adds the next bytes of the pieces.
    pub fn append(&mut self, bytes: &[u8]) {
        super::snapshot_memory::append(&mut self.bytes, bytes);
    }

    /// Adds a small file.
    pub fn add_extra(&mut self, name: &str, content: Vec<u8>) {
        self.extras.push((name.to_owned(), content));
    }

    /// Empties the snapshot and keeps its memory for the next one.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
        self.extras.clear();
    }

    /// The bytes of its tensors, to plant faults in tests.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Bytes of tensors.
    pub fn n_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes of tensors that fit in its memory.
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    fn pieces(&self) -> Vec<Piece<'_>> {
        self.pieces.iter().map(|piece| piece.borrowed(&self.bytes)).collect()
    }

    fn extras(&self) -> Vec<(&str, &[u8])> {
        self.extras.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect()
    }
}

impl OwnedPiece {
    fn borrowed<'a>(&'a self, buffer: &'a [u8]) -> Piece<'a> {
        Piece {
            name: &self.name,
            dtype: self.dtype,
            global_shape: &self.global_shape,
            offset: &self.region.offset,
            shape: &self.region.extent,
            bytes: &buffer[self.bytes.clone()],
            fingerprint: self.fingerprint,
        }
    }
}

impl CheckpointWriter {
    /// Saves a snapshot like [`CheckpointWriter::save_together`], on its own thread; writer 0 then keeps those of `keep`
    /// checkpoints, if given. `complete` adds the bytes that come later, first of all on that thread; if it fails, no writer
    /// commits. `sum` must not use a group of the training step, because its order among the step's
    /// collectives would depend on timing: it needs its own group, or the launcher.
    ///
    /// # Errors
    /// When the system cannot start a thread; the snapshot is then lost.
    pub fn save_in_background<E: Display>(
        &self,
        meta: CheckpointMeta,
        writer_rank: WriterRank,
        snapshot: Snapshot,
        complete: impl FnOnce(&mut Snapshot) -> Result<(), CheckpointError> + Send + 'static,
        keep: Option<Keep>,
        sum: impl FnMut(u64) -> Result<u64, E> + Send + 'static,
    ) -> Result<BackgroundSave, CheckpointError> {
        let writer = self.clone();
        let save = move || {
            let mut snapshot = snapshot;
            let completed = complete(&mut snapshot);
            let pieces = completed.map(|()| snapshot.pieces());
            let saved = writer.save_if_complete(&meta, writer_rank, pieces.as_deref(), &snapshot.extras(), sum);
            drop(pieces);
            let retained = match (&saved, keep) {
                (Ok(id), Some(keep)) if writer_rank.writer == 0 => writer.retain(keep, id).map(drop),
                _ => Ok(()),
            };
            EndedSave { snapshot, saved, retained }
        };
        let thread = Builder::new().name("save".into()).spawn(save);
        let refused = |error| CheckpointError::io("start a thread to write", self.root(), &error);
        thread.map(|thread| BackgroundSave { thread }).map_err(refused)
    }
}

impl BackgroundSave {
    /// Whether [`BackgroundSave::wait`] would return at once.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the checkpoint is durable or has failed, and older ones are removed.
    pub fn wait(self) -> EndedSave {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_uses_the_prepared_memory() {
        let values = vec![7u8; 40_000];
        let mut snapshot = Snapshot::with_memory(values.len());
        let memory = snapshot.bytes.as_ptr();
        assert_eq!((snapshot.n_bytes(), snapshot.capacity()), (0, values.len()));

        snapshot.reserve(values.len());
        let shape = [10_000];
        snapshot.add(&Piece {
            name: "w",
            dtype: Dtype::F32,
            global_shape: &shape,
            offset: &[0],
            shape: &shape,
            bytes: &values,
            fingerprint: None,
        });

        assert_eq!((snapshot.bytes.as_ptr(), &snapshot.bytes), (memory, &values));
    }
}
