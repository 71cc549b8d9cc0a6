//! A disk that stops after a number of operations, fills up after a number of bytes, and can lose unsynced data.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::replaced_worlds::Meanwhile;
use crate::checkpoint::volume::{LocalDisk, Volume, VolumeFile};

#[derive(Debug, Default)]
struct State {
    n_operations: usize,
    stops_after: Option<usize>,
    has_stopped: bool,
    bytes_left: Option<u64>,
    /// Files whose content is not durable.
    unsynced: BTreeSet<PathBuf>,
    /// Changes of names that are not durable, in order.
    pending: Vec<Change>,
    /// What others do while the user of the disk is suspended.
    meanwhile: Meanwhile,
}

#[derive(Debug)]
enum Change {
    Created(PathBuf),
    Renamed(PathBuf, PathBuf),
}

/// A local disk with faults; clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct FaultyDisk(Arc<Mutex<State>>);

impl FaultyDisk {
    /// Every operation after the first `n` fails, as if the process had been killed there.
    pub(super) fn stopping_after(n: usize) -> Self {
        Self(Arc::new(Mutex::new(State { stops_after: Some(n), ..State::default() })))
    }

    /// Writes fail after this many bytes; all other operations work.
    pub(super) fn full_after(bytes: u64) -> Self {
        Self(Arc::new(Mutex::new(State { bytes_left: Some(bytes), ..State::default() })))
    }

    /// The user of the disk is suspended before an operation.
    pub(super) fn suspended(meanwhile: Meanwhile) -> Self {
        Self(Arc::new(Mutex::new(State { meanwhile, ..State::default() })))
    }

    pub(super) fn n_operations(&self) -> usize {
        self.0.lock().unwrap().n_operations
    }

    /// Whether an operation failed because the disk had stopped.
    pub(super) fn has_stopped(&self) -> bool {
        self.0.lock().unwrap().has_stopped
    }

    /// Simulates a power failure: reverts unsynced names and cuts unsynced contents in half.
    pub(super) fn lose_power(&self) {
        let mut state = self.0.lock().unwrap();
        let pending = std::mem::take(&mut state.pending);
        let mut unsynced = std::mem::take(&mut state.unsynced);
        for change in pending.into_iter().rev() {
            match change {
                Change::Created(path) if path.is_dir() => fs::remove_dir_all(path).unwrap(),
                Change::Created(path) if path.exists() => fs::remove_file(path).unwrap(),
                Change::Renamed(from, to) if to.exists() => {
                    fs::rename(&to, &from).unwrap();
                    if unsynced.remove(&to) {
                        unsynced.insert(from);
                    }
                }
                _ => {}
            }
        }
        for path in unsynced.iter().filter(|path| path.exists()) {
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        }
    }

    /// Counts an operation; fails when the disk has stopped.
    fn operate(&self) -> io::Result<std::sync::MutexGuard<'_, State>> {
        let mut state = self.0.lock().unwrap();
        if state.stops_after.is_some_and(|n| state.n_operations >= n) {
            state.has_stopped = true;
            return Err(io::Error::other("the disk has stopped"));
        }
        state.meanwhile.clone().before(state.n_operations);
        state.n_operations += 1;
        Ok(state)
    }
}

impl Volume for FaultyDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.operate()?;
        LocalDisk.create_dir(path)?;
        state.pending.push(Change::Created(path.to_owned()));
        Ok(())
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn VolumeFile>> {
        let mut state = self.operate()?;
        let file = LocalDisk.create_file(path)?;
        state.pending.push(Change::Created(path.to_owned()));
        Ok(Box::new(FaultyFile { file, path: path.to_owned(), disk: self.clone() }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.operate()?;
        LocalDisk.rename(from, to)?;
        if state.unsynced.remove(from) {
            state.unsynced.insert(to.to_owned());
        }
        state.pending.push(Change::Renamed(from.to_owned(), to.to_owned()));
        Ok(())
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.operate()?;
        let lies_in = |change: &Change| match change {
            Change::Created(file) | Change::Renamed(file, _) => file.parent() == Some(path),
        };
        state.pending.retain(|change| !lies_in(change));
        Ok(())
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let _state = self.operate()?;
        LocalDisk.remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        let _state = self.operate()?;
        LocalDisk.remove_dir_all(path)
    }
}

struct FaultyFile {
    file: Box<dyn VolumeFile>,
    path: PathBuf,
    disk: FaultyDisk,
}

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.disk.operate()?;
        state.unsynced.insert(self.path.clone());
        let room = state.bytes_left.unwrap_or(u64::MAX).min(bytes.len() as u64) as usize;
        if room == 0 && !bytes.is_empty() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let written = self.file.write(&bytes[..room])?;
        state.bytes_left = state.bytes_left.map(|left| left - written as u64);
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl VolumeFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.disk.operate()?;
        state.unsynced.remove(&self.path);
        Ok(())
    }
}
