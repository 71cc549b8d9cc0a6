//! A data file that is opened once: what is hashed is what is read.
//!
//! A name can get another file between two opens, and a file another content between two reads. Tokens that are stored under the
//! hash of a content must come from that content.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use phalanx_storage::foreign_file;

use super::records::ReadError;

/// How old the last change of a file must be to be told from a later one by its time, on every file system.
const RESOLUTION: Duration = Duration::from_secs(2);

/// A data file that is open.
#[derive(Debug, Clone)]
pub(crate) struct DataFile {
    path: PathBuf,
    file: Arc<File>,
    state: State,
    opened: SystemTime,
}

/// What the system tells of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    n_bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl State {
    fn of(metadata: &Metadata) -> Self {
        Self {
            n_bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether a change from now on gives the file another time.
    fn is_older_than(&self, now: SystemTime) -> bool {
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(self.changed.0.max(0).unsigned_abs());
        now.duration_since(changed).is_ok_and(|age| age > RESOLUTION)
    }
}

impl DataFile {
    /// Opens a file; it must have an end, and the same bytes whenever it is read.
    pub(crate) fn open(path: &Path) -> Result<Self, ReadError> {
        let read_error = |error| ReadError::file(path, &error);
        let file = foreign_file::open(path).map_err(read_error)?;
        let metadata = file.metadata().map_err(read_error)?;
        // Files of the kernel have no length; their content is made as they are read, and may have no end.
        if metadata.len() == 0 && !matches!(file.read_at(&mut [0], 0), Ok(0)) {
            return Err(read_error(foreign_file::unfit("it is a file of the kernel, not a regular file")));
        }
        let state = State::of(&metadata);
        Ok(Self { path: path.to_owned(), file: Arc::new(file), state, opened: SystemTime::now() })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its length.
    pub(crate) const fn len(&self) -> u64 {
        self.state.n_bytes
    }

    /// The open file, for reads at positions.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Another descriptor of the open file; both have one position.
    pub(crate) fn try_clone(&self) -> Result<File, ReadError> {
        self.file.try_clone().map_err(|error| ReadError::file(&self.path, &error))
    }

    /// A reader with its own position, at the beginning.
    pub(crate) fn reader(&self) -> impl Read + use<> {
        Reader { file: Arc::clone(&self.file), at: 0 }
    }

    /// The hash of its content.
    pub(crate) fn hash(&self) -> Result<blake3::Hash, ReadError> {
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(self.reader()).map_err(|error| ReadError::file(&self.path, &error))?;
        Ok(hasher.finalize())
    }

    /// Checks that the content still is that with this hash, as it was when the file was opened.
    pub(crate) fn check_unchanged(&self, hash: &blake3::Hash) -> Result<(), ReadError> {
        let metadata = self.file.metadata().map_err(|error| ReadError::file(&self.path, &error))?;
        let is_same = State::of(&metadata) == self.state
            && (self.state.is_older_than(self.opened) || self.hash().is_ok_and(|now| now == *hash));
        if is_same { Ok(()) } else { Err(ReadError::Changed { path: self.path.clone() }) }
    }
}

struct Reader {
    file: Arc<File>,
    at: u64,
}

impl Read for Reader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(bytes, self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_that_changes_after_its_hash_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        std::fs::write(&path, "one").unwrap();
        let file = DataFile::open(&path).unwrap();
        let hash = file.hash().unwrap();
        assert_eq!(file.check_unchanged(&hash), Ok(()));

        // Another file under the name is no change of the one that is open.
        std::fs::write(dir.path().join("b.txt"), "two").unwrap();
        std::fs::rename(dir.path().join("b.txt"), &path).unwrap();
        assert_eq!(file.hash(), Ok(hash));
        let file = DataFile::open(&path).unwrap();
        let hash = file.hash().unwrap();
        // Within the resolution of its times, and of the same length.
        std::fs::write(&path, "six").unwrap();

        let changed = file.check_unchanged(&hash).unwrap_err();

        assert_eq!(changed, ReadError::Changed { path });
    }

    #[test]
    fn what_is_no_file_with_a_content_of_its_own_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let pointer = dir.path().join("pointer.jsonl");
        std::fs::write(&pointer, "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n").unwrap();

        let error = |path: &Path| DataFile::open(path).unwrap_err().to_string();

        assert!(error(&pipe).contains("it is a pipe"), "{}", error(&pipe));
        assert!(error(Path::new("/dev/zero")).contains("it is a device"));
        assert!(error(Path::new("/proc/self/status")).contains("is a file of the kernel"));
        assert!(error(dir.path()).contains("is a folder"));
        assert!(error(&pointer).contains("pointer of Git LFS"), "{}", error(&pointer));
    }
}
