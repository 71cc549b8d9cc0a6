//! One job at a time writes into an `output_dir`. The kernel keeps the lock, so no crash leaves it behind.

use crate::error::JobError;
use std::fs::{File, TryLockError};
use std::path::Path;

/// Held while a job writes into its folder.
#[derive(Debug)]
#[must_use = "dropped, it lets another job in"]
pub(crate) struct OutputLock {
    _file: Option<File>,
}

impl OutputLock {
    /// Takes the folder for this job.
    ///
    /// # Errors
    /// When another job has it, in this process or another.
    pub(crate) fn take(output_dir: &Path) -> Result<OutputLock, JobError> {
        let path = output_dir.join(".lock");
        let file = File::options().append(true).create(true).open(&path);
        let file = file.map_err(|source| JobError::Io { action: "write", path, source })?;
        match file.try_lock() {
            Ok(()) => Ok(OutputLock { _file: Some(file) }),
            Err(TryLockError::WouldBlock) => Err(JobError::InUse { path: output_dir.to_owned() }),
            // Some network file systems know no locks. A job there is as safe as it was without this one.
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
    fn a_folder_has_one_job_at_a_time() {
        let dir = tempfile::tempdir().unwrap();

        let first = OutputLock::take(dir.path()).unwrap();
        let second = OutputLock::take(dir.path());
        drop(first);
        let third = OutputLock::take(dir.path());

        assert!(matches!(second, Err(JobError::InUse { path }) if path == dir.path()));
        assert!(third.is_ok());
    }
}
