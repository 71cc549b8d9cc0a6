//! Checkpoints in a folder: a file gets its name once its content is durable; directories are synced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checkpoint_id::CheckpointId;
use super::error::CheckpointError;
use super::store::{NewFile, Store, StoredFile};
use super::volume::{LocalDisk, Volume, VolumeFile};

/// Prefix of a removed checkpoint's name while its files are deleted.
const TRASH: &str = ".trash-";

/// A folder of the file system as a [`Store`].
#[derive(Clone, Debug)]
pub struct Disk {
    volume: Arc<dyn Volume>,
}

impl Disk {
    /// Writes through this volume; reads go to the file system.
    pub fn on(volume: Arc<dyn Volume>) -> Self {
        Self { volume }
    }

    /// Creates a directory and its missing parents, durably.
    fn create_dirs(&self, path: &Path) -> Result<(), CheckpointError> {
        if path.as_os_str().is_empty() || path.is_dir() {
            return Ok(());
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        self.create_dirs(parent)?;
        let io = |error: io::Error| CheckpointError::io("create", path, &error);
        match self.volume.create_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(io(error)),
            _ => {}
        }
        self.volume.sync_dir(if parent.as_os_str().is_empty() { Path::new(".") } else { parent }).map_err(io)
    }

    /// Removes a checkpoint; of a link to one, only the link: others decide about what is elsewhere.
    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        if fs::symlink_metadata(dir)?.is_symlink() {
            return self.volume.remove_file(dir);
        }
        match self.volume.remove_file(&dir.join("COMMIT")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => self.volume.sync_dir(dir)?,
        }
        let name = dir.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let trash = dir.with_file_name(format!("{TRASH}{name}"));
        self.volume.rename(dir, &trash)?;
        self.volume.remove_dir_all(&trash)
    }
}

impl Default for Disk {
    fn default() -> Self {
        Self::on(Arc::new(LocalDisk))
    }
}

impl Store for Disk {
    fn claim(&self, dir: &Path) -> Result<bool, CheckpointError> {
        let root = dir.parent().unwrap_or(Path::new(""));
        self.create_dirs(root)?;
        match self.volume.create_dir(dir) {
            Ok(()) => self.sync_dir(root).map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(CheckpointError::io("create", dir, &error)),
        }
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        let temp = temporary(path);
        let file = self.volume.create_file(&temp)?;
        Ok(Box::new(TempFile { volume: self.volume.clone(), file, temp, path: path.to_owned() }))
    }

    fn sync_dir(&self, dir: &Path) -> Result<(), CheckpointError> {
        self.volume.sync_dir(dir).map_err(|error| CheckpointError::io("write", dir, &error))
    }

    fn open(&self, path: &Path) -> Result<Option<Arc<dyn StoredFile>>, CheckpointError> {
        match open_regular(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CheckpointError::io("read", path, &error)),
            Ok(None) => Err(CheckpointError::NotAFile { path: path.to_owned() }),
            Ok(Some(file)) => Ok(Some(Arc::new(file))),
        }
    }

    fn list(&self, root: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
        let is_dir = |path: &PathBuf| match fs::metadata(path) {
            Ok(metadata) => Ok(metadata.is_dir()),
            // Removed since it was listed. A link to nothing is a checkpoint on a disk that is not there.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_link_of_checkpoint(path) => Ok(false),
            Err(error) => Err(CheckpointError::io("read", path, &error)),
        };
        let paths = entries(root)?.into_iter().map(|path| is_dir(&path).map(|is_dir| is_dir.then_some(path)));
        paths.filter_map(Result::transpose).collect()
    }

    fn remove(&self, dir: &Path) -> Result<(), CheckpointError> {
        self.remove_dir(dir).map_err(|error| CheckpointError::io("remove", dir, &error))
    }

    /// Removes the marker that has no name yet, so that it never gets one.
    fn seal(&self, dir: &Path, _: u64) -> Result<(), CheckpointError> {
        let unfinished = temporary(&dir.join("COMMIT"));
        match self.volume.remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(CheckpointError::io("remove", unfinished, &error))
            }
            _ => Ok(()),
        }
    }

    fn sweep(&self, root: &Path) -> Result<(), CheckpointError> {
        let remove = |path: &PathBuf| {
            self.volume.remove_dir_all(path).map_err(|error| CheckpointError::io("remove", path, &error))
        };
        entries(root)?.iter().filter(|path| is_trash(path)).try_for_each(remove)
    }
}

/// A file under its temporary name, until its content is durable.
struct TempFile {
    volume: Arc<dyn Volume>,
    file: Box<dyn VolumeFile>,
    temp: PathBuf,
    path: PathBuf,
}

impl Write for TempFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl NewFile for TempFile {
    fn finish(mut self: Box<Self>) -> io::Result<()> {
        self.file.sync()?;
        self.volume.rename(&self.temp, &self.path)
    }
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    n_bytes: u64,
    /// Device, inode, and time of the last change.
    identity: String,
}

impl StoredFile for OpenFile {
    fn n_bytes(&self) -> u64 {
        self.n_bytes
    }
    fn identity(&self) -> &str {
        &self.identity
    }
    fn read_exact_at(&self, out: &mut [u8], start: u64) -> io::Result<()> {
        self.file.read_exact_at(out, start)
    }
}

/// Opens a regular file without following a link out of the directory; `None` when the path is not a regular file.
fn open_regular(path: &Path) -> io::Result<Option<OpenFile>> {
    // Checked first, because opening a pipe or a device may block or act.
    if !fs::symlink_metadata(path)?.is_file() {
        return Ok(None);
    }
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    let metadata = file.metadata()?;
    let identity = format!("{} {} {}.{}", metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec());
    Ok(Some(OpenFile { file, n_bytes: metadata.len(), identity }))
}

/// The name of a file until its content is durable.
fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!("tmp.{name}"))
}

fn is_link_of_checkpoint(path: &Path) -> bool {
    CheckpointId::from_dir(path).is_some() && fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink())
}

fn is_trash(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("{TRASH}step-")))
}

fn entries(root: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let io = |error: io::Error| CheckpointError::io("read", root, &error);
    match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(io(error)),
        Ok(entries) => entries.map(|entry| Ok(entry.map_err(io)?.path())).collect(),
    }
}
