//! One direction of what passes between a member and a peer: an operation for each [`CHUNK`] of elements, wherever these lie.
#![allow(unsafe_code)] // What a lane stands for is lent to it by whoever lets it pass: see [`Lane::start`].

use phalanx_device::span::Stretch;
use phalanx_device::{Collective, CollectiveError, ElementType, Operand, Operation, OperationKind, RawBuffer, Ticket};
use std::collections::VecDeque;
use std::ops::Range;

/// Elements of one operation on memory that is not shared.
pub(super) const CHUNK: usize = 64 << 10;
/// Operations of one direction that are under way.
pub(super) const UNDER_WAY: usize = 2;

/// One direction of a flow: an operation for each [`CHUNK`] of elements, of which two are under way, since memory that is
/// not shared passes through little that is. Both sides cut the flow at the same elements, however these lie in their
/// memory; those of a chunk that lie together where the host reaches them are not copied for it.
pub(super) struct Lane {
    kind: OperationKind,
    chunks: Vec<Vec<Stretch>>,
    together: [Vec<f32>; UNDER_WAY],
    under_way: VecDeque<Ticket>,
}

impl Lane {
    pub(super) fn new(kind: OperationKind, runs: Vec<Stretch>) -> Lane {
        Lane { kind, chunks: chunks(runs), together: Default::default(), under_way: VecDeque::new() }
    }

    pub(super) fn n_chunks(&self) -> usize {
        self.chunks.len()
    }

    fn sends(&self) -> bool {
        matches!(self.kind, OperationKind::Send { .. })
    }

    /// Starts the operation of chunk `i`, if there is one, when all but the one before it are finished.
    ///
    /// # Safety
    /// What the runs stand for is lent until all that was started is finished, or a finish has failed.
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
        // SAFETY: the caller's promise; each operation that is under way has a buffer of `together` to itself.
        let ticket = unsafe { group.start(&Operation { kind: self.kind, sequence: 0, unit: 1 }, &[operand]) }?;
        self.under_way.push_back(ticket);
        Ok(())
    }

    /// Finishes the operation of chunk `i`, if there is one: the oldest.
    pub(super) fn finish(&mut self, group: &mut dyn Collective, i: usize) -> Result<(), CollectiveError> {
        let Some(chunk) = self.chunks.get(i) else { return Ok(()) };
        group.finish(self.under_way.pop_front().expect("it was started"))?;
        if !self.sends() && is_gathered(chunk) {
            scatter(&self.together[i % UNDER_WAY], chunk);
        }
        Ok(())
    }

    /// Lets these chunks pass.
    ///
    /// # Safety
    /// As of [`Lane::start`].
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

    /// Gives up what is under way: what was refused here the peer would wait for.
    pub(super) fn give_up(&mut self, group: &mut dyn Collective, why: &CollectiveError) {
        group.abort(&why.to_string());
        self.under_way.drain(..).for_each(|ticket| drop(group.finish(ticket)));
    }
}

/// Runs of memory, cut so that each list of them has [`CHUNK`] elements; the last one may have fewer.
fn chunks(runs: Vec<Stretch>) -> Vec<Vec<Stretch>> {
    const BYTES: usize = CHUNK * size_of::<f32>();
    let mut chunks: Vec<Vec<Stretch>> = Vec::new();
    let mut room = 0;
    for run in runs {
        let mut at = 0;
        while at < run.bytes() {
            if room == 0 {
                chunks.push(Vec::new());
                room = BYTES;
            }
            let n = room.min(run.bytes() - at);
            chunks.last_mut().expect("there is room in one").push(run.slice(at..at + n));
            (at, room) = (at + n, room - n);
        }
    }
    chunks
}

/// Whether a chunk passes by way of a buffer.
fn is_gathered(chunk: &[Stretch]) -> bool {
    !matches!(chunk, [alone] if alone.is_on_host())
}

/// A buffer as long as all of these runs; with their elements, if these are to be sent.
fn gathered(runs: &[Stretch], buffer: &mut Vec<f32>, sends: bool) -> RawBuffer {
    buffer.clear();
    buffer.resize(runs.iter().map(|run| run.bytes()).sum::<usize>() / size_of::<f32>(), 0.0);
    if sends {
        let mut at = 0;
        for run in runs {
            let n = run.bytes() / size_of::<f32>();
            // SAFETY: the run is lent for reading: see [`Lane::start`].
            unsafe { run.read(bytemuck::cast_slice_mut(&mut buffer[at..at + n])) };
            at += n;
        }
    }
    RawBuffer::of_mut(buffer)
}

/// Puts what has come where it belongs.
fn scatter(buffer: &[f32], runs: &[Stretch]) {
    let mut at = 0;
    for run in runs {
        let n = run.bytes() / size_of::<f32>();
        // SAFETY: the run is lent for writing: see [`Lane::start`].
        unsafe { run.write(bytemuck::cast_slice(&buffer[at..at + n])) };
        at += n;
    }
}
