//! The sums of one operation, chunk by chunk: a chunk of this member's own part is summed as soon as all contributions to it have
//! arrived, while they are in cache, and sent on while later chunks arrive.

use super::frame::CHUNK_BYTES;
use crate::reduce;
use phalanx_device::{ElementType, RawBuffer};
use std::ops::Range;

/// Which contributions have arrived.
#[derive(Debug, Default)]
pub(super) struct Sums {
    chunks: Vec<Chunk>,
    /// Index of the first chunk of each operand.
    first: Vec<usize>,
    /// Whether a member's contribution to a chunk has arrived, by chunk and member.
    has_arrived: Vec<bool>,
    n_members: u32,
    bytes_left: usize,
}

/// Numbers of peers.
#[derive(Clone, Copy, Debug, Default)]
struct Chunk {
    /// Whose contribution has arrived, and may still be being stored.
    arrived: u32,
    /// Whose contribution is stored.
    stored: u32,
}

/// What to do with a contribution that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contribution {
    /// Store it: others are missing.
    Store,
    /// Sum: all others are stored, so this one need not be.
    Sum,
}

impl Sums {
    /// Forgets the previous operation; the next one is one of `n_members` members.
    pub(super) fn clear(&mut self, n_members: u32) {
        self.chunks.clear();
        self.first.clear();
        self.has_arrived.clear();
        (self.n_members, self.bytes_left) = (n_members, 0);
    }

    /// Adds the next operand, of whose sum this member computes `bytes`.
    pub(super) fn add(&mut self, bytes: usize) {
        self.first.push(self.chunks.len());
        self.chunks.resize(self.chunks.len() + bytes.div_ceil(CHUNK_BYTES), Chunk::default());
        self.has_arrived.resize(self.chunks.len() * self.n_members as usize, false);
        self.bytes_left += bytes;
    }

    /// Whether all sums are computed.
    pub(super) fn are_done(&self) -> bool {
        self.bytes_left == 0
    }

    /// Records the arrival of a peer's contribution to the chunk at byte `offset` of an operand. None if it had arrived before.
    pub(super) fn arrive(&mut self, peer: u32, operand: usize, offset: usize) -> Option<Contribution> {
        let (n_peers, i) = (self.n_members - 1, self.chunk_idx(operand, offset));
        if std::mem::replace(&mut self.has_arrived[i * self.n_members as usize + peer as usize], true) {
            return None;
        }
        let chunk = &mut self.chunks[i];
        chunk.arrived += 1;
        let is_last = chunk.arrived == n_peers && chunk.stored + 1 == n_peers;
        Some(if is_last { Contribution::Sum } else { Contribution::Store })
    }

    /// Records that a contribution is stored. Returns whether it was the last one, so that the chunk has to be summed.
    pub(super) fn store(&mut self, operand: usize, offset: usize) -> bool {
        let i = self.chunk_idx(operand, offset);
        self.chunks[i].stored += 1;
        self.chunks[i].stored == self.n_members - 1
    }

    /// Records that a chunk of that many bytes is summed.
    pub(super) fn finish(&mut self, bytes: usize) {
        self.bytes_left -= bytes;
    }

    fn chunk_idx(&self, operand: usize, offset: usize) -> usize {
        self.first[operand] + offset / CHUNK_BYTES
    }
}

/// A sum to be computed, whose sources are in a list beside it.
#[derive(Clone, Debug)]
pub(super) struct Sum {
    pub(super) operand: usize,
    /// The chunk, in bytes of the member's part.
    pub(super) range: Range<usize>,
    pub(super) dtype: ElementType,
    pub(super) to: RawBuffer,
    /// Whether all peers need it.
    pub(super) is_sent: bool,
}

impl Sum {
    /// Computes the sum, in the order of the sources.
    ///
    /// # Safety
    /// The sources are aligned and as long as the target, and no other thread writes them or touches the target.
    #[allow(unsafe_code)] // Operands are raw memory.
    pub(super) unsafe fn compute(&self, sources: &[*const u8]) {
        let n = self.to.bytes() / self.dtype.bytes();
        // SAFETY: the caller's promise.
        unsafe { reduce::sum(self.dtype, sources, &[self.to.start()], n) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_contribution_to_a_chunk_causes_its_sum_once() {
        let mut sums = Sums::default();
        sums.clear(4);
        sums.add(CHUNK_BYTES + 8);

        // Of three peers, two store at the same time, then the third one finds all others stored.
        assert_eq!([0, 2].map(|peer| sums.arrive(peer, 0, CHUNK_BYTES)), [Some(Contribution::Store); 2]);
        assert_eq!([0, 2].map(|_| sums.store(0, CHUNK_BYTES)), [false, false]);
        assert_eq!(sums.arrive(3, 0, CHUNK_BYTES), Some(Contribution::Sum));
        sums.finish(8);
        assert!(!sums.are_done());

        // All three store at the same time; the last one to have stored sums.
        assert_eq!([0, 2, 3].map(|peer| sums.arrive(peer, 0, 0)), [Some(Contribution::Store); 3]);
        assert_eq!([0, 2, 3].map(|_| sums.store(0, 0)), [false, false, true]);
        sums.finish(CHUNK_BYTES);
        assert!(sums.are_done());
    }

    #[test]
    fn second_contribution_of_a_peer_does_not_stand_in_for_a_missing_one() {
        let mut sums = Sums::default();
        sums.clear(3);
        sums.add(8);

        assert_eq!(sums.arrive(0, 0, 0), Some(Contribution::Store));
        assert_eq!(sums.arrive(0, 0, 0), None);
    }
}
