//! Where the coordinators of a job keep what their successors need: the lease and the record, the authority and the register,
//! the job's number, and the address of the active one. It is a folder of `output_dir`, or the object store that `output_dir`
//! names.

use crate::config::output::is_url;
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use phalanx_actors::quic::link::Published;
use phalanx_actors::store::conditional::{Conditional, Objects, Version};
use phalanx_actors::store::directory::{existing_store, open_store};
use phalanx_actors::store::{SharedStore, StoreError};
use phalanx_actors::trust::place::Place;
use phalanx_storage::checkpoint::conditional::{ConditionalObjects, ObjectVersion};
use phalanx_storage::sync_dir::sync_dir;
use phalanx_strategies::elastic::identity::JobId;
use phalanx_strategies::elastic::timing::Timing;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Folder of a job, in its output folder, for the coordinator's files.
pub(crate) const CONTROL: &str = "control";
/// File in that folder with the addresses of the active coordinator, for operators and nodes that share the folder.
pub(crate) const ADDRESS: &str = "address";
/// File in that folder with the configuration of the job.
pub(crate) const CONFIG: &str = "config.yaml";
/// File in that folder with the place of the job's checkpoints, unless it is in `output_dir`, and the place from which it continues.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
/// File in that folder with the number of the job.
pub(crate) const JOB: &str = "job";

/// File in that folder with the machine and path of a coordinator of the job: a copy of the folder is told by it.
const HOME: &str = "home";

#[derive(Clone, Debug)]
pub(crate) enum ControlPlace {
    /// A folder, which the machines of the job share.
    Folder(PathBuf),
    /// Objects in the store of the job.
    Objects(Arc<Conditional>),
}

impl ControlPlace {
    /// The place of a job with this `output_dir`. Nothing is read yet.
    ///
    /// # Errors
    /// When the URL of an object store, or its settings, are invalid.
    pub(crate) fn of(output_dir: &Path, timing: &Timing) -> Result<ControlPlace, JobError> {
        ControlPlace::at(&output_dir.join(CONTROL), timing)
    }

    /// The place at this path or URL.
    ///
    /// # Errors
    /// As [`ControlPlace::of`].
    pub(crate) fn at(root: &Path, timing: &Timing) -> Result<ControlPlace, JobError> {
        match root.to_str().filter(|_| is_url(root)) {
            Some(url) => {
                let objects = Remote(ConditionalObjects::open(url)?);
                Ok(ControlPlace::Objects(Arc::new(Conditional::new(Arc::new(objects), timing.lease))))
            }
            None => Ok(ControlPlace::Folder(root.to_owned())),
        }
    }

    /// The absolute path or the URL of this place, with which [`ControlPlace::at`] finds it from other machines.
    pub(crate) fn root(&self) -> Option<String> {
        match self {
            ControlPlace::Folder(dir) => std::path::absolute(dir).ok()?.to_str().map(str::to_owned),
            ControlPlace::Objects(objects) => objects.location("").to_str().map(|url| url.trim_end_matches('/').into()),
        }
    }

    /// The store of lease and record.
    ///
    /// # Errors
    /// When the folder is not writable.
    pub(crate) fn store(&self) -> Result<SharedStore, ControlPlaneError> {
        Ok(match self {
            ControlPlace::Folder(dir) => Arc::new(open_store(&dir.join("store"))?),
            ControlPlace::Objects(objects) => objects.clone(),
        })
    }

    /// The store of lease and record, only to be read: nothing is created, and no lock is taken.
    pub(crate) fn store_as_it_is(&self) -> SharedStore {
        match self {
            ControlPlace::Folder(dir) => Arc::new(existing_store(&dir.join("store"))),
            ControlPlace::Objects(objects) => objects.clone(),
        }
    }

    /// The place of secrets.
    pub(crate) fn secrets(&self) -> Place {
        match self {
            ControlPlace::Folder(dir) => Place::Folder(dir.clone()),
            ControlPlace::Objects(objects) => Place::Store(objects.clone()),
        }
    }

    /// The addresses of the active coordinator, as nodes look for them, and whether the job is recorded as ended.
    pub(crate) fn published(&self, job: JobId) -> Published {
        let (place, of_end) = (self.clone(), self.clone());
        Published::new(move || place.read(ADDRESS).ok().flatten(), move || of_end.has_ended(job))
    }

    /// Whether the record here is that of the job and has its end.
    pub(crate) fn has_ended(&self, job: JobId) -> bool {
        let is_of_job = || self.read(JOB).ok().flatten().is_some_and(|text| text.trim() == job.0.to_string());
        // A new run replaces the number first.
        self.store_as_it_is().read_record().is_ok_and(|record| record.ending.is_some()) && is_of_job()
    }

    /// Notes that the job is in this folder, and in no folder that this one is a copy of.
    ///
    /// # Errors
    /// When the note cannot be written.
    pub(crate) fn settle(&self) -> Result<(), JobError> {
        let ControlPlace::Folder(dir) = self else { return Ok(()) };
        let Some(home) = fs::canonicalize(dir).ok().and_then(|home| Some(format!("{}\n{}", host(), home.to_str()?)))
        else {
            return Ok(());
        };
        match self.read(HOME)? {
            Some(text) if text == home => Ok(()),
            _ => self.write(HOME, &home),
        }
    }

    /// The folder that this one is a copy of: it is on this machine, too, and the job is there. A folder that was moved is none, nor is
    /// one of a network that is mounted twice: the device differs there, but not the number of the file.
    pub(crate) fn copied_from(&self) -> Option<PathBuf> {
        let ControlPlace::Folder(dir) = self else { return None };
        let home = self.read(HOME).ok()??;
        let (machine, home) = home.split_once('\n')?;
        let identity = |path: &Path| fs::metadata(path).map(|found| found.ino()).ok();
        let (own, other) = (identity(dir)?, identity(Path::new(home))?);
        (machine == host() && own != other).then(|| PathBuf::from(home))
    }

    /// The text of a file; `None` if there is none.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn read(&self, name: &str) -> Result<Option<String>, JobError> {
        let path = self.path(name);
        let text = match self {
            ControlPlace::Folder(_) => match fs::read(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                read => Some(read.map_err(|source| JobError::Io { action: "read", path, source })?),
            },
            // An empty object stands for none.
            ControlPlace::Objects(objects) => {
                objects.read_document(name).map_err(ControlPlaneError::from)?.filter(|bytes| !bytes.is_empty())
            }
        };
        Ok(text.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Replaces a file that is not secret, atomically and durably.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<(), JobError> {
        let path = self.path(name);
        match self {
            ControlPlace::Folder(_) => {
                write(&path, text.as_bytes()).map_err(|source| JobError::Io { action: "write", path, source })
            }
            ControlPlace::Objects(objects) => {
                Ok(objects.write_document(name, text.as_bytes()).map_err(ControlPlaneError::from)?)
            }
        }
    }

    /// Removes a file.
    ///
    /// # Errors
    /// When it exists and cannot be removed.
    pub(crate) fn remove(&self, name: &str) -> Result<(), JobError> {
        let path = self.path(name);
        match self {
            ControlPlace::Folder(_) => match fs::remove_file(&path) {
                Err(source) if source.kind() != ErrorKind::NotFound => {
                    Err(JobError::Io { action: "remove", path, source })
                }
                _ => Ok(()),
            },
            ControlPlace::Objects(_) if self.read(name)?.is_none() => Ok(()),
            ControlPlace::Objects(_) => self.write(name, ""),
        }
    }

    /// The path or URL of a file, for errors.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        match self {
            ControlPlace::Folder(dir) => dir.join(name),
            ControlPlace::Objects(objects) => objects.location(name),
        }
    }
}

fn host() -> String {
    sysinfo::System::host_name().unwrap_or_default()
}

/// Small documents below a path or URL. A writer replaces one only if nobody else has replaced it. `limit` bounds each answer of
/// an object store.
///
/// # Errors
/// When the folder is not writable, or the URL or its settings are invalid.
pub(crate) fn documents_at(root: &Path, limit: Duration) -> Result<Arc<Conditional>, JobError> {
    let folder = as_folder(root);
    Ok(Arc::new(match folder.to_str().filter(|_| is_url(&folder)) {
        Some(url) => Conditional::new(Arc::new(Remote(ConditionalObjects::open(url)?)), limit),
        None => open_store(&folder).map_err(ControlPlaneError::from)?,
    }))
}

/// The folder that a URL of the scheme `file` names, or the path itself.
fn as_folder(root: &Path) -> PathBuf {
    let path = root.to_str().and_then(|text| text.strip_prefix("file://"));
    path.map_or_else(|| root.to_owned(), PathBuf::from)
}

/// Where the checkpoints of a run's folder may be, the likeliest place first; or the folder is that of the checkpoints.
pub(crate) fn checkpoint_places(folder: &Path) -> Vec<PathBuf> {
    let noted = fs::read_to_string(folder.join(CONTROL).join(CHECKPOINTS)).unwrap_or_default();
    listed_places(&noted).into_iter().chain([folder.join("checkpoints"), folder.to_owned()]).collect()
}

/// The places in the file [`CHECKPOINTS`].
pub(crate) fn listed_places(text: &str) -> Vec<PathBuf> {
    text.lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect()
}

/// Writes a file atomically and durably.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = File::create(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    sync_dir(dir)
}

/// The objects of a job in its object store.
#[derive(Debug)]
struct Remote(ConditionalObjects);

impl Remote {
    fn failed(&self, name: &str, action: &'static str, error: &io::Error) -> StoreError {
        StoreError::Io { path: self.location(name), action, message: error.to_string() }
    }
}

impl Objects for Remote {
    fn read(&self, name: &str, limit: Duration) -> Result<Option<(Vec<u8>, Version)>, StoreError> {
        let found = self.0.read(name, limit).map_err(|error| self.failed(name, "read", &error))?;
        Ok(found.map(|(bytes, ObjectVersion { e_tag, generation })| (bytes, Version { e_tag, generation })))
    }

    fn replace(
        &self,
        name: &str,
        expected: Option<&Version>,
        bytes: &[u8],
        _is_durable: bool,
        limit: Duration,
    ) -> Result<Option<Version>, StoreError> {
        let expected = expected.cloned().map(|Version { e_tag, generation }| ObjectVersion { e_tag, generation });
        let replaced = self.0.replace(name, expected.as_ref(), bytes, limit);
        let replaced = replaced.map_err(|error| self.failed(name, "written", &error))?;
        Ok(replaced.map(|ObjectVersion { e_tag, generation }| Version { e_tag, generation }))
    }

    fn location(&self, name: &str) -> PathBuf {
        Path::new(self.0.url()).join(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_of_a_folder_is_told_from_a_moved_one_and_has_a_job_of_its_own_once_it_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| ControlPlace::Folder(dir.path().join(name));
        fs::create_dir(dir.path().join("first")).unwrap();
        place("first").settle().unwrap();
        std::os::unix::fs::symlink("first", dir.path().join("link")).unwrap();

        fs::create_dir(dir.path().join("copy")).unwrap();
        fs::copy(dir.path().join("first").join(HOME), dir.path().join("copy").join(HOME)).unwrap();
        let copied = place("copy").copied_from();
        place("copy").settle().unwrap();

        assert_eq!(copied, fs::canonicalize(dir.path().join("first")).ok());
        assert_eq!((place("copy").copied_from(), place("link").copied_from()), (None, None));
        fs::rename(dir.path().join("first"), dir.path().join("moved")).unwrap();
        assert_eq!(place("moved").copied_from(), None);
    }
}
