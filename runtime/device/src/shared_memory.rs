//! Sealed memory that the ranks of a machine map.
//!
//! Sealed memory cannot be resized, so no access below [`SharedMemory::len`] can fault.
#![allow(unsafe_code)] // This file maps memory that other processes write.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::CollectiveError;

const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
/// Most bytes of one mapping; a larger size is a mistake.
pub const BYTES_MAX: u64 = 1 << 42;

/// A type that may lie in memory that other processes write at any time.
///
/// # Safety
/// It consists of atomics only: every bit pattern is valid and every access is atomic.
pub unsafe trait AtomicsOnly {}

/// A mapping of sealed memory.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread. A shared reference allows access only as atomics or
// through raw pointers, whose users keep the protocol.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates memory of `len` zero bytes. Pages are allocated when they are first touched.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if it is too large; [`CollectiveError::System`] if memory is refused.
    pub fn create(len: u64) -> Result<SharedMemory, CollectiveError> {
        if len == 0 || len > BYTES_MAX {
            let expected = format!("1 to {BYTES_MAX}");
            return Err(CollectiveError::Shape { field: "bytes of shared memory", expected, found: len });
        }
        // SAFETY: the name is a C string and the flags are valid; the result is checked.
        let raw = unsafe { libc::memfd_create(c"phalanx".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if raw < 0 {
            return Err(CollectiveError::last_os("memfd_create"));
        }
        // SAFETY: the descriptor is new and unowned.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: an open descriptor and plain integers.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), len as libc::off_t) } != 0 {
            return Err(CollectiveError::last_os("ftruncate"));
        }
        // SAFETY: as above.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS | libc::F_SEAL_SEAL) } != 0 {
            return Err(CollectiveError::last_os("fcntl(F_ADD_SEALS)"));
        }
        SharedMemory::map(fd, len as usize)
    }

    /// Maps memory that another process created, after checking that it is sealed against resizing.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if it is not sealed or its size is not one that [`SharedMemory::create`] accepts;
    /// [`CollectiveError::System`] if mapping is refused.
    pub fn attach(fd: OwnedFd) -> Result<SharedMemory, CollectiveError> {
        let len = sealed_bytes(fd.as_fd())?;
        if len == 0 || len > BYTES_MAX {
            return Err(CollectiveError::Invalid { field: "size of the memory", expected: BYTES_MAX, found: len });
        }
        SharedMemory::map(fd, len as usize)
    }

    /// As [`SharedMemory::attach`], or one of `known` if that is the same memory, which saves the page faults of a new
    /// mapping.
    ///
    /// # Errors
    /// As [`SharedMemory::attach`].
    pub fn attach_or_keep(fd: OwnedFd, known: &[Arc<SharedMemory>]) -> Result<Arc<SharedMemory>, CollectiveError> {
        let found = inode(fd.as_fd()).ok();
        let is_it = |memory: &&Arc<SharedMemory>| found.is_some() && inode(memory.fd()).ok() == found;
        match known.iter().find(is_it) {
            Some(memory) => Ok(memory.clone()),
            None => Ok(Arc::new(SharedMemory::attach(fd)?.with_huge_pages())),
        }
    }

    /// Requests huge pages, which speed up access to large tensors. A refusal is ignored.
    pub fn with_huge_pages(self) -> SharedMemory {
        // SAFETY: the range is our mapping, and the advice does not change its contents.
        unsafe { libc::madvise(self.base.cast(), self.len, libc::MADV_HUGEPAGE) };
        self
    }

    /// Allocates the pages of the first `bytes` now. Where the system does not support this, they are allocated on
    /// first touch.
    pub fn populate(&self, bytes: usize) {
        // SAFETY: the range lies in our mapping, and its contents stay.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::madvise(self.base.cast(), bytes.min(self.len), libc::MADV_POPULATE_WRITE)
        };
    }

    /// Writes zeros from `start` on, wherever pages are allocated; all other pages are zero.
    ///
    /// # Errors
    /// [`CollectiveError::System`] if the system does not report the allocated pages.
    ///
    /// # Safety
    /// No process reads or writes the memory from `start` on until this returns, and no reference to it exists.
    pub(crate) unsafe fn clear(&self, start: usize) -> Result<(), CollectiveError> {
        let mut at = start;
        while let Some(data) = self.seek(at, libc::SEEK_DATA)? {
            let hole = self.seek(data, libc::SEEK_HOLE)?.unwrap_or(self.len).min(self.len);
            if hole <= data {
                break;
            }
            // SAFETY: the range lies in our mapping, and the caller excludes all other accesses.
            unsafe { self.base.add(data).write_bytes(0, hole - data) };
            at = hole;
        }
        Ok(())
    }

    /// The first offset from `at` on whose page is allocated, or is not; none if there is no such page.
    fn seek(&self, at: usize, whence: libc::c_int) -> Result<Option<usize>, CollectiveError> {
        if at >= self.len {
            return Ok(None);
        }
        // SAFETY: a query on an open descriptor. It moves the file position, which is unused.
        let found = unsafe { libc::lseek(self.fd.as_raw_fd(), at as libc::off_t, whence) };
        if found >= 0 {
            return Ok(Some(found as usize));
        }
        let error = std::io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ENXIO) { Ok(None) } else { Err(CollectiveError::io("lseek", &error)) }
    }

    /// Whether both map the same memory.
    pub fn is_same(&self, other: &SharedMemory) -> bool {
        matches!((inode(self.fd()), inode(other.fd())), (Ok(own), Ok(theirs)) if own == theirs)
    }

    /// The descriptor, to be passed to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The offset of `address`, if the `bytes` bytes from there lie in the memory.
    pub fn offset_of(&self, address: usize, bytes: usize) -> Option<u64> {
        let offset = address.checked_sub(self.base.addr())?;
        (offset.checked_add(bytes)? <= self.len).then_some(offset as u64)
    }

    /// The address at an offset from a peer, if `bytes` bytes from there lie in the memory and it is aligned to
    /// `align`.
    pub fn checked(&self, at: u64, bytes: usize, align: usize) -> Result<*mut u8, CollectiveError> {
        let end = usize::try_from(at).ok().and_then(|at| at.checked_add(bytes));
        match end {
            // SAFETY: the range was just checked to lie in the mapping.
            Some(end) if end <= self.len && at.is_multiple_of(align as u64) => {
                Ok(unsafe { self.base.add(at as usize) })
            }
            _ => Err(CollectiveError::Invalid { field: "offset of a tensor", expected: self.len as u64, found: at }),
        }
    }

    /// The atomics at an offset of this process's own layout.
    ///
    /// # Panics
    /// If they do not lie in the memory or are not aligned.
    pub fn get<T: AtomicsOnly>(&self, at: usize) -> &T {
        assert!(at + size_of::<T>() <= self.len && at.is_multiple_of(align_of::<T>()), "offset {at}");
        // SAFETY: the range lies in the mapping and is aligned (the base is at a page); the type consists of atomics.
        unsafe { &*self.base.add(at).cast::<T>() }
    }

    fn map(fd: OwnedFd, len: usize) -> Result<SharedMemory, CollectiveError> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory; the result is checked.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(CollectiveError::last_os("mmap"));
        }
        // Operands are named by address (`RawBuffer`).
        base.expose_provenance();
        Ok(SharedMemory { fd, base: base.cast(), len })
    }
}

/// Identifies a file of this machine: device and inode.
fn inode(fd: BorrowedFd<'_>) -> std::io::Result<(u64, u64)> {
    let file = File::from(fd.try_clone_to_owned()?).metadata()?;
    Ok((file.dev(), file.ino()))
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `map` mapped this range, and it is unmapped once; borrows of it end earlier.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// Size of the memory behind `fd`, if it is sealed.
fn sealed_bytes(fd: BorrowedFd<'_>) -> Result<u64, CollectiveError> {
    // SAFETY: a query on an open descriptor.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 {
        return Err(CollectiveError::last_os("fcntl(F_GET_SEALS)"));
    }
    if seals & SEALS != SEALS {
        return Err(CollectiveError::Invalid { field: "seals", expected: SEALS as u64, found: seals as u64 });
    }
    // SAFETY: `stat` is plain data for which zero is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the buffer is ours and lives through the call.
    if unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(CollectiveError::last_os("fstat"));
    }
    Ok(stat.st_size as u64)
}

/// Memory of one rank that all ranks of the machine map. Collectives read and write its tensors without a copy; the
/// user of the arena divides it up. New memory is zero. It stays mapped for the lifetime of the arena.
#[derive(Clone, Debug)]
pub struct Arena {
    memory: Arc<SharedMemory>,
    start: usize,
}

impl Arena {
    /// The arena of `memory` without its first `start` bytes.
    ///
    /// # Safety
    /// Holders of the arena or of a clone access its bytes through safe functions. The caller promises for all holders:
    /// of the machines whose regions share bytes, in any mapping, at most one is run, read or written at a time, and no
    /// reference into another one exists meanwhile. Peers access the arena only as operands of operations that its
    /// owner has started.
    pub unsafe fn new(memory: Arc<SharedMemory>, start: usize) -> Arena {
        Arena { memory, start }
    }

    /// First byte, at a multiple of 64.
    pub fn base(&self) -> *mut u8 {
        // SAFETY: the offset is at most the length of the memory.
        unsafe { self.memory.base().add(self.start.min(self.memory.len())) }
    }

    /// Zeroes the arena.
    ///
    /// # Errors
    /// As `SharedMemory::clear`.
    ///
    /// # Safety
    /// As `SharedMemory::clear`: no machine and no operation uses the arena, and no reference into it exists.
    pub unsafe fn clear(&self) -> Result<(), CollectiveError> {
        // SAFETY: the caller's contract.
        unsafe { self.memory.clear(self.start) }
    }

    /// The memory that contains the arena.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Whether both are the same memory, possibly in two mappings.
    pub fn is_same(&self, other: &Arena) -> bool {
        self.start == other.start && self.memory.is_same(&other.memory)
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len().saturating_sub(self.start)
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attach_refuses_memory_that_is_not_sealed() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 21).unwrap();

        let error = SharedMemory::attach(file.into()).unwrap_err();

        assert!(
            matches!(error, CollectiveError::System { .. } | CollectiveError::Invalid { field: "seals", .. }),
            "{error}"
        );
    }

    #[test]
    fn offset_outside_the_memory_is_refused() {
        let memory = SharedMemory::create(4096).unwrap();

        assert!(memory.checked(4088, 8, 8).is_ok());
        for (at, bytes) in [(4089, 8), (4096, 8), (u64::MAX, 8), (8, usize::MAX), (4, 8)] {
            assert!(matches!(memory.checked(at, bytes, 8), Err(CollectiveError::Invalid { .. })), "{at} {bytes}");
        }
    }

    #[test]
    fn cleared_memory_reads_zero_and_allocates_no_pages() {
        let memory = SharedMemory::create(64 * 4096).unwrap();
        let taken = || {
            let stat = File::from(memory.fd().try_clone_to_owned().unwrap()).metadata().unwrap();
            stat.blocks() * 512
        };
        let written = [5, 3 * 4096, 40 * 4096 + 17, 64 * 4096 - 1];
        // SAFETY: all offsets lie in the mapping, and no other thread or process uses it.
        written.iter().for_each(|at| unsafe { memory.base().add(*at).write(7) });
        let before = taken();

        // SAFETY: no other thread or process uses the mapping.
        unsafe { memory.clear(4096) }.unwrap();

        // SAFETY: as above.
        let read = written.map(|at| unsafe { memory.base().add(at).read() });
        assert_eq!(read, [7, 0, 0, 0]);
        assert_eq!(taken(), before);
    }

    #[test]
    fn second_mapping_reads_what_the_first_wrote() {
        let one = SharedMemory::create(4096).unwrap();
        let other = SharedMemory::attach(one.fd().try_clone_to_owned().unwrap()).unwrap();

        // SAFETY: byte 5 lies in both mappings, and no other thread or process uses them.
        let read = unsafe {
            one.base().add(5).write(77);
            other.base().add(5).read()
        };

        assert_eq!(read, 77);
    }
}
