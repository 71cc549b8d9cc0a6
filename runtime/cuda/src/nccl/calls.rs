//! An operation as calls of NCCL, which run as one group, after copies.

use phalanx_device::parts::part;
use phalanx_device::{ElementType, Operand, Operation, OperationKind};

/// The first version that keeps the order of launches of several communicators, as the library numbers it.
pub(super) const VERSION_WITH_LAUNCH_ORDER: i32 = 22_600;

/// `ncclSum`.
pub(super) const SUM: i32 = 0;

/// Operands in scratch memory begin at multiples of it.
const ALIGN_BYTES: usize = 256;

/// One call; addresses of `Send` may be offsets into scratch memory while they are planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    AllReduce { send: u64, recv: u64, n: usize, dtype: i32 },
    ReduceScatter { send: u64, recv: u64, n: usize, dtype: i32 },
    Reduce { send: u64, recv: u64, n: usize, dtype: i32, root: i32 },
    AllGather { send: u64, recv: u64, n: usize, dtype: i32 },
    Broadcast { send: u64, recv: u64, n: usize, dtype: i32, root: i32 },
    Send { from: u64, n: usize, dtype: i32, peer: i32 },
    Recv { to: u64, n: usize, dtype: i32, peer: i32 },
}

/// A place: an address, or an offset into scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    At(u64),
    Scratch(u64),
}

impl Place {
    fn address(self, scratch: u64) -> u64 {
        match self {
            Place::At(address) => address,
            Place::Scratch(offset) => scratch + offset,
        }
    }
}

/// The copies and calls of one operation.
#[derive(Debug, Default)]
pub(super) struct Plan {
    copies: Vec<(u64, Place, usize)>,
    calls: Vec<Call>,
    /// Sends from scratch memory, by offset.
    sends: Vec<Call>,
    scratch_bytes: usize,
}

/// The number of a type in NCCL.
const fn number(dtype: ElementType) -> i32 {
    match dtype {
        ElementType::I32 => 2,
        ElementType::F16 => 6,
        ElementType::F32 => 7,
        ElementType::F64 => 8,
        ElementType::Bf16 => 9,
    }
}

/// Where a member and its peers are.
#[derive(Clone, Copy)]
struct Group {
    position: u32,
    size: u32,
    unit: usize,
}

impl Plan {
    /// Replaces the plan by that of a checked operation.
    pub(super) fn of(&mut self, operation: &Operation, operands: &[Operand], position: u32, size: u32) {
        self.copies.clear();
        self.calls.clear();
        self.sends.clear();
        self.scratch_bytes = 0;
        let group = Group { position, size, unit: operation.unit };
        for operand in operands.iter().filter(|operand| operand.n_elements > 0) {
            self.operand(operation.kind, operand, group);
        }
    }

    /// Bytes of scratch memory that it needs.
    pub(super) const fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// Copies that come before the calls: from, to, bytes.
    pub(super) fn copies(&self, scratch: u64) -> impl Iterator<Item = (u64, u64, usize)> {
        self.copies.iter().map(move |(from, to, bytes)| (*from, to.address(scratch), *bytes))
    }

    /// The calls.
    pub(super) fn calls(&self, scratch: u64) -> impl Iterator<Item = Call> {
        let of_scratch = move |call: &Call| match *call {
            Call::Send { from, n, dtype, peer } => Call::Send { from: scratch + from, n, dtype, peer },
            other => other,
        };
        self.calls.iter().copied().chain(self.sends.iter().map(of_scratch))
    }

    fn operand(&mut self, kind: OperationKind, o: &Operand, group: Group) {
        let (n, dtype) = (o.n_elements, number(o.dtype));
        let (send, recv) = (o.send.address() as u64, o.recv.address() as u64);
        match kind {
            OperationKind::AllReduce => self.calls.push(Call::AllReduce { send, recv, n, dtype }),
            OperationKind::ReduceScatter => self.reduce_scatter(o, group),
            OperationKind::AllGather => self.all_gather(o, group),
            OperationKind::AllToAll => self.all_to_all(o, group),
            OperationKind::Broadcast { root } => {
                // The root may have no result, the others no input; NCCL does not touch what it does not need.
                let recv = if o.recv.bytes() > 0 { recv } else { send };
                let send = if root == group.position { send } else { recv };
                self.calls.push(Call::Broadcast { send, recv, n, dtype, root: root as i32 });
            }
            OperationKind::Send { to } => self.calls.push(Call::Send { from: send, n, dtype, peer: to as i32 }),
            OperationKind::Recv { from } => self.calls.push(Call::Recv { to: recv, n, dtype, peer: from as i32 }),
            OperationKind::Shift { by } => self.shift(by, o, group),
            OperationKind::Barrier => {}
        }
    }

    /// One call where all parts are equally long, else a sum for each member's part.
    fn reduce_scatter(&mut self, o: &Operand, group: Group) {
        let (width, dtype) = (o.dtype.bytes(), number(o.dtype));
        let (send, recv) = (o.send.address() as u64, o.recv.address() as u64);
        if let Some(n) = equal_parts(o.n_elements, group) {
            self.calls.push(Call::ReduceScatter { send, recv, n, dtype });
            return;
        }
        for root in 0..group.size {
            let theirs = part(o.n_elements, group.unit, group.size, root);
            let from = send + (theirs.start * width) as u64;
            if !theirs.is_empty() {
                // Only the root's result is used.
                let recv = if root == group.position { recv } else { from };
                self.calls.push(Call::Reduce { send: from, recv, n: theirs.len(), dtype, root: root as i32 });
            }
        }
    }

    /// One call where all parts are equally long, else a copy of each member's part to all.
    fn all_gather(&mut self, o: &Operand, group: Group) {
        let (width, dtype) = (o.dtype.bytes(), number(o.dtype));
        let recv = o.recv.address() as u64;
        let own = part(o.n_elements, group.unit, group.size, group.position);
        let send = if o.send == o.recv { recv + (own.start * width) as u64 } else { o.send.address() as u64 };
        if let Some(n) = equal_parts(o.n_elements, group) {
            self.calls.push(Call::AllGather { send, recv, n, dtype });
            return;
        }
        for root in 0..group.size {
            let theirs = part(o.n_elements, group.unit, group.size, root);
            let to = recv + (theirs.start * width) as u64;
            if !theirs.is_empty() {
                let send = if root == group.position { send } else { to };
                self.calls.push(Call::Broadcast { send, recv: to, n: theirs.len(), dtype, root: root as i32 });
            }
        }
    }

    fn all_to_all(&mut self, o: &Operand, group: Group) {
        let (width, dtype) = (o.dtype.bytes(), number(o.dtype));
        let own = part(o.n_elements, group.unit, group.size, group.position).len();
        for peer in 0..group.size {
            let theirs = part(o.n_elements, group.unit, group.size, peer);
            let from = o.send.address() as u64 + (theirs.start * width) as u64;
            let to = o.recv.address() as u64 + (peer as usize * own * width) as u64;
            if peer == group.position {
                self.copy(from, to, own * width);
                continue;
            }
            if !theirs.is_empty() {
                self.calls.push(Call::Send { from, n: theirs.len(), dtype, peer: peer as i32 });
            }
            if own > 0 {
                self.calls.push(Call::Recv { to, n: own, dtype, peer: peer as i32 });
            }
        }
    }

    /// An input that the result replaces is sent from a copy: messages of a group go both ways at once.
    fn shift(&mut self, by: i32, o: &Operand, group: Group) {
        let (n, dtype) = (o.n_elements, number(o.dtype));
        let (send, recv) = (o.send.address() as u64, o.recv.address() as u64);
        let target = OperationKind::shift_target(by, group.position, group.size);
        let source = OperationKind::shift_source(by, group.position, group.size);
        if target == group.position {
            self.copy(send, recv, o.send.bytes());
            return;
        }
        if o.send == o.recv {
            let offset = self.scratch_bytes as u64;
            self.scratch_bytes += o.send.bytes().next_multiple_of(ALIGN_BYTES);
            self.copies.push((send, Place::Scratch(offset), o.send.bytes()));
            self.sends.push(Call::Send { from: offset, n, dtype, peer: target as i32 });
        } else {
            self.calls.push(Call::Send { from: send, n, dtype, peer: target as i32 });
        }
        self.calls.push(Call::Recv { to: recv, n, dtype, peer: source as i32 });
    }

    fn copy(&mut self, from: u64, to: u64, bytes: usize) {
        if from != to && bytes > 0 {
            self.copies.push((from, Place::At(to), bytes));
        }
    }
}

/// Length of the parts, if all are equally long.
fn equal_parts(n: usize, group: Group) -> Option<usize> {
    let each = n / group.size as usize;
    (each * group.size as usize == n && each.is_multiple_of(group.unit)).then_some(each)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_device::RawBuffer;

    fn operand(send: usize, recv: usize, n_elements: usize) -> Operand {
        let buffer = |at, n: usize| RawBuffer::on_device(at, 4 * n, 0);
        Operand { send: buffer(send, n_elements), recv: buffer(recv, n_elements), dtype: ElementType::F32, n_elements }
    }

    fn plan(kind: OperationKind, unit: usize, operand: Operand, position: u32, size: u32) -> Plan {
        let mut plan = Plan::default();
        plan.of(&Operation { kind, sequence: 0, unit }, &[operand], position, size);
        plan
    }

    #[test]
    fn equal_parts_are_one_call_and_unequal_parts_one_for_each_member_with_elements() {
        let even = plan(OperationKind::ReduceScatter, 3, operand(0, 4096, 12), 1, 2);
        let odd = plan(OperationKind::ReduceScatter, 5, operand(0, 4096, 12), 1, 4);

        assert_eq!(even.calls, [Call::ReduceScatter { send: 0, recv: 4096, n: 6, dtype: 7 }]);
        let reduce = |start: u64, recv, n, root| Call::Reduce { send: 4 * start, recv, n, dtype: 7, root };
        assert_eq!(odd.calls, [reduce(0, 4096, 5, 1), reduce(5, 20, 5, 2), reduce(10, 40, 2, 3)]);
    }

    #[test]
    fn equal_parts_agree_with_the_division_of_tensors() {
        for (n, unit, size) in (0..40).flat_map(|n| (1..6).flat_map(move |unit| (1..5u32).map(move |s| (n, unit, s)))) {
            let group = Group { position: 0, size, unit };
            let parts: Vec<usize> = (0..size).map(|i| part(n, unit, size, i).len()).collect();

            if let Some(each) = equal_parts(n, group) {
                assert!(parts.iter().all(|len| *len == each), "{n} in units of {unit} over {size}");
            }
        }
    }

    #[test]
    fn shift_in_place_sends_a_copy() {
        let plan = plan(OperationKind::Shift { by: 1 }, 1, operand(4096, 4096, 10), 0, 3);

        assert_eq!(plan.scratch_bytes(), 256);
        assert_eq!(plan.copies(1 << 20).collect::<Vec<_>>(), [(4096, 1 << 20, 40)]);
        let calls =
            [Call::Recv { to: 4096, n: 10, dtype: 7, peer: 2 }, Call::Send { from: 1 << 20, n: 10, dtype: 7, peer: 1 }];
        assert_eq!(plan.calls(1 << 20).collect::<Vec<_>>(), calls);
    }
}
