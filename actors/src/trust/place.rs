//! Where a coordinator keeps its secrets and its register: in a folder, or in the store that it shares with standbys on machines
//! without a common file system.
//!
//! Whoever can read the bucket of a store can read the secrets of its jobs, as can the owner of a folder: access to the bucket
//! is what admits a coordinator.

use super::{TrustError, file};
use crate::store::conditional::Conditional;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A folder of one machine, or objects that several machines share.
#[derive(Clone, Debug)]
pub enum Place {
    /// A folder; its files are readable only by their owner.
    Folder(PathBuf),
    /// The documents of a store.
    Store(Arc<Conditional>),
}

impl Place {
    /// Creates the folder, if it is one.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn create(&self) -> Result<(), TrustError> {
        match self {
            Place::Folder(dir) => file::create_dir(dir),
            Place::Store(_) => Ok(()),
        }
    }

    /// Reads a file; none if there is none.
    ///
    /// # Errors
    /// When the file cannot be read, or other users may read it (`TRUST-5`).
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, TrustError> {
        match self {
            Place::Folder(dir) => file::read(&dir.join(name)),
            Place::Store(store) => Ok(store.read_document(name)?),
        }
    }

    /// Replaces a file atomically and durably.
    ///
    /// # Errors
    /// When the file cannot be replaced, or another coordinator has replaced it in a store.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), TrustError> {
        match self {
            Place::Folder(dir) => file::write(&dir.join(name), bytes),
            Place::Store(store) => Ok(store.write_document(name, bytes)?),
        }
    }

    /// The path or URL of a file, for errors.
    pub fn path(&self, name: &str) -> PathBuf {
        match self {
            Place::Folder(dir) => dir.join(name),
            Place::Store(store) => store.location(name),
        }
    }
}

impl From<&Path> for Place {
    fn from(dir: &Path) -> Place {
        Place::Folder(dir.to_owned())
    }
}

impl From<&PathBuf> for Place {
    fn from(dir: &PathBuf) -> Place {
        Place::Folder(dir.clone())
    }
}

impl From<&Place> for Place {
    fn from(place: &Place) -> Place {
        place.clone()
    }
}
