//! Files whose names or contents are in the hands of others: those of model and data folders, and locks that other users could take.
//!
//! Such a file is opened once, is a regular one, and is read up to a bounded length. A pipe would block whoever reads it, a device
//! may have no end, and Git keeps the name of a large content in its place: all are refused before anything is read. Whoever can
//! open a file can lock it and keep its owner out, so a lock belongs to its owner alone and is behind no link.

use std::fs::{File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// The beginning of the small text that Git has in place of a large file.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A pointer is shorter than this. Source: the specification of Git LFS.
const LFS_POINTER_BYTES_MAX: u64 = 1024;

/// Read and written by the owner.
const PRIVATE: u32 = 0o600;

/// Time between two looks at a lock.
const LOOK: Duration = Duration::from_millis(50);

/// The part of the patience for a lock after which the user is told of the wait.
const UNTIL_TOLD: u32 = 12;

/// Opens a regular file, also behind links.
///
/// # Errors
/// When it cannot be opened, is a folder, a pipe, a socket or a device, or a pointer of Git LFS.
pub fn open(path: &Path) -> io::Result<File> {
    // Checked first, because opening a device may act; and again, because the path may have changed.
    check_regular(&std::fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    check_regular(&metadata)?;
    let mut head = [0; LFS_POINTER.len()];
    if metadata.len() < LFS_POINTER_BYTES_MAX && file.read_exact_at(&mut head, 0).is_ok() && head == LFS_POINTER {
        return Err(unfit("it is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder"));
    }
    Ok(file)
}

/// Opens a file for a lock of the kernel that only this user can take, and creates it if it is missing. It can be read and written.
///
/// # Errors
/// When the file cannot be opened, is a link or no regular file, or belongs to another user.
pub fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(PRIVATE);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    check_regular(&metadata)?;
    let is_open_to_others = metadata.mode() & 0o077 != 0;
    // File systems without permissions refuse this to the owner, too.
    if is_open_to_others && file.set_permissions(Permissions::from_mode(PRIVATE)).is_err() && !is_own(&metadata) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it belongs to another user, who could hold the lock",
        ));
    }
    Ok(file)
}

/// Whether a file belongs to the user of this process.
fn is_own(metadata: &Metadata) -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == metadata.uid())
}

/// Waits for a lock as long as its holder makes progress: `sign` must change within `patience`. Says after a while what is waited
/// for. Returns whether the lock was taken.
///
/// # Errors
/// When the file system has no locks, and that of `sign`.
pub fn wait_for_lock<S: PartialEq>(
    file: &File,
    patience: Duration,
    mut sign: impl FnMut() -> io::Result<S>,
    tell: impl FnOnce(),
) -> io::Result<bool> {
    let (mut seen, mut since, mut tell) = (None, Instant::now(), Some(tell));
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::Error(error)) => return Err(error),
            Err(TryLockError::WouldBlock) => {}
        }
        let now = Some(sign()?);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        if since.elapsed() >= patience {
            return Ok(false);
        }
        if since.elapsed() >= patience / UNTIL_TOLD
            && let Some(tell) = tell.take()
        {
            tell();
        }
        std::thread::sleep(LOOK.min(patience));
    }
}

/// Reads a regular file of at most `bytes_max` bytes.
///
/// # Errors
/// As [`open`]; when it is longer, or cannot be read.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let too_long = |n: u64| {
        let text = format!("it has {n} bytes or more, and at most {bytes_max} are read");
        io::Error::new(io::ErrorKind::FileTooLarge, text)
    };
    let n_bytes = file.metadata()?.len();
    if n_bytes > bytes_max {
        return Err(too_long(n_bytes));
    }
    let mut bytes = Vec::with_capacity(n_bytes as usize);
    // It may grow meanwhile, and some file systems say that files are empty which are not.
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max { Err(too_long(bytes.len() as u64)) } else { Ok(bytes) }
}

/// As [`read`], of UTF-8.
///
/// # Errors
/// As [`read`], and when it is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    String::from_utf8(read(path, bytes_max)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Whether there is something of this name, also a link to nothing, which is then refused when it is read.
///
/// # Errors
/// When the file system cannot tell, for example without permission.
pub fn is_there(path: &Path) -> io::Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Checks that a file is a regular one.
///
/// # Errors
/// When it is a folder, a pipe, a socket or a device.
pub fn check_regular(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let found = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(unfit(&format!("it is {found}, not a regular file")))
}

/// A file of another kind than the one that is needed.
pub fn unfit(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn pipe_device_folder_and_long_file_are_refused_before_they_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
        symlink("/dev/zero", path("zero")).unwrap();
        std::fs::write(path("long"), [0; 11]).unwrap();
        std::fs::write(path("short"), [0; 10]).unwrap();
        symlink(path("short"), path("link")).unwrap();

        let refused = |name: &str| read(&path(name), 10).unwrap_err().to_string();

        assert_eq!(refused("pipe"), "it is a pipe, not a regular file");
        assert_eq!(refused("zero"), "it is a device, not a regular file");
        assert_eq!(refused(""), "it is a folder, not a regular file");
        assert!(refused("long").contains("11 bytes"));
        assert_eq!(read(&path("link"), 10).unwrap().len(), 10);
    }

    #[test]
    fn pointer_of_git_lfs_is_refused_in_one_sentence() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n").unwrap();

        let error = read(&path, 1000).unwrap_err().to_string();

        assert!(error.contains("pointer of Git LFS") && error.contains("git lfs pull"), "{error}");
    }

    #[test]
    fn lock_is_private_even_if_it_was_not_before_and_behind_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let [new, old, link] = ["new", "old", "link"].map(|name| dir.path().join(name));
        std::fs::write(&old, "content").unwrap();
        std::fs::set_permissions(&old, Permissions::from_mode(0o644)).unwrap();
        symlink(&old, &link).unwrap();

        for path in [&new, &old] {
            let file = open_lock(path).unwrap();

            assert_eq!(file.metadata().unwrap().mode() & 0o777, PRIVATE, "{}", path.display());
        }
        assert!(open_lock(&link).is_err());
        assert!(std::process::Command::new("mkfifo").arg(dir.path().join("pipe")).status().unwrap().success());
        assert!(open_lock(&dir.path().join("pipe")).unwrap_err().to_string().contains("a pipe"));
        assert_eq!(std::fs::read(&old).unwrap(), b"content");
    }

    #[test]
    fn lock_is_waited_for_while_its_holder_makes_progress() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let holder = open_lock(&path).unwrap();
        holder.lock().unwrap();
        let waiting = open_lock(&path).unwrap();
        let patience = Duration::from_millis(20);

        let is_stuck = !wait_for_lock(&waiting, patience, || Ok(0), || ()).unwrap();
        let mut n_looks = 0;
        let mut holder = Some(holder);
        let sign = || {
            n_looks += 1;
            // Progress for longer than the patience, then the end.
            drop(if n_looks > 10 { holder.take() } else { None });
            Ok(n_looks)
        };
        let is_taken = wait_for_lock(&waiting, patience, sign, || ()).unwrap();

        assert!(is_stuck && is_taken);
    }

    #[test]
    fn link_to_nothing_is_there_and_cannot_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        symlink("nothing", &link).unwrap();

        assert!(is_there(&link).unwrap());
        assert!(read(&link, 10).is_err());
        assert!(!is_there(&dir.path().join("other")).unwrap());
        assert!(!is_there(&dir.path().join("other/below")).unwrap());
    }
}
