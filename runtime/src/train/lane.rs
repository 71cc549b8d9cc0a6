//! One direction of a flow between a member and a peer: one operation for each [`CHUNK`] of elements.
#![allow(unsafe_code)] // The caller vouches for the memory of a lane's runs: see [`Lane::start`].

use phalanx_device::span::{Span, chunks};
use phalanx_device::staging::Staging;
use phalanx_device::{Collective, CollectiveError, ElementType, Operand, Operation, OperationKind, RawBuffer, Ticket};
use std::collections::VecDeque;
use std::ops::Range;

/// Elements of one operation on memory that is not shared.
pub(super) const CHUNK: usize = 64 << 10;
const CHUNK_BYTES: usize = CHUNK * size_of::<f32>();
/// Operations of one direction in flight.
pub(super) const UNDER_WAY: usize = 2;
/// Slots of the staging of one direction: for the operations in flight, and for the chunk that a device copies meanwhile.
pub(super) const SLOTS: usize = UNDER_WAY + 1;

/// One direction of a flow: one operation for each [`CHUNK`] of elements, two in flight, because memory that is not shared
/// passes through a small staging area. Both sides split the flow at the same elements, whatever their memory layout; a
/// chunk that is contiguous in host memory is not copied. While a chunk is in flight, the next one is copied from the
/// device, or the previous one to it.
pub(super) struct Lane {
    kind: OperationKind,
    chunks: Vec<Vec<Span>>,
    /// For chunks that are not contiguous in host memory; made for the first of them.
    staging: Option<Staging>,
    /// Chunks before this one are sent, or their copies have begun.
    begun: usize,
    under_way: VecDeque<Ticket>,
}

impl Lane {
    pub(super) fn new(kind: OperationKind, runs: Vec<Span>) -> Lane {
        Lane { kind, chunks: chunks(runs, CHUNK_BYTES), staging: None, begun: 0, under_way: VecDeque::new() }
    }

    pub(super) fn n_chunks(&self) -> usize {
        self.chunks.len()
    }

    fn sends(&self) -> bool {
        matches!(self.kind, OperationKind::Send { .. })
    }

    /// Starts the operation of chunk `i`, if there is one, and copies ahead the next chunk before `end`. All operations but
    /// the previous one must be finished.
    ///
    /// # Safety
    /// The memory of the runs is borrowed until every started operation is finished, or a finish has failed.
    unsafe fn start(&mut self, group: &mut dyn Collective, i: usize, end: usize) -> Result<(), CollectiveError> {
        if i >= end {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.copy_ahead(i) }?;
        let buffer = self.buffer(i)?;
        let sends = self.sends();
        let (send, recv) = if sends { (buffer, RawBuffer::EMPTY) } else { (RawBuffer::EMPTY, buffer) };
        let n_elements = buffer.bytes() / size_of::<f32>();
        let operand = Operand { send, recv, dtype: ElementType::F32, n_elements };
        // SAFETY: the caller's promise; each operation in flight has its own slot.
        let ticket = unsafe { group.start(&Operation { kind: self.kind, sequence: 0, unit: 1 }, &[operand]) }?;
        self.under_way.push_back(ticket);
        if i + 1 < end {
            // SAFETY: the caller's promise.
            unsafe { self.copy_ahead(i + 1) }?;
        }
        Ok(())
    }

    /// Begins to copy chunk `i`, if it is to be sent through staging.
    ///
    /// # Safety
    /// As for [`Lane::start`].
    unsafe fn copy_ahead(&mut self, i: usize) -> Result<(), CollectiveError> {
        if !self.sends() || i < self.begun {
            return Ok(());
        }
        self.begun = i + 1;
        if !is_staged(&self.chunks[i]) {
            return Ok(());
        }
        let staging = staging(&mut self.staging, &self.chunks)?;
        // SAFETY: the caller's promise.
        Ok(unsafe { staging.gather(i % SLOTS, &self.chunks[i]) }?)
    }

    /// The memory of the operation of chunk `i`.
    fn buffer(&mut self, i: usize) -> Result<RawBuffer, CollectiveError> {
        let chunk = &self.chunks[i];
        if !is_staged(chunk) {
            return Ok(chunk[0].buffer());
        }
        let n_bytes: usize = chunk.iter().map(Span::bytes).sum();
        let bytes = staging(&mut self.staging, &self.chunks)?.bytes(i % SLOTS)?;
        Ok(RawBuffer::new(bytes.as_mut_ptr(), bytes.len()).slice(0..n_bytes))
    }

    /// Finishes the operation of chunk `i`, the oldest, if there is one.
    ///
    /// # Safety
    /// As for [`Lane::start`].
    unsafe fn finish(&mut self, group: &mut dyn Collective, i: usize) -> Result<(), CollectiveError> {
        let Some(chunk) = self.chunks.get(i) else { return Ok(()) };
        group.finish(self.under_way.pop_front().expect("it was started"))?;
        if !self.sends() && is_staged(chunk) {
            let staging = staging(&mut self.staging, &self.chunks)?;
            // SAFETY: the caller's promise.
            unsafe { staging.scatter(i % SLOTS, chunk) }?;
        }
        Ok(())
    }

    /// Transfers these chunks.
    ///
    /// # Safety
    /// As for [`Lane::start`].
    pub(super) unsafe fn pass(
        &mut self,
        group: &mut dyn Collective,
        part: Range<usize>,
    ) -> Result<(), CollectiveError> {
        // SAFETY: the caller's promise.
        unsafe { pass(group, &mut [&mut *self], part, || ()) }
    }

    /// Aborts the group and finishes the operations in flight; otherwise the peer would wait for the failed one.
    pub(super) fn give_up(&mut self, group: &mut dyn Collective, why: &CollectiveError) {
        group.abort(&why.to_string());
        self.under_way.drain(..).for_each(|ticket| drop(group.finish(ticket)));
        // Dropping it ends its copies.
        self.staging = None;
    }
}

/// Transfers these chunks of lanes to and from one peer. Neither direction waits for the other: waiting for one advances
/// both. Calls `passed` after each chunk.
///
/// # Safety
/// As for [`Lane::start`].
pub(super) unsafe fn pass(
    group: &mut dyn Collective,
    lanes: &mut [&mut Lane],
    part: Range<usize>,
    mut passed: impl FnMut(),
) -> Result<(), CollectiveError> {
    for i in part.start..=part.end {
        for lane in lanes.iter_mut() {
            let end = part.end.min(lane.n_chunks());
            // SAFETY: the caller's promise.
            unsafe { lane.start(group, i, end) }?;
        }
        if i > part.start {
            for lane in lanes.iter_mut() {
                // SAFETY: the caller's promise.
                unsafe { lane.finish(group, i - 1) }?;
            }
        }
        passed();
    }
    Ok(())
}

/// The staging for these lists of runs, made when it is first needed.
pub(super) fn staging<'a>(
    staging: &'a mut Option<Staging>,
    chunks: &[Vec<Span>],
) -> Result<&'a mut Staging, CollectiveError> {
    Ok(match staging {
        Some(staging) => staging,
        None => {
            let slot_bytes = chunks.iter().map(|chunk| chunk.iter().map(Span::bytes).sum()).max().unwrap_or(0);
            staging.insert(Staging::new(chunks.iter().flatten(), SLOTS, slot_bytes)?)
        }
    })
}

/// Whether a chunk passes through staging.
fn is_staged(chunk: &[Span]) -> bool {
    !matches!(chunk, [alone] if alone.is_on_host())
}
