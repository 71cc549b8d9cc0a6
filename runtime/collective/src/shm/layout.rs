//! Where everything lies in the control memory of a world.
//!
//! In order: one page of header; a page per rank; per group, in the order of the world: words of its abort, a ring per member
//! for operations of the group, a flat area per member, and for every ordered pair of members a ring of the sender and one of the
//! receiver. Most of it is never touched and so never takes a page of memory.
#![allow(unsafe_code)] // Types are declared to be atomics only.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use crate::wakeup::Wakeup;
use phalanx_device::CollectiveError;
use phalanx_device::descriptor::DESCRIPTOR_WORDS;
use phalanx_device::operation::{IN_FLIGHT_MAX, OPERANDS_MAX};
use phalanx_device::shared_memory::{AtomicsOnly, BYTES_MAX};
use phalanx_device::world::{LOCAL_RANKS_MAX, World};

/// First word of control memory.
pub(super) const MAGIC: u64 = 0x5048_4c58_434f_4c32;
/// Changes with this file.
pub(super) const VERSION: u64 = 4;
/// Longest text of an abort, in bytes.
pub(super) const REASON_BYTES: usize = 1024;
/// Posts of a ring. Twice what may be in flight, see `stream`.
pub(super) const POSTS: u64 = 2 * IN_FLIGHT_MAX as u64;
/// Places of a ring: those of all operations in flight.
pub(super) const OFFSETS: u64 = 2 * OPERANDS_MAX as u64;
/// Operations on tensors of up to this many bytes in total go through the flat area.
pub(super) const FLAT_BYTES: usize = 4096;

const PAGE: usize = 4096;

/// The first page.
#[repr(C)]
pub(super) struct Header {
    pub magic: AtomicU64,
    pub version: AtomicU64,
    pub total_bytes: AtomicU64,
    /// Job, generation, incarnation.
    pub id: [AtomicU64; 3],
    /// Over the number of ranks and all groups.
    pub world_digest: AtomicU64,
    /// Of the world.
    pub abort: AbortWords,
}

/// Whether something is aborted, and why.
#[repr(C, align(64))]
pub(super) struct AbortWords {
    /// 0 until a member has claimed the right to write the reason of the abort.
    pub reason_claim: AtomicU32,
    /// 0 while it works, 1 when it is aborted with a reason, 2 when it is aborted and the reason not yet there.
    pub aborted: AtomicU32,
    pub reason_len: AtomicU32,
    pub reason: [AtomicU8; REASON_BYTES],
}

/// What one rank shows to everybody.
#[repr(C)]
pub(super) struct Slot {
    pub wakeup: Wakeup,
    /// 1 once a process acts as this rank.
    pub taken: AtomicU32,
    /// Operations in which it writes memory of others at this moment.
    pub writes: AtomicU32,
    /// Operations started and finished, over all groups.
    pub entered: AtomicU64,
    pub finished: AtomicU64,
    pub waiting: WaitingWords,
}

/// What a rank waits for; written when it first sleeps in a wait.
#[repr(C)]
pub(super) struct WaitingWords {
    /// Odd while the words are being written; 0 modulo 4 when the rank waits for nothing.
    pub version: AtomicU64,
    /// Group, stream and number in the stream, descriptor.
    pub words: [AtomicU64; 3 + DESCRIPTOR_WORDS],
}

/// How far one member is in one stream.
#[repr(C)]
pub(super) struct RingHead {
    /// Operations of which the member has done its share, in sequence; it accesses no tensors of later ones.
    pub done: Line,
    /// Operations that it has announced. Peers do not wait for this one, so it is not on the line that they look at.
    pub announced: Line,
}

/// A counter alone on its cache line.
#[repr(C, align(64))]
pub(super) struct Line(pub AtomicU64);

/// One operation as one member announces it: a cache line.
#[repr(C, align(64))]
pub(super) struct Post {
    /// Number in the stream plus one, written last.
    pub stamp: AtomicU64,
    pub descriptor: [AtomicU64; DESCRIPTOR_WORDS],
    /// Number of its first place, which lies in the ring at that number modulo [`OFFSETS`].
    pub offsets_at: AtomicU64,
}

/// Where one operand of the announcing member lies: byte offsets in its arena.
#[repr(C)]
pub(super) struct OperandOffsets {
    pub send: AtomicU64,
    pub recv: AtomicU64,
}

/// Any byte. For fuzz targets.
#[cfg(feature = "fuzzing")]
#[repr(C)]
pub(super) struct Byte(pub AtomicU8);

#[cfg(feature = "fuzzing")]
// SAFETY: it is an atomic.
unsafe impl AtomicsOnly for Byte {}

// SAFETY: all of these consist of atomics, arrays of them and each other.
unsafe impl AtomicsOnly for Header {}
// SAFETY: as above.
unsafe impl AtomicsOnly for AbortWords {}
// SAFETY: as above.
unsafe impl AtomicsOnly for Slot {}
// SAFETY: as above.
unsafe impl AtomicsOnly for RingHead {}
// SAFETY: as above.
unsafe impl AtomicsOnly for Post {}
// SAFETY: as above.
unsafe impl AtomicsOnly for OperandOffsets {}

const _: () = assert!(size_of::<Header>() <= PAGE && size_of::<Slot>() <= PAGE && size_of::<Post>() == 64);

/// Bytes of one ring: head, posts, places.
pub(super) const RING_BYTES: usize = HEAD_BYTES + 64 * POSTS as usize + 16 * OFFSETS as usize;
/// Bytes of its head.
pub(super) const HEAD_BYTES: usize = size_of::<RingHead>();
const ABORT_BYTES: usize = size_of::<AbortWords>();
const FLAT_AREA_BYTES: usize = FLAT_BYTES * POSTS as usize;

/// Offsets in the control memory of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    n_ranks: u32,
    /// Where each group begins, and its size.
    groups: Vec<(usize, u32)>,
    total_bytes: usize,
}

impl Layout {
    /// Layout for a world on one machine.
    ///
    /// # Errors
    /// [`CollectiveError::Shape`] if there are too many ranks or groups for one machine.
    pub(super) fn new(world: &World) -> Result<Layout, CollectiveError> {
        let n_ranks = world.n_ranks();
        if n_ranks > LOCAL_RANKS_MAX {
            let expected = format!("at most {LOCAL_RANKS_MAX}");
            return Err(CollectiveError::Shape { field: "ranks of one machine", expected, found: n_ranks.into() });
        }
        let mut at = PAGE * (1 + n_ranks as usize);
        let mut groups = Vec::with_capacity(world.groups().len());
        for members in world.groups() {
            groups.push((at, members.len() as u32));
            let n = members.len();
            at += (ABORT_BYTES + n * (RING_BYTES + FLAT_AREA_BYTES) + 2 * n * n * RING_BYTES).next_multiple_of(PAGE);
        }
        if at as u64 > BYTES_MAX {
            let expected = format!("at most {BYTES_MAX}");
            return Err(CollectiveError::Shape { field: "bytes of control memory", expected, found: at as u64 });
        }
        Ok(Layout { n_ranks, groups, total_bytes: at })
    }

    pub(super) fn n_ranks(&self) -> u32 {
        self.n_ranks
    }

    pub(super) fn total_bytes(&self) -> usize {
        self.total_bytes
    }

    pub(super) fn slot_at(&self, rank: u32) -> usize {
        PAGE * (1 + rank as usize)
    }

    /// The words of a group's abort.
    pub(super) fn abort_at(&self, group: usize) -> usize {
        self.groups[group].0
    }

    /// The ring of a member for operations of the group.
    pub(super) fn group_ring_at(&self, group: usize, position: u32) -> usize {
        self.groups[group].0 + ABORT_BYTES + position as usize * RING_BYTES
    }

    /// The flat area of a member for operation `index` of the group.
    pub(super) fn flat_at(&self, group: usize, position: u32, index: u64) -> usize {
        let (at, n) = self.groups[group];
        let slot = (index % POSTS) as usize;
        at + ABORT_BYTES + n as usize * RING_BYTES + position as usize * FLAT_AREA_BYTES + slot * FLAT_BYTES
    }

    /// The ring of the sender, or that of the receiver, for messages from one member to another.
    pub(super) fn pair_ring_at(&self, group: usize, from: u32, to: u32, is_sender: bool) -> usize {
        let (at, n) = self.groups[group];
        let n = n as usize;
        let pair = (from as usize * n + to as usize) * 2 + usize::from(!is_sender);
        at + ABORT_BYTES + n * (RING_BYTES + FLAT_AREA_BYTES) + pair * RING_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_device::world::WorldId;

    #[test]
    fn areas_do_not_overlap_and_fill_the_memory() {
        let id = WorldId { job: 0, generation: 0, incarnation: 0 };
        let world = World::new(id, 4, vec![vec![0, 1, 2], vec![3, 0]]).unwrap();
        let layout = Layout::new(&world).unwrap();

        let mut areas: Vec<(usize, usize)> = vec![(0, PAGE)];
        areas.extend((0..4).map(|rank| (layout.slot_at(rank), PAGE)));
        for (group, n) in [(0, 3), (1, 2)] {
            areas.push((layout.abort_at(group), ABORT_BYTES));
            for a in 0..n {
                areas.push((layout.group_ring_at(group, a), RING_BYTES));
                areas.extend((0..POSTS).map(|index| (layout.flat_at(group, a, index), FLAT_BYTES)));
                for b in 0..n {
                    areas.push((layout.pair_ring_at(group, a, b, true), RING_BYTES));
                    areas.push((layout.pair_ring_at(group, a, b, false), RING_BYTES));
                }
            }
        }

        areas.sort_unstable();
        assert!(areas.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
        assert!(areas.iter().all(|(at, bytes)| at + bytes <= layout.total_bytes() && at % 64 == 0));
    }
}
