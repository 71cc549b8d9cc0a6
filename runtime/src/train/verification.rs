//! When the copies of a world's state are compared, and what a rank remembers for that.
//!
//! The automatic interval keeps the time of comparisons below [`SHARE_MAX`] of training. All ranks compute it from the same
//! sums, so that they compare after the same steps.

use super::weights::Tensor;
use crate::config::elastic::VerifySteps;
use phalanx_strategies::elastic::copies::{Copies, name};
use phalanx_strategies::elastic::dispute::Memory;
use phalanx_strategies::elastic::identity::Step;
use std::collections::BTreeMap;

/// Largest share of the time of training that comparisons take.
const SHARE_MAX: f64 = 1e-3;
/// Longest automatic interval, in steps.
const EVERY_MAX: u64 = 1 << 16;

pub(crate) struct Verification {
    steps: VerifySteps,
    /// Steps between comparisons, once known in this world.
    every: Option<u64>,
    /// What the world holds more than once, once known.
    pub(crate) copies: Option<Copies>,
    /// The boxes of each part of this rank's memory: its own state, then its shadows.
    pub(crate) parts: Vec<BTreeMap<u64, Tensor>>,
    /// The outcome of the latest comparison.
    pub(crate) compared: Compared,
    /// Time of the comparison since the latest step began, waits for other ranks included; none without one.
    pub(crate) spent_s: Option<f64>,
    /// Time of the latest exchange.
    pub(crate) exchange_s: f64,
    /// What this process computed, for steps whose copies differed.
    pub(crate) memory: Memory,
}

/// The outcome of a comparison before a save.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Compared {
    /// The fingerprints of the rank's own boxes, by name.
    pub(crate) own: BTreeMap<u64, u64>,
    /// Whether all of the state has other copies, which agree with it.
    pub(crate) is_verified: bool,
    /// Whether no copy differs from another one; there may be none.
    pub(crate) is_compared: bool,
    /// The seed of a bit that a test flips in the copy of the state.
    pub(crate) planted: Option<u64>,
}

impl Compared {
    /// The fingerprint of a box, if it was compared.
    pub(crate) fn fingerprint(&self, tensor: &Tensor) -> Option<u64> {
        self.own.get(&name(&tensor.name, &tensor.held.region)).copied()
    }
}

impl Verification {
    pub(crate) fn new(steps: VerifySteps) -> Verification {
        let mut memory = Memory::default();
        memory.begin(Vec::new());
        let (every, copies, parts, compared) = (None, None, Vec::new(), Compared::default());
        Verification { steps, every, copies, parts, compared, spent_s: None, exchange_s: 0.0, memory }
    }

    /// Begins a world, which repeats disputed steps.
    pub(crate) fn begin(&mut self, disputed: Vec<Step>) {
        (self.every, self.copies) = (None, None);
        (self.parts, self.compared, self.exchange_s) = (Vec::new(), Compared::default(), 0.0);
        self.memory.begin(disputed);
    }

    /// Whether copies are ever compared.
    pub(crate) fn is_on(&self) -> bool {
        self.steps != VerifySteps::Every(0)
    }

    /// Whether copies are compared after this step; all ranks agree.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        let every = match self.steps {
            VerifySteps::Every(n) => Some(n),
            VerifySteps::Auto => self.every,
        };
        self.is_on() && (every.is_none_or(|n| step.is_multiple_of(n)) || self.memory.is_disputed(Step(step)))
    }

    /// Chooses the interval from the time of a comparison and of a step, both summed over all ranks.
    pub(crate) fn choose(&mut self, compare_s: f64, step_s: f64) {
        let every = (compare_s / step_s / SHARE_MAX).max(1.0).min(EVERY_MAX as f64).ceil() as u64;
        self.every = Some(every.next_power_of_two());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_interval_keeps_comparisons_below_a_thousandth() {
        let mut verification = Verification::new(VerifySteps::Auto);
        assert!(verification.is_due(3), "the first step of a world measures the time");

        for (compare_s, step_s, every) in [(1e-6, 1.0, 1), (2e-3, 1.0, 2), (3e-3, 1.0, 4), (1.0, 1e-9, EVERY_MAX)] {
            verification.choose(compare_s, step_s);
            let due: Vec<u64> = (1..=2 * every).filter(|step| verification.is_due(*step)).collect();
            assert_eq!(due, [every, 2 * every]);
        }
    }

    #[test]
    fn disputed_step_is_compared_in_any_case() {
        let mut verification = Verification::new(VerifySteps::Every(10));

        verification.begin(vec![Step(7)]);

        assert_eq!((1..=20).filter(|step| verification.is_due(*step)).collect::<Vec<_>>(), [7, 10, 20]);
        assert!(!Verification::new(VerifySteps::Every(0)).is_due(0));
    }
}
