//! The turn of a process to write the tokens of a key, so that processes of one machine do not do the same work.
//!
//! A turn saves work only: each process writes a complete file, so whoever gets no turn tokenizes as well. Nobody waits for a
//! process that makes no progress.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use phalanx_storage::foreign_file;

use super::token_cache::{cache_path, io_error};
use super::tokenize_error::{Stopped, TokenizeError};

/// How long the process with the turn may write nothing until others stop to wait for it.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// The turn to write the tokens of a key; it ends when dropped.
#[derive(Debug)]
pub(super) struct Turn {
    path: PathBuf,
    /// None where the system has no locks of files, or the turn did not come.
    locked: Option<File>,
}

impl Turn {
    /// Waits while another process writes these tokens, at most `patience` without progress of it. The system ends the turn of a
    /// process that dies. Calls `look` while it waits, whose error ends that.
    pub(super) fn wait(
        dir: &Path,
        key: &[u8; 32],
        patience: Duration,
        look: &dyn Fn() -> Result<(), Stopped>,
    ) -> Result<Self, TokenizeError> {
        std::fs::create_dir_all(dir).map_err(|error| io_error("create the folder of", dir, &error))?;
        let tokens = cache_path(dir, key);
        let path = tokens.with_extension("lock");
        let tell =
            || tracing::warn!(path = %path.display(), "waiting for another process that tokenizes the same file");
        let mut is_stopped = false;
        let sign = || {
            look().map(|()| progress(&tokens)).map_err(|stopped| {
                is_stopped = true;
                std::io::Error::other(stopped)
            })
        };
        let taken = foreign_file::open_lock(&path).and_then(|file| {
            let is_taken = foreign_file::wait_for_lock(&file, patience, sign, tell)?;
            Ok(is_taken.then_some(file))
        });
        if is_stopped {
            return Err(Stopped.into());
        }
        match &taken {
            Ok(Some(_)) => {}
            Ok(None) => {
                tracing::warn!(path = %path.display(), "the process that tokenizes this file makes no progress; tokenizing it here, too");
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the token cache is not locked; other processes may tokenize the same file");
            }
        }
        Ok(Self { locked: taken.ok().flatten(), path })
    }
}

impl Turn {
    /// Tells those who wait that work goes on, although nothing is written.
    pub(super) fn goes_on(&self) {
        if let Some(file) = &self.locked {
            // At worst, others stop to wait and do the same work.
            let _ = file.set_modified(SystemTime::now());
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.locked.is_some() {
            // A process that waits for the removed file finds the tokens when it has the turn, or tokenizes as well.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What others see of the work of the process with the turn: the bytes in its unfinished files, and when it last told that it goes
/// on.
fn progress(tokens: &Path) -> (u64, Option<SystemTime>) {
    let prefix = format!("{}.tmp-", tokens.file_stem().unwrap_or_default().to_string_lossy());
    let entries = tokens.parent().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let unfinished = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
    let n_bytes = unfinished.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum();
    let told = tokens.with_extension("lock").metadata().and_then(|metadata| metadata.modified()).ok();
    (n_bytes, told)
}

#[cfg(test)]
mod tests {
    use super::super::token_cache::{TokenFile, TokenWriter};
    use super::*;

    const KEY: [u8; 32] = [7; 32];

    #[test]
    fn turn_to_write_is_waited_for_and_ends_when_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let first = Turn::wait(dir.path(), &KEY, PATIENCE, &|| Ok(())).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let path = dir.path().to_owned();
        let other = std::thread::spawn(move || {
            let _turn = Turn::wait(&path, &KEY, PATIENCE, &|| Ok(())).unwrap();
            sender.send(TokenFile::open(&path, &KEY).unwrap().is_some()).unwrap();
        });
        assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err(), "two have the turn at once");
        // Another key has its own turn.
        drop(Turn::wait(dir.path(), &[8; 32], PATIENCE, &|| Ok(())).unwrap());
        drop(TokenWriter::create(dir.path(), &KEY).unwrap().finish().unwrap());

        drop(first);

        assert_eq!(receiver.recv(), Ok(true));
        other.join().unwrap();
        let left = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(left.into_iter().all(|name| name.to_str().unwrap().ends_with(".tokens")));
    }

    #[test]
    fn process_without_progress_is_not_waited_for_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let stuck = Turn::wait(dir.path(), &KEY, PATIENCE, &|| Ok(())).unwrap();
        stuck.locked.as_ref().unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        let before = progress(&cache_path(dir.path(), &KEY));
        stuck.goes_on();
        assert_ne!(progress(&cache_path(dir.path(), &KEY)), before, "a sign of work is progress");

        let other = Turn::wait(dir.path(), &KEY, Duration::from_millis(20), &|| Ok(())).unwrap();

        assert!(other.locked.is_none());
        drop(other);
        assert!(stuck.path.exists(), "only the process with the turn removes its lock");
    }

    #[test]
    fn lock_behind_a_link_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("target");
        std::fs::write(&target, "content").unwrap();
        let path = cache_path(dir.path(), &KEY).with_extension("lock");
        std::os::unix::fs::symlink(&target, &path).unwrap();

        assert!(Turn::wait(dir.path(), &KEY, PATIENCE, &|| Ok(())).unwrap().locked.is_none());
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "content");
    }
}
