//! Files to which a job appends while it runs: its measurements and its history.
//!
//! Invariants:
//! - JOURNAL-1 A file that cannot be written (a full disk, a quota, a lost mount) ends nothing: its records wait in memory, and
//!   every further record tries again. Records beyond [`WAITING_BYTES_MAX`] are dropped and counted.
//! - JOURNAL-2 The file has whole records in their order, except for a last one that is incomplete until the file can be
//!   written again.
//! - JOURNAL-3 A file that is removed or replaced while the job runs, as by a rotation of logs, is opened again within `LOOK`.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Limit of the records that wait in memory: some ten thousand steps.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// A file that grows by records.
pub(crate) struct Journal {
    path: PathBuf,
    open: Open,
    /// The file, once it could be opened.
    file: Option<Box<dyn Write + Send>>,
    /// Bytes to write before the next record.
    waiting: Vec<u8>,
    n_dropped: u64,
    error: Option<io::Error>,
    /// Which file has the path since it was opened, and when that was last looked at.
    identity: Option<(u64, u64)>,
    looked: Instant,
}

/// Opens a file to append to it, and creates it if it is missing. A pipe would keep its writer waiting for a reader.
///
/// # Errors
/// When it cannot be opened, or is a pipe.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let file = File::options().append(true).create(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match file.metadata()?.file_type().is_fifo() {
        true => Err(io::Error::new(ErrorKind::InvalidInput, "it is a pipe")),
        false => Ok(file),
    }
}

/// Opens a file of lines to append to it, as [`open`]. A line that a crash has cut off ends there, so that the next one is whole.
///
/// # Errors
/// As [`open`], and when it cannot be written.
pub(crate) fn open_lines(path: &Path) -> io::Result<File> {
    let mut file = open(path)?;
    let (n_bytes, mut last) = (file.metadata()?.len(), [b'\n']);
    if n_bytes > 0 {
        // A file that only can be written stays as it is.
        let _ = File::open(path).and_then(|file| file.read_exact_at(&mut last, n_bytes - 1));
    }
    if last != [b'\n'] {
        file.write_all(b"\n")?;
    }
    Ok(file)
}

/// Time between two looks whether the path still names the file.
const LOOK: Duration = Duration::from_secs(1);

type Open = Box<dyn FnMut(&Path) -> io::Result<Box<dyn Write + Send>> + Send>;

impl Journal {
    /// A journal in the file that `open` opens, now or as soon as that succeeds.
    pub(crate) fn new(
        path: PathBuf,
        open: impl FnMut(&Path) -> io::Result<Box<dyn Write + Send>> + Send + 'static,
    ) -> Journal {
        let (open, waiting): (Open, _) = (Box::new(open), Vec::new());
        let mut journal = Journal {
            path,
            open,
            file: None,
            waiting,
            n_dropped: 0,
            error: None,
            identity: None,
            looked: Instant::now(),
        };
        journal.retry();
        journal
    }

    /// Appends a record (JOURNAL-1). Allocates nothing while the file can be written.
    pub(crate) fn append(&mut self, record: &[u8]) {
        if self.looked.elapsed() >= LOOK {
            self.look();
        }
        let n_written = match &mut self.file {
            Some(file) if self.waiting.is_empty() => {
                let (n_written, outcome) = write(&mut **file, record);
                self.error = outcome.err();
                n_written
            }
            _ => 0,
        };
        let rest = &record[n_written..];
        if !rest.is_empty() {
            // The rest of a record that was begun must follow it.
            if n_written == 0 && self.waiting.len() + rest.len() > WAITING_BYTES_MAX {
                self.n_dropped += 1;
            } else {
                self.waiting.extend_from_slice(rest);
            }
            self.retry();
        }
    }

    /// Opens the file again if its path names another one, or none (JOURNAL-3).
    pub(crate) fn look(&mut self) {
        self.looked = Instant::now();
        if self.file.is_some() && identity(&self.path) != self.identity {
            tracing::warn!(path = %self.path.display(), "the file was removed or replaced; further records go to a new one");
            self.file = None;
        }
    }

    /// Tries to write the records that wait.
    pub(crate) fn retry(&mut self) {
        if self.file.is_none() {
            match (self.open)(&self.path) {
                Ok(file) => {
                    self.file = Some(file);
                    self.identity = identity(&self.path);
                }
                Err(error) => return self.error = Some(error),
            }
        }
        let file = self.file.as_mut().expect("it is open now");
        let (n_written, outcome) = write(&mut **file, &self.waiting);
        self.waiting.drain(..n_written);
        self.error = outcome.err();
    }

    /// Why the file lacks records, as a sentence; `None` while it has all of them.
    pub(crate) fn fault(&self) -> Option<String> {
        let error = self.error.as_ref()?;
        Some(format!("cannot write {}: {error}; records wait in memory", self.path.display()))
    }

    /// The records that the file will never have.
    pub(crate) const fn n_dropped(&self) -> u64 {
        self.n_dropped
    }
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("path", &self.path).field("error", &self.error).finish_non_exhaustive()
    }
}

/// Device and number of the file at a path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

/// Writes as many of the bytes as the file takes; returns their number.
fn write(file: &mut dyn Write, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut n_written = 0;
    while n_written < bytes.len() {
        match file.write(&bytes[n_written..]) {
            Ok(0) => return (n_written, Err(ErrorKind::WriteZero.into())),
            Ok(n) => n_written += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return (n_written, Err(error)),
        }
    }
    (n_written, Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    // JOURNAL-3
    #[test]
    fn file_that_is_removed_comes_back_with_the_next_records() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        let mut journal = Journal::new(path.clone(), |path| {
            Ok(Box::new(std::fs::File::options().append(true).create(true).open(path)?))
        });
        journal.append(b"one\n");
        std::fs::remove_file(&path).unwrap();

        journal.look();
        journal.append(b"two\n");

        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two\n");
        assert_eq!(journal.fault(), None);
    }

    /// A disk with room for some bytes.
    #[derive(Clone, Default)]
    struct Disk(Arc<Mutex<(usize, Vec<u8>)>>);

    impl Disk {
        fn has_room_for(&self, n_bytes: usize) {
            self.0.lock().unwrap().0 = n_bytes;
        }

        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().1.clone()).unwrap()
        }
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut disk = self.0.lock().unwrap();
            let n = bytes.len().min(disk.0);
            disk.0 -= n;
            disk.1.extend_from_slice(&bytes[..n]);
            if n == 0 { Err(ErrorKind::StorageFull.into()) } else { Ok(n) }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn journal(disk: &Disk) -> Journal {
        let disk = disk.clone();
        Journal::new("metrics.jsonl".into(), move |_| Ok(Box::new(disk.clone())))
    }

    // JOURNAL-1, JOURNAL-2
    #[test]
    fn records_of_a_full_disk_follow_once_it_has_room() {
        let disk = Disk::default();
        let mut journal = journal(&disk);
        disk.has_room_for(6);

        ["one\n", "two\n", "three\n"].into_iter().for_each(|record| journal.append(record.as_bytes()));
        let (text, fault) = (disk.text(), journal.fault());
        disk.has_room_for(1000);
        journal.append(b"four\n");

        assert_eq!(text, "one\ntw");
        assert!(fault.unwrap().starts_with("cannot write metrics.jsonl: "));
        assert_eq!((disk.text().as_str(), journal.fault()), ("one\ntwo\nthree\nfour\n", None));
    }

    // JOURNAL-1
    #[test]
    fn pipe_without_or_with_a_reader_is_a_fault_and_nobody_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.jsonl");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());

        let alone = Journal::new(path.clone(), |path| Ok(Box::new(open(path)?))).fault();
        let _reader = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        let read = Journal::new(path, |path| Ok(Box::new(open(path)?))).fault();

        assert!(alone.is_some() && read.unwrap().contains("it is a pipe"));
    }

    // JOURNAL-1
    #[test]
    fn file_that_cannot_be_opened_is_opened_later() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("later");
        let mut journal = Journal::new(folder.join("log"), |path| {
            Ok(Box::new(std::fs::File::options().append(true).create(true).open(path)?))
        });

        journal.append(b"a\n");
        assert!(journal.fault().is_some());
        std::fs::create_dir(&folder).unwrap();
        journal.append(b"b\n");

        assert_eq!(std::fs::read_to_string(folder.join("log")).unwrap(), "a\nb\n");
        assert_eq!(journal.fault(), None);
    }

    // JOURNAL-1
    #[test]
    fn records_in_memory_are_bounded_and_dropped_ones_are_counted() {
        let disk = Disk::default();
        let mut journal = journal(&disk);
        let record = [&[b'x'; 1023][..], b"\n"].concat();

        (0..5000).for_each(|_| journal.append(&record));
        disk.has_room_for(usize::MAX);
        journal.retry();

        let n_written = disk.text().lines().count();
        assert_eq!(n_written, WAITING_BYTES_MAX / 1024);
        assert_eq!((journal.n_dropped(), journal.fault()), (5000 - n_written as u64, None));
    }
}
