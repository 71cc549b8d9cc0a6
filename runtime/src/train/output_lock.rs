//! Only one job at a time writes to an `output_dir`. The kernel holds the locks, so a crash releases them; other users cannot
//! take them ([`open_lock`]).
//!
//! The process that starts a job locks `.lock` alone. Each rank process shares `.lock-ranks`, because ranks may outlive a
//! coordinator. `.lock-preparing` is that of [`Preparing`].

use crate::error::JobError;
use phalanx_storage::foreign_file::{self, open_lock};
use std::fs::{File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Held while a job writes into its folder.
#[derive(Debug)]
#[must_use = "a drop releases the lock"]
pub(crate) struct OutputLock {
    file: Option<File>,
}

/// The file of [`Preparing`] in a job's folder.
const PREPARING: &str = ".lock-preparing";
/// How long ranks may take to end after the process that started them.
const RANKS_PATIENCE: Duration = Duration::from_secs(5);
/// Interval of checks for ranks that end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl OutputLock {
    /// Locks the folder for this job.
    ///
    /// # Errors
    /// When another job, in this or another process, holds the lock.
    pub(crate) fn take(output_dir: &Path) -> Result<OutputLock, JobError> {
        let path = output_dir.join(".lock");
        let file = open_lock(&path).map_err(|source| refused(output_dir, path, source))?;
        match file.try_lock() {
            Ok(()) => Ok(OutputLock { file: Some(file) }),
            Err(TryLockError::WouldBlock) => Err(JobError::InUse { path: output_dir.to_owned() }),
            // Some network file systems have no locks; the job then runs without one.
            Err(TryLockError::Error(error)) => {
                tracing::warn!(%error, folder = %output_dir.display(), "the folder cannot be locked");
                Ok(OutputLock { file: None })
            }
        }
    }

    /// Whether the lock excludes other jobs: the file system has locks.
    pub(crate) const fn is_exclusive(&self) -> bool {
        self.file.is_some()
    }
}

/// Why the lock cannot be opened.
fn refused(output_dir: &Path, path: PathBuf, source: std::io::Error) -> JobError {
    match source.kind() {
        ErrorKind::PermissionDenied => JobError::NotWritable { path: output_dir.to_owned(), source },
        _ => JobError::Io { action: "write", path, source },
    }
}

/// Held while a job prepares its data, before it locks its folder: shows others what its process does, and excludes nobody.
#[derive(Debug)]
#[must_use = "a drop ends it"]
pub(crate) struct Preparing {
    path: PathBuf,
    _file: File,
}

impl Preparing {
    /// Shows it in the folder, if that can be written and no other job does.
    pub(crate) fn show(output_dir: &Path) -> Option<Preparing> {
        let path = output_dir.join(PREPARING);
        std::fs::create_dir_all(output_dir).ok()?;
        let file = open_lock(&path).ok()?;
        file.try_lock().ok()?;
        Some(Preparing { path, _file: file })
    }

    /// Whether a job prepares its data for this folder.
    pub(crate) fn is_shown(output_dir: &Path) -> bool {
        let file = foreign_file::open(&output_dir.join(PREPARING));
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }
}

impl Drop for Preparing {
    fn drop(&mut self) {
        // A job that ends here leaves no folder behind that it has made.
        let _ = std::fs::remove_file(&self.path);
        let _ = self.path.parent().map(std::fs::remove_dir);
    }
}

/// Held by a rank process of a job while it may write into the job's folder.
#[derive(Debug)]
#[must_use = "a drop releases the lock"]
pub(crate) struct RankLock {
    _file: Option<File>,
}

impl RankLock {
    /// Shares the lock of the folder's ranks. Without a folder or locks, the rank runs without it.
    pub(crate) fn share(output_dir: &Path) -> RankLock {
        let shared = open_lock(&output_dir.join(".lock-ranks")).map_err(TryLockError::Error);
        let shared = shared.and_then(|file| file.try_lock_shared().map(|()| file));
        if let Err(error) = &shared {
            tracing::debug!(%error, folder = %output_dir.display(), "the folder cannot be locked for its ranks");
        }
        RankLock { _file: shared.ok() }
    }

    /// Waits for the end of the ranks of an earlier job in this folder.
    ///
    /// # Errors
    /// When ranks do not end: their job runs, even if its coordinator does not.
    pub(crate) fn await_end_of_ranks(output_dir: &Path) -> Result<(), JobError> {
        let path = output_dir.join(".lock-ranks");
        let file = open_lock(&path).map_err(|source| refused(output_dir, path, source))?;
        let deadline = Instant::now() + RANKS_PATIENCE;
        // The check holds the lock for a moment only; the first rank of the next job starts later.
        while let Err(TryLockError::WouldBlock) = file.try_lock() {
            if Instant::now() >= deadline {
                return Err(JobError::RanksLive { path: output_dir.to_owned() });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preparation_is_shown_while_it_lasts_and_leaves_no_folder_behind() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");

        let preparing = Preparing::show(&out).unwrap();
        let (during, second) = (Preparing::is_shown(&out), Preparing::show(&out));
        drop(preparing);

        assert!(during && second.is_none());
        assert!(!Preparing::is_shown(&out) && !out.exists());
    }

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

    #[test]
    fn job_begins_only_after_the_ranks_of_the_earlier_one_have_ended() {
        let dir = tempfile::tempdir().unwrap();
        let ranks = [(); 2].map(|()| RankLock::share(dir.path()));

        let refused = RankLock::await_end_of_ranks(dir.path());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(POLL_INTERVAL);
                drop(ranks);
            });
            RankLock::await_end_of_ranks(dir.path()).unwrap();
        });

        assert!(matches!(refused, Err(JobError::RanksLive { path }) if path == dir.path()));
    }

    #[test]
    fn rank_without_a_folder_runs_without_a_lock() {
        let dir = tempfile::tempdir().unwrap();

        let _lock = RankLock::share(&dir.path().join("absent"));

        assert!(!dir.path().join("absent").exists());
    }
}
