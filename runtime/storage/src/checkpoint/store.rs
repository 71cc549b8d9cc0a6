//! The storage interface for checkpoints: a folder of the file system, or a bucket of an object store.

use std::fmt::Debug;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use super::error::CheckpointError;

/// Storage for checkpoints. Paths are paths of the file system, or URLs; a URL is extended like a path.
pub trait Store: Debug + Send + Sync {
    /// Claims the directory of a checkpoint for its leader, which then owns it alone. `false` when it is already claimed.
    ///
    /// # Errors
    /// When the store refuses.
    fn claim(&self, dir: &Path) -> Result<bool, CheckpointError>;

    /// Starts a file. It appears under its name, whole, when it is finished.
    ///
    /// # Errors
    /// When the store refuses.
    fn create(&self, path: &Path) -> io::Result<Box<dyn NewFile>>;

    /// Makes the names of all files that were finished in a directory durable.
    ///
    /// # Errors
    /// When the store refuses.
    fn sync_dir(&self, dir: &Path) -> Result<(), CheckpointError>;

    /// Opens a file for reading; `None` when there is none.
    ///
    /// # Errors
    /// When the store refuses, or the path is not a file.
    fn open(&self, path: &Path) -> Result<Option<Arc<dyn StoredFile>>, CheckpointError>;

    /// The directories directly below `root`; empty when `root` does not exist.
    ///
    /// # Errors
    /// When `root` cannot be read.
    fn list(&self, root: &Path) -> Result<Vec<std::path::PathBuf>, CheckpointError>;

    /// Removes a checkpoint, its marker first, so that a crash midway leaves an uncommitted directory, never half a
    /// checkpoint.
    ///
    /// # Errors
    /// When the store refuses; a later call removes the rest.
    fn remove(&self, dir: &Path) -> Result<(), CheckpointError>;

    /// Keeps the writer of a directory without a marker from finishing it, on behalf of the world of this generation: the marker
    /// that it has begun never gets its name. A marker that exists stays.
    ///
    /// # Errors
    /// When the store refuses; the writer may then finish.
    fn seal(&self, dir: &Path, generation: u64) -> Result<(), CheckpointError>;

    /// Finishes removals below `root` that a crash interrupted.
    ///
    /// # Errors
    /// When the store refuses.
    fn sweep(&self, root: &Path) -> Result<(), CheckpointError>;

    /// Whether an operation has had no answer for so long that nobody should wait for it who can do something else.
    fn is_stalled(&self) -> bool {
        false
    }
}

/// A file being written. If dropped before it is finished, no file has its name.
pub trait NewFile: Write + Send {
    /// Makes the content durable and gives the file its name.
    ///
    /// # Errors
    /// When the store refuses; the content then counts as lost.
    fn finish(self: Box<Self>) -> io::Result<()>;
}

/// A stored file. All reads return bytes of one version, or an error.
pub trait StoredFile: Debug + Send + Sync {
    /// Its length in bytes.
    fn n_bytes(&self) -> u64;

    /// A value that changes when the file is replaced.
    fn identity(&self) -> &str;

    /// Fills `out` with the bytes from `start` on.
    ///
    /// # Errors
    /// When reading fails or the file is shorter.
    fn read_exact_at(&self, out: &mut [u8], start: u64) -> io::Result<()>;
}

/// Reads a small file whole; `None` when it does not exist.
pub(super) fn read_whole(store: &dyn Store, path: &Path, max: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
    let Some(file) = store.open(path)? else { return Ok(None) };
    let found = file.n_bytes();
    if found > max {
        return Err(CheckpointError::TooLong { path: path.to_owned(), max, found });
    }
    let mut content = vec![0; found as usize];
    file.read_exact_at(&mut content, 0).map_err(|error| CheckpointError::io("read", path, &error))?;
    Ok(Some(content))
}

/// The error for a missing file that must exist.
pub(super) fn absent(path: &Path) -> CheckpointError {
    CheckpointError::MissingFile { path: path.to_owned() }
}
