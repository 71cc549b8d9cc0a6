//! The checkpoints below one directory: which there are, which is the newest that can be trusted, which may go.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::reader::{Checkpoint, Hashing};
use super::volume::Volume;

/// What a removed checkpoint is called while its files are deleted.
const TRASH: &str = ".trash-";

/// A checkpoint's directory with the step and generation that its name states; ordered by step, then generation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CheckpointId {
    /// Steps that were completed.
    pub step: u64,
    /// The generation under which it was written.
    pub generation: u64,
    /// The directory.
    pub path: PathBuf,
}

/// A checkpoint that was passed over, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Its directory.
    pub path: PathBuf,
    /// Why it is not loaded.
    pub reason: CheckpointError,
}

impl CheckpointId {
    pub(super) fn new(root: &Path, step: u64, generation: u64) -> Self {
        Self { step, generation, path: root.join(format!("step-{step:010}.g{generation:04}")) }
    }

    /// Reads step and generation off a directory's name; `None` unless it is exactly a name that we give.
    pub fn from_dir(dir: &Path) -> Option<Self> {
        let name = dir.file_name()?.to_str()?;
        let (step, generation) = name.strip_prefix("step-")?.split_once(".g")?;
        let (step, generation) = (step.parse().ok()?, generation.parse().ok()?);
        let id = Self::new(dir.parent()?, step, generation);
        (id.path.file_name()?.to_str()? == name).then(|| Self { path: dir.to_owned(), ..id })
    }
}

/// Every directory named like a checkpoint, newest first, whether it is valid or not. A `root` that does not exist has none.
///
/// # Errors
/// When `root` cannot be read.
pub fn list(root: &Path) -> Result<Vec<CheckpointId>, CheckpointError> {
    let mut ids: Vec<_> = entries(root)?.iter().filter_map(|path| CheckpointId::from_dir(path)).collect();
    ids.retain(|id| fs::symlink_metadata(&id.path).is_ok_and(|metadata| metadata.is_dir()));
    ids.sort_unstable_by(|a, b| b.cmp(a));
    Ok(ids)
}

/// Opens the newest checkpoint that verifies, and says which newer ones were passed over and why.
///
/// # Errors
/// When `root` cannot be read; a damaged checkpoint is no error but is skipped.
pub fn latest_valid(root: &Path) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    newest_valid(list(root)?, Hashing::AllThreads)
}

fn newest_valid(
    ids: Vec<CheckpointId>,
    hashing: Hashing,
) -> Result<(Option<Checkpoint>, Vec<Skipped>), CheckpointError> {
    let mut skipped = Vec::new();
    for id in ids {
        match Checkpoint::open_hashing(&id.path, hashing) {
            Ok(checkpoint) => return Ok((Some(checkpoint), skipped)),
            Err(reason) => skipped.push(Skipped { path: id.path, reason }),
        }
    }
    Ok((None, skipped))
}

/// Keeps the newest valid checkpoint up to `saved` and the `keep - 1` committed ones before it; removes older ones, and the
/// remains of saves before it that did not finish. Newer ones are left: they show what damaged them, or belong to an earlier
/// run that went further. Returns what was removed. Nothing is removed while no checkpoint is valid.
///
/// It reads the newest checkpoint whole, on the calling thread only, so that it can run beside training.
///
/// The marker goes first, so that a crash midway leaves an uncommitted directory and never half a checkpoint.
///
/// # Errors
/// When `root` cannot be read or a removal fails; the rest is kept for the next call.
pub fn retain(
    volume: &dyn Volume,
    root: &Path,
    keep: usize,
    saved: &CheckpointId,
) -> Result<Vec<PathBuf>, CheckpointError> {
    for path in entries(root)?.iter().filter(|path| is_trash(path)) {
        volume.remove_dir_all(path).map_err(|error| CheckpointError::io("remove", path, &error))?;
    }
    let ids: Vec<_> = list(root)?.into_iter().filter(|id| id <= saved).collect();
    let (Some(newest), _) = newest_valid(ids.clone(), Hashing::ThisThread)? else { return Ok(Vec::new()) };
    let older = ids.into_iter().filter(|id| id < newest.id());
    let mut kept = 1;
    let mut removed = Vec::new();
    for id in older {
        if id.path.join("COMMIT").exists() && kept < keep {
            kept += 1;
            continue;
        }
        remove(volume, root, &id.path).map_err(|error| CheckpointError::io("remove", &id.path, &error))?;
        removed.push(id.path);
    }
    Ok(removed)
}

fn remove(volume: &dyn Volume, root: &Path, dir: &Path) -> io::Result<()> {
    match volume.remove_file(&dir.join("COMMIT")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => volume.sync_dir(dir)?,
    }
    let name = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let trash = root.join(format!("{TRASH}{name}"));
    volume.rename(dir, &trash)?;
    volume.remove_dir_all(&trash)
}

fn is_trash(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("{TRASH}step-")))
}

fn entries(root: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let io = |error: io::Error| CheckpointError::io("read", root, &error);
    match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(io(error)),
        Ok(entries) => entries.map(|entry| Ok(entry.map_err(io)?.path())).collect(),
    }
}
