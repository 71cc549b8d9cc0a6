//! The stream of a group's operations, as one member drives it.
//!
//! An operation goes through three steps at each member, in order of the stream:
//! 1. *started*: the member has announced the operation and the offsets of its tensors;
//! 2. *worked*: all members have announced the same operation, and this member has done its share: it has computed its
//!    part of a sum, or copied its input from peers;
//! 3. *complete*: no peer accesses this member's tensors any more.
//!
//! Small operations are *flat*: announcing includes a copy of the member's data, every member computes its own result
//! from the copies, and no member waits twice.
//!
//! Invariants:
//! - SHM-GROUP-1: a member alone writes its posts, offsets and flat area, before it announces; peers read them after
//!   the announcement.
//! - SHM-GROUP-2: a member completes operation `i` only after all members have announced `i`. It announces `i` only
//!   while it has fewer than [`IN_FLIGHT_MAX`] incomplete operations. So when a member announces `i`, all have
//!   announced `i - IN_FLIGHT_MAX`, so all have completed `i - 2 · IN_FLIGHT_MAX`: no member reads the post and flat
//!   area that `i` reuses. The same holds for offsets: completion waits for every member that reads them.
//! - SHM-GROUP-3: peers read and write a member's tensors only between reading its post and their `done`, for which
//!   completion waits; in that time one member alone writes and reads each element of a sum's result.
//! - SHM-GROUP-4: a member is marked while it writes tensors of other members, and starts no write once the world is
//!   aborted (`Control::writing`): so the memory of an ended world can be reused once no rank is marked.
#![allow(unsafe_code)] // Raw pointers to tensors that other ranks write; SHM-GROUP-1 to SHM-GROUP-3 separate accesses.

use std::sync::Arc;

use super::layout::FLAT_BYTES;
use super::plane::Plane;
use super::queue::{Pending, Queue};
use super::ring::Ring;
use crate::{flat, reduce};
use phalanx_device::operation::IN_FLIGHT_MAX;
use phalanx_device::parts::part;
use phalanx_device::world::LOCAL_RANKS_MAX;
use phalanx_device::{CollectiveError, Operand, Operation, OperationKind, RawBuffer};

const _: () = assert!(super::layout::POSTS == 2 * IN_FLIGHT_MAX as u64, "SHM-GROUP-2");
/// Bytes of a cache line; parts of a sum consist of whole cache lines.
const LINE_BYTES: usize = 64;

/// Operations of the whole group.
#[derive(Debug)]
pub(super) struct GroupStream {
    plane: Arc<Plane>,
    group: usize,
    members: Vec<u32>,
    position: u32,
    /// Rings of all members, by position.
    rings: Vec<Ring>,
    queue: Queue,
    worked: u64,
    /// For operation `worked`, the number of each member's first operand, up to the first member without an
    /// announcement.
    offsets_at: Vec<u64>,
}

impl GroupStream {
    /// The stream of group number `group` for its member at `position`.
    pub(super) fn new(plane: Arc<Plane>, group: usize, members: &[u32], position: u32) -> GroupStream {
        let ring = |position| Ring::new(plane.control.clone(), plane.control.layout().group_ring_at(group, position));
        let rings: Vec<Ring> = (0..members.len() as u32).map(ring).collect();
        let queue = Queue::new(rings[position as usize].clone());
        let offsets_at = Vec::with_capacity(members.len());
        GroupStream { plane, group, members: members.to_vec(), position, rings, queue, worked: 0, offsets_at }
    }

    /// The operations.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Starts a checked operation.
    ///
    /// # Errors
    /// As [`Queue::push`].
    pub(super) fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<u64, CollectiveError> {
        let is_flat = is_flat(operands);
        let size = self.members.len() as u32;
        let index = self.queue.push(&self.plane, operation, operands, (self.position, size), !is_flat)?;
        if is_flat {
            let to = self.flat_area(self.position, index);
            // SAFETY: SHM-GROUP-1, SHM-GROUP-2: no member reads this area before the announcement. It is large enough,
            // see `is_flat`.
            unsafe { flat::collect(operation, operands, (self.position, size), to) };
        }
        self.queue.announce(index);
        self.wake_peers();
        Ok(index)
    }

    /// Makes all progress that is possible without waiting.
    ///
    /// # Errors
    /// [`CollectiveError::Mismatch`], [`CollectiveError::Invalid`].
    pub(super) fn advance(&mut self) -> Result<(), CollectiveError> {
        self.advance_while(|_| true)
    }

    /// Finishes flat operations that all members have announced, although the world is aborted. They need no further
    /// peer, and some members may have finished them before the abort; so a vote has the same outcome at all members,
    /// even if the first member to finish it aborts the world because of it.
    ///
    /// # Errors
    /// As [`GroupStream::advance`].
    pub(super) fn advance_decided(&mut self) -> Result<(), CollectiveError> {
        self.advance_while(|pending| is_flat(&pending.operands))
    }

    fn advance_while(&mut self, may_work: impl Fn(&Pending) -> bool) -> Result<(), CollectiveError> {
        while self.worked < self.queue.started() && may_work(self.queue.get(self.worked)) {
            self.poll_announcements()?;
            if self.offsets_at.len() < self.members.len() {
                break;
            }
            let pending = self.queue.get(self.worked);
            let is_flat = is_flat(&pending.operands);
            if is_flat {
                self.work_flat(pending)
            } else {
                self.work(pending)?
            }
            self.worked += 1;
            self.offsets_at.clear();
            self.queue.ring().set_done(self.worked);
            if !is_flat {
                self.wake_peers();
            }
        }
        while self.queue.completed() < self.worked && self.is_released(self.queue.completed()) {
            self.queue.complete(&self.plane);
        }
        Ok(())
    }

    /// Compares the announcements of the oldest unfinished operation, including those after a missing announcement.
    ///
    /// # Errors
    /// [`CollectiveError::Mismatch`].
    pub(super) fn compare_all(&self) -> Result<(), CollectiveError> {
        if self.worked == self.queue.started() {
            return Ok(());
        }
        (0..self.members.len() as u32).try_for_each(|peer| self.compare(peer).map(|_| ()))
    }

    /// Records which members have announced the oldest unfinished operation.
    fn poll_announcements(&mut self) -> Result<(), CollectiveError> {
        while self.offsets_at.len() < self.members.len() {
            match self.compare(self.offsets_at.len() as u32)? {
                Some(offsets_at) => self.offsets_at.push(offsets_at),
                None => break,
            }
        }
        Ok(())
    }

    /// The number of the peer's first operand, if it has announced the same operation.
    fn compare(&self, peer: u32) -> Result<Option<u64>, CollectiveError> {
        let Some((descriptor, offsets_at)) = self.rings[peer as usize].announced(self.worked) else { return Ok(None) };
        let own = self.queue.get(self.worked).descriptor;
        if descriptor.agrees(&own) {
            return Ok(Some(offsets_at));
        }
        let mut sides = [(self.members[self.position as usize], own), (self.members[peer as usize], descriptor)];
        sides.sort_by_key(|(rank, _)| *rank);
        let [(rank_a, a), (rank_b, b)] =
            sides.map(|(rank, descriptor)| (self.plane.control.world().name_of(rank), descriptor));
        Err(CollectiveError::Mismatch { rank_a, a, rank_b, b })
    }

    /// Whether no peer accesses this member's tensors of operation `index` any longer.
    fn is_released(&self, index: u64) -> bool {
        let pending = self.queue.get(index);
        if is_flat(&pending.operands) {
            return true;
        }
        let size = self.members.len() as u32;
        let is_done = |peer: u32| self.rings[peer as usize].done() > index;
        match pending.operation.kind {
            OperationKind::Broadcast { root } if root != self.position => true,
            OperationKind::Shift { by } => is_done(OperationKind::shift_target(by, self.position, size)),
            _ => (0..size).all(is_done),
        }
    }

    /// This member's share of an operation whose tensors lie in arenas.
    fn work(&self, pending: &Pending) -> Result<(), CollectiveError> {
        let (operation, size) = (&pending.operation, self.members.len() as u32);
        for (i, operand) in pending.operands.iter().enumerate() {
            let (n, width) = (operand.n_elements, operand.dtype.bytes());
            let own = part(n, operation.unit, size, self.position);
            // The address of a peer's sent elements from `start` on.
            let sent = |peer: u32, start: usize, n: usize| {
                let at = self.offsets(peer, i).send.saturating_add((start * width) as u64);
                self.plane.peer(self.members[peer as usize], at, n * width, width)
            };
            match operation.kind {
                OperationKind::AllReduce => self.sum_part(i, operand)?,
                OperationKind::ReduceScatter => {
                    let mut sources = [std::ptr::null::<u8>(); LOCAL_RANKS_MAX as usize];
                    for peer in 0..size {
                        sources[peer as usize] = sent(peer, own.start, own.len())?;
                    }
                    let sources = &sources[..size as usize];
                    // SAFETY: SHM-GROUP-3; the sources were checked, and `recv` belongs to this member and may equal
                    // its own source.
                    unsafe { reduce::sum(operand.dtype, sources, &[operand.recv.start()], own.len()) };
                }
                OperationKind::AllGather => {
                    let is_in_place = operand.send == operand.recv;
                    for peer in (0..size).filter(|peer| !is_in_place || *peer != self.position) {
                        let theirs = part(n, operation.unit, size, peer);
                        let to = operand.recv.slice(theirs.start * width..theirs.end * width);
                        copy(sent(peer, 0, theirs.len())?, to);
                    }
                }
                OperationKind::AllToAll => {
                    for peer in 0..size {
                        let at = peer as usize * own.len() * width;
                        let to = operand.recv.slice(at..at + own.len() * width);
                        copy(sent(peer, own.start, own.len())?, to);
                    }
                }
                OperationKind::Broadcast { root } => {
                    if operand.recv.bytes() > 0 && (root != self.position || operand.send != operand.recv) {
                        copy(sent(root, 0, n)?, operand.recv);
                    }
                }
                OperationKind::Shift { by } => {
                    copy(sent(OperationKind::shift_source(by, self.position, size), 0, n)?, operand.recv);
                }
                OperationKind::Send { .. } | OperationKind::Recv { .. } | OperationKind::Barrier => {}
            }
        }
        Ok(())
    }

    /// Sums one part of all members' tensors and writes it to all of them.
    fn sum_part(&self, operand_idx: usize, operand: &Operand) -> Result<(), CollectiveError> {
        let (width, size) = (operand.dtype.bytes(), self.members.len());
        let own = part(operand.n_elements, LINE_BYTES / width, size as u32, self.position);
        let mut sources = [std::ptr::null::<u8>(); LOCAL_RANKS_MAX as usize];
        let mut targets = [std::ptr::null_mut::<u8>(); LOCAL_RANKS_MAX as usize];
        for (peer, rank) in self.members.iter().enumerate() {
            let offsets = self.offsets(peer as u32, operand_idx);
            let skip = (own.start * width) as u64;
            let address = |at: u64| self.plane.peer(*rank, at.saturating_add(skip), own.len() * width, width);
            sources[peer] = address(offsets.send)?;
            targets[peer] = address(offsets.recv)?;
        }
        let _writing = self.plane.control.writing(self.plane.rank)?;
        // SAFETY: SHM-GROUP-3: between the announcements and `done` this member alone touches these elements of all
        // tensors.
        unsafe { reduce::sum(operand.dtype, &sources[..size], &targets[..size], own.len()) };
        Ok(())
    }

    /// This member's share of a flat operation.
    fn work_flat(&self, pending: &Pending) {
        let offsets = (self.position, self.members.len() as u32);
        let copy_of = |peer| self.flat_area(peer, self.worked).cast_const();
        // SAFETY: SHM-GROUP-1, SHM-GROUP-2: every member wrote its area before it announced the same operation.
        unsafe { flat::deliver(&pending.operation, &pending.operands, offsets, copy_of) };
    }

    fn offsets(&self, peer: u32, operand_idx: usize) -> super::ring::Offsets {
        let first = self.offsets_at[peer as usize];
        self.rings[peer as usize].read_offsets(first.wrapping_add(operand_idx as u64))
    }

    fn flat_area(&self, peer: u32, index: u64) -> *mut u8 {
        let control = &self.plane.control;
        // SAFETY: the layout has an area of FLAT_BYTES there.
        unsafe { control.memory().base().add(control.layout().flat_at(self.group, peer, index)) }
    }

    fn wake_peers(&self) {
        for rank in self.members.iter().filter(|rank| **rank != self.plane.rank) {
            self.plane.control.wakeup(*rank).wake();
        }
    }
}

/// Whether the operation is flat; members agree, because they agree on the tensors.
fn is_flat(operands: &[Operand]) -> bool {
    flat::bytes_of(operands) <= FLAT_BYTES
}

/// Copies bytes that no thread writes.
pub(super) fn copy(from: *const u8, to: RawBuffer) {
    // SAFETY: the caller checked that `from` has `to.bytes()` bytes, and no thread writes them (SHM-GROUP-1,
    // SHM-GROUP-3); the operation borrows `to`, which does not overlap `from`, because overlapping operands are staged
    // or refused.
    unsafe { std::ptr::copy_nonoverlapping(from, to.start(), to.bytes()) };
}
