//! The operations of one stream that a member has started and not completed.

use std::collections::VecDeque;

use super::layout::OFFSETS;
use super::plane::{Piece, Plane};
use super::ring::{Offsets, Ring};
use phalanx_device::descriptor::Descriptor;
use phalanx_device::operation::IN_FLIGHT_MAX;
use phalanx_device::{CollectiveError, Operand, Operation, OperationKind, RawBuffer};

/// One started operation.
#[derive(Debug)]
pub(super) struct Pending {
    pub operation: Operation,
    pub operands: Vec<Operand>,
    pub descriptor: Descriptor,
    /// Number of its first operand in the stream.
    pub offsets_at: u64,
    pieces: Vec<Piece>,
}

/// Operations of one stream, in order, with the ring that announces them.
#[derive(Debug)]
pub(super) struct Queue {
    ring: Ring,
    pending: VecDeque<Pending>,
    /// Reused, so that a warm stream does not allocate.
    spare: Vec<Pending>,
    completed: u64,
    /// Number of the next operand.
    offsets_next: u64,
}

impl Queue {
    /// An empty stream.
    pub(super) fn new(ring: Ring) -> Queue {
        Queue { ring, pending: VecDeque::new(), spare: Vec::new(), completed: 0, offsets_next: 0 }
    }

    /// The ring of this member.
    pub(super) fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Operations started.
    pub(super) fn started(&self) -> u64 {
        self.completed + self.pending.len() as u64
    }

    /// Operations completed, in order.
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    /// The operation with number `index`, which is not completed.
    ///
    /// # Panics
    /// If there is no such operation.
    pub(super) fn get(&self, index: u64) -> &Pending {
        &self.pending[(index - self.completed) as usize]
    }

    /// Whether another operation of `n_operands` may be started.
    ///
    /// # Errors
    /// [`CollectiveError::TooManyInFlight`], [`CollectiveError::TooManyOperandsInFlight`].
    pub(super) fn check_room(&self, n_operands: usize) -> Result<(), CollectiveError> {
        if self.pending.len() >= IN_FLIGHT_MAX {
            return Err(CollectiveError::TooManyInFlight { max: IN_FLIGHT_MAX });
        }
        let oldest = self.pending.front().map_or(self.offsets_next, |oldest| oldest.offsets_at);
        let wanted = (self.offsets_next - oldest) as usize + n_operands;
        if wanted > OFFSETS as usize {
            return Err(CollectiveError::TooManyOperandsInFlight { wanted, max: OFFSETS as usize });
        }
        Ok(())
    }

    /// Adds an operation and returns its number; if `is_shared`, peers access its operands in this rank's arena. It is
    /// announced separately.
    ///
    /// # Errors
    /// As [`Queue::check_room`]; [`CollectiveError::StagingFull`]. The queue is unchanged then.
    pub(super) fn push(
        &mut self,
        plane: &Plane,
        operation: &Operation,
        operands: &[Operand],
        (position, size): (u32, u32),
        is_shared: bool,
    ) -> Result<u64, CollectiveError> {
        self.check_room(operands.len())?;
        let descriptor = Descriptor::of(operation, operands);
        let mut pending = self.spare.pop().unwrap_or_else(|| Pending {
            operation: *operation,
            operands: Vec::new(),
            descriptor,
            offsets_at: 0,
            pieces: Vec::new(),
        });
        (pending.operation, pending.descriptor, pending.offsets_at) = (*operation, descriptor, self.offsets_next);
        pending.operands.clear();
        pending.operands.extend_from_slice(operands);
        if is_shared {
            for (number, operand) in (self.offsets_next..).zip(operands) {
                match place(plane, operation, operand, (position, size), &mut pending.pieces) {
                    Ok(offsets) => self.ring.write_offsets(number, offsets),
                    Err(error) => {
                        plane.release(&mut pending.pieces, false);
                        self.spare.push(pending);
                        return Err(error);
                    }
                }
            }
            self.offsets_next += operands.len() as u64;
        }
        let index = self.started();
        self.pending.push_back(pending);
        Ok(index)
    }

    /// Announces operation `index`.
    pub(super) fn announce(&self, index: u64) {
        let pending = self.get(index);
        self.ring.announce(index, &pending.descriptor, pending.offsets_at);
    }

    /// Completes the oldest operation: puts results in place and frees its staging pieces.
    pub(super) fn complete(&mut self, plane: &Plane) {
        let mut pending = self.pending.pop_front().expect("the queue has an incomplete operation");
        plane.release(&mut pending.pieces, true);
        self.spare.push(pending);
        self.completed += 1;
    }
}

/// The offsets of one operand for peers: in the arena, or in a staged copy.
fn place(
    plane: &Plane,
    operation: &Operation,
    operand: &Operand,
    (position, size): (u32, u32),
    pieces: &mut Vec<Piece>,
) -> Result<Offsets, CollectiveError> {
    let sent = operand.sent(operation, position, size);
    if operation.kind == OperationKind::AllReduce {
        return place_of_sum(plane, sent, operand.recv, pieces);
    }
    // A shift whose result replaces its input: the peer may read after this member has written.
    let is_replaced = matches!(operation.kind, OperationKind::Shift { .. }) && sent == operand.recv;
    let send = match plane.offset_of(sent).filter(|_| !is_replaced) {
        Some(offset) => offset,
        None => plane.stage(sent.bytes(), Some(sent), None, pieces)?,
    };
    Ok(Offsets { send, recv: 0 })
}

/// Peers write the result of an `AllReduce`, so it must be in shared memory as well; a sum outside the arena uses one
/// staged piece for input and result.
fn place_of_sum(
    plane: &Plane,
    sent: RawBuffer,
    recv: RawBuffer,
    pieces: &mut Vec<Piece>,
) -> Result<Offsets, CollectiveError> {
    Ok(match (plane.offset_of(sent), plane.offset_of(recv)) {
        (Some(send), Some(recv)) => Offsets { send, recv },
        (Some(send), None) => Offsets { send, recv: plane.stage(recv.bytes(), None, Some(recv), pieces)? },
        (None, Some(to)) => Offsets { send: plane.stage(sent.bytes(), Some(sent), None, pieces)?, recv: to },
        (None, None) => {
            let both = plane.stage(sent.bytes(), Some(sent), Some(recv), pieces)?;
            Offsets { send: both, recv: both }
        }
    })
}
