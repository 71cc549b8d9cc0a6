//! Layout of the control memory of a world.
//!
//! In order: one page of header; a page per rank; per group, in the order of the world: its abort words, a ring per
//! member for operations of the group, a flat area per member, and for every ordered pair of members a ring of the
//! sender and a ring of the receiver. Most pages are never touched and so never allocated.
#![allow(unsafe_code)] // Implements `AtomicsOnly`.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use crate::wakeup::Wakeup;
use phalanx_device::CollectiveError;
use phalanx_device::descriptor::DESCRIPTOR_WORDS;
use phalanx_device::operation::{IN_FLIGHT_MAX, OPERANDS_MAX};
use phalanx_device::shared_memory::{AtomicsOnly, BYTES_MAX};
use phalanx_device::world::{LOCAL_RANKS_MAX, World};

/// First word of control memory.
pub(super) const MAGIC: u64 = 0x5048_4c58_434f_4c32;
/// Version of this layout; change it with every change of this file.
pub(super) const VERSION: u64 = 4;
/// Longest reason of an abort, in bytes.
pub(super) const REASON_BYTES: usize = 1024;
/// Posts of a ring: twice the most operations in flight, see SHM-GROUP-2 in `group`.
pub(super) const POSTS: u64 = 2 * IN_FLIGHT_MAX as u64;
/// Entries of operand offsets in a ring, for all operations in flight.
pub(super) const OFFSETS: u64 = 2 * OPERANDS_MAX as u64;
/// Operations on up to this many bytes of tensors in total use the flat area.
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
    /// Hash of the number of ranks and all groups.
    pub world_digest: AtomicU64,
    /// Abort of the world.
    pub abort: AbortWords,
}

/// Abort state of a world or group, with its reason.
#[repr(C, align(64))]
pub(super) struct AbortWords {
    /// 0 until a member has claimed the right to write the reason of the abort.
    pub reason_claim: AtomicU32,
    /// 0: not aborted; 1: aborted, with a reason; 2: aborted, the reason not yet written.
    pub aborted: AtomicU32,
    pub reason_len: AtomicU32,
    pub reason: [AtomicU8; REASON_BYTES],
}

/// State that one rank publishes to all processes.
#[repr(C)]
pub(super) struct Slot {
    pub wakeup: Wakeup,
    /// 1 once a process acts as this rank.
    pub taken: AtomicU32,
    /// Operations in which the rank is writing memory of other ranks.
    pub writes: AtomicU32,
    /// Operations started and finished, over all groups.
    pub entered: AtomicU64,
    pub finished: AtomicU64,
    pub waiting: WaitingWords,
}

/// The operation for which a rank waits; written when the rank first sleeps in a wait.
#[repr(C)]
pub(super) struct WaitingWords {
    /// Odd while the words are being written; 0 modulo 4 when the rank waits for nothing.
    pub version: AtomicU64,
    /// Group, stream and number in the stream, descriptor.
    pub words: [AtomicU64; 3 + DESCRIPTOR_WORDS],
}

/// Progress of one member in one stream.
#[repr(C)]
pub(super) struct RingHead {
    /// Operations in which the member has done its share, in order; it accesses no tensors of later operations.
    pub done: Line,
    /// Operations that the member has announced. Peers do not poll this counter, so it has a line of its own.
    pub announced: Line,
}

/// A counter alone on its cache line.
#[repr(C, align(64))]
pub(super) struct Line(pub AtomicU64);

/// A member's announcement of one operation, on one cache line.
#[repr(C, align(64))]
pub(super) struct Post {
    /// Number in the stream plus one, written last.
    pub stamp: AtomicU64,
    pub descriptor: [AtomicU64; DESCRIPTOR_WORDS],
    /// Number of its first operand; the operand's offsets are at that number modulo [`OFFSETS`] in the ring.
    pub offsets_at: AtomicU64,
}

/// Byte offsets of one operand in the arena of the announcing member.
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

/// Bytes of one ring: head, posts, operand offsets.
pub(super) const RING_BYTES: usize = HEAD_BYTES + 64 * POSTS as usize + 16 * OFFSETS as usize;
/// Bytes of a ring's head.
pub(super) const HEAD_BYTES: usize = size_of::<RingHead>();
const ABORT_BYTES: usize = size_of::<AbortWords>();
const FLAT_AREA_BYTES: usize = FLAT_BYTES * POSTS as usize;

/// Offsets in the control memory of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    n_ranks: u32,
    /// Start and size of each group.
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

    /// Offset of a group's abort words.
    pub(super) fn abort_at(&self, group: usize) -> usize {
        self.groups[group].0
    }

    /// Offset of a member's ring for operations of the group.
    pub(super) fn group_ring_at(&self, group: usize, position: u32) -> usize {
        self.groups[group].0 + ABORT_BYTES + position as usize * RING_BYTES
    }

    /// Offset of a member's flat area for operation `index` of the group.
    pub(super) fn flat_at(&self, group: usize, position: u32, index: u64) -> usize {
        let (at, n) = self.groups[group];
        let slot = (index % POSTS) as usize;
        at + ABORT_BYTES + n as usize * RING_BYTES + position as usize * FLAT_AREA_BYTES + slot * FLAT_BYTES
    }

    /// Offset of the sender's or the receiver's ring for messages from one member to another.
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
    use phalanx_device::world_id::WorldId;

    #[test]
    fn areas_do_not_overlap_and_lie_in_the_memory() {
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
