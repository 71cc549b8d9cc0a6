//! The communicator: one group seen from one of its members.
#![allow(unsafe_code)] // Starting an operation borrows memory beyond the call.

use super::descriptor::Descriptor;
use super::element::Element;
use super::error::CollectiveError;
use super::operation::{Operand, Operation, OperationKind, RawBuffer, Stream};
use super::parts::part;
use std::sync::Arc;

/// An operation that was started and has to be finished.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "an operation that is never finished may leave its peers waiting"]
pub struct Ticket {
    /// Its stream.
    pub stream: Stream,
    /// Its number in the stream, from 0.
    pub index: u64,
}

/// How far a rank is in the operations of a group: "entered #n, finished #m".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Operations started.
    pub entered: u64,
    /// Operations finished.
    pub finished: u64,
}

/// The operation that a rank is waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Index of the group in the world.
    pub group: usize,
    /// The stream.
    pub stream: Stream,
    /// Its number in the stream, from 0.
    pub index: u64,
    /// The operation.
    pub descriptor: Descriptor,
}

impl std::fmt::Display for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "group {}: {}", self.group, self.descriptor)
    }
}

/// Operations of one stream that this member has started and others have not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    /// The stream, from this member's side.
    pub stream: Stream,
    /// The operation that this member started last in it, from 0.
    pub index: u64,
    /// Positions of the members that have not started it.
    pub positions: Vec<u32>,
}

impl Behind {
    /// Compares the number of operations that this member has started with those of the `others`, by position.
    pub fn of(stream: Stream, own: u64, others: Vec<(u32, u64)>) -> Option<Behind> {
        let behind = others.into_iter().filter(|(_, started)| *started < own);
        let positions: Vec<u32> = behind.map(|(position, _)| position).collect();
        (!positions.is_empty()).then(|| Behind { stream, index: own - 1, positions })
    }
}

/// The control end of a communicator, for a thread other than the one that starts and finishes its operations. No method
/// waits for that thread or for a member.
pub trait CollectiveControl: Send + Sync {
    /// For each stream, the members that have not started every operation that this member has started.
    fn behind(&self) -> Vec<Behind>;

    /// Aborts this group at all its members: every wait in it returns at once, every later call fails with `reason`,
    /// and other groups of the world continue. The first reason stands.
    fn abort(&self, reason: &str);

    /// Errors that the device's library has noticed by itself, while the device runs operations that the host has already
    /// finished.
    ///
    /// # Errors
    /// [`CollectiveError::Library`], [`CollectiveError::Device`].
    fn check(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    /// Operations that the device has begun and completed, if it runs them after the host has finished them.
    fn device_progress(&self) -> Option<Progress> {
        None
    }
}

/// One group of ranks seen from one member.
///
/// Every member issues the operations of a [`Stream`] in the same order. Sums run over positions 0, 1, 2, … for every
/// element, so the result has the same bits at every member and in every run (the hierarchical communicator states its
/// own order).
///
/// While a member waits in `finish`, it also does its share of all other operations that it has started, in any group;
/// so members can finish operations of different streams in different orders without a deadlock.
///
/// # Errors
/// Any error except a refusal ([`CollectiveError::is_refusal`]) and an abort of the group alone aborts the world: every
/// later call at every rank fails with [`CollectiveError::Aborted`], and the contents of all result buffers are
/// unspecified. Members that disagree about an operation get [`CollectiveError::Mismatch`], or an abort with that
/// reason.
pub trait Collective: Send {
    /// Position of this member in the group.
    fn position(&self) -> u32;

    /// Members of the group.
    fn size(&self) -> u32;

    /// Starts an operation. Never waits for another member.
    ///
    /// # Errors
    /// As every operation; if this fails, nothing was started.
    ///
    /// # Safety
    /// The buffers of `operands` are valid for reads (`send`) and writes (`recv`) until the ticket is finished, and
    /// until then no other code writes `send` or touches `recv`, except where an operation allows them to overlap. If
    /// finishing fails, peers may read and write memory of an arena until the abort reaches them.
    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError>;

    /// Waits until this member's part of the operation is done: results are in place and operands may be reused by
    /// whatever the machine runs next (operands in host memory: by any thread). Tickets of one stream may be finished
    /// in any order.
    ///
    /// # Errors
    /// As every operation; [`CollectiveError::UnknownTicket`] for a ticket of another communicator.
    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError>;

    /// Aborts the world: every waiter returns at once, every later call fails with `reason`. The first reason stands.
    fn abort(&self, reason: &str);

    /// The control end of this communicator.
    fn control(&self) -> Arc<dyn CollectiveControl>;
}

/// Operations on slices, each started and finished in one call: for host code without work to overlap.
///
/// # Errors
/// As [`Collective`].
pub trait SliceOperations: Collective {
    /// Replaces `values` by the sum over members.
    fn all_reduce<T: Element>(&mut self, values: &mut [T]) -> Result<(), CollectiveError> {
        run_in_chunks(self, OperationKind::AllReduce, values)
    }

    /// Sums `input` over members; this member's part goes to `output`.
    fn reduce_scatter<T: Element>(
        &mut self,
        input: &[T],
        output: &mut [T],
        unit: usize,
    ) -> Result<(), CollectiveError> {
        run(self, OperationKind::ReduceScatter, unit, between(input, output, input.len()))
    }

    /// Puts the members' parts `input` together in `output`.
    fn all_gather<T: Element>(&mut self, input: &[T], output: &mut [T], unit: usize) -> Result<(), CollectiveError> {
        let n_elements = output.len();
        run(self, OperationKind::AllGather, unit, between(input, output, n_elements))
    }

    /// Sends part `i` of `input` to member `i`; `output` gets this member's part from every member, in order of
    /// position.
    fn all_to_all<T: Element>(&mut self, input: &[T], output: &mut [T], unit: usize) -> Result<(), CollectiveError> {
        run(self, OperationKind::AllToAll, unit, between(input, output, input.len()))
    }

    /// Replaces `values` by those of the member at `root`.
    fn broadcast<T: Element>(&mut self, values: &mut [T], root: u32) -> Result<(), CollectiveError> {
        run_in_chunks(self, OperationKind::Broadcast { root }, values)
    }

    /// Copies `values` to the member at `to`, which receives them.
    fn send<T: Element>(&mut self, values: &[T], to: u32) -> Result<(), CollectiveError> {
        run(self, OperationKind::Send { to }, 1, between(values, &mut [], values.len()))
    }

    /// Replaces `values` by those that the member at `from` sends.
    fn recv<T: Element>(&mut self, values: &mut [T], from: u32) -> Result<(), CollectiveError> {
        let n_elements = values.len();
        run(self, OperationKind::Recv { from }, 1, between(&[], values, n_elements))
    }

    /// Sends `input` to position `(i + by) mod n` and receives `output` from `(i - by) mod n`.
    fn shift<T: Element>(&mut self, input: &[T], output: &mut [T], by: i32) -> Result<(), CollectiveError> {
        run(self, OperationKind::Shift { by }, 1, between(input, output, input.len()))
    }

    /// Returns when every member has called it.
    fn barrier(&mut self) -> Result<(), CollectiveError> {
        let operation = Operation { kind: OperationKind::Barrier, sequence: 0, unit: 1 };
        start_and_finish(self, &operation, &[])
    }
}

impl<C: Collective + ?Sized> SliceOperations for C {}

fn between<T: Element>(input: &[T], output: &mut [T], n_elements: usize) -> Operand {
    Operand { send: RawBuffer::of(input), recv: RawBuffer::of_mut(output), dtype: T::TYPE, n_elements }
}

/// Runs an operation whose operands the caller has borrowed for the duration of the call. Members match such operations
/// by order alone, so all have sequence number 0.
fn run<C: Collective + ?Sized>(
    group: &mut C,
    kind: OperationKind,
    unit: usize,
    operand: Operand,
) -> Result<(), CollectiveError> {
    start_and_finish(group, &Operation { kind, sequence: 0, unit }, &[operand])
}

/// Bytes of a slice per operation: chunks of a few ranks fit in the L2 cache together.
const CHUNK_BYTES: usize = 256 << 10;

/// Runs an operation in place, in chunks that need little staging space. Each chunk starts before the previous one is
/// finished.
fn run_in_chunks<C: Collective + ?Sized, T: Element>(
    group: &mut C,
    kind: OperationKind,
    values: &mut [T],
) -> Result<(), CollectiveError> {
    let operation = Operation { kind, sequence: 0, unit: 1 };
    let mut before: Option<Ticket> = None;
    let n_chunks = values.len().div_ceil(CHUNK_BYTES / size_of::<T>()).max(1);
    for i in 0..n_chunks {
        let range = part(values.len(), 1, n_chunks as u32, i as u32);
        let chunk = RawBuffer::of_mut(values).slice(range.start * size_of::<T>()..range.end * size_of::<T>());
        let operand = Operand::in_place(chunk, T::TYPE, range.len());
        // SAFETY: the slice is borrowed until this returns. By then every started operation is finished, or a finish
        // has failed: then the world is aborted, and no communicator touches operands any more.
        let ticket = unsafe { group.start(&operation, &[operand]) };
        if let Some(before) = before.take() {
            group.finish(before)?;
        }
        before = Some(ticket?);
    }
    before.map_or(Ok(()), |last| group.finish(last))
}

fn start_and_finish<C: Collective + ?Sized>(
    group: &mut C,
    operation: &Operation,
    operands: &[Operand],
) -> Result<(), CollectiveError> {
    // SAFETY: callers hold the borrows of all operands until this returns, after the operation is finished. Only an
    // unsafe function makes a slice of an arena; its caller is responsible for the time after a failure.
    let ticket = unsafe { group.start(operation, operands) }?;
    group.finish(ticket)
}
