//! Which rows of the data set a step trains on: a function of (seed, step), never of rank or world size.
//!
//! Invariants:
//! - `SAMPLER-1` Each epoch visits each row exactly once.
//! - `SAMPLER-2` The rows of a step depend on seed, step, global batch size and row count only, so a resumed job needs
//!   the step and nothing else, and a rescaled job sees the same data.
//! - `SAMPLER-3` Neighbouring steps take neighbouring positions of one endless sequence: no row is dropped at the end
//!   of an epoch; a step there takes its remaining rows from the next epoch.
//!
//! An epoch's order is a keyed bijection evaluated per position, so it needs no memory for any number of rows.
//! Source: Luby and Rackoff 1988, "How to construct pseudorandom permutations from pseudorandom functions" (Feistel network);
//! Black and Rogaway 2002, "Ciphers with arbitrary finite domains", §3 (cycle walking down to the exact domain).
//! We differ in the round function: a fast mixer, not a cryptographic one, since the order need not resist attacks.

use crate::rng::CounterRng;
use thiserror::Error;

/// Rounds of the Feistel network. Four suffice for a pseudorandom permutation of a large domain; a small data set leaves
/// few bits to each half, where more rounds are needed before all orders become about equally likely.
const N_ROUNDS: u64 = 8;

/// The stream of dropout among those of a seed.
const DROPOUT: u64 = 0x6472_6f70_6f75_7400;

/// Why a sampler cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SamplerError {
    /// The data set is empty.
    #[error("the data set has no rows to sample")]
    NoRows,
    /// A step without rows makes no progress through the data.
    #[error("global batch size must be at least 1, found 0")]
    EmptyBatch,
}

/// The endless sequence of rows that a job trains on, cut into steps of one global batch each.
///
/// # Example
/// ```
/// use phalanx_strategies::sampler::Sampler;
///
/// let sampler = Sampler::new(42, 10, 4, true)?;
/// let mut rows = [0; 4];
/// sampler.fill_step(3, 0, &mut rows);
/// // A rank that owns the second half of the batch requests only that half and gets the same rows.
/// let mut half = [0; 2];
/// sampler.fill_step(3, 2, &mut half);
/// assert_eq!(half, rows[2..]);
/// # Ok::<(), phalanx_strategies::sampler::SamplerError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    seed: u64,
    n_rows: u64,
    global_batch_rows: u64,
    shuffle: bool,
}

impl Sampler {
    /// Creates the sampler of `n_rows` rows; without `shuffle` every epoch takes them in file order.
    ///
    /// # Errors
    /// When there are no rows or a batch would hold none.
    pub fn new(seed: u64, n_rows: u64, global_batch_rows: u64, shuffle: bool) -> Result<Self, SamplerError> {
        if n_rows == 0 {
            return Err(SamplerError::NoRows);
        }
        if global_batch_rows == 0 {
            return Err(SamplerError::EmptyBatch);
        }
        Ok(Self { seed, n_rows, global_batch_rows, shuffle })
    }

    /// Writes the rows at positions `first ..` of the global batch of `step` (counted from 0) into `rows`.
    ///
    /// # Panics
    /// When the positions exceed the global batch: two ranks would train on the same row.
    pub fn fill_step(&self, step: u64, first: u64, rows: &mut [u64]) {
        let end = first + rows.len() as u64;
        assert!(end <= self.global_batch_rows, "batch position {end} exceeds the batch of {}", self.global_batch_rows);
        let start = u128::from(step) * u128::from(self.global_batch_rows) + u128::from(first);
        let mut epoch = (start / u128::from(self.n_rows)) as u64;
        let mut offset = (start % u128::from(self.n_rows)) as u64;
        let mut order = self.order(epoch);
        for row in rows {
            if offset == self.n_rows {
                (epoch, offset) = (epoch + 1, 0);
                order = self.order(epoch);
            }
            *row = if self.shuffle { order.apply(offset) } else { offset };
            offset += 1;
        }
    }

    /// The random numbers of dropout in a step; of a row of the data, those of the fork by its index.
    pub const fn dropout_of(&self, step: u64) -> CounterRng {
        CounterRng::new(self.seed).fork(DROPOUT).fork(step)
    }

    /// Passes over the data completed when `n_steps` steps are done, as shown in progress lines.
    pub fn epochs_after(&self, n_steps: u64) -> f64 {
        n_steps as f64 * self.global_batch_rows as f64 / self.n_rows as f64
    }

    /// The number of steps that visit every row at least `n_epochs` times.
    pub fn steps_for_epochs(&self, n_epochs: u64) -> u64 {
        let rows = u128::from(n_epochs) * u128::from(self.n_rows);
        rows.div_ceil(u128::from(self.global_batch_rows)) as u64
    }

    fn order(&self, epoch: u64) -> Permutation {
        Permutation::new(self.n_rows, self.seed, epoch)
    }
}

/// A pseudorandom bijection of `0 .. n`, one for each (seed, stream).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    half_bits: u32,
    round_keys: [u64; N_ROUNDS as usize],
}

impl Permutation {
    /// The bijection of `0 .. n` that belongs to `seed` and `stream`; different streams of one seed are unrelated.
    pub fn new(n: u64, seed: u64, stream: u64) -> Self {
        // The network permutes 2^(2·half_bits) ≥ n values; that is less than 4n, so walking back into the domain takes
        // fewer than four applications on average.
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(1);
        let base = mix(seed ^ mix(stream.wrapping_add(GOLDEN)));
        let round_keys = std::array::from_fn(|round| mix(base.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1))));
        Self { n, half_bits, round_keys }
    }

    /// The image of `index`.
    ///
    /// # Panics
    /// When `index` is outside the domain.
    pub fn apply(&self, index: u64) -> u64 {
        assert!(index < self.n, "index {index} is outside a permutation of {}", self.n);
        let mut value = self.network(index);
        while value >= self.n {
            value = self.network(value);
        }
        value
    }

    fn network(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.round_keys {
            (left, right) = (right, left ^ (mix(right.wrapping_add(key)) & mask));
        }
        (left << self.half_bits) | right
    }
}

/// 2^64 divided by the golden ratio: successive multiples are spread evenly over the words.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64, a bijection in which each input bit flips each output bit with probability near one half.
/// Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", §5.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sequence(sampler: &Sampler, steps: std::ops::Range<u64>) -> Vec<u64> {
        let mut rows = vec![0; sampler.global_batch_rows as usize];
        let mut all = Vec::new();
        for step in steps {
            sampler.fill_step(step, 0, &mut rows);
            all.extend_from_slice(&rows);
        }
        all
    }

    proptest! {
        #[test]
        fn permutation_is_a_bijection(n in 1u64..3000, seed: u64, stream: u64) {
            let permutation = Permutation::new(n, seed, stream);

            let mut images: Vec<u64> = (0..n).map(|i| permutation.apply(i)).collect();
            images.sort_unstable();

            prop_assert_eq!(images, (0..n).collect::<Vec<_>>());
        }

        // SAMPLER-1
        #[test]
        fn every_epoch_visits_every_row_exactly_once(n in 1u64..200, batch in 1u64..50, seed: u64, shuffle: bool) {
            let sampler = Sampler::new(seed, n, batch, shuffle).unwrap();

            let rows = sequence(&sampler, 0..(3 * n).div_ceil(batch));

            for epoch in rows.chunks_exact(n as usize) {
                let mut seen = epoch.to_vec();
                seen.sort_unstable();
                prop_assert_eq!(seen, (0..n).collect::<Vec<_>>());
            }
        }

        // SAMPLER-2
        #[test]
        fn resumed_sequence_equals_the_uninterrupted_one(n in 1u64..200, batch in 1u64..50, seed: u64, stop in 0u64..40) {
            let uninterrupted = sequence(&Sampler::new(seed, n, batch, true).unwrap(), 0..40);

            let mut resumed = sequence(&Sampler::new(seed, n, batch, true).unwrap(), 0..stop);
            resumed.extend(sequence(&Sampler::new(seed, n, batch, true).unwrap(), stop..40));

            prop_assert_eq!(resumed, uninterrupted);
        }

        // SAMPLER-2
        #[test]
        fn rows_of_a_step_do_not_depend_on_how_ranks_divide_it(n in 1u64..200, seed: u64, step in 0u64..100, world in 1usize..12) {
            let sampler = Sampler::new(seed, n, 24, true).unwrap();
            let whole = sequence(&sampler, step..step + 1);

            let mut gathered = Vec::new();
            for places in (0..24u64).collect::<Vec<_>>().chunks(24usize.div_ceil(world)) {
                let mut part = vec![0; places.len()];
                sampler.fill_step(step, places[0], &mut part);
                gathered.extend(part);
            }

            prop_assert_eq!(gathered, whole);
        }

        // SAMPLER-3
        #[test]
        fn sequence_does_not_depend_on_the_batch_size(n in 1u64..200, batch in 1u64..30, seed: u64) {
            let one_by_one = sequence(&Sampler::new(seed, n, 1, true).unwrap(), 0..batch * 10);

            let in_batches = sequence(&Sampler::new(seed, n, batch, true).unwrap(), 0..10);

            prop_assert_eq!(in_batches, one_by_one);
        }
    }

    #[test]
    fn without_shuffling_rows_come_in_file_order() {
        let sampler = Sampler::new(7, 5, 3, false).unwrap();

        assert_eq!(sequence(&sampler, 0..4), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]);
    }

    #[test]
    fn epochs_and_seeds_have_different_orders() {
        let first = sequence(&Sampler::new(1, 100, 100, true).unwrap(), 0..2);
        let other_seed = sequence(&Sampler::new(2, 100, 100, true).unwrap(), 0..1);

        assert_ne!(first[..100], first[100..]);
        assert_ne!(first[..100], other_seed);
    }

    // All 24 orders of 4 rows over 24,000 keys: the expected count is 1000 with a standard deviation of 31, so that a
    // deviation of 200 in any count (over 6 σ) means bias, not chance.
    #[test]
    fn orders_of_a_small_set_are_about_equally_likely() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..24_000 {
            let permutation = Permutation::new(4, seed, 0);
            *counts.entry([0, 1, 2, 3].map(|i| permutation.apply(i))).or_insert(0) += 1;
        }

        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|count| (800..=1200).contains(count)), "{counts:?}");
    }

    #[test]
    fn step_far_into_training_does_not_overflow() {
        let sampler = Sampler::new(3, u64::from(u32::MAX), 1 << 20, true).unwrap();
        let mut rows = [0; 8];

        sampler.fill_step(u64::MAX >> 8, 0, &mut rows);

        assert!(rows.iter().all(|&row| row < u64::from(u32::MAX)));
    }

    #[test]
    fn empty_data_and_empty_batches_are_refused() {
        assert_eq!(Sampler::new(0, 0, 4, true), Err(SamplerError::NoRows));
        assert_eq!(Sampler::new(0, 4, 0, true), Err(SamplerError::EmptyBatch));
    }

    #[test]
    fn steps_for_epochs_rounds_up() {
        let sampler = Sampler::new(0, 10, 4, true).unwrap();

        assert_eq!(sampler.steps_for_epochs(3), 8);
        assert_eq!(sampler.epochs_after(5), 2.0);
    }
}
