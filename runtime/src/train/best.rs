//! The best evaluation of a run, and whether the run ends because none has been better for a while.
//!
//! As `EarlyStoppingCallback` and `load_best_model_at_end` of `transformers`: only a lower loss is better, and every evaluation that
//! is not better counts.

use crate::config::output::BestRule;
use serde::{Deserialize, Serialize};

/// The evaluations of a run so far. It is a part of the state of the run, so that a run that continues decides as one that was
/// not interrupted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Best {
    /// The lowest loss, as the bits of a float: decimal digits might lose the last one.
    loss_bits: Option<u64>,
    /// The step after which it was measured.
    pub(crate) step: u64,
    /// The step after which the last evaluation ran.
    pub(crate) evaluated: u64,
    /// Evaluations since the best one.
    pub(crate) n_worse: u64,
}

impl Best {
    /// Records an evaluation; returns whether it is the best so far.
    pub(crate) fn see(&mut self, step: u64, loss: f64) -> bool {
        self.evaluated = step;
        let is_better = loss.is_finite() && self.loss().is_none_or(|best| loss < best);
        if is_better {
            (self.loss_bits, self.step, self.n_worse) = (Some(loss.to_bits()), step, 0);
        } else {
            self.n_worse += 1;
        }
        is_better
    }

    /// The lowest loss.
    pub(crate) fn loss(&self) -> Option<f64> {
        self.loss_bits.map(f64::from_bits)
    }

    /// Whether the run ends.
    pub(crate) fn is_over(&self, rule: BestRule) -> bool {
        rule.patience.is_some_and(|patience| self.n_worse >= patience)
    }
}

impl Best {
    /// Whether these evaluations had ended the run when it was at `step`: with the step after the last of them.
    pub(crate) fn has_ended(&self, step: u64, rule: BestRule) -> bool {
        let has_more = rule.patience.is_some_and(|patience| self.n_worse > patience);
        self.is_over(rule) && (self.evaluated < step || has_more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_is_over_after_as_many_evaluations_without_a_lower_loss() {
        let rule = BestRule { patience: Some(2), keeps_best: true };
        let mut best = Best::default();

        let seen: Vec<(bool, bool)> = [3.0, 2.0, 2.0, f64::NAN, 1.0, 1.5]
            .into_iter()
            .zip((10..).step_by(10))
            .map(|(loss, step)| (best.see(step, loss), best.is_over(rule)))
            .collect();

        // An equal loss is not better, and neither is one that is no number.
        assert_eq!(seen, [(true, false), (true, false), (false, false), (false, true), (true, false), (false, false)]);
        assert_eq!((best.step, best.evaluated, best.n_worse, best.loss()), (50, 60, 1, Some(1.0)));
        assert!(!best.is_over(BestRule { patience: None, ..rule }));
    }

    #[test]
    fn best_evaluation_survives_a_checkpoint_bit_for_bit() {
        let mut best = Best::default();
        best.see(7, 0.1 + 0.2);

        let text = serde_json::to_string(&best).unwrap();

        assert_eq!(serde_json::from_str::<Best>(&text).unwrap(), best);
    }
}
