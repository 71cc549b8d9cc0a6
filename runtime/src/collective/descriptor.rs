//! What a rank says it is about to do; ranks compare these before any of them touches data.

use std::fmt;

/// Kind of an operation, with the root where there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Sum, result everywhere.
    AllReduce,
    /// Sum of tensors that lie in the segment, result everywhere, in place.
    AllReduceShared,
    /// Sum, each rank keeps its part.
    ReduceScatter,
    /// Concatenation, everywhere.
    AllGather,
    /// Copy from `root` to all.
    Broadcast {
        /// The rank that has the data.
        root: u32,
    },
    /// Nothing but waiting for each other.
    Barrier,
    /// A code that this build does not know; only ever read from a peer.
    Unknown {
        /// The code.
        code: u64,
    },
}

/// Type of the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// 32-bit floats.
    F32,
    /// A code that this build does not know; only ever read from a peer.
    Unknown {
        /// The code.
        code: u64,
    },
}

/// One operation as one rank issued it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// What it does.
    pub kind: OpKind,
    /// Elements: of the buffer of an all-reduce or broadcast, of one rank's part otherwise.
    pub n_elements: u64,
    /// Their type.
    pub dtype: ElementType,
    /// Position in the group's order of operations, from 1.
    pub sequence: u64,
}

impl Descriptor {
    /// The words by which the descriptor travels: kind, elements, type, sequence number, and a hash of the four.
    pub(super) fn encode(&self) -> [u64; 5] {
        let kind = match self.kind {
            OpKind::AllReduce => 1,
            OpKind::AllReduceShared => 2,
            OpKind::ReduceScatter => 3,
            OpKind::AllGather => 4,
            OpKind::Broadcast { root } => 5 | (u64::from(root) << 32),
            OpKind::Barrier => 6,
            OpKind::Unknown { code } => code,
        };
        let dtype = match self.dtype {
            ElementType::F32 => 1,
            ElementType::Unknown { code } => code,
        };
        let fields = [kind, self.n_elements, dtype, self.sequence];
        [kind, self.n_elements, dtype, self.sequence, hash(fields)]
    }

    /// Reads what a peer wrote; codes that this build does not know are kept as such.
    pub(super) fn decode(words: [u64; 5]) -> Descriptor {
        let [kind, n_elements, dtype, sequence, _] = words;
        let kind = match (kind as u32, (kind >> 32) as u32) {
            (1, 0) => OpKind::AllReduce,
            (2, 0) => OpKind::AllReduceShared,
            (3, 0) => OpKind::ReduceScatter,
            (4, 0) => OpKind::AllGather,
            (5, root) => OpKind::Broadcast { root },
            (6, 0) => OpKind::Barrier,
            _ => OpKind::Unknown { code: kind },
        };
        let dtype = if dtype == 1 { ElementType::F32 } else { ElementType::Unknown { code: dtype } };
        Descriptor { kind, n_elements, dtype, sequence }
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {:?} of {} {:?}", self.sequence, self.kind, self.n_elements, self.dtype)
    }
}

/// FNV-1a over 64-bit words. Source: Fowler, Noll and Vo, 1991; here per word, which is enough to tell operations apart
/// because equal hashes only skip the comparison field by field.
fn hash(words: [u64; 4]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |h, w| (h ^ w).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_survives_its_words() {
        for kind in [OpKind::AllReduce, OpKind::AllGather, OpKind::Broadcast { root: 7 }, OpKind::Unknown { code: 99 }]
        {
            let d = Descriptor { kind, n_elements: 12, dtype: ElementType::F32, sequence: 5 };

            assert_eq!(Descriptor::decode(d.encode()), d);
        }
    }

    #[test]
    fn every_field_changes_the_hash() {
        let d = Descriptor { kind: OpKind::AllReduce, n_elements: 12, dtype: ElementType::F32, sequence: 5 };
        let others = [
            Descriptor { kind: OpKind::AllGather, ..d },
            Descriptor { n_elements: 13, ..d },
            Descriptor { dtype: ElementType::Unknown { code: 2 }, ..d },
            Descriptor { sequence: 6, ..d },
        ];

        for other in others {
            assert_ne!(other.encode()[4], d.encode()[4], "{other}");
        }
    }
}
