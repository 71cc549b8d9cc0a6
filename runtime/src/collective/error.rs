//! What can go wrong with a group of ranks.

use super::GroupId;
use super::descriptor::Descriptor;

/// Failure of a collective or of joining its group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// Two ranks issued different operations under the same number.
    #[error("rank {rank_a} issued {a} but rank {rank_b} issued {b}")]
    Mismatch {
        /// One of the ranks.
        rank_a: u32,
        /// What it issued.
        a: Descriptor,
        /// The other rank.
        rank_b: u32,
        /// What that one issued.
        b: Descriptor,
    },
    /// The group was aborted.
    #[error("group aborted: {reason}")]
    Aborted {
        /// Why, in the words of whoever aborted it.
        reason: String,
    },
    /// A buffer has the wrong number of elements.
    #[error("{operation}: expected {expected} elements, found {found}")]
    Length {
        /// The operation.
        operation: &'static str,
        /// Elements that the other buffer asks for.
        expected: usize,
        /// Elements of the buffer.
        found: usize,
    },
    /// A rank outside the group was named.
    #[error("rank {rank} is not in a group of {size}")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Ranks of the group.
        size: u32,
    },
    /// Another process or thread already acts as this rank.
    #[error("rank {rank} is already taken")]
    RankTaken {
        /// The rank.
        rank: u32,
    },
    /// The segment belongs to another generation or incarnation.
    #[error("expected a segment of {expected}, found one of {found}")]
    Stale {
        /// What the caller belongs to.
        expected: GroupId,
        /// What the segment says.
        found: GroupId,
    },
    /// A group of this shape cannot be built.
    #[error(
        "expected 1 to {max} ranks and a segment below 2^46 bytes, found {size} ranks with {arena_bytes} bytes each"
    )]
    Shape {
        /// Most ranks that a group can have.
        max: u32,
        /// Ranks asked for.
        size: u32,
        /// Bytes of shared tensors asked for per rank.
        arena_bytes: u64,
    },
    /// A segment or a peer's offset is not what a member of this build writes.
    #[error("not a usable segment: {field} is {found}, expected {expected}")]
    Invalid {
        /// What was checked.
        field: &'static str,
        /// What it should have been.
        expected: u64,
        /// What it was.
        found: u64,
    },
    /// The rank's part of the segment has no room for another tensor.
    #[error("shared tensors: {wanted_bytes} bytes wanted, {free_bytes} free")]
    ArenaFull {
        /// Bytes asked for.
        wanted_bytes: u64,
        /// Bytes left.
        free_bytes: u64,
    },
    /// The operating system refused.
    #[error("{call}: {kind}")]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        kind: std::io::ErrorKind,
    },
}

impl CollectiveError {
    /// The error that the last system call of this thread left behind.
    pub(super) fn last_os(call: &'static str) -> CollectiveError {
        CollectiveError::System { call, kind: std::io::Error::last_os_error().kind() }
    }
}
