//! Files that others wrote, such as those of model directories: regular ones of a bounded length.
//!
//! A pipe would block whoever reads it, and a device may have no end; both are refused before anything is read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file, also behind links.
///
/// # Errors
/// When it cannot be opened, or is a folder, a pipe, a socket or a device.
pub fn open(path: &Path) -> io::Result<File> {
    // Checked first, because opening a device may act; and again, because the path may have changed.
    check_regular(&std::fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
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

fn check_regular(metadata: &std::fs::Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    let found = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "a folder",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {found}, not a regular file")))
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
