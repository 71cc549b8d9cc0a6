//! Small objects in a folder that machines share. Each version of an object is a file of its own, `NAME.N`, which never changes;
//! the highest number counts.
//!
//! A hard link gives a whole file its final name, unless that name exists: of several writers of one version, exactly one wins, on
//! any machine. There is no lock: whoever is paused at any point, or dies there, delays nobody, and no reader of the folder can
//! keep a writer out.
//!
//! - A late link, of a writer that was paused meanwhile, may succeed after its version was pruned. Higher versions exist then,
//!   so the writer looks for them after each link.
//! - A network file system may repeat a link whose answer was lost, which then fails. The number of links tells what happened.
//! - A version that need not survive a power failure is not synced, and may be empty after one. Only renewals of the lease are such
//!   versions.
//!
//! Source: link(2), on exclusive creation over NFS; Lamport 1998, "The part-time parliament", for what is built above it.

use super::StoreError;
use super::conditional::{Conditional, LEASE, Objects, Replaced, Version};
use crate::sync_dir::sync_dir;
use std::collections::BTreeMap;
use std::fs::{self, DirEntry, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A folder whose files stand for versions of objects.
#[derive(Clone, Debug)]
pub struct Directory {
    folder: PathBuf,
}

/// Number of versions that are kept of each object.
const KEPT: u64 = 16;
/// Attempts of a reader whose version is pruned meanwhile.
const ATTEMPTS: usize = 16;
/// Extension of files without a final name.
const UNNAMED: &str = "new";
/// Age at which a file without a final name counts as left behind by a crash.
const LEFTOVER: Duration = Duration::from_secs(24 * 3600);

/// Opens the store of a job in a folder, and creates the folder if necessary.
///
/// # Errors
/// When the folder is not writable.
pub fn open_store(folder: &Path) -> Result<Conditional, StoreError> {
    // The system answers in its own time.
    Ok(Conditional::new(Arc::new(Directory::open(folder)?), Duration::MAX))
}

/// The store of a job in a folder that is only read; one that does not exist has neither lease nor record.
pub fn existing_store(folder: &Path) -> Conditional {
    Conditional::new(Arc::new(Directory { folder: folder.to_owned() }), Duration::MAX)
}

impl Directory {
    /// Opens a folder, and creates it if necessary.
    ///
    /// # Errors
    /// When the folder is not writable.
    pub fn open(folder: &Path) -> Result<Directory, StoreError> {
        fs::create_dir_all(folder).map_err(|error| failed(folder, "created", &error))?;
        let directory = Directory { folder: folder.to_owned() };
        let probe = directory.unnamed("probe");
        let written = File::create_new(&probe).and_then(|_| fs::remove_file(&probe));
        written.map_err(|error| failed(&probe, "written", &error))?;
        directory.remove_leftovers();
        Ok(directory)
    }

    /// A path that no other writer uses.
    fn unnamed(&self, name: &str) -> PathBuf {
        // The standard library seeds each hasher at random; process ids are not unique across machines.
        let random = RandomState::new().hash_one(std::process::id());
        self.folder.join(format!("{name}.{random:016x}.{UNNAMED}"))
    }

    fn remove_leftovers(&self) {
        let is_left = |entry: &DirEntry| {
            let age = entry.metadata().ok().and_then(|metadata| metadata.modified().ok()?.elapsed().ok());
            entry.path().extension().is_some_and(|end| end == UNNAMED) && age.is_some_and(|age| age > LEFTOVER)
        };
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.filter(is_left).for_each(|entry| _ = fs::remove_file(entry.path()));
    }

    /// The versions of an object and their files.
    fn versions(&self, name: &str) -> Result<BTreeMap<u64, PathBuf>, StoreError> {
        let entries = fs::read_dir(&self.folder).map_err(|error| failed(&self.folder, "read", &error))?;
        let mut versions = BTreeMap::new();
        for entry in entries {
            let path = entry.map_err(|error| failed(&self.folder, "read", &error))?.path();
            if path.file_stem().is_some_and(|stem| stem == name)
                && let Some(Ok(number)) = path.extension().and_then(|end| end.to_str()).map(str::parse)
            {
                versions.insert(number, path);
            }
        }
        Ok(versions)
    }

    fn path_of(&self, name: &str, number: u64) -> PathBuf {
        self.folder.join(format!("{name}.{number:020}"))
    }

    /// Creates this version; false if it exists.
    fn create(&self, path: &Path, name: &str, bytes: &[u8], is_durable: bool) -> io::Result<bool> {
        let unnamed = self.unnamed(name);
        let create = || {
            let mut file = File::create_new(&unnamed)?;
            file.write_all(bytes)?;
            if is_durable {
                file.sync_all()?;
            }
            match fs::hard_link(&unnamed, path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(fs::metadata(&unnamed)?.nlink() > 1),
                Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported) => {
                    create_in_place(path, bytes)
                }
                linked => linked.map(|()| true),
            }
        };
        let created = create();
        let removed = fs::remove_file(&unnamed);
        let is_created = created?;
        removed?;
        if is_created && is_durable {
            sync_dir(&self.folder)?;
        }
        Ok(is_created)
    }
}

impl Objects for Directory {
    fn read(&self, name: &str, _: Duration) -> Result<Option<(Vec<u8>, Version)>, StoreError> {
        'attempts: for _ in 0..ATTEMPTS {
            let versions = self.versions(name)?;
            let Some(last) = versions.keys().next_back().copied() else { return Ok(None) };
            for (number, path) in versions.iter().rev() {
                match fs::read(path) {
                    // A power failure has interrupted a renewal.
                    Ok(bytes) if bytes.iter().all(|byte| *byte == 0) && name == LEASE && *number > 1 => {}
                    Ok(bytes) => return Ok(Some((bytes, version(last)))),
                    Err(error) if error.kind() == ErrorKind::NotFound => continue 'attempts,
                    Err(error) => return Err(failed(path, "read", &error)),
                }
            }
            return Ok(None);
        }
        let message = format!("each of {ATTEMPTS} versions was replaced while it was being read");
        Err(StoreError::Io { path: self.location(name), action: "read", message })
    }

    fn replace(&self, name: &str, expected: Option<&Version>, bytes: &[u8], is_durable: bool, _: Duration) -> Replaced {
        let last = expected.and_then(number).unwrap_or(0);
        let next = last + 1;
        let path = self.path_of(name, next);
        if !self.create(&path, name, bytes, is_durable).map_err(|error| failed(&path, "written", &error))? {
            return Ok(None);
        }
        let versions = self.versions(name)?;
        if versions.keys().next_back() > Some(&next) {
            // It may be a version that was pruned. Whether or not it counted for a moment, others have gone on.
            return Ok(None);
        }
        for path in versions.range(..next.saturating_sub(KEPT)).map(|(_, path)| path) {
            // Another writer may prune, too.
            let _ = fs::remove_file(path);
        }
        Ok(Some(version(next)))
    }

    fn location(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Creates a file under its final name, on file systems without hard links. A reader may find a part of it, which is an error
/// that passes, unless its writer has died.
fn create_in_place(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    match File::create_new(path) {
        Ok(mut file) => file.write_all(bytes).and_then(|()| file.sync_all()).map(|()| true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

fn version(number: u64) -> Version {
    Version { e_tag: None, generation: Some(number.to_string()) }
}

fn number(version: &Version) -> Option<u64> {
    version.generation.as_deref()?.parse().ok()
}

fn failed(path: &Path, action: &'static str, error: &io::Error) -> StoreError {
    StoreError::Io { path: path.to_owned(), action, message: error.to_string() }
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
