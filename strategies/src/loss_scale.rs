//! Dynamic loss scaling for fp16: the loss is scaled so that small gradients survive half precision.
//!
//! Source: Micikevicius et al. 2018, §3.2 (arXiv:1710.03740); the rule (halve on overflow, double after a run of good
//! steps) follows PyTorch's `GradScaler`.

use serde::{Deserialize, Serialize};

/// The loss scale of a run, and how it adapts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// Current factor of the loss.
    pub scale: f64,
    /// Steps since the scale last changed.
    pub good_steps: u64,
    /// Good steps after which the scale doubles; `None` keeps it fixed.
    pub window: Option<u64>,
    /// The scale never falls below this.
    pub min: f64,
}

/// The outcome of a step, given its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The update was made.
    Updated,
    /// The gradient overflowed: the update was skipped and the scale halved.
    Skipped,
    /// The gradient overflowed although the scale cannot fall further.
    Diverged,
}

impl LossScale {
    /// No scaling: in f32 and bf16 runs, a non-finite gradient means divergence.
    pub const OFF: LossScale = LossScale { scale: 1.0, good_steps: 0, window: None, min: 1.0 };

    /// Records whether the gradient of a step was finite.
    pub fn observe(&mut self, finite: bool) -> Verdict {
        if finite {
            self.good_steps += 1;
            if self.window.is_some_and(|w| self.good_steps >= w) {
                (self.scale, self.good_steps) = (self.scale * 2.0, 0);
            }
            return Verdict::Updated;
        }
        self.good_steps = 0;
        if self.window.is_none() || self.scale * 0.5 < self.min {
            return Verdict::Diverged;
        }
        self.scale *= 0.5;
        Verdict::Skipped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflow_halves_and_a_run_of_good_steps_doubles() {
        let mut s = LossScale { scale: 8.0, good_steps: 0, window: Some(2), min: 2.0 };
        assert_eq!((s.observe(false), s.scale), (Verdict::Skipped, 4.0));
        s.observe(true);
        assert_eq!((s.observe(true), s.scale), (Verdict::Updated, 8.0));
    }

    #[test]
    fn overflow_at_the_smallest_scale_is_divergence() {
        let mut s = LossScale { scale: 2.0, good_steps: 0, window: Some(2), min: 2.0 };
        assert_eq!(s.observe(false), Verdict::Diverged);
        assert_eq!(LossScale::OFF.clone().observe(false), Verdict::Diverged);
    }
}
