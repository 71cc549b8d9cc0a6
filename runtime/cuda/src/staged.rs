//! Collectives of device operands over a host communicator: copies in pinned host memory.
//!
//! The fallback where NCCL is missing, and the reference for it. Nothing overlaps: a start waits until the compute stream has
//! copied the operands out.

use crate::error::CudaError;
use crate::gpu::{DeviceMemory, Gpu};
use phalanx_device::operation_check::check;
use phalanx_device::{
    Collective, CollectiveControl, CollectiveError, Operand, Operation, OperationKind, RawBuffer, Space, Stream, Ticket,
};
use std::sync::Arc;

/// Copies begin at multiples of it: whole cache lines, and aligned for every element type.
const ALIGN_BYTES: usize = 64;

/// A host communicator whose operands may also be memory of one GPU.
pub(crate) struct Staged {
    gpu: Arc<Gpu>,
    host: Box<dyn Collective>,
    in_flight: Vec<InFlight>,
    pool: Pool,
}

impl std::fmt::Debug for Staged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staged")
            .field("gpu", &self.gpu.name)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

/// An operation that was started and not finished.
#[derive(Debug)]
struct InFlight {
    stream: Stream,
    index: u64,
    staging: Staging,
}

/// Host copies of the operands of one operation.
#[derive(Debug, Default)]
struct Staging {
    /// None if all operands are in host memory.
    memory: Option<DeviceMemory>,
    /// Results, as device memory and its host copy.
    results: Vec<(RawBuffer, RawBuffer)>,
}

/// Pinned memory for reuse: allocating it takes milliseconds.
#[derive(Debug, Default)]
struct Pool {
    free: Vec<DeviceMemory>,
    /// The compute stream may still be copying from it; free when the stream was waited for.
    returning: Vec<DeviceMemory>,
}

impl Pool {
    /// Pinned memory of at least `bytes` bytes, the smallest that is free.
    ///
    /// # Errors
    /// When the host has too little memory.
    fn take(&mut self, gpu: &Arc<Gpu>, bytes: usize) -> Result<DeviceMemory, CudaError> {
        let fits = self.free.iter().enumerate().filter(|(_, memory)| memory.bytes >= bytes);
        match fits.min_by_key(|(_, memory)| memory.bytes) {
            // Memory of other operations of the step is left for them.
            Some((i, memory)) if memory.bytes <= 2 * bytes.next_power_of_two() => Ok(self.free.swap_remove(i)),
            _ => gpu.allocate_pinned(bytes.next_power_of_two()),
        }
    }

    /// Frees the memory of copies that are complete because the compute stream was waited for.
    fn settle(&mut self) {
        self.free.append(&mut self.returning);
    }
}

impl Staged {
    /// The communicator `host` for operands in the memory of `gpu`.
    pub(crate) fn new(gpu: Arc<Gpu>, host: Box<dyn Collective>) -> Staged {
        Staged { gpu, host, in_flight: Vec::new(), pool: Pool::default() }
    }

    /// Copies what the operation reads to the host, and starts it there.
    ///
    /// # Safety
    /// As [`Collective::start`].
    unsafe fn start_staged(
        &mut self,
        operation: &Operation,
        operands: &[Operand],
    ) -> Result<(Ticket, Staging), CollectiveError> {
        let mut staging = Staging::default();
        let is_on_host = |operand: &Operand| [operand.send, operand.recv].iter().all(|b| b.space() == Space::Host);
        if operands.iter().all(is_on_host) {
            // SAFETY: the caller's contract.
            let ticket = unsafe { self.host.start(operation, operands) }?;
            return Ok((ticket, staging));
        }
        let bytes = operands.iter().map(staging_bytes).sum::<usize>().max(ALIGN_BYTES);
        // Copies into memory that this makes free come after it, so they cannot overtake its last use.
        let memory = self.pool.take(&self.gpu, bytes).map_err(|e| failed(&e))?;
        // SAFETY: the caller keeps the operands valid, and the memory is new to all streams.
        let on_host = unsafe { self.copy_out(operation, operands, &memory, &mut staging) };
        let started = on_host.map_err(|e| failed(&e)).and_then(|on_host| {
            // SAFETY: operands of the host are copies that live until the ticket is finished, or the caller's.
            unsafe { self.host.start(operation, &on_host) }
        });
        match started {
            Ok(ticket) => {
                staging.memory = Some(memory);
                Ok((ticket, staging))
            }
            Err(error) => {
                self.pool.returning.push(memory);
                Err(error)
            }
        }
    }

    /// The operands as the host communicator sees them, after their contents are copied.
    ///
    /// # Safety
    /// The operands are valid, and nothing else uses `memory`.
    unsafe fn copy_out(
        &mut self,
        operation: &Operation,
        operands: &[Operand],
        memory: &DeviceMemory,
        staging: &mut Staging,
    ) -> Result<Vec<Operand>, CudaError> {
        let (position, size) = (self.position(), self.size());
        let mut at = 0;
        let mut place = |buffer: RawBuffer| {
            if buffer.space() == Space::Host || buffer.bytes() == 0 {
                return if buffer.bytes() == 0 { RawBuffer::EMPTY } else { buffer };
            }
            let start = std::ptr::with_exposed_provenance_mut::<u8>(memory.address as usize + at);
            at += buffer.bytes().next_multiple_of(ALIGN_BYTES);
            RawBuffer::new(start, buffer.bytes())
        };
        self.gpu.bind()?;
        let mut on_host = Vec::with_capacity(operands.len());
        for operand in operands {
            let is_unread = matches!(operation.kind, OperationKind::Broadcast { root } if root != position);
            let (send, recv) = (operand.send, operand.recv);
            let copy = match (place(recv), send == recv) {
                (recv, true) => Operand { send: recv, recv, ..*operand },
                (recv, false) if is_unread => Operand { send: RawBuffer::EMPTY, recv, ..*operand },
                (recv, false) => Operand { send: place(send), recv, ..*operand },
            };
            let (from, to) = (operand.sent(operation, position, size), copy.sent(operation, position, size));
            if from.space() != Space::Host && from.bytes() > 0 {
                // SAFETY: the caller's contract; the copy is as long, and read after the stream was waited for.
                unsafe { self.gpu.enqueue_read(from.address() as u64, to, self.gpu.compute) }?;
            }
            if recv.space() != Space::Host && recv.bytes() > 0 {
                staging.results.push((recv, copy.recv));
            }
            on_host.push(copy);
        }
        self.gpu.synchronize()?;
        self.pool.settle();
        Ok(on_host)
    }

    /// Enqueues copies of the results to the device.
    fn copy_in(&mut self, staging: Staging) -> Result<(), CudaError> {
        let Some(memory) = staging.memory else { return Ok(()) };
        self.gpu.bind()?;
        let enqueued = staging.results.iter().try_for_each(|(to, from)| {
            // SAFETY: results are valid until the operation is finished, which is now for the machine; the copy stays
            // untouched until the stream was waited for.
            unsafe { self.gpu.enqueue_write(to.address() as u64, *from, self.gpu.compute) }
        });
        self.pool.returning.push(memory);
        enqueued
    }

    /// The first operand in memory that neither the host nor this GPU can access.
    fn elsewhere(&self, operands: &[Operand]) -> Option<CollectiveError> {
        let expected = Space::Device(self.gpu.ordinal);
        let buffers = operands.iter().flat_map(|operand| [operand.send, operand.recv]);
        let found = buffers.filter(|buffer| buffer.bytes() > 0).map(RawBuffer::space);
        let found = found.into_iter().find(|space| *space != expected && *space != Space::Host)?;
        Some(CollectiveError::WrongMemory { expected, found })
    }

    /// Aborts the world unless its members know of the error.
    fn spread<T>(&self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        if let Err(error) = &outcome
            && !error.is_refusal()
            && !matches!(error, CollectiveError::Aborted { .. } | CollectiveError::Mismatch { .. })
        {
            self.host.abort(&format!("position {}: {error}", self.host.position()));
        }
        outcome
    }
}

impl Collective for Staged {
    fn position(&self) -> u32 {
        self.host.position()
    }

    fn size(&self) -> u32 {
        self.host.size()
    }

    /// Waits until the compute stream has copied the operands out.
    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        let checked = check(operation, operands, self.position(), self.size());
        let started = checked.and_then(|()| self.elsewhere(operands).map_or(Ok(()), Err)).and_then(|()| {
            // SAFETY: the caller's contract.
            unsafe { self.start_staged(operation, operands) }
        });
        let (ticket, staging) = self.spread(started)?;
        self.in_flight.push(InFlight { stream: ticket.stream, index: ticket.index, staging });
        Ok(ticket)
    }

    /// Waits for the host communicator, and enqueues copies of the results: they are in place for what the compute stream
    /// runs next.
    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        let Ticket { stream, index } = ticket;
        let found = self.in_flight.iter().position(|work| (work.stream, work.index) == (stream, index));
        let work = self.in_flight.swap_remove(found.ok_or(CollectiveError::UnknownTicket { stream, index })?);
        let finished = self.host.finish(ticket);
        if let Err(error) = finished {
            self.pool.returning.extend(work.staging.memory);
            return Err(error);
        }
        let copied = self.copy_in(work.staging).map_err(|e| failed(&e));
        self.spread(copied)
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        self.host.control()
    }
}

impl Drop for Staged {
    /// Ends operations that were never finished, since the host communicator accesses their copies until then. Waits in a
    /// group that is aborted return at once.
    fn drop(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        self.host.control().abort("a member left the group with operations in flight");
        for InFlight { stream, index, .. } in &self.in_flight {
            let _ = self.host.finish(Ticket { stream: *stream, index: *index });
        }
    }
}

/// Bytes of the host copies of an operand.
fn staging_bytes(operand: &Operand) -> usize {
    let of = |buffer: RawBuffer| match buffer.space() {
        Space::Host => 0,
        Space::Device(_) => buffer.bytes().next_multiple_of(ALIGN_BYTES),
    };
    if operand.send == operand.recv { of(operand.recv) } else { of(operand.send) + of(operand.recv) }
}

pub(crate) fn failed(error: &CudaError) -> CollectiveError {
    CollectiveError::Device { reason: error.to_string() }
}
