//! Errors of a group of ranks.

use super::descriptor::Descriptor;
use super::operation::{OperationKind, Space};
use super::world_id::WorldId;

/// Failure of a collective or of joining its world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// Two ranks issued different operations at the same index of a stream.
    #[error("rank {rank_a} issued {a} but rank {rank_b} issued {b}")]
    Mismatch {
        /// One of the ranks, by its number in the world.
        rank_a: u32,
        /// What it issued.
        a: Descriptor,
        /// The other rank.
        rank_b: u32,
        /// What the other rank issued.
        b: Descriptor,
    },
    /// The world was aborted.
    #[error("aborted: {reason}")]
    Aborted {
        /// The reason given by the aborting member.
        reason: String,
        /// The lost rank, if a lost rank is the reason.
        lost: Option<u32>,
    },
    /// A buffer has the wrong number of elements.
    #[error("{kind:?}: expected {expected} elements in {side}, found {found}")]
    Length {
        /// The operation.
        kind: OperationKind,
        /// `send` or `recv`.
        side: &'static str,
        /// Elements that the operation asks for.
        expected: usize,
        /// Elements of the buffer.
        found: usize,
    },
    /// The address of a buffer is not a multiple of the size of its elements.
    #[error("{kind:?}: {side} is not aligned to {bytes} bytes")]
    Unaligned {
        /// The operation.
        kind: OperationKind,
        /// `send` or `recv`.
        side: &'static str,
        /// The alignment that is needed.
        bytes: usize,
    },
    /// A buffer lies in device memory, and this communicator reaches host memory only.
    #[error("{kind:?}: {side} lies in the memory of device {device}, but this communicator reaches host memory only")]
    NotOnHost {
        /// The operation.
        kind: OperationKind,
        /// `send` or `recv`.
        side: &'static str,
        /// Number of the device.
        device: u32,
    },
    /// Operands lie in memory that this communicator does not reach, or in different memories.
    #[error("an operand lies in {found}; expected: {expected}")]
    WrongMemory {
        /// The memory of the other operands, or the one that the communicator reaches.
        expected: Space,
        /// The memory of the operand.
        found: Space,
    },
    /// Bits were changed on their way between two ranks.
    #[error("what arrived from rank {peer} is not what it sent: the checksum of a frame differs")]
    Damaged {
        /// The sender, by its number in the world.
        peer: u32,
    },
    /// The device failed. Its state is lost, and only a new process can use it again.
    #[error("{reason}")]
    Device {
        /// The failed call and the device.
        reason: String,
    },
    /// `send` and `recv` share memory in a way that the operation does not allow.
    #[error("{kind:?}: send and recv overlap")]
    Overlap {
        /// The operation.
        kind: OperationKind,
    },
    /// The unit of an operation is 0.
    #[error("the unit of an operation is 0, expected at least 1")]
    Unit,
    /// One operation has too many tensors.
    #[error("{found} tensors in one operation, expected at most {max}")]
    TooManyOperands {
        /// Most that one operation can have.
        max: usize,
        /// Found.
        found: usize,
    },
    /// More operations started than may be in flight.
    #[error("{max} operations of one stream are already in flight; finish one first")]
    TooManyInFlight {
        /// Most that one stream can have.
        max: usize,
    },
    /// Operations in flight have more tensors together than can be announced.
    #[error("operations in flight would have {wanted} tensors, expected at most {max}; finish one first")]
    TooManyOperandsInFlight {
        /// With the new operation.
        wanted: usize,
        /// Most that can be announced.
        max: usize,
    },
    /// The arena's staging area has too little space for tensors outside the arena.
    #[error("staging area: {wanted_bytes} contiguous bytes wanted, at most {free_bytes} are free")]
    StagingFull {
        /// Bytes asked for.
        wanted_bytes: u64,
        /// Bytes of the largest free piece.
        free_bytes: u64,
    },
    /// The other end of a socket is not a process of this user, or not the expected process.
    #[error("peer has {what} {found}, expected {expected}")]
    Untrusted {
        /// `user` or `process`.
        what: &'static str,
        /// The expected user or process.
        expected: u32,
        /// The user or process at the other end.
        found: u32,
    },
    /// The peer failed to prove that it has the job's secret.
    #[error("a peer failed to prove that it has the job's secret")]
    Unauthenticated,
    /// No connection to a peer was made in time.
    #[error("connection with rank {rank} at {address} timed out")]
    Unreachable {
        /// The peer.
        rank: u32,
        /// The peer's address, or this rank's own if the peer was to connect.
        address: std::net::SocketAddr,
    },
    /// An operation names a position outside the group, or the member's own as its peer.
    #[error("position {position} of a group of {size} named the invalid position {named}")]
    NoSuchPosition {
        /// The position named.
        named: u32,
        /// The member that named it.
        position: u32,
        /// Members of the group.
        size: u32,
    },
    /// A ticket of another communicator, or one already finished.
    #[error("ticket {index} of {stream:?} is not in flight in this communicator")]
    UnknownTicket {
        /// Its stream.
        stream: super::operation::Stream,
        /// Its number in the stream.
        index: u64,
    },
    /// A rank outside the world was named.
    #[error("rank {rank} is not in a world of {size}")]
    NoSuchRank {
        /// The rank.
        rank: u32,
        /// Ranks of the world.
        size: u32,
    },
    /// The world has no such group, or the rank is not in it.
    #[error("rank {rank} is not in group {group} (the world has {n_groups} groups)")]
    NotAMember {
        /// The rank.
        rank: u32,
        /// Index of the group.
        group: usize,
        /// Groups of the world.
        n_groups: usize,
    },
    /// Another process or thread already acts as this rank.
    #[error("rank {rank} is already taken")]
    RankTaken {
        /// The rank.
        rank: u32,
    },
    /// A segment or a peer belongs to another world.
    #[error("expected {expected}, found {found}")]
    Stale {
        /// The caller's world.
        expected: WorldId,
        /// The world of the segment or peer.
        found: WorldId,
    },
    /// A world of this shape cannot be built.
    #[error("{field} is {found}, expected {expected}")]
    Shape {
        /// What was checked.
        field: &'static str,
        /// The allowed values.
        expected: String,
        /// What it was.
        found: u64,
    },
    /// A peer wrote a value that no member of this build writes.
    #[error("invalid data from a peer: {field} is {found}, expected {expected}")]
    Invalid {
        /// What was checked.
        field: &'static str,
        /// What it should have been.
        expected: u64,
        /// What it was.
        found: u64,
    },
    /// The library of the device's collectives failed.
    #[error("{call}: {reason}")]
    Library {
        /// The function.
        call: &'static str,
        /// The library's error.
        reason: String,
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
    /// The world was aborted with this reason.
    pub fn aborted(reason: impl Into<String>) -> CollectiveError {
        CollectiveError::Aborted { reason: reason.into(), lost: None }
    }

    /// Whether the failed operation can be retried after others are finished: the world continues.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            CollectiveError::TooManyInFlight { .. }
                | CollectiveError::TooManyOperandsInFlight { .. }
                | CollectiveError::StagingFull { .. }
        )
    }

    /// The error of this thread's last system call.
    pub fn last_os(call: &'static str) -> CollectiveError {
        CollectiveError::io(call, &std::io::Error::last_os_error())
    }

    /// An error of the standard library's input and output.
    pub fn io(call: &'static str, error: &std::io::Error) -> CollectiveError {
        CollectiveError::System { call, kind: error.kind() }
    }
}
