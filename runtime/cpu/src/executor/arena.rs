//! The memory of a region: an anonymous mapping, zeroed by the kernel on first touch; a file for the offloaded region;
//! or a part of the memory that a rank shares with its peers.

use memmap2::{MmapMut, MmapOptions};
use phalanx_device::AllocError;
use phalanx_device::shared_memory::Arena as SharedArena;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Page-aligned memory of a fixed size.
#[derive(Debug)]
pub(super) enum Arena {
    Own(Option<MmapMut>),
    Shared { memory: SharedArena, offset: usize, bytes: usize },
}

/// Shared regions begin at multiples of a page.
const PAGE: usize = 4096;
/// Most names to try for a file.
const NAMES_MAX: u32 = 1000;

impl Arena {
    pub(super) fn new(bytes: usize) -> Result<Arena, AllocError> {
        if bytes == 0 {
            return Ok(Arena::Own(None));
        }
        let map = MmapOptions::new().len(bytes).map_anon().map_err(|source| AllocError { bytes, source })?;
        // Huge pages save address translation in the products; a system without them is only slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Arena::Own(Some(map)))
    }

    /// Allocates the pages now. Where the system does not support this, they are allocated on first touch.
    pub(super) fn populate(&self) {
        #[cfg(target_os = "linux")]
        if let Arena::Own(Some(map)) = self {
            let _ = map.advise(memmap2::Advice::PopulateWrite);
        }
    }

    /// Memory backed by a file in `dir`, to which the system can evict pages. The mapped file has no name, so it is
    /// deleted when the process ends.
    pub(super) fn in_file(dir: &Path, bytes: usize) -> Result<Arena, AllocError> {
        if bytes == 0 {
            return Ok(Arena::Own(None));
        }
        let failed = |source| AllocError { bytes, source };
        let (path, file) = new_file(dir, &mut |i| format!(".offload-{}-{i}", std::process::id())).map_err(failed)?;
        std::fs::remove_file(&path).map_err(failed)?;
        file.set_len(bytes as u64).map_err(failed)?;
        // SAFETY: this process created the file and unlinked it, so no other process can open, write or truncate it.
        let map = unsafe { MmapOptions::new().len(bytes).map_mut(&file) }.map_err(failed)?;
        Ok(Arena::Own(Some(map)))
    }

    /// A region of `bytes` bytes at `offset` of shared memory.
    ///
    /// # Panics
    /// If the region exceeds the memory, whose size comes from [`super::CpuMachine::shared_bytes`].
    pub(super) fn within(memory: &SharedArena, offset: usize, bytes: usize) -> Arena {
        assert!(offset + bytes <= memory.len(), "region of {bytes} bytes at {offset} of {} shared", memory.len());
        Arena::Shared { memory: memory.clone(), offset, bytes }
    }

    /// Bytes that a region of this size occupies in shared memory.
    pub(super) const fn shared_bytes(bytes: usize) -> usize {
        bytes.next_multiple_of(PAGE)
    }

    /// Address of the first byte, aligned to a page, or to a cache line in shared memory.
    pub(super) fn base(&self) -> *mut u8 {
        match self {
            Arena::Own(map) => map.as_ref().map_or(std::ptr::NonNull::dangling().as_ptr(), |m| m.as_ptr().cast_mut()),
            // SAFETY: `within` asserts that the offset lies in the memory.
            Arena::Shared { memory, offset, .. } => unsafe { memory.base().add(*offset) },
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Arena::Own(map) => map.as_ref().map_or(0, |m| m.len()),
            Arena::Shared { bytes, .. } => *bytes,
        }
    }
}

/// Creates a file under the first unused name: processes of other containers may share the folder and have the same
/// process ids.
fn new_file(dir: &Path, name: &mut dyn FnMut(u32) -> String) -> std::io::Result<(PathBuf, File)> {
    for i in 0..NAMES_MAX {
        let path = dir.join(name(i));
        match File::options().read(true).write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            opened => return opened.map(|file| (path, file)),
        }
    }
    Err(std::io::Error::new(
        ErrorKind::AlreadyExists,
        format!("all {NAMES_MAX} names for an offload file exist in {}; remove stale files", dir.display()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offload_file_does_not_overwrite_an_existing_file_of_the_same_name() {
        let dir = tempfile::tempdir().unwrap();
        let mut name = |i: u32| format!(".offload-7-{i}");
        // A process of another container has the same id and has not yet removed its file.
        std::fs::write(dir.path().join(name(0)), b"theirs").unwrap();

        let (path, file) = new_file(dir.path(), &mut name).unwrap();
        file.set_len(100).unwrap();

        assert_eq!(path, dir.path().join(".offload-7-1"));
        assert_eq!(std::fs::read(dir.path().join(".offload-7-0")).unwrap(), b"theirs");
    }

    #[test]
    fn offloaded_memory_has_no_file_name_once_it_is_mapped() {
        let dir = tempfile::tempdir().unwrap();

        let arena = Arena::in_file(dir.path(), 8192).unwrap();

        assert_eq!((arena.len(), std::fs::read_dir(dir.path()).unwrap().count()), (8192, 0));
    }
}
