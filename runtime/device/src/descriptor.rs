//! A member's announcement of an operation; members compare announcements before any of them accesses data.

use std::fmt;

use super::operation::{Operand, Operation, OperationKind};

/// Words of an encoded descriptor.
pub const DESCRIPTOR_WORDS: usize = 5;

/// One operation as one member issued it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// Code of the kind; every build can carry unknown codes.
    kind: u32,
    argument: u32,
    sequence: u32,
    n_operands: u32,
    unit: u64,
    /// Sum of [`Operand::n_elements`] over all operands.
    n_elements: u64,
    /// Hash of the fields above and of the type and length of every operand.
    digest: u64,
}

impl Descriptor {
    /// Describes an operation as the member at `position` issues it. The descriptors of a send and its receive differ
    /// only in the side, which [`Descriptor::agrees`] ignores.
    pub fn of(operation: &Operation, operands: &[Operand]) -> Descriptor {
        let (kind, argument) = match operation.kind {
            OperationKind::AllReduce => (1, 0),
            OperationKind::ReduceScatter => (2, 0),
            OperationKind::AllGather => (3, 0),
            OperationKind::AllToAll => (4, 0),
            OperationKind::Broadcast { root } => (5, root),
            OperationKind::Send { to } => (6, to),
            OperationKind::Recv { from } => (7, from),
            OperationKind::Shift { by } => (8, by as u32),
            OperationKind::Barrier => (9, 0),
        };
        let n_elements = operands.iter().map(|operand| operand.n_elements as u64).fold(0, u64::wrapping_add);
        let (sequence, unit) = (operation.sequence, operation.unit as u64);
        let described = match operation.kind {
            OperationKind::Send { .. } | OperationKind::Recv { .. } => [6, 0, u64::from(sequence), unit],
            _ => [kind, u64::from(argument), u64::from(sequence), unit],
        };
        let of_operands = operands.iter().flat_map(|o| [u64::from(o.dtype.code()), o.n_elements as u64]);
        let digest = digest(described.into_iter().chain(of_operands));
        let n_operands = operands.len() as u32;
        Descriptor { kind: kind as u32, argument, sequence, n_operands, unit, n_elements, digest }
    }

    /// Whether both members issued the same operation.
    pub fn agrees(&self, other: &Descriptor) -> bool {
        let is_transfer = |kind| kind == 6 || kind == 7;
        let same_kind = if is_transfer(self.kind) {
            is_transfer(other.kind)
        } else {
            (self.kind, self.argument) == (other.kind, other.argument)
        };
        let rest = |d: &Descriptor| (d.sequence, d.n_operands, d.unit, d.n_elements, d.digest);
        same_kind && rest(self) == rest(other)
    }

    /// Operands of the operation.
    pub fn n_operands(&self) -> usize {
        self.n_operands as usize
    }

    /// Encodes the descriptor for a peer.
    pub fn encode(&self) -> [u64; DESCRIPTOR_WORDS] {
        let pair = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
        [pair(self.kind, self.argument), pair(self.sequence, self.n_operands), self.unit, self.n_elements, self.digest]
    }

    /// Decodes what a peer wrote; the values are not validated.
    pub fn decode(words: [u64; DESCRIPTOR_WORDS]) -> Descriptor {
        let [what, which, unit, n_elements, digest] = words;
        let halves = |word: u64| (word as u32, (word >> 32) as u32);
        let ((kind, argument), (sequence, n_operands)) = (halves(what), halves(which));
        Descriptor { kind, argument, sequence, n_operands, unit, n_elements, digest }
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} ", self.sequence)?;
        match self.kind {
            1 => write!(f, "all_reduce"),
            2 => write!(f, "reduce_scatter"),
            3 => write!(f, "all_gather"),
            4 => write!(f, "all_to_all"),
            5 => write!(f, "broadcast from position {}", self.argument),
            6 => write!(f, "send to position {}", self.argument),
            7 => write!(f, "recv from position {}", self.argument),
            8 => write!(f, "shift by {}", self.argument as i32),
            9 => write!(f, "barrier"),
            code => write!(f, "operation of unknown kind {code}"),
        }?;
        let plural = if self.n_operands == 1 { "" } else { "s" };
        write!(
            f,
            " of {} elements in {} tensor{plural}, unit {}, digest {:08x}",
            self.n_elements, self.n_operands, self.unit, self.digest as u32
        )
    }
}

/// FNV-1a over 64-bit words, each followed by a rotation. Source: Fowler, Noll and Vo, 1991; per word instead of per
/// byte, which is enough to distinguish operations of one program.
pub fn digest(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |h, w| (h ^ w).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::ElementType;
    use crate::operation::RawBuffer;

    fn operand(dtype: ElementType, n_elements: usize) -> Operand {
        Operand { send: RawBuffer::EMPTY, recv: RawBuffer::EMPTY, dtype, n_elements }
    }

    fn operation(kind: OperationKind) -> Operation {
        Operation { kind, sequence: 3, unit: 1 }
    }

    #[test]
    fn descriptor_round_trips_through_its_words() {
        for kind in [OperationKind::AllReduce, OperationKind::Broadcast { root: 7 }, OperationKind::Shift { by: -2 }] {
            let descriptor = Descriptor::of(&operation(kind), &[operand(ElementType::Bf16, 12)]);

            assert_eq!(Descriptor::decode(descriptor.encode()), descriptor);
        }
    }

    #[test]
    fn descriptors_disagree_when_any_field_differs() {
        let operands = [operand(ElementType::F32, 12), operand(ElementType::F32, 20)];
        let base = operation(OperationKind::AllReduce);
        let descriptor = Descriptor::of(&base, &operands);

        let others = [
            Descriptor::of(&operation(OperationKind::AllGather), &operands),
            Descriptor::of(&operation(OperationKind::Shift { by: 1 }), &operands),
            Descriptor::of(&Operation { sequence: 4, ..base }, &operands),
            Descriptor::of(&Operation { unit: 2, ..base }, &operands),
            Descriptor::of(&base, &operands[..1]),
            Descriptor::of(&base, &[operands[1], operands[0]]),
            Descriptor::of(&base, &[operands[0], operand(ElementType::I32, 20)]),
        ];

        assert!(descriptor.agrees(&Descriptor::of(&base, &operands)));
        for other in others {
            assert!(!descriptor.agrees(&other), "{other}");
        }
    }

    #[test]
    fn send_agrees_only_with_a_receive_of_the_same_tensors() {
        let send = Descriptor::of(&operation(OperationKind::Send { to: 1 }), &[operand(ElementType::F32, 12)]);
        let recv = operation(OperationKind::Recv { from: 0 });

        assert!(send.agrees(&Descriptor::of(&recv, &[operand(ElementType::F32, 12)])));
        assert!(!send.agrees(&Descriptor::of(&recv, &[operand(ElementType::F32, 13)])));
        assert!(!send.agrees(&Descriptor::of(&recv, &[operand(ElementType::F16, 12)])));
    }
}
