//! The checkpoints below one directory: lists them, finds the newest valid one, removes old ones.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checkpoint_id::CheckpointId;
use super::error::{CheckpointError, ReadFailure};
use super::given_up::Beginning;
use super::reader::{self, Checkpoint, Hashing};
use super::store::Store;
use crate::checkpoint::location;

/// A checkpoint that was skipped, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Its directory.
    pub path: PathBuf,
    /// Why it is not loaded.
    pub reason: CheckpointError,
}

/// Every directory named like a checkpoint, newest first, whether it is valid or not. A `root` that does not exist has none.
///
/// # Errors
/// When `root` cannot be read.
pub fn list(root: &Path) -> Result<Vec<CheckpointId>, CheckpointError> {
    list_in(&*location::at(root)?, root)
}

/// [`list`] in an open store.
///
/// # Errors
/// As [`list`].
pub fn list_in(store: &dyn Store, root: &Path) -> Result<Vec<CheckpointId>, CheckpointError> {
    let (current, given_up) = current_and_given_up(store, root)?;
    let mut ids = [current, given_up].concat();
    ids.sort_unstable_by(|a, b| b.cmp(a));
    Ok(ids)
}

/// Those that count, and those of runs that were given up; each newest first.
fn current_and_given_up(
    store: &dyn Store,
    root: &Path,
) -> Result<(Vec<CheckpointId>, Vec<CheckpointId>), CheckpointError> {
    let dirs = store.list(root)?;
    let beginnings: Vec<Beginning> = dirs.iter().filter_map(|dir| Beginning::from_dir(dir)).collect();
    let mut ids: Vec<_> = dirs.iter().filter_map(|dir| CheckpointId::from_dir(dir)).collect();
    ids.sort_unstable_by(|a, b| b.cmp(a));
    Ok(ids.into_iter().partition(|id| !beginnings.iter().any(|beginning| beginning.gives_up(id))))
}

/// Opens the newest checkpoint that verifies; also returns the newer ones that were skipped, with reasons: only unfinished
/// saves and verified damage are skipped.
///
/// # Errors
/// When `root` or a newer checkpoint cannot be read: it may be intact, and resuming from an older one would lose work.
pub fn latest_valid(root: &Path) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    latest_valid_in(&location::at(root)?, root)
}

/// [`latest_valid`] in an open store.
///
/// # Errors
/// As [`latest_valid`].
pub fn latest_valid_in(
    store: &Arc<dyn Store>,
    root: &Path,
) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    let (current, given_up) = current_and_given_up(&**store, root)?;
    let (found, mut skipped) = newest_valid(store, current, Hashing::AllThreads)?;
    let is_newer = |id: &CheckpointId| found.as_ref().is_none_or(|found| id > found.id());
    let newer = given_up.into_iter().filter(is_newer);
    skipped.extend(newer.map(|id| Skipped { path: id.path, reason: CheckpointError::GivenUp }));
    Ok((found, skipped))
}

/// The newest committed checkpoint, whose data is not read: a look at its small files.
///
/// # Errors
/// When `root` cannot be read.
pub fn newest_committed(root: &Path) -> Result<Option<Checkpoint>, CheckpointError> {
    let store = location::at(root)?;
    let (current, _) = current_and_given_up(&*store, root)?;
    Ok(current.iter().find_map(|id| Checkpoint::open_lazily_in(&store, &id.path).ok()))
}

/// As [`latest_valid`], among the checkpoints after this step that a generation from `first` on has written.
///
/// # Errors
/// As [`latest_valid`].
pub fn latest_after(root: &Path, step: u64, first: u64) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    let store = location::at(root)?;
    let (current, _) = current_and_given_up(&*store, root)?;
    let newer = current.into_iter().filter(|id| id.step > step && id.generation >= first).collect();
    newest_valid(&store, newer, Hashing::AllThreads)
}

/// As [`latest_valid`], but prefers checkpoints that were saved after a comparison of all copies of the state: a newer one without
/// is skipped, unless there is no other.
///
/// # Errors
/// As [`latest_valid`].
pub fn latest_compared(root: &Path) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    let store = location::at(root)?;
    let (newest, mut skipped) = latest_valid_in(&store, root)?;
    let newest = match newest {
        Some(newest) if !newest.contents().compared => newest,
        newest => return Ok((newest, skipped)),
    };
    let is_compared = |id: &CheckpointId| {
        Checkpoint::open_lazily_in(&store, &id.path).is_ok_and(|checkpoint| checkpoint.contents().compared)
    };
    let (current, _) = current_and_given_up(&*store, root)?;
    let older = current.into_iter().filter(|id| id < newest.id() && is_compared(id)).collect();
    // An older one that cannot be read is no reason to fail: the newest one can.
    let Ok((Some(found), damaged)) = newest_valid(&store, older, Hashing::AllThreads) else {
        return Ok((Some(newest), skipped));
    };
    let reason = CheckpointError::NotCompared { older: found.id().path.clone() };
    skipped.push(Skipped { path: newest.id().path.clone(), reason });
    skipped.extend(damaged);
    Ok((Some(found), skipped))
}

fn newest_valid(
    store: &Arc<dyn Store>,
    ids: Vec<CheckpointId>,
    hashing: Hashing,
) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    let mut skipped = Vec::new();
    for id in ids {
        match Checkpoint::open_hashing(store, &id.path, hashing) {
            Ok(checkpoint) => return Ok((Some(checkpoint), skipped)),
            Err(error) if error.read_failure() == ReadFailure::Unreadable => return Err(error),
            Err(reason) => skipped.push(Skipped { path: id.path, reason }),
        }
    }
    Ok((None, skipped))
}

/// Which checkpoints of a run are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Number of newest ones.
    pub newest: usize,
    /// The step whose checkpoint is kept besides them.
    pub also: Option<u64>,
}

impl From<usize> for Keep {
    fn from(newest: usize) -> Keep {
        Keep { newest, also: None }
    }
}

/// Keeps the newest valid checkpoint up to `saved`, that of the step `keep.also`, and `keep.newest - 1` others before it whose
/// marker and manifest verify, and damaged ones among them; removes older ones, earlier saves of a step that is kept, and remains of
/// unfinished saves before the newest. Those of a run that was given up count as the oldest. Newer ones stay: they are evidence of damage. A checkpoint that
/// cannot be read stays, because it may be intact. Returns the removed directories. Removes nothing while no checkpoint is valid.
///
/// Reads the whole newest checkpoint on the calling thread only, so that it can run beside training.
///
/// # Errors
/// When `root` or the newest checkpoint cannot be read, or a removal fails; the rest is kept for the next call.
pub fn retain(
    store: &Arc<dyn Store>,
    root: &Path,
    keep: Keep,
    saved: &CheckpointId,
) -> Result<Vec<PathBuf>, CheckpointError> {
    store.sweep(root)?;
    let (current, given_up) = current_and_given_up(&**store, root)?;
    let ids: Vec<_> = current.into_iter().filter(|id| id <= saved).collect();
    let (Some(newest), _) = newest_valid(store, ids.clone(), Hashing::ThisThread)? else { return Ok(Vec::new()) };
    let older = ids.into_iter().filter(|id| id < newest.id()).chain(given_up);
    let (mut kept, mut steps) = (1, BTreeSet::from([newest.id().step]));
    let mut removed = Vec::new();
    for id in older {
        let failure = reader::read_manifest(&**store, &id.path).err().map(|error| error.read_failure());
        let stays = match failure {
            Some(ReadFailure::Unreadable) => true,
            Some(ReadFailure::Unfinished) => false,
            None if steps.contains(&id.step) => false,
            Some(ReadFailure::Damaged) | None => kept < keep.newest || keep.also == Some(id.step),
        };
        if stays {
            kept += usize::from(failure.is_none() && keep.also != Some(id.step));
            steps.extend(failure.is_none().then_some(id.step));
            continue;
        }
        store.remove(&id.path)?;
        removed.push(id.path);
    }
    Ok(removed)
}
