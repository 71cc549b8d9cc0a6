//! The interface that makes files durable: a local disk in production, a disk that fails or loses power in tests.

#![allow(unsafe_code)] // Early write-back is a system call without a safe wrapper.

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

/// After this many bytes the system starts to write them to the device, so that writing overlaps with hashing and the
/// final sync has little left to do.
const WRITE_BACK_BYTES: u64 = 8 << 20;

/// Storage for files. Only writes go through it; every operation may fail, and nothing is durable before the matching
/// `sync`.
pub trait Volume: Debug + Send + Sync {
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
    /// Makes the content durable. After a failure the content counts as lost.
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
        Ok(Box::new(LocalFile { file: File::create_new(path)?, len: 0, begun: 0 }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        crate::sync_dir::sync_dir(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

/// A file that is written from its start to its end.
struct LocalFile {
    file: File,
    len: u64,
    /// Bytes for which write-back was started.
    begun: u64,
}

impl Write for LocalFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.len += n as u64;
        if self.len - self.begun >= WRITE_BACK_BYTES {
            let (start, len) = (self.begun as i64, (self.len - self.begun) as i64);
            // SAFETY: the descriptor is open. A failure is harmless: the final sync writes everything and reports errors.
            unsafe { libc::sync_file_range(self.file.as_raw_fd(), start, len, libc::SYNC_FILE_RANGE_WRITE) };
            self.begun = self.len;
        }
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl VolumeFile for LocalFile {
    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}
