//! What can go wrong with a group of ranks.

use super::descriptor::Descriptor;
use super::operation::OperationKind;
use super::world::WorldId;

/// Failure of a collective or of joining its world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// Two ranks issued different operations as the same one of a stream.
    #[error("rank {rank_a} issued {a} but rank {rank_b} issued {b}")]
    Mismatch {
        /// One of the ranks, by its number in the world.
        rank_a: u32,
        /// What it issued.
        a: Descriptor,
        /// The other rank.
        rank_b: u32,
        /// What that one issued.
        b: Descriptor,
    },
    /// The world was aborted.
    #[error("aborted: {reason}")]
    Aborted {
        /// The reason given by the aborting member.
        reason: String,
        /// The lost rank, if that is the reason.
        silent: Option<u32>,
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
    /// A buffer does not begin at a multiple of the size of its elements.
    #[error("{kind:?}: {side} is not aligned to {bytes} bytes")]
    Unaligned {
        /// The operation.
        kind: OperationKind,
        /// `send` or `recv`.
        side: &'static str,
        /// The alignment that is needed.
        bytes: usize,
    },
    /// A buffer lies in the memory of a device, which this communicator does not reach.
    #[error(
        "{kind:?}: {side} lies in the memory of device {device}, and this communicator reaches that of the host only"
    )]
    NotOnHost {
        /// The operation.
        kind: OperationKind,
        /// `send` or `recv`.
        side: &'static str,
        /// Number of the device.
        device: u32,
    },
    /// What is read and what is written share memory in a way that the operation does not allow.
    #[error("{kind:?}: send and recv overlap")]
    Overlap {
        /// The operation.
        kind: OperationKind,
    },
    /// Blocks of no elements.
    #[error("the unit of an operation is 0")]
    Unit,
    /// More tensors than fit one operation.
    #[error("{found} tensors in one operation, at most {max}")]
    TooManyOperands {
        /// Most that one operation can have.
        max: usize,
        /// Found.
        found: usize,
    },
    /// More operations started than may be in flight.
    #[error("{max} operations of one stream are in flight already")]
    TooManyInFlight {
        /// Most that one stream can have.
        max: usize,
    },
    /// Operations in flight have more tensors together than can be announced.
    #[error("operations in flight would have {wanted} tensors, at most {max}")]
    TooManyOperandsInFlight {
        /// With the new operation.
        wanted: usize,
        /// Most that there can be.
        max: usize,
    },
    /// Tensors outside the arena have no room in its staging area.
    #[error("staging: {wanted_bytes} bytes wanted, {free_bytes} free in one piece")]
    StagingFull {
        /// Bytes asked for.
        wanted_bytes: u64,
        /// Bytes of the largest free piece.
        free_bytes: u64,
    },
    /// The other end of a socket is not a process of this user, or not the one expected.
    #[error("peer has {what} {found}, expected {expected}")]
    Untrusted {
        /// `user` or `process`.
        what: &'static str,
        /// The user or process that may be there.
        expected: u32,
        /// The rank that holds it.
        found: u32,
    },
    /// The other end of a connection does not know the secret of the job.
    #[error("a peer does not know the secret of the job")]
    Unauthenticated,
    /// No connection to a peer was made in time.
    #[error("no connection with rank {rank} at {address} in time")]
    Unreachable {
        /// The peer.
        rank: u32,
        /// Where it was called, or this rank's own address if it was to call.
        address: std::net::SocketAddr,
    },
    /// An operation names a position that it cannot name.
    #[error("position {position} of a group of {size} named position {named}")]
    NoSuchPosition {
        /// The position named.
        named: u32,
        /// The member that named it.
        position: u32,
        /// Members of the group.
        size: u32,
    },
    /// A ticket that this communicator did not give, or that was finished before.
    #[error("ticket {index} of {stream:?} is not in flight here")]
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
    /// A group outside the world, or one that the rank is not in.
    #[error("rank {rank} is not in group {group} of {n_groups}")]
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
        /// What the caller belongs to.
        expected: WorldId,
        /// What was found.
        found: WorldId,
    },
    /// A world of this shape cannot be built.
    #[error("{field} is {found}, expected {expected}")]
    Shape {
        /// What was checked.
        field: &'static str,
        /// What it may be.
        expected: String,
        /// What it was.
        found: u64,
    },
    /// Something that a peer wrote is not what a member of this build writes.
    #[error("not written by a member: {field} is {found}, expected {expected}")]
    Invalid {
        /// What was checked.
        field: &'static str,
        /// What it should have been.
        expected: u64,
        /// What it was.
        found: u64,
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
        CollectiveError::Aborted { reason: reason.into(), silent: None }
    }

    /// Whether an operation that failed in this way can be tried again once others are finished: the world goes on.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            CollectiveError::TooManyInFlight { .. }
                | CollectiveError::TooManyOperandsInFlight { .. }
                | CollectiveError::StagingFull { .. }
        )
    }

    /// The error that the last system call of this thread left behind.
    pub fn last_os(call: &'static str) -> CollectiveError {
        CollectiveError::io(call, &std::io::Error::last_os_error())
    }

    /// An error of the standard library's input and output.
    pub fn io(call: &'static str, error: &std::io::Error) -> CollectiveError {
        CollectiveError::System { call, kind: error.kind() }
    }
}
