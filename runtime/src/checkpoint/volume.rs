//! The seam below which files are made durable: local disk in production, a disk that fails or loses power in tests.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// A place that keeps files. Only writing goes through it; every operation may fail, and nothing is durable before the
/// matching `sync`.
pub trait Volume: Send + Sync {
    /// Creates a directory; its parent must exist and it must not.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a file that must not exist.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn VolumeFile>>;
    /// Renames within the volume, replacing a file at the target.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes the entries of a directory durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Removes a directory and everything in it.
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
}

/// A file being written.
pub trait VolumeFile: Write + Send {
    /// Makes the content durable. After a failure the content must be taken for lost.
    fn sync(&mut self) -> io::Result<()>;
}

/// The local file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalDisk;

impl Volume for LocalDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn VolumeFile>> {
        Ok(Box::new(File::create_new(path)?))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

impl VolumeFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
