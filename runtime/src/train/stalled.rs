//! Finds a run that does not learn: its gradient is exactly 0 step after step, so no later step can change its loss; or it
//! overflows in fp16 step after step, so that no update is made.
//!
//! The first is how a run with far too large a learning rate ends when its numbers stay finite: the outputs are saturated.

use crate::events::StepMetrics;

/// Steps in a row without a gradient after which the run is reported. A single one may have no token to predict.
const STEPS: u64 = 5;

/// Skipped updates in a row after which the run is reported; a usual first loss scale needs fewer until it fits.
const SKIPPED: u64 = 16;

/// Counts consecutive steps without a gradient, or without an update.
#[derive(Debug, Default)]
pub(super) struct Stalled {
    n_steps: u64,
    n_skipped: u64,
}

impl Stalled {
    /// Adds the count to the measurements of a step. Returns a warning once for each time in which the run no longer learns.
    pub(super) fn see(&mut self, m: &mut StepMetrics) -> Option<String> {
        self.n_steps = if m.grad_norm == 0.0 && m.lr > 0.0 { self.n_steps + 1 } else { 0 };
        m.stalled_steps = (self.n_steps > 0).then_some(self.n_steps);
        self.n_skipped = if m.grad_norm.is_finite() { 0 } else { self.n_skipped + 1 };
        if self.n_skipped == SKIPPED {
            let scale = m.loss_scale.unwrap_or(1.0);
            return Some(format!(
                "warning: {SKIPPED} updates in a row were skipped because the gradient overflowed in fp16, and the loss scale \
                 is still {scale:e}; use bf16, or a lower `initial_loss_scale`"
            ));
        }
        (self.n_steps == STEPS).then(|| {
            format!(
                "warning: the gradient has been 0 for {STEPS} steps, so the loss of {:.4} no longer changes; try a lower \
                 `learning_rate` from an earlier checkpoint, and check that samples have tokens to train on",
                m.loss
            )
        })
    }
}

/// The warning at the end of a run in which most or all steps made no update.
pub(super) fn skipped((n_steps, n_updates): (u64, u64)) -> Option<String> {
    let n_skipped = n_steps.saturating_sub(n_updates);
    let then = match n_updates {
        0 => "so the model is the one with which the run began",
        _ => "so the model has learned from the other steps only",
    };
    (2 * n_skipped > n_steps).then(|| {
        format!(
            "warning: {n_skipped} of {n_steps} updates were skipped because the gradient overflowed in fp16, {then}; use bf16, a \
             lower `initial_loss_scale`, or more steps"
        )
    })
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
    fn updates_that_are_skipped_in_a_row_are_reported_once() {
        let mut stalled = Stalled::default();
        let mut said = |grad_norm: &str| {
            let json = format!(
                r#"{{"step":1,"loss":3.0,"grad_norm":{grad_norm},"lr":1e-3,"tokens_per_s":1.0,"step_ms":1.0,"epoch":0.0,
                    "predicted_tokens":1,"mfu_pct":0.0,"memory_bytes":1,"data_wait_pct":0.0,"loss_scale":65536.0}}"#
            );
            stalled.see(&mut serde_json::from_str(&json).unwrap())
        };

        let warnings: Vec<_> = (0..40).filter_map(|_| said("null")).collect();

        assert!(
            warnings.len() == 1 && warnings[0].contains("skipped") && warnings[0].contains("6.5536e4"),
            "{warnings:?}"
        );
        assert_eq!((said("1.0"), said("null")), (None, None));
    }

    #[test]
    fn run_without_updates_is_told_that_its_model_is_unchanged() {
        assert!(skipped((20, 0)).unwrap().contains("20 of 20 updates were skipped"));
        assert!(skipped((20, 0)).unwrap().contains("with which the run began"));
        assert!(skipped((20, 9)).unwrap().contains("11 of 20"));
        assert_eq!((skipped((20, 10)), skipped((20, 20)), skipped((0, 0))), (None, None, None));
    }

    #[test]
    fn single_steps_without_a_gradient_or_a_learning_rate_are_not_reported() {
        assert!(seen(&[0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0], 1e-3).0.iter().all(|said| !said));
        assert!(seen(&[0.0; 10], 0.0).0.iter().all(|said| !said));
    }
}
