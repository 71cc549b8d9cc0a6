//! One sum over machines with several members each, in three operations.
//!
//! 1. The members of a machine reduce-scatter in shared memory: each gets the machine's sum of its part.
//! 2. Members at the same local position on all machines all-reduce that part over TCP, all positions at once, so that
//!    every member's connections carry a share.
//! 3. The members of a machine gather the parts in shared memory.
//!
//! Order of a sum: on each machine by position, then over machines in the order of their first member. Half-width
//! floats are widened first and rounded once at the end, so f32 is sent.
//!
//! Source: Goyal et al. 2017, Accurate, Large Minibatch SGD (arXiv:1706.02677), §4 (intra-node, inter-node, intra-node).
#![allow(unsafe_code)] // Operands are raw memory that the operation borrows.

use half::{bf16, f16};

use crate::shm::collective::ShmCollective;
use crate::summand::Summand;
use crate::tcp::collective::TcpCollective;
use phalanx_device::operation::IN_FLIGHT_MAX;
use phalanx_device::parts::part;
use phalanx_device::{
    Collective, CollectiveControl, CollectiveError, ElementType, Operand, Operation, OperationKind, RawBuffer, Ticket,
};

/// Most sums of one communicator in flight.
pub(super) const SUMS_MAX: usize = IN_FLIGHT_MAX;
/// Elements of a block of a part: whole cache lines of every type.
const UNIT: usize = 32;

/// The communicators of one group whose machines have equally many members.
#[derive(Debug)]
pub(super) struct Levels {
    /// Members of this machine.
    pub inner: ShmCollective,
    /// Members at this local position on all machines.
    pub outer: TcpCollective,
}

impl Levels {
    /// Aborts only the groups of the steps.
    pub(super) fn abort(&self, reason: &str) {
        self.inner.control_end().abort(reason);
        self.outer.control_end().abort(reason);
    }
}

/// One sum.
#[derive(Debug)]
pub(super) struct StagedSum {
    /// Its number among the operations of the group.
    pub index: u64,
    operands: Vec<Operand>,
    sequence: u32,
    /// By operand: the f32 copy, if its elements are narrow.
    wide: Vec<Vec<f32>>,
    step: Step,
}

#[derive(Debug)]
enum Step {
    Waiting,
    Scattering(Ticket),
    Crossing(Ticket),
    Gathering(Ticket),
}

impl StagedSum {
    /// A sum that has not started.
    pub(super) fn new(index: u64, operation: &Operation, operands: &[Operand]) -> StagedSum {
        let wide = operands.iter().map(|operand| match operand.dtype {
            ElementType::Bf16 => widened::<bf16>(operand),
            ElementType::F16 => widened::<f16>(operand),
            _ => Vec::new(),
        });
        let wide = wide.collect();
        StagedSum { index, operands: operands.to_vec(), sequence: operation.sequence, wide, step: Step::Waiting }
    }

    /// Advances as far as possible without waiting; returns whether the sum is in place.
    ///
    /// # Errors
    /// As the operations of both levels.
    pub(super) fn advance(&mut self, levels: &mut Levels) -> Result<bool, CollectiveError> {
        loop {
            let (position, size) = (levels.inner.position(), levels.inner.size());
            let next = match &self.step {
                Step::Waiting => {
                    let operands = self.scattered(position, size);
                    Step::Scattering(self.start(&mut levels.inner, OperationKind::ReduceScatter, &operands)?)
                }
                Step::Scattering(ticket) => {
                    if !levels.inner.try_finish(ticket)? {
                        return Ok(false);
                    }
                    let operands = self.crossing(position, size);
                    Step::Crossing(self.start(&mut levels.outer, OperationKind::AllReduce, &operands)?)
                }
                Step::Crossing(ticket) => {
                    if !levels.outer.try_finish(ticket)? {
                        return Ok(false);
                    }
                    let operands: Vec<Operand> = (0..self.operands.len()).map(|i| self.result(i)).collect();
                    Step::Gathering(self.start(&mut levels.inner, OperationKind::AllGather, &operands)?)
                }
                Step::Gathering(ticket) => {
                    if !levels.inner.try_finish(ticket)? {
                        return Ok(false);
                    }
                    self.round();
                    return Ok(true);
                }
            };
            self.step = next;
        }
    }

    fn start(
        &self,
        group: &mut dyn Collective,
        kind: OperationKind,
        operands: &[Operand],
    ) -> Result<Ticket, CollectiveError> {
        let operation = Operation { kind, sequence: self.sequence, unit: UNIT };
        // SAFETY: the sum borrows or owns its operands; both outlive its steps.
        unsafe { group.start(&operation, operands) }
    }

    /// The buffer for the sum of operand `i`: the whole tensor, in the type of the running sum.
    fn result(&self, i: usize) -> Operand {
        let Operand { recv, dtype, n_elements, .. } = self.operands[i];
        match dtype {
            ElementType::Bf16 | ElementType::F16 => {
                let wide = RawBuffer::new(self.wide[i].as_ptr().cast::<u8>().cast_mut(), 4 * n_elements);
                Operand::in_place(wide, ElementType::F32, n_elements)
            }
            _ => Operand::in_place(recv, dtype, n_elements),
        }
    }

    /// The first step: this machine's sum of the own part, written to the result buffer.
    fn scattered(&self, position: u32, size: u32) -> Vec<Operand> {
        let operands = self.operands.iter().enumerate().map(|(i, operand)| {
            let result = self.result(i);
            let send = if result.dtype == operand.dtype { operand.send } else { result.send };
            Operand { send, recv: own_part(&result, position, size), ..result }
        });
        operands.collect()
    }

    /// The second step: the own part, in place.
    fn crossing(&self, position: u32, size: u32) -> Vec<Operand> {
        let operands = (0..self.operands.len()).map(|i| {
            let result = self.result(i);
            let own = own_part(&result, position, size);
            Operand::in_place(own, result.dtype, own.bytes() / result.dtype.bytes())
        });
        operands.collect()
    }

    /// Rounds sums of narrow elements.
    fn round(&self) {
        for (operand, wide) in self.operands.iter().zip(&self.wide) {
            match operand.dtype {
                ElementType::Bf16 => narrow::<bf16>(wide, operand),
                ElementType::F16 => narrow::<f16>(wide, operand),
                _ => {}
            }
        }
    }
}

fn own_part(result: &Operand, position: u32, size: u32) -> RawBuffer {
    let (own, width) = (part(result.n_elements, UNIT, size, position), result.dtype.bytes());
    result.recv.slice(own.start * width..own.end * width)
}

fn widened<T: Summand<Wide = f32>>(operand: &Operand) -> Vec<f32> {
    // SAFETY: the sum borrows the operand, checked to be aligned and of this length; any bits are a `T`.
    let values = unsafe { std::slice::from_raw_parts(operand.send.start().cast::<T>(), operand.n_elements) };
    let mut wide: Vec<f32> = values.iter().map(|x| x.widen()).collect();
    // Later accesses use the address.
    wide.as_mut_ptr().expose_provenance();
    wide
}

fn narrow<T: Summand<Wide = f32>>(wide: &[f32], operand: &Operand) {
    // SAFETY: the sum borrows the operand exclusively, checked to be aligned and of this length.
    let values = unsafe { std::slice::from_raw_parts_mut(operand.recv.start().cast::<T>(), operand.n_elements) };
    for (to, x) in values.iter_mut().zip(wide) {
        *to = T::narrow(*x);
    }
}
