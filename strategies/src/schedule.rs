//! Learning-rate schedules: pure functions of the step.

use serde::{Deserialize, Serialize};
use std::f64::consts::PI;

/// Shape of the schedule after warmup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// Stays at the peak.
    Constant,
    /// Straight to the minimum at the last step.
    Linear,
    /// Half a cosine to the minimum. Source: Loshchilov and Hutter 2017, SGDR (arXiv:1608.03983), without restarts.
    #[default]
    Cosine,
    /// Warmup, stable, decay: at the peak, then straight to the minimum in the last part.
    /// Source: Hu et al. 2024, MiniCPM, §4 (arXiv:2404.06395).
    Wsd {
        /// Steps of the decay at the end.
        decay_steps: u64,
    },
}

/// A learning-rate schedule.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// Largest learning rate.
    pub peak: f64,
    /// Smallest learning rate at the end, as a fraction of the peak.
    pub min_ratio: f64,
    /// Steps of linear warmup from `peak / warmup_steps`.
    pub warmup_steps: u64,
    /// Steps of the run.
    pub total_steps: u64,
    /// What follows the warmup.
    pub shape: Shape,
}

impl Schedule {
    /// Learning rate of step `t`, counted from 0.
    pub fn learning_rate(&self, t: u64) -> f64 {
        if t < self.warmup_steps {
            return self.peak * (t + 1) as f64 / self.warmup_steps as f64;
        }
        let floor = self.peak * self.min_ratio;
        let falling = |progress: f64| floor + (self.peak - floor) * (1.0 - progress.clamp(0.0, 1.0));
        let after_warmup = |from: u64| (t - from) as f64 / self.total_steps.saturating_sub(from).max(1) as f64;
        match self.shape {
            Shape::Constant => self.peak,
            Shape::Linear => falling(after_warmup(self.warmup_steps)),
            Shape::Cosine => {
                let progress = after_warmup(self.warmup_steps).clamp(0.0, 1.0);
                floor + (self.peak - floor) * 0.5 * (1.0 + (PI * progress).cos())
            }
            Shape::Wsd { decay_steps } => {
                let from = self.total_steps.saturating_sub(decay_steps).max(self.warmup_steps);
                if t < from { self.peak } else { falling(after_warmup(from)) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(shape: Shape) -> Schedule {
        Schedule { peak: 1.0, min_ratio: 0.1, warmup_steps: 4, total_steps: 20, shape }
    }

    #[test]
    fn warmup_rises_from_its_first_fraction_to_the_peak() {
        let s = schedule(Shape::Cosine);
        let first: Vec<f64> = (0..5).map(|t| s.learning_rate(t)).collect();
        assert_eq!(first, [0.25, 0.5, 0.75, 1.0, 1.0]);
    }

    #[test]
    fn every_falling_schedule_reaches_its_minimum_at_the_last_step() {
        for shape in [Shape::Linear, Shape::Cosine, Shape::Wsd { decay_steps: 5 }] {
            let end = schedule(shape).learning_rate(20);
            assert!((end - 0.1).abs() < 1e-12, "{shape:?} ends at {end}");
        }
    }

    #[test]
    fn wsd_stays_at_the_peak_until_its_decay() {
        let s = schedule(Shape::Wsd { decay_steps: 5 });
        assert_eq!(s.learning_rate(15), 1.0);
        assert!(s.learning_rate(16) < 1.0);
    }
}
