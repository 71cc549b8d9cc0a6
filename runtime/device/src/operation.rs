//! An operation of a group, and the memory that it reads and writes.

use std::ops::Range;

use super::element::{Element, ElementType};
use super::parts::part;

/// Most operands of one operation: a bucket of tensors is one operation.
pub const OPERANDS_MAX: usize = 512;
/// Most operations of one stream that a member may have in flight.
pub const IN_FLIGHT_MAX: usize = 64;

/// The kind of an operation. Positions are positions in the group. See [`Operand`] for what each kind reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperationKind {
    /// Sum over members, with the result at every member.
    AllReduce,
    /// Sum over members; each keeps its part.
    ReduceScatter,
    /// Concatenation of the members' parts, at every member.
    AllGather,
    /// Part `i` of every member's tensor goes to member `i`.
    AllToAll,
    /// Copy from one member to all members.
    Broadcast {
        /// The member that has the data.
        root: u32,
    },
    /// Copy to one member, which issues the matching `Recv`.
    Send {
        /// The member.
        to: u32,
    },
    /// Copy from one member, which issues the matching `Send`.
    Recv {
        /// The member.
        from: u32,
    },
    /// Every member sends to position `(i + by) mod n` and receives from `(i - by) mod n`.
    Shift {
        /// How far.
        by: i32,
    },
    /// Members wait for each other; has no operands.
    Barrier,
}

impl OperationKind {
    /// The stream that orders the operation.
    pub fn stream(self) -> Stream {
        match self {
            OperationKind::Send { to } => Stream::SendTo(to),
            OperationKind::Recv { from } => Stream::RecvFrom(from),
            _ => Stream::Group,
        }
    }

    /// The position from which the member at `position` of `size` receives in a shift.
    pub fn shift_source(by: i32, position: u32, size: u32) -> u32 {
        (i64::from(position) - i64::from(by)).rem_euclid(i64::from(size)) as u32
    }

    /// The position to which the member at `position` of `size` sends in a shift.
    pub fn shift_target(by: i32, position: u32, size: u32) -> u32 {
        (i64::from(position) + i64::from(by)).rem_euclid(i64::from(size)) as u32
    }
}

/// A sequence of operations that members match in the order of their starts; streams are independent of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stream {
    /// Operations of the whole group.
    Group,
    /// Sends to one member.
    SendTo(u32),
    /// Receives from one member.
    RecvFrom(u32),
}

/// One operation, without its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operation {
    /// The kind.
    pub kind: OperationKind,
    /// The caller's sequence number; members must agree on it.
    pub sequence: u32,
    /// Elements of a block when a tensor is divided into parts; members must agree on it. At least 1.
    pub unit: usize,
}

/// The memory to which an address belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Host memory.
    Host,
    /// Memory of a device, by its number on this machine; the host must not dereference it.
    Device(u32),
}

impl std::fmt::Display for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Space::Host => write!(f, "host memory"),
            Space::Device(device) => write!(f, "the memory of device {device}"),
        }
    }
}

/// Memory, by address and length; unlike a pointer, it is `Send`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawBuffer {
    address: usize,
    bytes: usize,
    space: Space,
}

impl RawBuffer {
    /// No memory.
    pub const EMPTY: RawBuffer = RawBuffer { address: 0, bytes: 0, space: Space::Host };

    /// `bytes` bytes of the host at `start`.
    pub fn new(start: *mut u8, bytes: usize) -> RawBuffer {
        RawBuffer { address: start.expose_provenance(), bytes, space: Space::Host }
    }

    /// `bytes` bytes in the memory of a device.
    pub const fn on_device(address: usize, bytes: usize, device: u32) -> RawBuffer {
        RawBuffer { address, bytes, space: Space::Device(device) }
    }

    /// The memory of a slice, for reading: valid as [`Operand::send`] only.
    pub fn of<T: Element>(values: &[T]) -> RawBuffer {
        RawBuffer { address: values.as_ptr().expose_provenance(), bytes: size_of_val(values), space: Space::Host }
    }

    /// The memory of a slice.
    pub fn of_mut<T: Element>(values: &mut [T]) -> RawBuffer {
        RawBuffer { address: values.as_mut_ptr().expose_provenance(), bytes: size_of_val(values), space: Space::Host }
    }

    /// First byte.
    ///
    /// # Panics
    /// If it is not in host memory.
    pub fn start(self) -> *mut u8 {
        assert_eq!(self.space, Space::Host, "the host cannot access device memory");
        std::ptr::with_exposed_provenance_mut(self.address)
    }

    /// Address of the first byte.
    pub fn address(self) -> usize {
        self.address
    }

    /// The memory that holds it.
    pub const fn space(self) -> Space {
        self.space
    }

    /// Length in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Whether the two buffers share a byte.
    pub fn overlaps(self, other: RawBuffer) -> bool {
        self.space == other.space
            && self.bytes > 0
            && other.bytes > 0
            && self.address < other.address + other.bytes
            && other.address < self.address + self.bytes
    }

    /// The bytes `range` of it.
    ///
    /// # Panics
    /// If the range exceeds the buffer.
    pub fn slice(self, range: Range<usize>) -> RawBuffer {
        assert!(range.start <= range.end && range.end <= self.bytes, "bytes {range:?} of a buffer of {}", self.bytes);
        RawBuffer { address: self.address + range.start, bytes: range.len(), ..self }
    }
}

/// One tensor of an operation at one member. Operands of an operation are independent of each other.
///
/// # Shapes
/// With `n = n_elements`, the *part* of a member as in [`part`], and lengths in elements:
///
/// | kind | `send` | `recv` |
/// |---|---|---|
/// | `AllReduce` | n | n; may be the memory of `send` |
/// | `ReduceScatter` | n | own part; may be that part of `send` |
/// | `AllGather` | own part; or n, the memory of `recv`, where the own part is read | n |
/// | `AllToAll` | n | size × own part |
/// | `Broadcast` | n at the root, empty or unread elsewhere | n; may be the memory of `send`, empty at the root |
/// | `Send` | n | empty |
/// | `Recv` | empty | n |
/// | `Shift` | n | n; may be the memory of `send` |
///
/// `send` and `recv` overlap only where the table allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Read.
    pub send: RawBuffer,
    /// Written.
    pub recv: RawBuffer,
    /// Type of the elements of both.
    pub dtype: ElementType,
    /// Elements of the whole tensor; members must agree on it.
    pub n_elements: usize,
}

impl Operand {
    /// An operand whose result replaces its input.
    pub fn in_place(buffer: RawBuffer, dtype: ElementType, n_elements: usize) -> Operand {
        Operand { send: buffer, recv: buffer, dtype, n_elements }
    }

    /// The bytes that this member contributes, as a range of `send`.
    pub fn sent(&self, operation: &Operation, position: u32, size: u32) -> RawBuffer {
        let width = self.dtype.bytes();
        match operation.kind {
            OperationKind::AllGather if self.send == self.recv => {
                let own = part(self.n_elements, operation.unit, size, position);
                self.send.slice(own.start * width..own.end * width)
            }
            OperationKind::Broadcast { root } if root != position => RawBuffer::EMPTY,
            OperationKind::Recv { .. } | OperationKind::Barrier => RawBuffer::EMPTY,
            _ => self.send,
        }
    }
}
