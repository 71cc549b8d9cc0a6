//! Fingerprints of state: sums that two copies of the same elements share, and that a flipped bit changes.
//!
//! The fingerprint of elements of a tensor is the sum, modulo 2^64, of each element's 32-bit word times an odd key that
//! depends only on the element's index in the whole tensor.
//!
//! Invariants:
//! - `FINGERPRINT-1` Changing one word changes the fingerprint: the difference of two words is below 2^32 in magnitude, so
//!   its product with a key of 32 bits is not zero modulo 2^64.
//! - `FINGERPRINT-2` The fingerprint of a box is the sum of those of its parts, in any order and with any cut. Threads and
//!   blocks of a device therefore need no order, and the fingerprint of a tensor does not depend on the mesh.
//!
//! Changes of several words cancel out with a probability of about 2^-31, because the keys are pseudo-random.
//!
//! Source: Carter and Wegman 1979, "Universal classes of hash functions", §3 (multiply-add); the keys are those of a
//! counter, mixed as in the finaliser of MurmurHash3, so no table of keys is read.

/// The key of the element at `index` of a tensor; odd.
#[inline(always)]
pub const fn key(index: u64) -> u32 {
    key_in_block(block(index), index as u32)
}

/// The fingerprint of consecutive elements of a tensor, from the one at index `first` on.
#[inline(always)]
pub fn fingerprint(first: u64, words: &[u32]) -> u64 {
    let mut sum = 0u64;
    let (mut first, mut words) = (first, words);
    while !words.is_empty() {
        // The upper half of the index is the same for a block of 2^32 elements, so that the loop below has 32-bit lanes.
        let (low, left) = (first as u32, (1u64 << 32) - (first & 0xffff_ffff));
        let (here, rest) = words.split_at(words.len().min(usize::try_from(left).unwrap_or(usize::MAX)));
        let seed = block(first);
        let mut of_block = 0u64;
        for (i, word) in here.iter().enumerate() {
            let key = key_in_block(seed, low.wrapping_add(i as u32));
            of_block = of_block.wrapping_add(u64::from(*word) * u64::from(key));
        }
        sum = sum.wrapping_add(of_block);
        (first, words) = (first.wrapping_add(here.len() as u64), rest);
    }
    sum
}

#[inline(always)]
const fn block(index: u64) -> u32 {
    ((index >> 32) as u32).wrapping_mul(0xc2b2_ae35)
}

#[inline(always)]
const fn key_in_block(seed: u32, low: u32) -> u32 {
    let x = low.wrapping_mul(0x9e37_79b1) ^ seed;
    let x = (x ^ (x >> 15)).wrapping_mul(0x85eb_ca6b);
    (x ^ (x >> 13)) | 1
}

/// Mixes a fingerprint with the name of its box, so that fingerprints of many boxes can be added up; a bijection of the
/// fingerprint.
pub const fn named(name: u64, fingerprint: u64) -> u64 {
    let z = fingerprint ^ name;
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_odd_and_mostly_distinct() {
        let keys: Vec<u32> = (0..4096).chain((1 << 32) - 8..(1 << 32) + 4088).map(key).collect();

        assert!(keys.iter().all(|key| key % 2 == 1));
        let distinct: std::collections::BTreeSet<&u32> = keys.iter().collect();
        assert!(distinct.len() > 8100, "{}", distinct.len());
    }

    proptest! {
        // FINGERPRINT-1
        #[test]
        fn any_flipped_bit_changes_the_fingerprint(
            words in prop::collection::vec(any::<u32>(), 1..200), first: u64, at: prop::sample::Index, bit in 0u32..32,
        ) {
            let before = fingerprint(first, &words);
            let mut words = words;
            let at = at.index(words.len());
            words[at] ^= 1 << bit;

            prop_assert_ne!(fingerprint(first, &words), before);
        }

        // FINGERPRINT-2
        #[test]
        fn fingerprint_of_a_run_is_the_sum_of_those_of_its_parts(
            words in prop::collection::vec(any::<u32>(), 0..200), cut: prop::sample::Index, block in 0u64..3, before in 0u64..300,
        ) {
            // Some runs cross a block of 2^32 elements.
            let first = (block << 32).saturating_sub(before);
            let cut = cut.index(words.len() + 1);
            let (head, tail) = words.split_at(cut);

            let parts = fingerprint(first + cut as u64, tail).wrapping_add(fingerprint(first, head));

            prop_assert_eq!(fingerprint(first, &words), parts);
            let one_by_one = (first..).zip(&words).map(|(i, word)| u64::from(*word).wrapping_mul(u64::from(key(i))));
            prop_assert_eq!(parts, one_by_one.fold(0, u64::wrapping_add));
        }
    }
}
