//! Random numbers as a pure function of (key, index): without state, so any rank can draw any element at any time.

/// A stream of random numbers addressed by index.
///
/// Source: Steele et al. 2014, SplitMix64 (OOPSLA), used as a mixing function of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterRng {
    key: u64,
}

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl CounterRng {
    /// The stream of this seed.
    pub const fn new(seed: u64) -> CounterRng {
        CounterRng { key: mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) }
    }

    /// An independent stream, named by a number.
    pub const fn fork(self, stream: u64) -> CounterRng {
        CounterRng { key: mix(self.key ^ mix(stream.wrapping_add(0xd1b5_4a32_d192_ed03))) }
    }

    /// An independent stream, named by a text.
    pub fn fork_named(self, name: &str) -> CounterRng {
        // FNV-1a: names are short and few; the hash must never change.
        let hash =
            name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        self.fork(hash)
    }

    /// The 64 random bits at `index`.
    pub const fn bits(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }

    /// Uniform in `(0, 1)`.
    pub fn uniform(self, index: u64) -> f64 {
        ((self.bits(index) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal variate. Source: Box and Muller 1958.
    pub fn normal(self, index: u64) -> f64 {
        let (u, v) = (self.uniform(2 * index), self.uniform(2 * index + 1));
        (-2.0 * u.ln()).sqrt() * (2.0 * std::f64::consts::PI * v).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_variates_have_the_moments_of_a_normal_distribution() {
        let rng = CounterRng::new(7).fork_named("w");
        let n = 200_000;
        let draws: Vec<f64> = (0..n).map(|i| rng.normal(i)).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let var = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        let fourth = draws.iter().map(|x| x.powi(4)).sum::<f64>() / n as f64;
        // Four standard errors of each estimate.
        assert!(
            mean.abs() < 0.009 && (var - 1.0).abs() < 0.013 && (fourth - 3.0).abs() < 0.09,
            "{mean} {var} {fourth}"
        );
    }

    #[test]
    fn streams_of_different_names_differ() {
        let rng = CounterRng::new(7);
        assert_ne!(rng.fork_named("a").bits(0), rng.fork_named("b").bits(0));
    }
}
