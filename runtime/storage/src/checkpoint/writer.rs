//! Saving: every writer's part, then the manifest, then the commit marker, each durable before the next.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::catalog::{self, Keep};
use super::checkpoint_id::CheckpointId;
use super::checkpoint_meta::CheckpointMeta;
use super::error::CheckpointError;
use super::fence::Fence;
use super::given_up::Beginning;
use super::pending::PendingCheckpoint;
use super::piece::Piece;
use super::store::Store;
use super::{location, pieces};

/// Bytes of one shard before the next one starts.
const SHARD_BYTES_MAX: u64 = 4 << 30;

/// Saves checkpoints below one directory. Cheap to clone and free of state, so that a background thread can save from a
/// snapshot that it owns.
#[derive(Clone, Debug)]
pub struct CheckpointWriter {
    store: Arc<dyn Store>,
    root: PathBuf,
    shard_bytes_max: u64,
    fence: Option<Fence>,
    beginning: Option<Beginning>,
}

/// A writer's position among the writers of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriterRank {
    /// Its number; 0 leads.
    pub writer: u32,
    /// How many writers there are.
    pub n_writers: u32,
}

impl CheckpointWriter {
    /// Saves below `root`, a path or the URL of an object store; a directory is created when needed.
    ///
    /// # Errors
    /// As [`location::at`].
    pub fn at(root: &Path) -> Result<Self, CheckpointError> {
        Ok(Self::on(location::at(root)?, root))
    }

    /// Saves below `root` in an open store.
    pub fn on(store: Arc<dyn Store>, root: &Path) -> Self {
        Self { store, root: root.to_owned(), shard_bytes_max: SHARD_BYTES_MAX, fence: None, beginning: None }
    }

    /// The same writer for a world that may be replaced (`CHECKPOINT-8`).
    #[must_use]
    pub fn behind(self, fence: Fence) -> Self {
        Self { fence: Some(fence), ..self }
    }

    /// The same writer for a run that gives up what it does not continue (`CHECKPOINT-9`).
    #[must_use]
    pub fn of_run(self, beginning: Option<Beginning>) -> Self {
        Self { beginning, ..self }
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
    /// When pieces contradict each other or do not tile, or the store refuses (disk full). What was written is removed as
    /// far as the store allows; earlier checkpoints are untouched, and the remains of a failed save are never loaded.
    pub fn save(
        &self,
        meta: &CheckpointMeta,
        pieces: &[Piece<'_>],
        extras: &[(&str, &[u8])],
    ) -> Result<CheckpointId, CheckpointError> {
        let alone = WriterRank { writer: 0, n_writers: 1 };
        self.save_together(meta, alone, pieces, extras, Ok::<_, CheckpointError>)
    }

    /// Saves a checkpoint together with the other writers. Each writer calls this with its own rank, pieces and extras;
    /// together their pieces tile every tensor. When this returns, the whole checkpoint is durable.
    ///
    /// `sum` returns the sum of the values that all writers pass, as a collective does; every writer calls it three times:
    /// for the generation that writer 0 claimed, for the number of failed writers, and for whether writer 0 failed to
    /// commit. All three values are far below 2^31.
    ///
    /// # Errors
    /// When this writer's pieces contradict each other or its store refuses; [`CheckpointError::OthersFailed`] when other
    /// writers fail; [`CheckpointError::Agreement`] when `sum` fails: the checkpoint then exists only if writer 0 has
    /// already committed it. What was written is removed as far as the store allows.
    pub fn save_together<E: std::fmt::Display>(
        &self,
        meta: &CheckpointMeta,
        writer_rank: WriterRank,
        pieces: &[Piece<'_>],
        extras: &[(&str, &[u8])],
        sum: impl FnMut(u64) -> Result<u64, E>,
    ) -> Result<CheckpointId, CheckpointError> {
        self.save_if_complete(meta, writer_rank, Ok(pieces), extras, sum)
    }

    /// As [`CheckpointWriter::save_together`], by a writer that may already have failed to get its pieces.
    pub(super) fn save_if_complete<E: std::fmt::Display>(
        &self,
        meta: &CheckpointMeta,
        writer_rank: WriterRank,
        pieces: Result<&[Piece<'_>], &CheckpointError>,
        extras: &[(&str, &[u8])],
        mut sum: impl FnMut(u64) -> Result<u64, E>,
    ) -> Result<CheckpointId, CheckpointError> {
        let step = meta.step;
        let is_leader = writer_rank.writer == 0;
        let mut sum =
            |value| sum(value).map_err(|error| CheckpointError::Agreement { step, reason: error.to_string() });
        let is_alone = writer_rank.n_writers == 1;
        let checked = pieces.map_err(Clone::clone).and_then(|pieces| {
            pieces::check(pieces, extras, is_alone)?;
            Ok(pieces)
        });
        let begun = checked.and_then(|pieces| {
            let pending = if is_leader { Some(self.begin(meta)?) } else { None };
            Ok((pending, pieces))
        });
        // The generation is sent plus one; zero means that there is none.
        let claimed = begun.as_ref().ok().and_then(|(pending, _)| pending.as_ref());
        let sent = claimed.map_or(0, |pending| pending.id().generation + 1);
        let Some(generation) = sum(sent)?.checked_sub(1) else {
            return Err(begun.err().unwrap_or(CheckpointError::OthersFailed { step, n_failed: 1 }));
        };
        let (pending, written) = match begun {
            Ok((pending, pieces)) => {
                let pending = pending.unwrap_or_else(|| self.join(meta, generation));
                let written = pending.write_part(writer_rank.writer, pieces, extras);
                (pending, written)
            }
            Err(error) => (self.join(meta, generation), Err(error)),
        };
        let id = pending.id().clone();
        if let Err(error) = settle(step, written, &mut sum) {
            // A store that has just been asked in vain is not asked again: there is no marker, and the next retention removes
            // the remains.
            if is_leader && !matches!(error, CheckpointError::Unreachable { .. }) {
                pending.abandon();
            }
            return Err(error);
        }
        // A marker that readers may have seen is never removed: only a failed commit is abandoned.
        let committed = if is_leader { pending.commit(writer_rank.n_writers) } else { Ok(()) };
        if committed.is_err() {
            pending.abandon();
        }
        settle(step, committed, &mut sum).map(|()| id)
    }

    /// Claims a new directory for a save of many writers. The leader calls it and sends the generation in
    /// [`PendingCheckpoint::id`] to the others. Most callers use [`CheckpointWriter::save_together`].
    ///
    /// # Errors
    /// When the store refuses.
    pub fn begin(&self, meta: &CheckpointMeta) -> Result<PendingCheckpoint, CheckpointError> {
        self.seal_earlier()?;
        let listed = catalog::list_in(&*self.store, &self.root)?;
        self.beginning.map_or(Ok(()), |beginning| beginning.note(&*self.store, &self.root, &listed))?;
        // After all generations of this step, even if retention removed the first ones: otherwise this would be the oldest.
        let of_step = listed.into_iter().find(|id| id.step == meta.step);
        let generation = of_step.map_or(0, |newest| newest.generation + 1).max(meta.generation);
        let mut id = CheckpointId::new(&self.root, meta.step, generation);
        while !self.store.claim(&id.path)? {
            id = CheckpointId::new(&self.root, meta.step, id.generation + 1);
        }
        Ok(PendingCheckpoint::new(self.store.clone(), id, meta, self.shard_bytes_max).behind(self.fence.clone()))
    }

    /// Keeps earlier worlds from finishing what they have begun to save (`CHECKPOINT-8`); later calls for one world do nothing.
    /// Its leader calls it before it reads a checkpoint to continue from; [`CheckpointWriter::begin`] calls it.
    ///
    /// # Errors
    /// When a later world has begun, or the store refuses.
    pub fn seal_earlier(&self) -> Result<(), CheckpointError> {
        self.fence.as_ref().map_or(Ok(()), |fence| fence.seal_earlier(&*self.store, &self.root))
    }

    /// Joins the save whose directory the leader claimed with this generation.
    pub fn join(&self, meta: &CheckpointMeta, generation: u64) -> PendingCheckpoint {
        let id = CheckpointId::new(&self.root, meta.step, generation);
        PendingCheckpoint::new(self.store.clone(), id, meta, self.shard_bytes_max)
    }

    /// Whether its store has not answered for so long that training should not wait for a save.
    pub fn is_stalled(&self) -> bool {
        self.store.is_stalled()
    }

    /// The directory below which it saves.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Removes checkpoints that are older than the one that was just saved; see [`catalog::retain`].
    ///
    /// # Errors
    /// As [`catalog::retain`].
    pub fn retain(&self, keep: impl Into<Keep>, saved: &CheckpointId) -> Result<Vec<PathBuf>, CheckpointError> {
        self.fence.as_ref().map_or(Ok(()), Fence::check)?;
        catalog::retain(&self.store, &self.root, keep.into(), saved)
    }
}

/// Agrees on the outcome: `Ok` for all writers or an error for all, the writer's own error if it has one.
fn settle(
    step: u64,
    own: Result<(), CheckpointError>,
    sum: &mut impl FnMut(u64) -> Result<u64, CheckpointError>,
) -> Result<(), CheckpointError> {
    let n_failed = sum(u64::from(own.is_err()));
    own?;
    match n_failed? {
        0 => Ok(()),
        n_failed => Err(CheckpointError::OthersFailed { step, n_failed }),
    }
}

// Saving runs on a background thread; this fails to compile if the writer cannot be sent there.
const _: fn() = || {
    fn sendable<T: Send + Sync + Clone + 'static>() {}
    sendable::<CheckpointWriter>();
};
