//! Damages valid frames at random and decodes them. For the tests of all decoders.
//!
//! `PHALANX_FUZZ_SEED` repeats a run, `PHALANX_FUZZ_FACTOR` multiplies the number of cases.

use crate::wire::VERSION;
#[cfg(test)]
use crate::wire::{self, Message};
#[cfg(test)]
use std::fmt::Debug;
use std::time::{SystemTime, UNIX_EPOCH};

/// Decodes `n_cases` damaged frames. Each gives an error, or a message that encodes to at most the frame's length and
/// decodes to itself. Fails unless both occur.
#[cfg(test)]
pub(crate) fn damage<M: Message + PartialEq + Debug>(messages: &[M], n_cases: u64) {
    let good: Vec<Vec<u8>> = messages.iter().map(|message| wire::encode(message).unwrap()).collect();
    let mut n_good = 0;
    let n_bad = cases(n_cases, &good, |case, bytes| match wire::decode::<M>(bytes) {
        Ok(message) => {
            n_good += 1;
            let again = wire::encode(&message).unwrap();
            assert!(again.len() <= bytes.len(), "{case:?}: {} bytes grew to {}", bytes.len(), again.len());
            assert_eq!(wire::decode(&again), Ok(message), "{case:?}");
            true
        }
        Err(_) => false,
    });
    assert!(n_good > 0 && n_bad > 0, "expected valid and invalid frames, found {n_good} and {n_bad}");
}

/// Calls `decode` with damaged copies, each with its seed and number; returns how many it rejected.
pub fn cases(n_cases: u64, good: &[Vec<u8>], mut decode: impl FnMut((u64, u64), &[u8]) -> bool) -> u64 {
    let var = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let drawn = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = var("PHALANX_FUZZ_SEED").unwrap_or_else(drawn);
    let n_cases = n_cases * var("PHALANX_FUZZ_FACTOR").unwrap_or(1);
    println!("PHALANX_FUZZ_SEED={seed}, {n_cases} cases");
    let mut random = Random(seed);
    let mut n_bad = 0;
    for n in 0..n_cases {
        let mut bytes = good[random.below(good.len())].clone();
        for _ in 0..=random.below(4) {
            mutate(&mut bytes, good, &mut random);
        }
        n_bad += u64::from(!decode((seed, n), &bytes));
    }
    n_bad
}

/// Applies one random kind of damage.
fn mutate(bytes: &mut Vec<u8>, good: &[Vec<u8>], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let rest = bytes.len() - at;
    match random.below(9) {
        0 if rest > 0 => bytes[at] ^= 1 << random.below(8),
        1 if rest > 0 => bytes[at] = random.next() as u8,
        // Markers of long integers, the largest values, one and zero.
        2 if rest > 0 => bytes[at] = [0, 1, 250, 251, 252, 253, 254, 255][random.below(8)],
        // A wrong length.
        3 => drop(bytes.splice(at..at + rest.min(1), [253].into_iter().chain(random.next().to_le_bytes()))),
        4 => drop(bytes.splice(at..at + rest.min(1), [252, 255, 255, 255, random.next() as u8])),
        5 => bytes.truncate(at),
        6 => bytes.extend(std::iter::repeat_n(random.next() as u8, random.below(40))),
        7 => drop(bytes.drain(at..at + random.below(rest + 1))),
        _ => {
            let other = &good[random.below(good.len())];
            let from = random.below(other.len() + 1);
            let piece = other[from..from + random.below(other.len() - from + 1)].to_vec();
            drop(bytes.splice(at..at + random.below(rest + 1), piece));
        }
    }
    // Restores most envelopes, so that the damage reaches the payload decoder.
    let envelope = &good[0][..4];
    if envelope.starts_with(&[b'p', b'x', VERSION]) && bytes.len() >= 4 && random.below(16) > 0 {
        bytes[..4].copy_from_slice(envelope);
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}
