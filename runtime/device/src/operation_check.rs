//! Checks operations and their operands before they start.

use crate::error::CollectiveError;
use crate::operation::{OPERANDS_MAX, Operand, Operation, OperationKind, Space};
use crate::parts::part;

/// Checks an operation and all its operands as the member at `position` issues it.
///
/// # Errors
/// As [`Operand::check`]; [`CollectiveError::NoSuchPosition`], [`CollectiveError::Unit`],
/// [`CollectiveError::TooManyOperands`].
pub fn check(operation: &Operation, operands: &[Operand], position: u32, size: u32) -> Result<(), CollectiveError> {
    let refused = match operation.kind {
        OperationKind::Broadcast { root } => (root >= size).then_some(root),
        OperationKind::Send { to: peer } | OperationKind::Recv { from: peer } => {
            (peer >= size || peer == position).then_some(peer)
        }
        _ => None,
    };
    if let Some(named) = refused {
        return Err(CollectiveError::NoSuchPosition { named, position, size });
    }
    if operation.unit == 0 {
        return Err(CollectiveError::Unit);
    }
    if operands.len() > OPERANDS_MAX {
        return Err(CollectiveError::TooManyOperands { max: OPERANDS_MAX, found: operands.len() });
    }
    operands.iter().try_for_each(|operand| operand.check(operation, position, size))
}

/// As [`check`], for a communicator that reads and writes host memory only.
///
/// # Errors
/// As [`check`]; [`CollectiveError::NotOnHost`].
pub fn check_on_host(
    operation: &Operation,
    operands: &[Operand],
    position: u32,
    size: u32,
) -> Result<(), CollectiveError> {
    for (side, buffer) in operands.iter().flat_map(|operand| [("send", operand.send), ("recv", operand.recv)]) {
        if let Space::Device(device) = buffer.space() {
            return Err(CollectiveError::NotOnHost { kind: operation.kind, side, device });
        }
    }
    check(operation, operands, position, size)
}

impl Operand {
    /// Checks the operand against its table.
    ///
    /// # Errors
    /// [`CollectiveError::Length`], [`CollectiveError::Unaligned`], [`CollectiveError::Overlap`].
    pub fn check(&self, operation: &Operation, position: u32, size: u32) -> Result<(), CollectiveError> {
        let (n, kind) = (self.n_elements, operation.kind);
        let own = part(n, operation.unit, size, position).len();
        let is_same = self.send == self.recv;
        let (send, recv) = match kind {
            OperationKind::AllReduce | OperationKind::Shift { .. } => (Some(n), Some(n)),
            OperationKind::ReduceScatter => (Some(n), Some(own)),
            OperationKind::AllGather => (Some(if is_same { n } else { own }), Some(n)),
            OperationKind::AllToAll => (Some(n), Some(own * size as usize)),
            OperationKind::Broadcast { root } if root == position => (Some(n), (self.recv.bytes() > 0).then_some(n)),
            OperationKind::Broadcast { .. } => (None, Some(n)),
            OperationKind::Send { .. } => (Some(n), Some(0)),
            OperationKind::Recv { .. } => (Some(0), Some(n)),
            OperationKind::Barrier => (Some(0), Some(0)),
        };
        for (side, expected, buffer) in [("send", send, self.send), ("recv", recv, self.recv)] {
            let Some(expected) = expected else { continue };
            if expected.checked_mul(self.dtype.bytes()) != Some(buffer.bytes()) {
                let found = buffer.bytes() / self.dtype.bytes();
                return Err(CollectiveError::Length { kind, side, expected, found });
            }
            if !buffer.address().is_multiple_of(self.dtype.bytes()) {
                return Err(CollectiveError::Unaligned { kind, side, bytes: self.dtype.bytes() });
            }
        }
        let may_overlap = match kind {
            OperationKind::ReduceScatter => {
                let own = part(n, operation.unit, size, position);
                let width = self.dtype.bytes();
                self.recv == self.send.slice(own.start * width..own.end * width)
            }
            OperationKind::AllToAll => false,
            _ => is_same,
        };
        let is_read = send.is_some();
        if is_read && !may_overlap && self.send.overlaps(self.recv) {
            return Err(CollectiveError::Overlap { kind });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::ElementType;
    use crate::operation::RawBuffer;
    use std::ops::Range;
    use std::ptr;

    const WIDTH: usize = 4;

    /// Elements `range` at an address that is never accessed.
    fn at(range: Range<usize>) -> RawBuffer {
        RawBuffer::new(ptr::without_provenance_mut(4096 + range.start * WIDTH), range.len() * WIDTH)
    }

    /// Checks an operand of ten elements in blocks of two, at position 1 of 2, whose part is `4..10`.
    fn outcome(kind: OperationKind, send: RawBuffer, recv: RawBuffer) -> Result<(), CollectiveError> {
        let operand = Operand { send, recv, dtype: ElementType::F32, n_elements: 10 };
        check(&Operation { kind, sequence: 0, unit: 2 }, &[operand], 1, 2)
    }

    #[test]
    fn operands_may_overlap_only_where_the_operation_allows_it() {
        let own = part(10, 2, 2, 1);
        let whole = at(0..10);
        let n_own = own.len();

        for kind in [OperationKind::AllReduce, OperationKind::Shift { by: 1 }, OperationKind::Broadcast { root: 1 }] {
            assert_eq!(outcome(kind, whole, whole), Ok(()));
            assert_eq!(outcome(kind, whole, at(5..15)), Err(CollectiveError::Overlap { kind }));
            assert_eq!(outcome(kind, whole, at(10..20)), Ok(()));
        }
        let kind = OperationKind::ReduceScatter;
        assert_eq!(outcome(kind, whole, at(own.clone())), Ok(()));
        assert_eq!(outcome(kind, whole, at(0..n_own)), Err(CollectiveError::Overlap { kind }));
        let kind = OperationKind::AllGather;
        assert_eq!(outcome(kind, whole, whole), Ok(()));
        assert_eq!(outcome(kind, at(own), whole), Err(CollectiveError::Overlap { kind }));
        let kind = OperationKind::AllToAll;
        assert_eq!(outcome(kind, whole, at(5..5 + 2 * n_own)), Err(CollectiveError::Overlap { kind }));
        assert_eq!(outcome(kind, whole, at(20..20 + 2 * n_own)), Ok(()));
    }

    #[test]
    fn broadcast_accepts_no_result_at_the_root_and_no_input_elsewhere() {
        assert_eq!(outcome(OperationKind::Broadcast { root: 1 }, at(0..10), RawBuffer::EMPTY), Ok(()));
        assert_eq!(outcome(OperationKind::Broadcast { root: 0 }, RawBuffer::EMPTY, at(0..10)), Ok(()));
    }

    #[test]
    fn wrong_length_and_wrong_alignment_are_reported_with_the_side() {
        let kind = OperationKind::Send { to: 0 };
        let odd = RawBuffer::new(ptr::without_provenance_mut(4097), 10 * WIDTH);

        let short = outcome(kind, at(0..9), RawBuffer::EMPTY);
        let unaligned = outcome(kind, odd, RawBuffer::EMPTY);

        assert_eq!(short, Err(CollectiveError::Length { kind, side: "send", expected: 10, found: 9 }));
        assert_eq!(unaligned, Err(CollectiveError::Unaligned { kind, side: "send", bytes: WIDTH }));
    }
}
