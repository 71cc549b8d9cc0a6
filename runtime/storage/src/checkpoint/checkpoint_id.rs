//! The directory of a checkpoint, whose name states its step and generation.

use crate::checkpoint::commit;
use std::path::{Path, PathBuf};

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

impl CheckpointId {
    pub(super) fn new(root: &Path, step: u64, generation: u64) -> Self {
        Self { step, generation, path: root.join(format!("step-{step:010}.g{generation:04}")) }
    }

    /// Whether this is the directory of a checkpoint: by its name, or, on this machine, by its marker, if it is a copy or a link under
    /// another name.
    pub fn is_at(dir: &Path) -> bool {
        Self::from_dir(dir).is_some() || dir.join(commit::COMMIT).is_file()
    }

    /// Parses step and generation from a directory's name; `None` unless the name has exactly our format.
    pub fn from_dir(dir: &Path) -> Option<Self> {
        let name = dir.file_name()?.to_str()?;
        let (step, generation) = name.strip_prefix("step-")?.split_once(".g")?;
        let (step, generation) = (step.parse().ok()?, generation.parse().ok()?);
        let id = Self::new(dir.parent()?, step, generation);
        (id.path.file_name()?.to_str()? == name).then(|| Self { path: dir.to_owned(), ..id })
    }
}
