//! The file of measurements, which the leader of each world takes over from its predecessor.
//!
//! The leader copies the lines that stay into a new file, which then gets the name of the old one. Invariants:
//! - TAKEN-OVER-1 A reader finds whole lines of one world for each step: it reads the old file or the new one, and a line is
//!   appended by one call.
//! - TAKEN-OVER-2 Once the leader of a later world has taken the file over, no line of an earlier world reaches it. An earlier leader
//!   has its lines in a file without a name. One that is suspended while it takes over does not finish: a later leader removes
//!   the new files of earlier ones before it renames its own, and an earlier leader compares its generation with the record
//!   after its new file exists ([`phalanx_storage::checkpoint::fence`] has the same reasoning).
//! - TAKEN-OVER-3 Where no file can be renamed, because a disk is full or a folder is read-only, the file is cut in place.

use phalanx_storage::checkpoint::fence::Fence;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::Builder;

/// Bytes that are read at a time from the end of the file.
const BLOCK_BYTES: u64 = 16 << 10;
/// A longer line is of no run.
const LINE_BYTES_MAX: usize = 1 << 20;

/// Takes over the file at `path` for the world of the fence, or for a run with one world. `kept` finds how many bytes stay. The
/// file that is returned appends.
///
/// # Errors
/// When a later world has begun, or the file cannot be written.
pub(crate) fn take_over(
    path: &Path,
    fence: Option<&Fence>,
    kept: impl Fn(&File) -> io::Result<u64>,
) -> io::Result<File> {
    // Of a link, the file that it names.
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let old = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(old) if old.metadata()?.file_type().is_fifo() => {
            return Err(io::Error::new(ErrorKind::InvalidInput, "it is a pipe"));
        }
        Ok(old) if old.metadata()?.is_file() => Some(old),
        Ok(_) => return in_place(path, kept),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let beside = beside(path, fence.map_or(0, Fence::generation));
    match renamed(path, &beside, old.as_ref(), fence, &kept) {
        Err(Obstacle::System(error)) => {
            tracing::debug!(%error, path = %path.display(), "the file is cut in place");
            let _ = fs::remove_file(&beside);
            in_place(path, kept)
        }
        Err(Obstacle::LaterWorld(error)) => Err(error),
        Ok(file) => {
            make_durable(&file);
            Ok(file)
        }
    }
}

/// Why a new file did not get the name of the old one.
enum Obstacle {
    LaterWorld(io::Error),
    System(io::Error),
}

impl From<io::Error> for Obstacle {
    fn from(error: io::Error) -> Obstacle {
        Obstacle::System(error)
    }
}

fn renamed(
    path: &Path,
    beside: &Path,
    old: Option<&File>,
    fence: Option<&Fence>,
    kept: &impl Fn(&File) -> io::Result<u64>,
) -> Result<File, Obstacle> {
    let mut new = OpenOptions::new().create(true).truncate(true).write(true).open(beside)?;
    if let Some(old) = old {
        let n_bytes = kept(old)?;
        if io::copy(&mut old.take(n_bytes), &mut new)? < n_bytes {
            return Err(Obstacle::System(ErrorKind::UnexpectedEof.into()));
        }
        new.set_permissions(old.metadata()?.permissions())?;
    }
    let others = others_beside(path, beside)?;
    let check = || fence.map_or(Ok(()), Fence::check).map_err(|error| Obstacle::LaterWorld(io::Error::other(error)));
    if let Err(obstacle) = check() {
        let _ = fs::remove_file(beside);
        return Err(obstacle);
    }
    for other in others {
        match fs::remove_file(other) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    let file = OpenOptions::new().append(true).open(beside);
    match file.and_then(|file| fs::rename(beside, path).map(|()| file)) {
        // A later world has removed it.
        Err(error) if error.kind() == ErrorKind::NotFound => Err(check().err().unwrap_or(error.into())),
        renamed => Ok(renamed?),
    }
}

/// Cuts the file where it is, and appends.
fn in_place(path: &Path, kept: impl Fn(&File) -> io::Result<u64>) -> io::Result<File> {
    let file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
    if file.metadata()?.is_file() {
        file.set_len(kept(&file)?)?;
    }
    Ok(file)
}

/// Makes the copied lines durable beside training: a step does not wait for a disk.
fn make_durable(file: &File) {
    let Ok(file) = file.try_clone() else { return };
    // Without a thread, the system writes them in its own time.
    let _ = Builder::new().name("sync".into()).spawn(move || file.sync_data());
}

/// The new file of a leader.
fn beside(path: &Path, generation: u64) -> PathBuf {
    path.with_file_name(OsString::from(format!("{}{generation}.new", prefix(path))))
}

fn prefix(path: &Path) -> String {
    format!(".{}.g", path.file_name().unwrap_or_default().to_string_lossy())
}

/// The new files of other leaders.
fn others_beside(path: &Path, own: &Path) -> io::Result<Vec<PathBuf>> {
    let prefix = prefix(path);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let paths = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<PathBuf>>>()?;
    let is_beside = |other: &PathBuf| {
        let name = other.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&prefix) && name.ends_with(".new") && other.file_name() != own.file_name()
    };
    Ok(paths.into_iter().filter(is_beside).collect())
}

/// The lines of a file, the last one first: a run that goes on needs only the end of a long file.
pub(crate) struct LinesFromEnd<'a> {
    file: &'a File,
    /// The part before the lines that were returned: where its bytes in memory begin, and these.
    first: u64,
    bytes: Vec<u8>,
}

/// A line with its newline, which a torn last line lacks.
pub(crate) struct Line {
    /// Bytes of the file up to its end.
    pub(crate) end: u64,
    pub(crate) bytes: Vec<u8>,
}

impl LinesFromEnd<'_> {
    pub(crate) fn of(file: &File) -> io::Result<LinesFromEnd<'_>> {
        Ok(LinesFromEnd { file, first: file.metadata()?.len(), bytes: Vec::new() })
    }

    /// The next line towards the beginning.
    ///
    /// # Errors
    /// When the file cannot be read, or has a line that is too long.
    pub(crate) fn next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let before = self.bytes.len().saturating_sub(1);
            let begin = match self.bytes[..before].iter().rposition(|byte| *byte == b'\n') {
                Some(newline) => newline + 1,
                None if self.first == 0 && self.bytes.is_empty() => return Ok(None),
                None if self.first == 0 => 0,
                None if self.bytes.len() > LINE_BYTES_MAX => {
                    let text = format!("a line has more than {LINE_BYTES_MAX} bytes");
                    return Err(io::Error::new(ErrorKind::InvalidData, text));
                }
                None => {
                    self.read_block()?;
                    continue;
                }
            };
            let end = self.first + self.bytes.len() as u64;
            return Ok(Some(Line { end, bytes: self.bytes.split_off(begin) }));
        }
    }

    fn read_block(&mut self) -> io::Result<()> {
        let n_bytes = self.first.min(BLOCK_BYTES.max(self.bytes.len() as u64));
        let mut block = vec![0; n_bytes as usize];
        self.file.read_exact_at(&mut block, self.first - n_bytes)?;
        self.first -= n_bytes;
        block.append(&mut self.bytes);
        self.bytes = block;
        Ok(())
    }
}

#[cfg(test)]
#[path = "taken_over_tests.rs"]
mod tests;
