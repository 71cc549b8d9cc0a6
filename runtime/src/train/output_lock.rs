//! Only one job at a time writes to an `output_dir`. The kernel holds the lock, so a crash releases it.

use crate::error::JobError;
use std::fs::{File, TryLockError};
use std::path::Path;

/// Held while a job writes into its folder.
#[derive(Debug)]
#[must_use = "a drop releases the lock"]
pub(crate) struct OutputLock {
    _file: Option<File>,
}

impl OutputLock {
    /// Locks the folder for this job.
    ///
    /// # Errors
    /// When another job, in this or another process, holds the lock.
    pub(crate) fn take(output_dir: &Path) -> Result<OutputLock, JobError> {
        let path = output_dir.join(".lock");
        let file = File::options().append(true).create(true).open(&path);
        let file = file.map_err(|source| JobError::Io { action: "write", path, source })?;
        match file.try_lock() {
            Ok(()) => Ok(OutputLock { _file: Some(file) }),
            Err(TryLockError::WouldBlock) => Err(JobError::InUse { path: output_dir.to_owned() }),
            // Some network file systems have no locks; the job then runs without one.
            Err(TryLockError::Error(error)) => {
                tracing::warn!(%error, folder = %output_dir.display(), "the folder cannot be locked");
                Ok(OutputLock { _file: None })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_job_in_a_folder_is_refused() {
        let dir = tempfile::tempdir().unwrap();

        let first = OutputLock::take(dir.path()).unwrap();
        let second = OutputLock::take(dir.path());
        drop(first);
        let third = OutputLock::take(dir.path());

        assert!(matches!(second, Err(JobError::InUse { path }) if path == dir.path()));
        assert!(third.is_ok());
    }
}
