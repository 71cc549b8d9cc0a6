//! Finds a run that no longer learns: its gradient is exactly 0 step after step, so no later step can change its loss.
//!
//! This is how a run with far too large a learning rate ends when its numbers stay finite: the outputs are saturated.

use crate::events::StepMetrics;

/// Steps in a row without a gradient after which the run is reported. A single one may have no token to predict.
const STEPS: u64 = 5;

/// Counts consecutive steps without a gradient.
#[derive(Debug, Default)]
pub(super) struct Stalled {
    n_steps: u64,
}

impl Stalled {
    /// Adds the count to the measurements of a step. Returns a warning once for each time in which the run no longer learns.
    pub(super) fn see(&mut self, m: &mut StepMetrics) -> Option<String> {
        self.n_steps = if m.grad_norm == 0.0 && m.lr > 0.0 { self.n_steps + 1 } else { 0 };
        m.stalled_steps = (self.n_steps > 0).then_some(self.n_steps);
        (self.n_steps == STEPS).then(|| {
            format!(
                "warning: the gradient has been 0 for {STEPS} steps, so the loss of {:.4} no longer changes; try a lower \
                 `learning_rate` from an earlier checkpoint, and check that samples have tokens to train on",
                m.loss
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said about steps with these gradient norms, and their counts.
    fn seen(norms: &[f64], lr: f64) -> (Vec<bool>, Vec<Option<u64>>) {
        let mut stalled = Stalled::default();
        let of_step = |(i, norm): (usize, &f64)| {
            let json = format!(
                r#"{{"step":{i},"loss":3.0,"grad_norm":{norm},"lr":{lr},"tokens_per_s":1.0,"step_ms":1.0,"epoch":0.0,
                    "predicted_tokens":1,"mfu_pct":0.0,"memory_bytes":1,"data_wait_pct":0.0}}"#
            );
            let mut m: StepMetrics = serde_json::from_str(&json).unwrap();
            (stalled.see(&mut m).is_some(), m.stalled_steps)
        };
        norms.iter().enumerate().map(of_step).unzip()
    }

    #[test]
    fn gradient_that_stays_0_is_reported_once_and_counted() {
        let (said, counts) = seen(&[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], 1e-3);

        assert_eq!(said, [false, false, false, false, false, true, false, false]);
        assert_eq!(counts, [None, Some(1), Some(2), Some(3), Some(4), Some(5), Some(6), None]);
    }

    #[test]
    fn single_steps_without_a_gradient_or_a_learning_rate_are_not_reported() {
        assert!(seen(&[0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0], 1e-3).0.iter().all(|said| !said));
        assert!(seen(&[0.0; 10], 0.0).0.iter().all(|said| !said));
    }
}
