//! Small operations: every member has a copy of every member's contribution, and computes its own result.
//!
//! In such a copy the operands lie one after the other, each in a slot of the size of its whole tensor, rounded up to
//! eight bytes; the bytes that the member sends lie at the start of the slot.
#![allow(unsafe_code)] // Copies and results are raw memory.

use super::reduce;
use phalanx_device::operation::{Operand, Operation, OperationKind, RawBuffer};
use phalanx_device::parts::part;
use phalanx_device::world::LOCAL_RANKS_MAX;

/// Bytes of all slots; `usize::MAX` if they exceed the address space.
pub(super) fn bytes_of(operands: &[Operand]) -> usize {
    operands.iter().map(slot_bytes).fold(0, usize::saturating_add)
}

/// Copies the contribution of the member at `position` of `size` to `to`.
///
/// # Safety
/// `to` is aligned to eight bytes, valid for [`bytes_of`] and accessed by no other thread; the sent buffers can be
/// read.
pub(super) unsafe fn collect(operation: &Operation, operands: &[Operand], (position, size): (u32, u32), to: *mut u8) {
    let mut at = 0;
    for operand in operands {
        let sent = operand.sent(operation, position, size);
        // SAFETY: the sent bytes are no longer than the slot at `at`.
        unsafe { std::ptr::copy_nonoverlapping(sent.start(), to.add(at), sent.bytes()) };
        at += slot_bytes(operand);
    }
}

/// Writes the results of the member at `position` of `size` from the copies of all members.
///
/// # Safety
/// `copy_of` returns the address at which [`collect`] wrote for the given member; no thread writes there now. The
/// result buffers can be written.
pub(super) unsafe fn deliver(
    operation: &Operation,
    operands: &[Operand],
    (position, size): (u32, u32),
    copy_of: impl Fn(u32) -> *const u8,
) {
    let mut at = 0;
    for operand in operands {
        let (n, width, recv) = (operand.n_elements, operand.dtype.bytes(), operand.recv);
        let own = part(n, operation.unit, size, position);
        let sent = |peer: u32, start: usize| copy_of(peer).wrapping_add(at + start * width);
        // SAFETY: each source lies in the slot of this operand; results are elsewhere.
        let copy = |from: *const u8, to: RawBuffer| unsafe {
            std::ptr::copy_nonoverlapping(from, to.start(), to.bytes());
        };
        match operation.kind {
            OperationKind::AllReduce | OperationKind::ReduceScatter => {
                let skip = if operation.kind == OperationKind::AllReduce { 0 } else { own.start };
                let n_summed = recv.bytes() / width;
                // SAFETY: as above, and slots are aligned for every element type.
                unsafe {
                    with_sources(
                        size,
                        |peer| sent(peer, skip),
                        |s| reduce::sum(operand.dtype, s, &[recv.start()], n_summed),
                    )
                };
            }
            OperationKind::AllGather => {
                for peer in 0..size {
                    let theirs = part(n, operation.unit, size, peer);
                    copy(sent(peer, 0), recv.slice(theirs.start * width..theirs.end * width));
                }
            }
            OperationKind::AllToAll => {
                for peer in 0..size {
                    let block = peer as usize * own.len() * width;
                    copy(sent(peer, own.start), recv.slice(block..block + own.len() * width));
                }
            }
            OperationKind::Broadcast { root } => copy(sent(root, 0), recv),
            OperationKind::Shift { by } => copy(sent(OperationKind::shift_source(by, position, size), 0), recv),
            OperationKind::Recv { from } => copy(sent(from, 0), recv),
            OperationKind::Send { .. } | OperationKind::Barrier => {}
        }
        at += slot_bytes(operand);
    }
}

/// Calls `body` with an address per member; does not allocate for groups of up to [`LOCAL_RANKS_MAX`].
pub(super) fn with_sources<R>(
    size: u32,
    address: impl Fn(u32) -> *const u8,
    body: impl FnOnce(&[*const u8]) -> R,
) -> R {
    let mut few = [std::ptr::null::<u8>(); LOCAL_RANKS_MAX as usize];
    if size <= LOCAL_RANKS_MAX {
        for peer in 0..size {
            few[peer as usize] = address(peer);
        }
        return body(&few[..size as usize]);
    }
    body(&(0..size).map(address).collect::<Vec<_>>())
}

fn slot_bytes(operand: &Operand) -> usize {
    let bytes = operand.n_elements.saturating_mul(operand.dtype.bytes());
    bytes.checked_next_multiple_of(8).unwrap_or(usize::MAX)
}
