//! The memory between the ranks of a communicator: a file in shared memory, named by the unique id.
//!
//! Each rank has a slot for its chunk of a collective, and each pair of ranks a channel for its chunk of a message. Pages that
//! are never touched take no memory.

use std::ffi::CString;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release, SeqCst};

/// Most ranks of a communicator.
pub const RANKS_MAX: usize = 64;
/// Bytes of a rank's chunk of a collective.
pub const SLOT_BYTES: usize = 256 << 10;
/// Bytes of a chunk of a message.
pub const CHANNEL_BYTES: usize = 32 << 10;

const CHANNELS_AT: usize = (RANKS_MAX * size_of::<RankWords>()).next_multiple_of(4096);
const SLOTS_AT: usize = (CHANNELS_AT + RANKS_MAX * RANKS_MAX * size_of::<Channel>()).next_multiple_of(4096);
const DATA_AT: usize = SLOTS_AT + RANKS_MAX * SLOT_BYTES;
const TOTAL_BYTES: usize = DATA_AT + RANKS_MAX * RANKS_MAX * CHANNEL_BYTES;

/// Words that describe an operation.
pub type Words = [u64; 2];

/// Announcements of one side. A side is at most one operation ahead of a peer that still compares, so two places suffice.
#[repr(C)]
pub struct Posted {
    places: [(AtomicU64, [AtomicU64; 2]); 2],
}

impl Posted {
    /// Announces operation number `seq`.
    pub fn post(&self, seq: u64, words: Words) {
        let (number, place) = &self.places[seq as usize % 2];
        place.iter().zip(words).for_each(|(at, word)| at.store(word, SeqCst));
        number.store(seq + 1, Release);
    }

    /// Operation number `seq`, once it is announced.
    pub fn read(&self, seq: u64) -> Option<Words> {
        let (number, place) = &self.places[seq as usize % 2];
        (number.load(Acquire) == seq + 1).then(|| [0, 1].map(|i| place[i].load(SeqCst)))
    }
}

/// Words of one rank.
#[repr(C, align(64))]
pub struct RankWords {
    /// Ranks of the communicator as this rank knows it, once it has joined.
    pub joined: AtomicU64,
    /// Identifies its machine.
    pub host: AtomicU64,
    /// Its device on that machine.
    pub device: AtomicU64,
    /// Identifies its process, and the device in it.
    pub place: AtomicU64,
    pub finalized: AtomicU64,
    /// Collectives launched, and begun.
    pub launched: AtomicU64,
    pub begun: AtomicU64,
    /// Chunks written to its slot, and read from all slots.
    pub wrote: AtomicU64,
    pub read: AtomicU64,
    pub posted: Posted,
}

/// Messages from one rank to another.
#[repr(C, align(64))]
pub struct Channel {
    /// Chunks written and read.
    pub sent: AtomicU64,
    pub taken: AtomicU64,
    pub sends: Posted,
    pub receives: Posted,
}

/// A mapping of the memory.
pub struct Shared {
    base: *mut u8,
    name: CString,
}

// SAFETY: the mapping belongs to the process; words are atomics, and chunks are accessed by one side at a time, as the words
// say.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// The memory of this name, which is created if it does not exist.
    pub fn open(name: CString) -> Option<Shared> {
        // SAFETY: a name that ends in NUL; results are checked; a new mapping touches no existing memory.
        unsafe {
            let file = libc::shm_open(name.as_ptr(), libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC, 0o600);
            if file < 0 {
                return None;
            }
            let is_sized = libc::ftruncate(file, TOTAL_BYTES as i64) == 0;
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
            let base = libc::mmap(std::ptr::null_mut(), TOTAL_BYTES, protection, flags, file, 0);
            libc::close(file);
            (is_sized && base != libc::MAP_FAILED).then(|| Shared { base: base.cast(), name })
        }
    }

    /// Removes the name: all ranks have opened the memory, or none will.
    pub fn unlink(&self) {
        // SAFETY: a name that ends in NUL.
        unsafe { libc::shm_unlink(self.name.as_ptr()) };
    }

    /// The words of a rank.
    pub fn rank(&self, rank: usize) -> &RankWords {
        assert!(rank < RANKS_MAX);
        // SAFETY: inside the mapping, which has only atomics there; any bits are valid.
        unsafe { &*self.base.cast::<RankWords>().add(rank) }
    }

    /// The channel between two ranks.
    pub fn channel(&self, from: usize, to: usize) -> &Channel {
        assert!(from < RANKS_MAX && to < RANKS_MAX);
        // SAFETY: as above.
        unsafe { &*self.base.add(CHANNELS_AT).cast::<Channel>().add(from * RANKS_MAX + to) }
    }

    /// The chunk of a rank.
    pub fn slot(&self, rank: usize) -> *mut u8 {
        assert!(rank < RANKS_MAX);
        self.base.wrapping_add(SLOTS_AT + rank * SLOT_BYTES)
    }

    /// The chunk of a channel.
    pub fn data(&self, from: usize, to: usize) -> *mut u8 {
        assert!(from < RANKS_MAX && to < RANKS_MAX);
        self.base.wrapping_add(DATA_AT + (from * RANKS_MAX + to) * CHANNEL_BYTES)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, and unmapped once.
        unsafe { libc::munmap(self.base.cast(), TOTAL_BYTES) };
    }
}
