//! Fingerprints of state, at the speed of memory: see [`phalanx_strategies::elastic::fingerprint`].

use super::simd::simd;
use phalanx_strategies::elastic::fingerprint;
use rayon::prelude::*;

/// Elements that one thread takes at a time.
const CHUNK: usize = 1 << 16;

/// The fingerprint of consecutive elements of a tensor, from the one at index `first` on.
pub fn fingerprint(first: u64, words: &[u32]) -> u64 {
    if words.len() <= CHUNK {
        return of_chunk(first, words);
    }
    let chunks = words.par_chunks(CHUNK).enumerate();
    chunks.map(|(i, words)| of_chunk(first + (i * CHUNK) as u64, words)).reduce(|| 0, u64::wrapping_add)
}

simd! {
    fn of_chunk(first: u64, words: &[u32]) -> u64 {
        fingerprint::fingerprint(first, words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_and_wide_instructions_give_the_fingerprint_of_the_definition() {
        let words: Vec<u32> = (0..3 * CHUNK as u32 + 7).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();

        for (first, n) in [(0, 5), (3, words.len()), ((1 << 32) - 100, words.len()), (1 << 40, CHUNK + 1)] {
            assert_eq!(super::fingerprint(first, &words[..n]), fingerprint::fingerprint(first, &words[..n]));
        }
    }
}
