//! Private files with atomic replacement: only their owner may read them.

use super::TrustError;
use crate::sync_dir::sync_dir;
use std::fs::{DirBuilder, File, OpenOptions, Permissions, rename};
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Limit for secrets and registers.
const BYTES_MAX: u64 = 16 << 20;

/// Creates a directory and its missing parents, private to their owner; leaves existing ones unchanged.
///
/// # Errors
/// When a directory cannot be created.
pub fn create_dir(path: &Path) -> Result<(), TrustError> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed("create", path))
}

/// Replaces a file atomically and durably. A crash leaves the old file or the new one.
///
/// # Errors
/// When the file cannot be replaced; the old or the new file is left, whole.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), TrustError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".new");
    let new = path.with_file_name(name);
    // Opening a leftover of a crash would keep its permissions.
    match std::fs::remove_file(&new) {
        Err(err) if err.kind() != ErrorKind::NotFound => return Err(failed("remove", &new)(err)),
        _ => {}
    }
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).map_err(failed("create", &new))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed("write", &new))?;
    rename(&new, path).map_err(failed("replace", path))?;
    sync_dir(dir).map_err(failed("sync", dir))
}

/// Whether files in a folder have the mode with which they are created. Mounts of other systems (SMB, exFAT, object stores) give one
/// mode to all files.
fn keeps_modes(dir: &Path) -> bool {
    // The standard library seeds each hasher at random.
    let probe = dir.join(format!(".mode-{:016x}", RandomState::new().hash_one(std::process::id())));
    let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&probe);
    let found = made.and_then(|file| file.metadata()).map(|metadata| metadata.mode());
    let _ = std::fs::remove_file(&probe);
    found.map_or(true, is_private)
}

/// Whether only the owner of a file with this mode may read it.
const fn is_private(mode: u32) -> bool {
    mode & 0o077 == 0
}

/// Reads a file written by [`write()`]; none if there is none.
///
/// # Errors
/// When other users may read the file (`TRUST-5`), unless all files of its folder have one mode; when it exceeds 16 MiB, or when
/// it cannot be read.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>, TrustError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(err) if err.kind() == ErrorKind::NotFound => return Ok(None),
        Err(err) => return Err(failed("open", path)(err)),
    };
    let metadata = file.metadata().map_err(failed("inspect", path))?;
    let mode = metadata.mode() & 0o777;
    if !is_private(mode) {
        // Volumes that are shared by a group, such as those with `fsGroup` of Kubernetes, give its rights at every mount. Only the
        // owner of a file can take them back.
        let is_of_group_only = mode & 0o007 == 0;
        if !keeps_modes(path.parent().unwrap_or(Path::new("."))) {
            tracing::warn!(
                path = %path.display(),
                "a secret file has the mode of all files of its file system: other users of this machine may read it"
            );
        } else if is_of_group_only && file.set_permissions(Permissions::from_mode(0o600)).is_ok() {
            tracing::warn!(path = %path.display(), "a secret file had rights for its group; it is private again");
        } else {
            return Err(TrustError::Exposed { path: path.to_path_buf(), mode });
        }
    }
    if metadata.len() > BYTES_MAX {
        let why = format!("expected at most {BYTES_MAX} bytes, found {}", metadata.len());
        return Err(TrustError::Damaged { path: path.to_path_buf(), why });
    }
    let mut bytes = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut bytes).map_err(failed("read", path))?;
    Ok(Some(bytes))
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> TrustError {
    move |err| TrustError::File { action, path: path.to_path_buf(), kind: err.kind() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_file_is_private_and_replaces_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");

        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();

        assert_eq!(read(&path).unwrap().unwrap(), b"two");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(dir.path().read_dir().unwrap().count(), 1, "no temporary file is left");
    }

    // TRUST-5
    #[test]
    fn secret_readable_by_the_group_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        write(&path, b"one").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();

        let err = read(&path).unwrap_err();

        assert_eq!(err, TrustError::Exposed { path, mode: 0o644 });
    }

    // TRUST-5
    #[test]
    fn own_file_with_rights_for_its_group_is_private_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        write(&path, b"one").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o660)).unwrap();

        assert_eq!(read(&path).unwrap().unwrap(), b"one");
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn leftovers_of_a_crash_are_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("secret.new"), b"half").unwrap();

        write(&dir.path().join("secret"), b"whole").unwrap();

        assert_eq!(read(&dir.path().join("secret")).unwrap().unwrap(), b"whole");
    }

    #[test]
    fn missing_file_is_read_as_none() {
        let dir = tempfile::tempdir().unwrap();

        assert_eq!(read(&dir.path().join("secret")), Ok(None));
    }
}
