//! Lion: `p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)`, then `m = beta2 m + (1 - beta2) g`. Every element
//! moves by the learning rate, so the rate is usually three to ten times smaller than AdamW's, and weight decay larger by
//! the same factor.
//!
//! Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2 (arXiv:2302.06675).

use super::{Hyperparameter, Range, Rule, StateTensor, decoupled_weight_decay};

/// Hyperparameters of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Share of the average of gradients in the direction of an update.
    pub beta1: f64,
    /// Decay of the average of gradients.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for Lion {
    fn default() -> Lion {
        Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }
}

impl Rule for Lion {
    fn words(&self) -> &'static [&'static str] {
        &["lion", "lion_pytorch"]
    }

    fn summary(&self) -> &'static str {
        "the sign of averaged gradients (Chen et al. 2023)"
    }

    fn hyperparameters(&mut self) -> Vec<Hyperparameter<'_>> {
        let Lion { beta1, beta2, weight_decay } = self;
        vec![
            decoupled_weight_decay(weight_decay),
            Hyperparameter {
                key: "adam_beta1",
                doc: "share of the average of gradients in the direction of an update",
                range: Range::BelowOne,
                value: beta1,
            },
            Hyperparameter {
                key: "adam_beta2",
                doc: "decay of the average of gradients",
                range: Range::BelowOne,
                value: beta2,
            },
        ]
    }

    fn state(&self, _: usize) -> &'static [StateTensor] {
        const { &[StateTensor::of_elements("exp_avg")] }
    }
}
