//! A sealed piece of memory that the ranks of a machine map.
//!
//! The memory cannot be resized by anybody once it is sealed, so no access below [`Layout::total_bytes`] can fault.
#![allow(unsafe_code)] // Mapping memory that other processes write is what this file is for.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use super::layout::{Header, Layout, MAGIC, REASON_BYTES, Slot, VERSION, group_words};
use super::{CollectiveError, GroupId, Progress};

const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// A mapped segment. Holding one does not make its holder a rank: a supervisor watches and aborts through it.
#[derive(Debug)]
pub struct Segment {
    fd: OwnedFd,
    base: *mut u8,
    layout: Layout,
    group: GroupId,
}

// SAFETY: the mapping belongs to the process, not to a thread. Through a shared reference the header and slots are only
// read and written as atomics, and all other accesses are unsafe functions whose callers keep the protocol.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes the segment of `group` for `size` ranks, each with `arena_bytes` for shared tensors.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if the group cannot be built; [`CollectiveError::System`] if memory is refused.
    pub fn create(group: GroupId, size: u32, arena_bytes: u64) -> Result<Segment, CollectiveError> {
        let layout = Layout::new(size, arena_bytes)?;
        // SAFETY: the name is a C string and the flags are valid; the result is checked.
        let raw = unsafe { libc::memfd_create(c"phalanx".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if raw < 0 {
            return Err(CollectiveError::last_os("memfd_create"));
        }
        // SAFETY: the descriptor is new and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: both calls take a descriptor that lives and plain integers.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), layout.total_bytes() as libc::off_t) } != 0 {
            return Err(CollectiveError::last_os("ftruncate"));
        }
        // SAFETY: as above.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS | libc::F_SEAL_SEAL) } != 0 {
            return Err(CollectiveError::last_os("fcntl(F_ADD_SEALS)"));
        }
        let segment = Segment::map(fd, layout, group)?;
        let header = segment.header();
        header.version.store(VERSION, Ordering::Relaxed);
        header.size.store(u64::from(size), Ordering::Relaxed);
        header.arena_bytes.store(layout.arena_bytes, Ordering::Relaxed);
        header.total_bytes.store(layout.total_bytes(), Ordering::Relaxed);
        for (word, value) in header.group.iter().zip(group_words(group)) {
            word.store(value, Ordering::Relaxed);
        }
        header.magic.store(MAGIC, Ordering::Release);
        Ok(segment)
    }

    /// Maps a segment that somebody else made, after checking everything it says about itself.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if it is not a segment of this build; [`CollectiveError::Stale`] if it is not one of
    /// `expected`; [`CollectiveError::System`] if mapping is refused.
    pub fn attach(fd: OwnedFd, expected: GroupId) -> Result<Segment, CollectiveError> {
        let found_bytes = sealed_bytes(fd.as_fd())?;
        let smallest = Layout { size: 1, arena_bytes: 0 };
        if found_bytes < smallest.total_bytes() {
            return Err(invalid("size of the memory", smallest.total_bytes(), found_bytes));
        }
        let probe = Segment::map(fd, smallest, expected)?;
        let header = probe.header();
        let check = |field, expected: u64, found: u64| {
            if expected == found { Ok(()) } else { Err(invalid(field, expected, found)) }
        };
        check("magic", MAGIC, header.magic.load(Ordering::Acquire))?;
        check("version", VERSION, header.version.load(Ordering::Relaxed))?;
        let [job, generation, incarnation] = [0, 1, 2].map(|i| header.group[i].load(Ordering::Relaxed));
        let found = GroupId { job, generation, incarnation };
        if found != expected {
            return Err(CollectiveError::Stale { expected, found });
        }
        let size = u32::try_from(header.size.load(Ordering::Relaxed)).unwrap_or(u32::MAX);
        let arena_bytes = header.arena_bytes.load(Ordering::Relaxed);
        let layout = Layout::new(size, arena_bytes)?;
        check("bytes of an arena", layout.arena_bytes, arena_bytes)?;
        check("total in the header", layout.total_bytes(), header.total_bytes.load(Ordering::Relaxed))?;
        check("size of the memory", layout.total_bytes(), found_bytes)?;
        let fd = probe.fd.try_clone().map_err(|e| CollectiveError::System { call: "dup", kind: e.kind() })?;
        Segment::map(fd, layout, expected)
    }

    /// The descriptor, to be passed to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The group that the segment belongs to.
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// Ranks of the group.
    pub fn size(&self) -> u32 {
        self.layout.size
    }

    /// How far `rank` is.
    ///
    /// # Errors
    /// [`CollectiveError::NoSuchRank`].
    pub fn progress(&self, rank: u32) -> Result<Progress, CollectiveError> {
        let slot = self.slot(rank)?;
        let finished = slot.finished.load(Ordering::Acquire);
        Ok(Progress { entered: slot.entered.load(Ordering::Acquire), finished })
    }

    /// Aborts the group: every waiter returns at once, every later call fails with `reason` (cut at
    /// [`REASON_BYTES`]). The first reason stands. Callable from any thread or process, any number of times.
    pub fn abort(&self, reason: &str) {
        let header = self.header();
        if header.reason_claim.swap(1, Ordering::AcqRel) == 0 {
            let bytes = &reason.as_bytes()[..reason.len().min(REASON_BYTES)];
            for (to, from) in header.reason.iter().zip(bytes) {
                to.store(*from, Ordering::Relaxed);
            }
            header.reason_len.store(bytes.len() as u32, Ordering::Relaxed);
            header.aborted.store(1, Ordering::SeqCst);
        } else {
            // Whoever claimed the reason may have died before it was written; the abort must not depend on it.
            let _ = header.aborted.compare_exchange(0, 2, Ordering::SeqCst, Ordering::SeqCst);
        }
        for rank in 0..self.layout.size {
            if let Ok(slot) = self.slot(rank) {
                slot.arrived.abort();
            }
        }
    }

    /// The error that every call returns once the group is aborted.
    pub fn aborted(&self) -> Option<CollectiveError> {
        let header = self.header();
        match header.aborted.load(Ordering::SeqCst) {
            0 => None,
            1 => {
                let len = (header.reason_len.load(Ordering::Relaxed) as usize).min(REASON_BYTES);
                let bytes: Vec<u8> = header.reason[..len].iter().map(|b| b.load(Ordering::Relaxed)).collect();
                Some(CollectiveError::Aborted { reason: String::from_utf8_lossy(&bytes).into_owned() })
            }
            _ => Some(CollectiveError::Aborted { reason: "reason not recorded".to_owned() }),
        }
    }

    /// Offsets.
    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What `rank` publishes.
    pub(super) fn slot(&self, rank: u32) -> Result<&Slot, CollectiveError> {
        if rank >= self.layout.size {
            return Err(CollectiveError::NoSuchRank { rank, size: self.layout.size });
        }
        // SAFETY: the slot lies in the mapping (checked rank), is page-aligned, and consists of atomics, for which every
        // bit pattern is valid.
        Ok(unsafe { &*self.base.add(self.layout.slot_at(rank) as usize).cast::<Slot>() })
    }

    /// Address of `n_elements` floats at a byte offset.
    ///
    /// # Panics
    /// If they do not lie in the segment, or not at a multiple of four.
    pub(super) fn floats(&self, at: u64, n_elements: usize) -> *mut f32 {
        let end = at.checked_add(4 * n_elements as u64);
        assert!(end.is_some_and(|end| end <= self.layout.total_bytes()) && at.is_multiple_of(4), "offset {at}");
        // SAFETY: the range was just checked to lie in the mapping.
        unsafe { self.base.add(at as usize).cast() }
    }

    /// Copies floats out of the segment.
    ///
    /// # Safety
    /// No rank writes these bytes at the same time.
    pub(super) unsafe fn load(&self, at: u64, to: &mut [f32]) {
        let from = self.floats(at, to.len());
        // SAFETY: `floats` checked the range; `to` is ours alone, so it overlaps no shared bytes of ours; the caller keeps writers out.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
    }

    /// Adds floats of the segment to `to`.
    ///
    /// # Safety
    /// No rank writes these bytes at the same time.
    pub(super) unsafe fn add(&self, at: u64, to: &mut [f32]) {
        let from = self.floats(at, to.len());
        // SAFETY: `floats` checked range and alignment; the caller keeps writers out while the slice lives.
        let from = unsafe { std::slice::from_raw_parts(from, to.len()) };
        for (sum, x) in to.iter_mut().zip(from) {
            *sum += x;
        }
    }

    /// Copies floats into the segment.
    ///
    /// # Safety
    /// No other rank reads or writes these bytes at the same time.
    pub(super) unsafe fn store(&self, at: u64, from: &[f32]) {
        let to = self.floats(at, from.len());
        // SAFETY: `floats` checked the range; the caller keeps everybody else out.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    fn header(&self) -> &Header {
        // SAFETY: every mapping holds the header page and is page-aligned; the header consists of atomics.
        unsafe { &*self.base.cast::<Header>() }
    }

    fn map(fd: OwnedFd, layout: Layout, group: GroupId) -> Result<Segment, CollectiveError> {
        let len = layout.total_bytes() as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory; the result is checked.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(CollectiveError::last_os("mmap"));
        }
        // SAFETY: the range is the mapping just made. Huge pages are a wish; refusal changes speed only.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        Ok(Segment { fd, base: base.cast(), layout, group })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the range is the one mapped in `map`, unmapped once; borrows of it end before the segment does.
        unsafe { libc::munmap(self.base.cast(), self.layout.total_bytes() as usize) };
    }
}

/// Size of the memory behind `fd`, if nobody can change it any more.
fn sealed_bytes(fd: BorrowedFd<'_>) -> Result<u64, CollectiveError> {
    // SAFETY: a query on a descriptor that lives.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 {
        return Err(CollectiveError::last_os("fcntl(F_GET_SEALS)"));
    }
    if seals & SEALS != SEALS {
        return Err(invalid("seals", SEALS as u64, seals as u64));
    }
    // SAFETY: `stat` is plain data for which zero is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the buffer is ours and lives through the call.
    if unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(CollectiveError::last_os("fstat"));
    }
    Ok(stat.st_size as u64)
}

fn invalid(field: &'static str, expected: u64, found: u64) -> CollectiveError {
    CollectiveError::Invalid { field, expected, found }
}
