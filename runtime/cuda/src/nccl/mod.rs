//! Collectives over NCCL.
//!
//! A start makes the communicator's own stream wait for the compute stream and enqueues the operation there; a finish makes
//! the compute stream wait for it. So results are in place for what the machine runs next, and the host never waits for the
//! GPU.
//!
//! Each operation is announced on the host communicator of the same group, as an operation without operands: mismatches,
//! members that are behind, and aborts are found there. A finish waits until all members have *started* the operation, as
//! on the CPU.
//!
//! Invariants:
//! - `NCCL-1`: operations of one communicator run in the order of their starts, whatever their stream in the sense of
//!   [`Stream`]. So the starts of all ranks, over all groups, must have a common order, which `WORLD-4` of `phalanx-strategies`
//!   proves for every mesh. Different communicators start in the order of their launches only where
//!   `NCCL_LAUNCH_ORDER_IMPLICIT` is 1, which every rank sets. NCCL before 2.26 does not know it: there each operation waits
//!   for the end of the one before, in whatever communicator.
//! - `NCCL-2`: once a communicator is aborted, its handle belongs to one thread, which frees it.
//! - `NCCL-3`: the stream gets no event while NCCL has not launched everything before it.
//!
//! Sums run in NCCL's order, which depends on the topology; movements are exact.
//!
//! - `connect`: members agree on NCCL and initialise it. - `calls`: an operation as calls of NCCL. - `member`: the handle,
//!   its control end and its end.

mod calls;
mod connect;
mod member;

pub use connect::Choice;
pub(crate) use connect::connect;

use crate::error::CudaError;
use crate::gpu::{DeviceMemory, Event, Gpu, Stream as GpuStream};
use crate::library::Nccl;
use crate::staged::failed;
use calls::{Call, Plan};
use member::{Control, Member};
use phalanx_device::descriptor::digest;
use phalanx_device::operation_check::check;
use phalanx_device::{
    Collective, CollectiveControl, CollectiveError, Operand, Operation, RawBuffer, Space, Stream, Ticket,
};
use std::sync::Arc;

/// One group, seen from one member, over NCCL.
pub(crate) struct NcclCommunicator {
    gpu: Arc<Gpu>,
    host: Box<dyn Collective>,
    member: Arc<Member>,
    stream: GpuStream,
    /// Whether its operations wait for those of other communicators, because NCCL does not keep their order.
    is_ordered_here: bool,
    in_flight: Vec<InFlight>,
    /// Events for reuse.
    events: Vec<Event>,
    /// The end of the last operation.
    last: Option<Event>,
    /// Kept between calls, so that the step does not allocate.
    plan: Plan,
    /// Copies of inputs that an operation overwrites. Freeing one would wait for the GPU, so smaller ones stay.
    scratch: Vec<DeviceMemory>,
}

impl std::fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclCommunicator")
            .field("gpu", &self.gpu.name)
            .field("position", &self.host.position())
            .finish()
    }
}

/// An operation on the GPU that was started and not finished.
#[derive(Debug)]
struct InFlight {
    stream: Stream,
    index: u64,
    done: Event,
}

impl NcclCommunicator {
    fn new(gpu: Arc<Gpu>, host: Box<dyn Collective>, member: Arc<Member>) -> Result<NcclCommunicator, CudaError> {
        let stream = gpu.take_urgent_stream()?;
        let is_ordered_here = member.version() < calls::VERSION_WITH_LAUNCH_ORDER;
        Ok(NcclCommunicator {
            gpu,
            host,
            member,
            stream,
            is_ordered_here,
            in_flight: Vec::new(),
            events: Vec::new(),
            last: None,
            plan: Plan::default(),
            scratch: Vec::new(),
        })
    }

    /// The memory of all operands; host memory for an operation without any.
    ///
    /// # Errors
    /// [`CollectiveError::WrongMemory`].
    fn space_of(&self, operands: &[Operand]) -> Result<Space, CollectiveError> {
        let mut spaces = operands.iter().flat_map(|o| [o.send, o.recv]).filter(|b| b.bytes() > 0).map(RawBuffer::space);
        let Some(first) = spaces.next() else {
            // Tensors without elements: any member with elements decides, and all members have equally many.
            let is_on_device = operands.iter().any(|o| o.send.space() != Space::Host || o.recv.space() != Space::Host);
            let own = Space::Device(self.gpu.ordinal);
            return Ok(if is_on_device { own } else { Space::Host });
        };
        let expected = if first == Space::Host { Space::Host } else { Space::Device(self.gpu.ordinal) };
        match std::iter::once(first).chain(spaces).find(|space| *space != expected) {
            Some(found) => Err(CollectiveError::WrongMemory { expected, found }),
            None => Ok(expected),
        }
    }

    /// Announces an operation on the GPU, and enqueues it.
    ///
    /// # Safety
    /// As [`Collective::start`].
    unsafe fn start_on_device(
        &mut self,
        operation: &Operation,
        operands: &[Operand],
    ) -> Result<Ticket, CollectiveError> {
        self.member.check()?;
        self.gpu.bind().map_err(|e| failed(&e))?;
        let (position, size) = (self.position(), self.size());
        self.plan.of(operation, operands, position, size);
        let scratch = self.scratch(self.plan.scratch_bytes()).map_err(|e| failed(&e))?;
        let announced = Operation { unit: announced_unit(operation, operands), ..*operation };
        // SAFETY: an operation without operands.
        let ticket = unsafe { self.host.start(&announced, &[]) }?;
        // SAFETY: the caller's contract; the scratch memory is used by this stream only.
        let done = unsafe { self.enqueue(scratch) }?;
        self.in_flight.push(InFlight { stream: ticket.stream, index: ticket.index, done });
        Ok(ticket)
    }

    /// Enqueues the planned calls between the compute stream's earlier work and an event.
    ///
    /// # Safety
    /// As [`Collective::start`]; nothing else uses `scratch`.
    unsafe fn enqueue(&mut self, scratch: u64) -> Result<Event, CollectiveError> {
        let (gpu, stream) = (self.gpu.clone(), self.stream);
        let event = self.event().map_err(|e| failed(&e))?;
        let n_started = self.member.give();
        let before = || {
            event.record(gpu.compute)?;
            event.hold(stream)?;
            if self.is_ordered_here {
                gpu.begin_ordered(stream)?;
            }
            // SAFETY: the words live as long as the member, which is freed after the stream's last operation.
            unsafe { gpu.write_word(self.member.begun_word(), n_started, stream) }?;
            // SAFETY: the caller's contract; the copies come before the calls in the stream.
            self.plan.copies(scratch).try_for_each(|(from, to, bytes)| unsafe { gpu.copy(from, to, bytes, stream) })
        };
        before().map_err(|e| failed(&e))?;
        // SAFETY: the caller's contract.
        self.member.launch(|nccl, comm| {
            self.plan.calls(scratch).try_for_each(|call| unsafe { run(nccl, comm, &call, stream) })
        })?;
        let after = || {
            // SAFETY: as above.
            unsafe { gpu.write_word(self.member.done_word(), n_started, stream) }?;
            if self.is_ordered_here {
                gpu.end_ordered(stream)?;
            }
            event.record(stream)
        };
        after().map_err(|e| failed(&e))?;
        Ok(event)
    }

    /// An event for reuse, or a new one.
    fn event(&mut self) -> Result<Event, CudaError> {
        self.events.pop().map_or_else(|| Event::for_order(&self.gpu), Ok)
    }

    /// Device memory of at least `bytes` bytes for this communicator's stream; 0 for none.
    fn scratch(&mut self, bytes: usize) -> Result<u64, CudaError> {
        if bytes == 0 {
            return Ok(0);
        }
        if self.scratch.last().is_none_or(|memory| memory.bytes < bytes) {
            self.scratch.push(self.gpu.allocate(bytes.next_power_of_two())?);
        }
        Ok(self.scratch.last().expect("there is one").address)
    }

    /// Ends the group here after a failure, and the world unless its members know of the failure.
    fn spread<T>(&self, outcome: Result<T, CollectiveError>) -> Result<T, CollectiveError> {
        if let Err(error) = &outcome
            && !error.is_refusal()
        {
            let reason = format!("position {}: {error}", self.host.position());
            match error {
                CollectiveError::Aborted { reason, .. } => self.member.abort(reason),
                CollectiveError::Mismatch { .. } => self.member.abort(&reason),
                _ => self.abort(&reason),
            }
        }
        outcome
    }
}

impl Collective for NcclCommunicator {
    fn position(&self) -> u32 {
        self.host.position()
    }

    fn size(&self) -> u32 {
        self.host.size()
    }

    /// Operations without operands, and those in host memory, are the host communicator's.
    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        let space = check(operation, operands, self.position(), self.size()).and_then(|()| self.space_of(operands));
        let started = space.and_then(|space| match space {
            // SAFETY: the caller's contract.
            Space::Host => unsafe { self.host.start(operation, operands) },
            // SAFETY: the caller's contract.
            Space::Device(_) => unsafe { self.start_on_device(operation, operands) },
        });
        self.spread(started)
    }

    /// Waits until all members have started the operation, and makes the compute stream wait for it: results are in place
    /// for what that stream runs next.
    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        let is_it = |work: &InFlight| (work.stream, work.index) == (ticket.stream, ticket.index);
        let work = self.in_flight.iter().position(is_it).map(|i| self.in_flight.swap_remove(i));
        let finished = self.host.finish(ticket).and_then(|()| self.member.check());
        let finished = finished.and_then(|()| match &work {
            Some(work) => self.gpu.bind().and_then(|()| work.done.hold(self.gpu.compute)).map_err(|e| failed(&e)),
            None => Ok(()),
        });
        if let Some(work) = work {
            // The last operation to be finished may not be the last to be started; its event only delays the end.
            self.events.extend(self.last.replace(work.done));
        }
        self.spread(finished)
    }

    fn abort(&self, reason: &str) {
        self.host.abort(reason);
        self.member.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        let (host, position) = (self.host.control(), self.host.position());
        Arc::new(Control { host, member: self.member.clone(), position })
    }
}

impl Drop for NcclCommunicator {
    /// Ends operations that were never finished: their operands may be freed now. Never waits.
    fn drop(&mut self) {
        if !self.in_flight.is_empty() {
            let reason = "a member left the group with operations in flight";
            self.host.control().abort(reason);
            self.member.abort(reason);
        }
        self.member.leave(self.stream, self.last.take(), std::mem::take(&mut self.scratch));
    }
}

/// Makes the announcements of members differ if their operands do: announcements have no operands of their own.
fn announced_unit(operation: &Operation, operands: &[Operand]) -> usize {
    let of_operands = operands.iter().flat_map(|o| [u64::from(o.dtype.code()), o.n_elements as u64]);
    let words = std::iter::once(operation.unit as u64).chain(of_operands);
    (digest(words) >> 1 | 1) as usize
}

/// # Safety
/// The call's memory is this GPU's, and the communicator is alive.
unsafe fn run(
    nccl: &Nccl,
    comm: crate::library::nccl::Comm,
    call: &Call,
    stream: GpuStream,
) -> Result<(), (&'static str, u32)> {
    let stream = stream.0;
    // SAFETY: the caller's contract.
    let (name, code) = unsafe {
        match *call {
            Call::AllReduce { send, recv, n, dtype } => {
                ("ncclAllReduce", (nccl.ncclAllReduce)(send, recv, n, dtype, calls::SUM, comm, stream))
            }
            Call::ReduceScatter { send, recv, n, dtype } => {
                ("ncclReduceScatter", (nccl.ncclReduceScatter)(send, recv, n, dtype, calls::SUM, comm, stream))
            }
            Call::Reduce { send, recv, n, dtype, root } => {
                ("ncclReduce", (nccl.ncclReduce)(send, recv, n, dtype, calls::SUM, root, comm, stream))
            }
            Call::AllGather { send, recv, n, dtype } => {
                ("ncclAllGather", (nccl.ncclAllGather)(send, recv, n, dtype, comm, stream))
            }
            Call::Broadcast { send, recv, n, dtype, root } => {
                ("ncclBroadcast", (nccl.ncclBroadcast)(send, recv, n, dtype, root, comm, stream))
            }
            Call::Send { from, n, dtype, peer } => ("ncclSend", (nccl.ncclSend)(from, n, dtype, peer, comm, stream)),
            Call::Recv { to, n, dtype, peer } => ("ncclRecv", (nccl.ncclRecv)(to, n, dtype, peer, comm, stream)),
        }
    };
    if code == 0 || code == crate::library::nccl::IN_PROGRESS { Ok(()) } else { Err((name, code)) }
}
