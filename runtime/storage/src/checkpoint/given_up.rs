//! Checkpoints of a run that was given up: a later one in the same directory began again, or went back to an earlier checkpoint
//! (`CHECKPOINT-9`).
//!
//! The leader of such a run notes where it began before it commits a checkpoint, by a directory whose name says all. From then on,
//! checkpoints that are older than the run and newer than its beginning are neither the newest nor a substitute for a damaged one, and
//! are the first that retention removes. They can still be named.

use super::checkpoint_id::CheckpointId;
use super::error::CheckpointError;
use super::store::Store;
use std::path::{Path, PathBuf};

/// Where a run began that does not continue from the newest checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// The latest generation of earlier runs in the directory.
    after_generation: u64,
    /// Step and generation of the checkpoint, in the same directory, from which it continues; zeros if there is none.
    from: (u64, u64),
}

impl Beginning {
    /// The beginning of a run that continues from this checkpoint, or from none, and saves below `root`.
    pub fn new(after_generation: u64, from: Option<&CheckpointId>, root: &Path) -> Beginning {
        let is_same = |parent: &Path| {
            parent == root
                || parent.canonicalize().is_ok_and(|parent| root.canonicalize().is_ok_and(|root| root == parent))
        };
        let from = from.filter(|id| id.path.parent().is_some_and(is_same));
        Beginning { after_generation, from: from.map_or((0, 0), |id| (id.step, id.generation)) }
    }

    /// Parses the name of a directory; `None` unless it has exactly our format.
    pub(super) fn from_dir(dir: &Path) -> Option<Beginning> {
        let name = dir.file_name()?.to_str()?;
        let (after, from) = name.strip_prefix("given-up.g")?.split_once(".after-step-")?;
        let (step, generation) = from.split_once(".g")?;
        let found =
            Beginning { after_generation: after.parse().ok()?, from: (step.parse().ok()?, generation.parse().ok()?) };
        (found.dir(dir.parent()?).file_name()? == name).then_some(found)
    }

    fn dir(&self, root: &Path) -> PathBuf {
        let Beginning { after_generation, from: (step, generation) } = self;
        root.join(format!("given-up.g{after_generation:04}.after-step-{step:010}.g{generation:04}"))
    }

    /// Whether it gives this checkpoint up.
    pub fn gives_up(&self, id: &CheckpointId) -> bool {
        id.generation <= self.after_generation && (id.step, id.generation) > self.from
    }

    /// Notes it, unless it gives up none of the checkpoints that are listed.
    pub(super) fn note(&self, store: &dyn Store, root: &Path, listed: &[CheckpointId]) -> Result<(), CheckpointError> {
        if listed.iter().any(|id| self.gives_up(id)) {
            store.claim(&self.dir(root))?;
        }
        Ok(())
    }
}
