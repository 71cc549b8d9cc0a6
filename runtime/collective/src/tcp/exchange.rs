//! One operation between machines: the destinations of sent bytes, and the bytes received so far.
//!
//! Members exchange directly: each member sends every peer the bytes that the peer needs. The parts of a sum go to the
//! member that owns the part; it adds them in order of position, so that the bits equal those of shared memory, and for
//! an all-reduce it sends the sum to all members. A member sends as many bytes as in a ring (`2 (n - 1) / n` of the
//! tensor for an all-reduce), but in two steps instead of `2 (n - 1)`, and in another order of addition.
//!
//! Source: Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH, §4 (direct
//! exchange for reduce-scatter and all-to-all); Patarasuk and Yuan 2009 for the bandwidth bound.
#![allow(unsafe_code)] // Operands are raw memory that the operation borrows.

use super::frame::CHUNK_BYTES;
use super::sums::{Contribution, Sum, Sums};
use crate::flat;
use phalanx_device::descriptor::Descriptor;
use phalanx_device::huge_pages;
use phalanx_device::parts::part;
use phalanx_device::{CollectiveError, Operand, Operation, OperationKind, RawBuffer};
use std::ops::Range;

/// Stages of an operation: contributions, then sums.
pub(super) const STAGES: usize = 2;
const LINE_BYTES: usize = 64;

/// One operation that this member has started. It is reused for later operations and keeps its memory.
#[derive(Debug)]
pub(super) struct Exchange {
    pub operation: Operation,
    pub operands: Vec<Operand>,
    pub descriptor: Descriptor,
    position: u32,
    size: u32,
    is_flat: bool,
    /// This member's contribution, if the announcement carries it to all peers.
    flat_copy: Vec<u64>,
    /// Destination of received bytes and the number of bytes still missing, by stage, sender and operand.
    incoming: Vec<(RawBuffer, usize)>,
    bytes_due: [usize; STAGES],
    /// Received parts of sums, and the input of a shift in place; may be larger than this operation needs.
    memory: Vec<u64>,
    /// Byte offset in `memory` of each operand's parts.
    parts_at: Vec<usize>,
    pub jobs_left: usize,
    sums: Sums,
}

/// Bytes that are arriving, until they are in their place.
#[derive(Debug)]
pub(super) struct Arrival {
    stage: usize,
    operand: usize,
    range: Range<usize>,
    /// Where they belong. None for the last contribution to a chunk: it is added to the others from where it was read to.
    pub(super) place: Option<RawBuffer>,
}

impl Exchange {
    /// An exchange without an operation: see [`Exchange::begin`].
    pub(super) fn unused() -> Exchange {
        let operation = Operation { kind: OperationKind::Barrier, sequence: 0, unit: 1 };
        Exchange {
            operation,
            operands: Vec::new(),
            descriptor: Descriptor::of(&operation, &[]),
            position: 0,
            size: 1,
            is_flat: true,
            flat_copy: Vec::new(),
            incoming: Vec::new(),
            bytes_due: [0; STAGES],
            memory: Vec::new(),
            parts_at: Vec::new(),
            jobs_left: 0,
            sums: Sums::default(),
        }
    }

    /// Takes on this operation and prepares to receive its bytes. Peers compare `descriptor`.
    pub(super) fn begin(
        &mut self,
        operation: &Operation,
        operands: &[Operand],
        descriptor: Descriptor,
        (position, size): (u32, u32),
    ) {
        (self.operation, self.descriptor) = (*operation, descriptor);
        (self.position, self.size) = (position, size);
        self.operands.clear();
        self.operands.extend_from_slice(operands);
        self.flat_copy.clear();
        self.incoming.clear();
        self.parts_at.clear();
        (self.bytes_due, self.jobs_left) = ([0; STAGES], 0);
        self.sums.clear(size);
        let flat_bytes = flat::bytes_of(operands);
        self.is_flat = flat_bytes <= super::frame::FLAT_BYTES;
        if self.is_flat {
            self.flat_copy.resize(flat_bytes / 8, 0);
            // SAFETY: the copy is aligned and has the requested size; the operation borrows its operands.
            unsafe { flat::collect(operation, operands, (position, size), self.flat_copy.as_mut_ptr().cast()) };
        } else {
            self.prepare();
        }
    }

    /// Whether the announcements carry all data.
    pub(super) fn is_flat(&self) -> bool {
        self.is_flat
    }

    /// This member's contribution, if the announcement carries it.
    pub(super) fn flat_copy(&self) -> &[u64] {
        &self.flat_copy
    }

    /// The bytes that go to `peer` in a stage.
    pub(super) fn source(&self, peer: u32, stage: usize, operand_idx: usize) -> RawBuffer {
        let operand = &self.operands[operand_idx];
        match (self.operation.kind, stage) {
            (OperationKind::AllReduce | OperationKind::ReduceScatter | OperationKind::AllToAll, 0) => {
                operand.send.slice(self.part_bytes(operand, peer))
            }
            (OperationKind::AllReduce, _) => operand.recv.slice(self.part_bytes(operand, self.position)),
            (OperationKind::AllGather, 0) => operand.sent(&self.operation, self.position, self.size),
            (OperationKind::Broadcast { root }, 0) if root == self.position => operand.send,
            (OperationKind::Shift { by }, 0) if OperationKind::shift_target(by, self.position, self.size) == peer => {
                match operand.send == operand.recv {
                    true => self.in_memory(self.parts_at[operand_idx], operand.send.bytes()),
                    false => operand.send,
                }
            }
            (OperationKind::Send { .. }, 0) => operand.send,
            _ => RawBuffer::EMPTY,
        }
    }

    /// Takes note of `len` bytes that follow from `peer`, and tells where they belong.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if the bytes were not expected.
    pub(super) fn arrive(
        &mut self,
        (peer, stage, operand): (u32, usize, usize),
        offset: u64,
        len: usize,
    ) -> Result<Arrival, CollectiveError> {
        let invalid = |field, expected, found| Err(CollectiveError::Invalid { field, expected, found });
        if stage >= STAGES || operand >= self.operands.len() || self.incoming.is_empty() {
            return invalid("stage or tensor of a frame", 0, operand as u64);
        }
        let is_summed = stage == 0 && self.has_sum();
        let i = self.incoming_idx(stage, peer, operand);
        let (to, left) = &mut self.incoming[i];
        let range = usize::try_from(offset).ok().and_then(|offset| Some(offset..offset.checked_add(len)?));
        // Contributions to sums come in whole chunks.
        let is_chunk = |range: &Range<usize>| {
            range.start.is_multiple_of(CHUNK_BYTES) && range.end == to.bytes().min(range.start + CHUNK_BYTES)
        };
        let range = match range {
            Some(range) if range.end <= to.bytes() && len <= *left && (!is_summed || is_chunk(&range)) => range,
            _ => return invalid("offset of bytes in a tensor", to.bytes() as u64, offset),
        };
        *left -= len;
        let place = match is_summed.then(|| self.sums.arrive(peer, operand, range.start)) {
            None | Some(Some(Contribution::Store)) => Some(to.slice(range.clone())),
            Some(Some(Contribution::Sum)) => None,
            Some(None) => return invalid("number of a peer's contributions to a chunk", 1, 2),
        };
        Ok(Arrival { stage, operand, range, place })
    }

    /// Takes note that bytes of `peer` have arrived; those without a place are at `body`. Returns the sum that they make due, whose
    /// sources it puts into `sources`.
    pub(super) fn arrived(
        &mut self,
        arrival: &Arrival,
        (peer, body): (u32, *const u8),
        sources: &mut Vec<*const u8>,
    ) -> Option<Sum> {
        self.bytes_due[arrival.stage] -= arrival.range.len();
        let given = match arrival.place {
            None => Some((peer, body)),
            Some(_) if arrival.stage > 0 || !self.has_sum() => return None,
            Some(_) if !self.sums.store(arrival.operand, arrival.range.start) => return None,
            Some(_) => None,
        };
        Some(self.sum(arrival.operand, arrival.range.clone(), given, sources))
    }

    /// Takes note that a sum is computed.
    pub(super) fn summed(&mut self, sum: &Sum) {
        self.sums.finish(sum.to.bytes());
    }

    /// Whether all sums are computed; so if there are none.
    pub(super) fn is_summed(&self) -> bool {
        self.sums.are_done()
    }

    /// Describes the sum of a chunk of this member's part. All contributions are stored, except that of the peer in `given`, which is
    /// where `given` says.
    fn sum(
        &self,
        operand: usize,
        range: Range<usize>,
        given: Option<(u32, *const u8)>,
        sources: &mut Vec<*const u8>,
    ) -> Sum {
        let of = &self.operands[operand];
        let own = self.part_bytes(of, self.position);
        let own_chunk = own.start + range.start..own.start + range.end;
        sources.clear();
        sources.extend((0..self.size).map(|peer| match given {
            Some((giver, bytes)) if giver == peer => bytes,
            _ if peer == self.position => of.send.slice(own_chunk.clone()).start().cast_const(),
            _ => self.incoming[self.incoming_idx(0, peer, operand)].0.slice(range.clone()).start().cast_const(),
        }));
        let to = match self.operation.kind {
            OperationKind::AllReduce => of.recv.slice(own_chunk),
            _ => of.recv.slice(range.clone()),
        };
        Sum { operand, range, dtype: of.dtype, to, is_sent: self.operation.kind == OperationKind::AllReduce }
    }

    /// Whether all bytes of a stage have arrived.
    pub(super) fn has_arrived(&self, stage: usize) -> bool {
        self.bytes_due[stage] == 0
    }

    /// Whether this member computes a sum once the contributions have arrived.
    pub(super) fn has_sum(&self) -> bool {
        !self.is_flat() && matches!(self.operation.kind, OperationKind::AllReduce | OperationKind::ReduceScatter)
    }

    /// Writes the results that do not depend on peers; for a flat operation all results, from the copies of all
    /// members.
    pub(super) fn complete<'a>(&self, copy_of: impl Fn(u32) -> &'a [u64]) {
        let place = (self.position, self.size);
        if self.is_flat {
            let own = self.flat_copy.as_ptr().cast();
            let copy_of = |peer: u32| if peer == self.position { own } else { copy_of(peer).as_ptr().cast() };
            // SAFETY: members filled their copies for the same operation, and the lengths were compared.
            unsafe { flat::deliver(&self.operation, &self.operands, place, copy_of) };
            return;
        }
        for operand in &self.operands {
            let own = self.part_bytes(operand, self.position);
            let (from, to) = match self.operation.kind {
                OperationKind::AllReduce | OperationKind::ReduceScatter
                    if self.size == 1 && operand.send != operand.recv =>
                {
                    (operand.send, operand.recv)
                }
                OperationKind::AllGather if operand.send != operand.recv => (operand.send, operand.recv.slice(own)),
                OperationKind::AllToAll => {
                    let at = self.position as usize * own.len();
                    let block = operand.recv.slice(at..at + own.len());
                    (operand.send.slice(own), block)
                }
                OperationKind::Broadcast { root }
                    if root == self.position && operand.recv.bytes() > 0 && operand.send != operand.recv =>
                {
                    (operand.send, operand.recv)
                }
                OperationKind::Shift { by }
                    if OperationKind::shift_target(by, self.position, self.size) == self.position
                        && operand.send != operand.recv =>
                {
                    (operand.send, operand.recv)
                }
                _ => continue,
            };
            // SAFETY: the operation borrows both, and its start checked that they do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from.start(), to.start(), to.bytes()) };
        }
    }

    /// Lays out memory for parts of sums and records the destination of all expected bytes.
    fn prepare(&mut self) {
        let (mut bytes, n_members) = (0, self.size as usize);
        for operand in &self.operands {
            self.parts_at.push(bytes);
            bytes += match self.operation.kind {
                OperationKind::AllReduce | OperationKind::ReduceScatter => {
                    let own = self.part_bytes(operand, self.position).len();
                    // A sum over one member is its contribution: see `complete`.
                    self.sums.add(if n_members > 1 { own } else { 0 });
                    // The contribution of a single peer is added as it arrives.
                    if n_members > 2 { n_members * own.next_multiple_of(8) } else { 0 }
                }
                OperationKind::Shift { .. } if operand.send == operand.recv => operand.send.bytes().next_multiple_of(8),
                _ => 0,
            };
        }
        // Bytes of earlier operations are overwritten before they are read.
        if self.memory.len() < bytes / 8 {
            self.memory = Vec::with_capacity(bytes / 8);
            huge_pages::request(self.memory.spare_capacity_mut());
            self.memory.resize(bytes / 8, 0);
        }
        // Later accesses use the address, see `in_memory`.
        self.memory.as_mut_ptr().expose_provenance();
        if let OperationKind::Shift { .. } = self.operation.kind {
            for (operand, at) in self.operands.iter().zip(&self.parts_at) {
                if operand.send == operand.recv {
                    let to = self.in_memory(*at, operand.send.bytes());
                    // SAFETY: the memory was just laid out for this copy; the operation borrows the operand.
                    unsafe { std::ptr::copy_nonoverlapping(operand.send.start(), to.start(), to.bytes()) };
                }
            }
        }
        for stage in 0..STAGES {
            for peer in 0..self.size {
                for operand_idx in 0..self.operands.len() {
                    let to = match peer == self.position {
                        true => RawBuffer::EMPTY,
                        false => self.target(peer, stage, operand_idx),
                    };
                    self.incoming.push((to, to.bytes()));
                    self.bytes_due[stage] += to.bytes();
                }
            }
        }
    }

    /// The destination of bytes from `peer`.
    fn target(&self, peer: u32, stage: usize, operand_idx: usize) -> RawBuffer {
        let operand = &self.operands[operand_idx];
        match (self.operation.kind, stage) {
            (OperationKind::AllReduce | OperationKind::ReduceScatter, 0) => {
                let len = self.part_bytes(operand, self.position).len();
                match self.size {
                    // Never stored: see `prepare`.
                    2 => RawBuffer::new(std::ptr::null_mut(), len),
                    _ => self.in_memory(self.parts_at[operand_idx] + peer as usize * len.next_multiple_of(8), len),
                }
            }
            (OperationKind::AllReduce, _) | (OperationKind::AllGather, 0) => {
                operand.recv.slice(self.part_bytes(operand, peer))
            }
            (OperationKind::AllToAll, 0) => {
                let len = self.part_bytes(operand, self.position).len();
                operand.recv.slice(peer as usize * len..(peer as usize + 1) * len)
            }
            (OperationKind::Broadcast { root }, 0) if root == peer => operand.recv,
            (OperationKind::Shift { by }, 0) if OperationKind::shift_source(by, self.position, self.size) == peer => {
                operand.recv
            }
            (OperationKind::Recv { from }, 0) if from == peer => operand.recv,
            _ => RawBuffer::EMPTY,
        }
    }

    /// The part of a member, in bytes. Only this file determines the parts of an all-reduce.
    fn part_bytes(&self, operand: &Operand, position: u32) -> Range<usize> {
        let width = operand.dtype.bytes();
        let unit = match self.operation.kind {
            OperationKind::AllReduce => LINE_BYTES / width,
            _ => self.operation.unit,
        };
        let own = part(operand.n_elements, unit, self.size, position);
        own.start * width..own.end * width
    }

    fn in_memory(&self, at: usize, bytes: usize) -> RawBuffer {
        RawBuffer::new(self.memory.as_ptr().cast::<u8>().cast_mut(), 8 * self.memory.len()).slice(at..at + bytes)
    }

    fn incoming_idx(&self, stage: usize, peer: u32, operand_idx: usize) -> usize {
        (stage * self.size as usize + peer as usize) * self.operands.len() + operand_idx
    }
}
