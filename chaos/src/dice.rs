//! Random numbers of a simulation: one sequence per purpose, all derived from the seed.

use phalanx_strategies::rng::CounterRng;
use std::ops::Range;

/// A sequence of random numbers.
#[derive(Clone, Debug)]
pub struct Dice {
    rng: CounterRng,
    next: u64,
}

impl Dice {
    /// The sequence of this seed and purpose.
    pub fn new(seed: u64, purpose: &str) -> Dice {
        Dice { rng: CounterRng::new(seed).fork_named(purpose), next: 0 }
    }

    /// A number of a non-empty range.
    pub fn pick(&mut self, range: Range<u64>) -> u64 {
        self.next += 1;
        range.start + self.rng.bits(self.next) % (range.end - range.start)
    }

    /// True with this probability.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.pick(0..100) < percent
    }
}
