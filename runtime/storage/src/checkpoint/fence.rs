//! Keeps the ranks of a world that has been replaced from committing or removing checkpoints (`CHECKPOINT-8`).

use super::error::CheckpointError;
use std::fmt;
use std::sync::Arc;

/// Reads the latest generation on record; `None` if it is not known now.
type Latest = dyn Fn() -> Option<u64> + Send + Sync;

/// The generation that saves, and how to find out whether a later one has begun.
#[derive(Clone)]
pub struct Fence {
    generation: u64,
    latest: Arc<Latest>,
}

impl Fence {
    /// A fence for the world of this generation.
    pub fn new(generation: u64, latest: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Fence {
        Fence { generation, latest: Arc::new(latest) }
    }

    /// Checks that no later world is on record.
    ///
    /// # Errors
    /// [`CheckpointError::Superseded`].
    pub(super) fn check(&self) -> Result<(), CheckpointError> {
        let generation = self.generation;
        match (self.latest)() {
            Some(latest) if latest > generation => Err(CheckpointError::Superseded { generation, latest }),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("generation", &self.generation).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::catalog::list;
    use super::super::writer::{CheckpointMeta, CheckpointWriter, Piece};
    use super::*;
    use crate::hf::dtype::Dtype;
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};

    // CHECKPOINT-8
    #[test]
    fn world_that_was_replaced_commits_no_checkpoint_and_removes_none() {
        let dir = tempfile::tempdir().unwrap();
        let recorded = Arc::new(AtomicU64::new(2));
        let latest = Arc::clone(&recorded);
        let fence = Fence::new(2, move || Some(latest.load(Ordering::Relaxed)));
        let writer = CheckpointWriter::at(dir.path()).unwrap().behind(fence);
        let meta = |step| CheckpointMeta {
            job: "job".into(),
            step,
            generation: 2,
            mesh: BTreeMap::new(),
            verified: true,
            compared: true,
        };
        let pieces = [Piece::whole("w", Dtype::F32, &[1], &[0; 4])];
        let save = |step| writer.save(&meta(step), &pieces, &[]);
        let first = save(1).unwrap();

        recorded.store(3, Ordering::Relaxed);
        let refused = save(2).unwrap_err();
        let kept = writer.retain(1, &first).unwrap_err();

        let expected = CheckpointError::Superseded { generation: 2, latest: 3 };
        assert_eq!((&refused, &kept), (&expected, &expected));
        let left: Vec<u64> = list(dir.path()).unwrap().iter().map(|id| id.step).collect();
        assert_eq!(left, [1], "nothing of the refused save is left");
    }
}
