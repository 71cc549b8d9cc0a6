//! Split weights in the memory of a machine, where the host sees f32 numbers; see [`Program::split`].
//!
//! To the host, element `i` of a split weight has the bytes `4 i` to `4 i + 4`, as if it were not split. Copies between the two are
//! two copies and a conversion on the host: they are rare, and as fast as its memory.
//!
//! [`Program::split`]: phalanx_strategies::program::Program::split

use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::{Kind, ValueId};
use std::collections::BTreeMap;
use std::ops::Range;

/// The bits that stand for what is no number: rounded, others would become numbers.
const NAN: u32 = 0x7fc0_0000;

/// The split weights of a machine: their ends by their starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SplitWeights(BTreeMap<u64, u64>);

impl SplitWeights {
    /// The split weights of programs; `place` is the address of a value.
    ///
    /// # Panics
    /// If programs store a weight differently.
    pub(crate) fn of(programs: &[&Compiled], place: impl Fn(&Compiled, ValueId) -> u64) -> SplitWeights {
        let mut found: BTreeMap<u64, (bool, u64)> = BTreeMap::new();
        for c in programs {
            let weights = (0..).map(ValueId).zip(&c.program.values).filter(|(_, value)| value.kind == Kind::Parameter);
            for (v, value) in weights {
                let (start, is_split) = (place(c, v), value.is_split);
                let (first, _) = *found.entry(start).or_insert((is_split, start + value.size_bytes() as u64));
                assert_eq!(first, is_split, "programs store `{}` alike", value.name);
            }
        }
        let split = found.into_iter().filter(|(_, (is_split, _))| *is_split);
        SplitWeights(split.map(|(start, (_, end))| (start, end)).collect())
    }

    /// Where `bytes` bytes from an address on are, if they belong to a split weight: the addresses of the bf16 numbers and of the
    /// rests, half as many bytes of each.
    ///
    /// # Panics
    /// If they are not whole elements of one weight.
    pub(crate) fn parts(&self, address: u64, bytes: usize) -> Option<[u64; 2]> {
        let (start, end) = self.0.range(..=address).next_back().filter(|(_, end)| address < **end)?;
        let offset = address - start;
        assert!(offset.is_multiple_of(4) && bytes.is_multiple_of(4), "elements are copied as a whole");
        assert!(address + bytes as u64 <= *end, "a copy is of one weight");
        Some([start + offset / 2, start + (end - start) / 2 + offset / 2])
    }
}

/// The halves of a run of bytes: the bf16 numbers, and the rests.
pub(crate) fn halves(bytes: Range<usize>) -> [Range<usize>; 2] {
    let middle = bytes.start + bytes.len() / 2;
    [bytes.start..middle, middle..bytes.end]
}

/// Replaces bf16 numbers and, behind them, as many rests by the f32 numbers. `spare` is kept for its memory.
pub(crate) fn join(bytes: &mut [u8], spare: &mut Vec<u8>) {
    spare.clear();
    spare.extend_from_slice(bytes);
    let (first, rest) = spare.split_at(bytes.len() / 2);
    let halves = first.as_chunks::<2>().0.iter().zip(rest.as_chunks::<2>().0);
    for (number, (first, rest)) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(halves) {
        let [first, rest] = [first, rest].map(|half| u32::from(u16::from_ne_bytes(*half)));
        *number = ((first << 16) + rest).wrapping_sub((rest & 0x8000) << 1).to_ne_bytes();
    }
}

/// The opposite of [`join`].
pub(crate) fn split(bytes: &mut [u8], spare: &mut Vec<u8>) {
    spare.clear();
    spare.extend_from_slice(bytes);
    let (first, rest) = bytes.split_at_mut(spare.len() / 2);
    let halves = first.as_chunks_mut::<2>().0.iter_mut().zip(rest.as_chunks_mut::<2>().0);
    for (number, (first, rest)) in spare.as_chunks::<4>().0.iter().zip(halves) {
        let bits = u32::from_ne_bytes(*number);
        let bits = if f32::from_bits(bits).is_nan() { NAN } else { bits };
        *first = ((bits.wrapping_add(0x8000) >> 16) as u16).to_ne_bytes();
        *rest = (bits as u16).to_ne_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers around every rounding: the bf16 numbers, the ties and their neighbours, of all exponents and both signs.
    fn numbers() -> Vec<u32> {
        let rests = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..=0xffffu32).flat_map(|high| rests.map(|rest| high << 16 | rest)).collect()
    }

    #[test]
    fn split_numbers_have_all_bits_and_the_nearest_bf16_number() {
        let numbers = numbers();
        let mut bytes: Vec<u8> = bytemuck::cast_slice(&numbers).to_vec();
        let mut spare = Vec::new();

        split(&mut bytes, &mut spare);
        let first: Vec<u16> = bytemuck::pod_collect_to_vec(&bytes[..bytes.len() / 2]);
        join(&mut bytes, &mut spare);

        let joined: Vec<u32> = bytemuck::pod_collect_to_vec(&bytes);
        for ((bits, joined), first) in numbers.into_iter().zip(joined).zip(first) {
            let (number, first) = (f32::from_bits(bits), half::bf16::from_bits(first));
            if number.is_nan() {
                assert_eq!((joined, first.is_nan()), (NAN, true), "{bits:08x}");
                continue;
            }
            let is_tie = bits & 0xffff == 0x8000;
            let nearest = half::bf16::from_f32(if is_tie { f32::from_bits(bits + 1) } else { number });
            assert_eq!((joined, first.to_bits()), (bits, nearest.to_bits()), "{bits:08x}");
        }
    }

    #[test]
    fn parts_of_a_run_lie_in_both_halves_of_its_weight() {
        let split = SplitWeights([(256, 256 + 400), (1024, 1024 + 40)].into_iter().collect());

        assert_eq!(split.parts(256, 400), Some([256, 456]));
        assert_eq!(split.parts(256 + 12, 4), Some([262, 462]));
        assert_eq!(split.parts(1024 + 36, 4), Some([1042, 1062]));
        assert_eq!([0, 255, 656, 1064].map(|address| split.parts(address, 4)), [None; 4]);
    }
}
