//! One direction of a flow between a member and a peer: one operation for each [`CHUNK`] of elements.
#![allow(unsafe_code)] // The caller vouches for the memory of a lane's runs: see [`Lane::start`].

use phalanx_device::span::Span;
use phalanx_device::{Collective, CollectiveError, ElementType, Operand, Operation, OperationKind, RawBuffer, Ticket};
use std::collections::VecDeque;
use std::ops::Range;

/// Elements of one operation on memory that is not shared.
pub(super) const CHUNK: usize = 64 << 10;
/// Operations of one direction in flight.
pub(super) const UNDER_WAY: usize = 2;

/// One direction of a flow: one operation for each [`CHUNK`] of elements, two in flight, because memory that is not shared
/// passes through a small staging area. Both sides split the flow at the same elements, whatever their memory layout; a
/// chunk that is contiguous in host memory is not copied.
pub(super) struct Lane {
    kind: OperationKind,
    chunks: Vec<Vec<Span>>,
    together: [Vec<f32>; UNDER_WAY],
    under_way: VecDeque<Ticket>,
}

impl Lane {
    pub(super) fn new(kind: OperationKind, runs: Vec<Span>) -> Lane {
        Lane { kind, chunks: chunks(runs), together: Default::default(), under_way: VecDeque::new() }
    }

    pub(super) fn n_chunks(&self) -> usize {
        self.chunks.len()
    }

    fn sends(&self) -> bool {
        matches!(self.kind, OperationKind::Send { .. })
    }

    /// Starts the operation of chunk `i`, if there is one. All operations but the previous one must be finished.
    ///
    /// # Safety
    /// The memory of the runs is borrowed until every started operation is finished, or a finish has failed.
    pub(super) unsafe fn start(&mut self, group: &mut dyn Collective, i: usize) -> Result<(), CollectiveError> {
        let sends = self.sends();
        let Some(chunk) = self.chunks.get(i) else { return Ok(()) };
        let buffer = match &chunk[..] {
            [alone] if alone.is_on_host() => alone.buffer(),
            _ => gathered(chunk, &mut self.together[i % UNDER_WAY], sends),
        };
        let (send, recv) = if sends { (buffer, RawBuffer::EMPTY) } else { (RawBuffer::EMPTY, buffer) };
        let n_elements = buffer.bytes() / size_of::<f32>();
        let operand = Operand { send, recv, dtype: ElementType::F32, n_elements };
        // SAFETY: the caller's promise; each operation in flight has its own buffer of `together`.
        let ticket = unsafe { group.start(&Operation { kind: self.kind, sequence: 0, unit: 1 }, &[operand]) }?;
        self.under_way.push_back(ticket);
        Ok(())
    }

    /// Finishes the operation of chunk `i`, the oldest, if there is one.
    pub(super) fn finish(&mut self, group: &mut dyn Collective, i: usize) -> Result<(), CollectiveError> {
        let Some(chunk) = self.chunks.get(i) else { return Ok(()) };
        group.finish(self.under_way.pop_front().expect("it was started"))?;
        if !self.sends() && is_gathered(chunk) {
            scatter(&self.together[i % UNDER_WAY], chunk);
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
        for i in part.start..=part.end {
            if i < part.end {
                // SAFETY: the caller's promise.
                unsafe { self.start(group, i) }?;
            }
            if i > part.start {
                self.finish(group, i - 1)?;
            }
        }
        Ok(())
    }

    /// Aborts the group and finishes the operations in flight; otherwise the peer would wait for the failed one.
    pub(super) fn give_up(&mut self, group: &mut dyn Collective, why: &CollectiveError) {
        group.abort(&why.to_string());
        self.under_way.drain(..).for_each(|ticket| drop(group.finish(ticket)));
    }
}

/// Splits runs of memory into lists of [`CHUNK`] elements; the last list may have fewer.
fn chunks(runs: Vec<Span>) -> Vec<Vec<Span>> {
    const BYTES: usize = CHUNK * size_of::<f32>();
    let mut chunks: Vec<Vec<Span>> = Vec::new();
    let mut room = 0;
    for run in runs {
        let mut at = 0;
        while at < run.bytes() {
            if room == 0 {
                chunks.push(Vec::new());
                room = BYTES;
            }
            let n = room.min(run.bytes() - at);
            chunks.last_mut().expect("a chunk with room is last").push(run.slice(at..at + n));
            (at, room) = (at + n, room - n);
        }
    }
    chunks
}

/// Whether a chunk passes through a buffer.
fn is_gathered(chunk: &[Span]) -> bool {
    !matches!(chunk, [alone] if alone.is_on_host())
}

/// A buffer for the elements of all runs, filled with them if they are to be sent.
fn gathered(runs: &[Span], buffer: &mut Vec<f32>, sends: bool) -> RawBuffer {
    buffer.clear();
    buffer.resize(runs.iter().map(|run| run.bytes()).sum::<usize>() / size_of::<f32>(), 0.0);
    if sends {
        let mut at = 0;
        for run in runs {
            let n = run.bytes() / size_of::<f32>();
            // SAFETY: the run is borrowed for reading: see [`Lane::start`].
            unsafe { run.read(bytemuck::cast_slice_mut(&mut buffer[at..at + n])) };
            at += n;
        }
    }
    RawBuffer::of_mut(buffer)
}

/// Copies received elements to their runs.
fn scatter(buffer: &[f32], runs: &[Span]) {
    let mut at = 0;
    for run in runs {
        let n = run.bytes() / size_of::<f32>();
        // SAFETY: the run is borrowed for writing: see [`Lane::start`].
        unsafe { run.write(bytemuck::cast_slice(&buffer[at..at + n])) };
        at += n;
    }
}
