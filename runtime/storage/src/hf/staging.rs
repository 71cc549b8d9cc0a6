//! A directory that appears at its final path complete, or not at all.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::error::HfError;

/// Lists the files of an export, one name per line, so that a later export replaces only those.
const MARKER: &str = ".phalanx-export";

/// A directory being written beside its final path; a drop before [`Staging::publish`] removes it.
#[must_use = "nothing appears at the final path before `publish`"]
pub(super) struct Staging {
    temp: PathBuf,
    dir: PathBuf,
    names: Vec<String>,
    published: bool,
    /// Held while this process writes; the system releases it when the process dies.
    _lock: Option<File>,
}

impl Staging {
    /// Starts a directory that will appear at `dir`, which must be absent, empty or an earlier export, or a link to such a directory.
    pub(super) fn new(dir: &Path) -> Result<Self, HfError> {
        refuse_foreign(dir)?;
        let dir = &followed(dir)?;
        let mut temp = beside(dir, "writing")?;
        if is_mounted(dir)
            && let Some(name) = temp.file_name()
        {
            temp = dir.join(name);
        }
        if let Some(parent) = temp.parent() {
            fs::create_dir_all(parent).map_err(|error| HfError::io("create", parent, &error))?;
        }
        // Remains of a killed process with the same id.
        if temp.exists() {
            fs::remove_dir_all(&temp).map_err(|error| HfError::io("remove", &temp, &error))?;
        }
        remove_abandoned(&temp);
        fs::create_dir(&temp).map_err(|error| HfError::io("create", &temp, &error))?;
        let lock = File::open(&temp).ok().filter(|file| file.try_lock().is_ok());
        Ok(Self { temp, dir: dir.to_owned(), names: Vec::new(), published: false, _lock: lock })
    }

    /// Writes one file and makes it durable.
    pub(super) fn write(
        &mut self,
        name: &str,
        content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<(), HfError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let bad = |reason: &str| HfError::BadExport { name: name.to_owned(), reason: reason.to_owned() };
        if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
            return Err(bad("it is not a plain file name"));
        }
        if self.names.iter().any(|written| written == name) {
            return Err(bad("two files have this name"));
        }
        let path = self.temp.join(name);
        write_durably(&path, content).map_err(|error| HfError::io("write", &path, &error))?;
        self.names.push(name.to_owned());
        Ok(())
    }

    /// Moves the directory to its final path.
    ///
    /// An earlier export is moved aside first and removed last: a crash between the two renames leaves it complete under
    /// its other name, so one of the two always exists.
    pub(super) fn publish(mut self) -> Result<(), HfError> {
        let marker = self.temp.join(MARKER);
        write_durably(&marker, |file| file.write_all((self.names.join("\n") + "\n").as_bytes()))
            .map_err(|error| HfError::io("write", &marker, &error))?;
        sync_dir(&self.temp)?;
        let moved = match is_mounted(&self.dir) {
            true => self.move_files(),
            false => self.move_whole().or_else(|error| {
                // Mounts of object stores do not rename folders.
                tracing::warn!(%error, "moving the files of the export one by one");
                self.move_files()
            }),
        };
        self.published = moved.is_ok();
        moved
    }

    /// Replaces the directory at the final path by two renames.
    fn move_whole(&self) -> Result<(), HfError> {
        let rename = |from: &Path, to: &Path| fs::rename(from, to).map_err(|error| HfError::io("rename", from, &error));
        let replaced = beside(&self.dir, "replaced")?;
        let replaces = self.dir.exists();
        if replaces {
            // The directory may have changed while we wrote.
            refuse_foreign(&self.dir)?;
            rename(&self.dir, &replaced)?;
        }
        if let Err(error) = rename(&self.temp, &self.dir) {
            if replaces {
                rename(&replaced, &self.dir)?;
            }
            return Err(error);
        }
        // A crash may now cost the new name. An error here must not move the files again.
        let parent = self.dir.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Err(error) = sync_dir(parent.unwrap_or(Path::new("."))) {
            tracing::warn!(%error, "the export may not survive a power failure");
        }
        if replaces && let Err(error) = fs::remove_dir_all(&replaced) {
            tracing::warn!(%error, path = %replaced.display(), "the earlier export remains");
        }
        Ok(())
    }

    /// Moves file by file into the directory at the final path, without the files of an earlier export. A crash leaves a part, whose
    /// marker lets the next export replace it.
    fn move_files(&self) -> Result<(), HfError> {
        let dir = &self.dir;
        fs::create_dir_all(dir).map_err(|error| HfError::io("create", dir, &error))?;
        refuse_foreign(dir)?;
        let earlier = fs::read_dir(dir).map_err(|error| HfError::io("read", dir, &error))?;
        let marker = [MARKER.to_owned()];
        let is_kept = |name: &str| name == MARKER || is_of_mount(dir, name);
        for entry in earlier.flatten().filter(|entry| !is_kept(&entry.file_name().to_string_lossy())) {
            fs::remove_file(entry.path()).map_err(|error| HfError::io("remove", entry.path(), &error))?;
        }
        for name in marker.iter().chain(&self.names) {
            let from = self.temp.join(name);
            fs::rename(&from, dir.join(name)).map_err(|error| HfError::io("rename", &from, &error))?;
        }
        // It is empty.
        let _ = fs::remove_dir(&self.temp);
        sync_dir(dir)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published {
            // The original error matters more than one about the remains.
            let _ = fs::remove_dir_all(&self.temp);
        }
    }
}

fn write_durably(path: &Path, content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create_new(path)?);
    content(&mut file)?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

fn sync_dir(dir: &Path) -> Result<(), HfError> {
    crate::sync_dir::sync_dir(dir).map_err(|error| HfError::io("write", dir, &error))
}

/// The name of a working directory beside `dir`, on the same file system, with the process id.
fn beside(dir: &Path, role: &str) -> Result<PathBuf, HfError> {
    let name = dir.file_name().ok_or_else(|| HfError::BadExport {
        name: dir.display().to_string(),
        reason: "the path does not end in a directory name".to_owned(),
    })?;
    Ok(dir.with_file_name(format!(".{}.{role}-{}", name.to_string_lossy(), std::process::id())))
}

/// Removes what killed processes have left of their files and directories for the same final path as `temp`, which is named
/// `.NAME.writing-PID`: those that no process has locked.
pub(crate) fn remove_abandoned(temp: &Path) {
    let name = temp.file_name().unwrap_or_default().to_string_lossy();
    let Some(prefix) = name.rfind('-').map(|end| &name[..=end]) else { return };
    // The folder of a bare name is the current one.
    let folder = temp.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let siblings = fs::read_dir(folder).into_iter().flatten().flatten();
    for other in siblings.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
        let is_abandoned = File::open(other.path()).is_ok_and(|file| file.try_lock().is_ok());
        if is_abandoned {
            // It only takes space.
            let _ = match other.path().is_dir() {
                true => fs::remove_dir_all(other.path()),
                false => fs::remove_file(other.path()),
            };
        }
    }
}

/// The directory itself, or the one that a link leads to.
fn followed(dir: &Path) -> Result<PathBuf, HfError> {
    let Ok(target) = fs::read_link(dir) else { return Ok(dir.to_owned()) };
    fs::canonicalize(dir).map_err(|_| HfError::Unmounted { dir: dir.to_owned(), target })
}

/// Whether a directory is the root of a file system, such as the volume of a container: it can be neither moved nor replaced.
pub(super) fn is_mounted(dir: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|metadata| metadata.dev()).ok();
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    device(dir).is_some_and(|own| device(parent) != Some(own))
}

/// Whether a name in a mounted directory is that of an export being written there, or of a new file system.
fn is_of_mount(dir: &Path, name: &str) -> bool {
    is_mounted(dir) && (name == "lost+found" || name.starts_with('.') && name.contains(".writing-"))
}

/// Refuses a directory that holds anything but an earlier export, as an export into it would, and a link that leads nowhere.
///
/// # Errors
/// When it holds another file, or cannot be read.
pub fn refuse_foreign(dir: &Path) -> Result<(), HfError> {
    let dir = &followed(dir)?;
    let io = |error: io::Error| HfError::io("read", dir, &error);
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(io)?,
    };
    let ours = fs::read_to_string(dir.join(MARKER)).unwrap_or_default();
    for entry in entries {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        let known = !ours.is_empty() && (name == MARKER || ours.lines().any(|ours| ours == name));
        if !known && !is_of_mount(dir, &name) {
            return Err(HfError::Occupied { dir: dir.to_owned(), found: name });
        }
    }
    Ok(())
}
