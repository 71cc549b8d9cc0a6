//! Keeps the ranks of a world that has been replaced from committing or removing checkpoints (`CHECKPOINT-8`).
//!
//! A world is on record before its ranks begin. Before its leader saves anything, or reads the checkpoint from which the world
//! continues, it lists the directories of checkpoints, compares its generation with the record, and seals every directory that has
//! no marker. A writer begins the marker, compares its generation with the record, and then gives the marker its name. Hence, of
//! two worlds:
//!
//! - What the earlier one had begun when the later one sealed never gets its name, and what it begins after that, it does not
//!   finish: the later world is on record then.
//! - An earlier world that is suspended before it seals does no harm to the later one: the directories that it has listed are
//!   older than the record that it reads after that.

use super::catalog::list_in;
use super::error::CheckpointError;
use super::store::Store;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Reads the latest generation on record; `None` if it is not known now.
type Latest = dyn Fn() -> Option<u64> + Send + Sync;

/// The generation that saves, and how to find out whether a later one has begun. Clones are of one world.
#[derive(Clone)]
pub struct Fence {
    generation: u64,
    latest: Arc<Latest>,
    /// Whether this world has sealed what earlier ones had begun.
    has_sealed: Arc<AtomicBool>,
}

impl Fence {
    /// A fence for the world of this generation.
    pub fn new(generation: u64, latest: impl Fn() -> Option<u64> + Send + Sync + 'static) -> Fence {
        Fence { generation, latest: Arc::new(latest), has_sealed: Arc::default() }
    }

    /// The generation of the world.
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// Checks that no later world is on record.
    ///
    /// # Errors
    /// [`CheckpointError::Superseded`].
    pub fn check(&self) -> Result<(), CheckpointError> {
        self.known_latest().map(drop)
    }

    /// The generation on record, which is not a later one.
    fn known_latest(&self) -> Result<Option<u64>, CheckpointError> {
        let generation = self.generation;
        match (self.latest)() {
            Some(latest) if latest > generation => Err(CheckpointError::Superseded { generation, latest }),
            latest => Ok(latest),
        }
    }

    /// Seals every directory below `root` that has no marker, unless this world has done so.
    pub(super) fn seal_earlier(&self, store: &dyn Store, root: &Path) -> Result<(), CheckpointError> {
        if self.has_sealed.load(Ordering::Acquire) {
            return Ok(());
        }
        let listed = list_in(store, root)?;
        // A job on one machine does not wait for its record. The next save of this world finds it.
        if self.known_latest()? != Some(self.generation) {
            return Ok(());
        }
        for id in listed {
            if store.open(&id.path.join("COMMIT"))?.is_none() {
                store.seal(&id.path, self.generation)?;
            }
        }
        self.has_sealed.store(true, Ordering::Release);
        Ok(())
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fence").field("generation", &self.generation).finish_non_exhaustive()
    }
}
