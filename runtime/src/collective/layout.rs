//! Where everything lies in a segment.
//!
//! In order: one page of header, a page per rank for its slot, the staging buffers (two halves per rank), the arenas
//! for shared tensors.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use super::futex::Counter;
use super::{CollectiveError, GroupId};

/// First word of every segment.
pub const MAGIC: u64 = 0x5048_4c58_434f_4c31;
/// Changes with this file.
pub const VERSION: u64 = 1;
/// Most ranks of one segment.
pub const RANKS_MAX: u32 = 64;
/// Bytes of one half of a staging buffer: with a few ranks' worth of them a reduction stays in the L2 cache.
pub const STAGING_BYTES: u64 = 256 << 10;
/// Longest text of an abort, in bytes.
pub const REASON_BYTES: usize = 512;

const PAGE: u64 = 4096;

/// The first page.
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU64,
    /// Ranks.
    pub size: AtomicU64,
    /// Bytes of each arena.
    pub arena_bytes: AtomicU64,
    /// Bytes of the segment.
    pub total_bytes: AtomicU64,
    /// Job, generation, incarnation.
    pub group: [AtomicU64; 3],
    /// 0 while nobody has taken the right to write the reason of the abort.
    pub reason_claim: AtomicU32,
    /// 0 while the group works, 1 when it is aborted with a reason, 2 when it is aborted and the reason not yet there.
    pub aborted: AtomicU32,
    /// Length of the reason.
    pub reason_len: AtomicU32,
    /// Its bytes.
    pub reason: [AtomicU8; REASON_BYTES],
}

/// What one rank publishes.
#[repr(C)]
pub struct Slot {
    /// Phases that the rank has arrived at.
    pub arrived: Counter,
    /// 1 once somebody acts as this rank.
    pub taken: AtomicU32,
    /// Operations entered.
    pub entered: AtomicU64,
    /// Operations finished.
    pub finished: AtomicU64,
    /// Descriptor and offset of the tensor, by parity of the phase.
    pub posts: [Post; 2],
}

/// What a rank is about to do and, for shared tensors, where its tensor lies.
#[repr(C, align(64))]
pub struct Post {
    /// See `Descriptor::encode`.
    pub descriptor: [AtomicU64; 5],
    /// Byte offset in the segment.
    pub tensor_at: AtomicU64,
}

const _: () = assert!(size_of::<Header>() as u64 <= PAGE && size_of::<Slot>() as u64 <= PAGE);

/// Offsets for a given number of ranks and size of arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Ranks.
    pub size: u32,
    /// Bytes of each arena, a multiple of the page.
    pub arena_bytes: u64,
}

impl Layout {
    /// Layout for `size` ranks with at least `arena_bytes` of shared tensors each.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if there are no ranks or too many of them or the arenas do not fit an address space.
    pub fn new(size: u32, arena_bytes: u64) -> Result<Layout, CollectiveError> {
        if size == 0 || size > RANKS_MAX || arena_bytes > 1 << 40 {
            return Err(CollectiveError::Shape { max: RANKS_MAX, size, arena_bytes });
        }
        Ok(Layout { size, arena_bytes: arena_bytes.next_multiple_of(PAGE) })
    }

    /// Where the slot of `rank` begins.
    pub fn slot_at(&self, rank: u32) -> u64 {
        PAGE + u64::from(rank) * PAGE
    }

    /// Where half `half` of the staging buffer of `rank` begins.
    pub fn staging_at(&self, rank: u32, half: u32) -> u64 {
        self.slot_at(self.size) + (2 * u64::from(rank) + u64::from(half)) * STAGING_BYTES
    }

    /// Where the arena of `rank` begins.
    pub fn arena_at(&self, rank: u32) -> u64 {
        self.staging_at(self.size, 0) + u64::from(rank) * self.arena_bytes
    }

    /// Bytes of the segment.
    pub fn total_bytes(&self) -> u64 {
        self.arena_at(self.size)
    }
}

/// The words of a group's name, in the order of the header.
pub fn group_words(group: GroupId) -> [u64; 3] {
    [group.job, group.generation, group.incarnation]
}
