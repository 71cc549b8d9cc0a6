//! Adam with decoupled weight decay: with `m` and `v` the averages of gradients and of their squares,
//! `p = p (1 - lr weight_decay) - lr m̂ / (sqrt(v̂) + eps)`, where `m̂ = m / (1 - beta1^t)` and `v̂ = v / (1 - beta2^t)`.
//!
//! Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).

use super::{Hyperparameter, N_SCALARS, Range, Rule, StateTensor, decoupled_weight_decay};

/// Hyperparameters of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay of the average of gradients.
    pub beta1: f64,
    /// Decay of the average of squared gradients.
    pub beta2: f64,
    /// Added to the root of the average of squared gradients.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

impl Rule for AdamW {
    fn words(&self) -> &'static [&'static str] {
        &["adamw", "adamw_torch", "adamw_torch_fused"]
    }

    fn summary(&self) -> &'static str {
        "Adam with decoupled weight decay (Loshchilov and Hutter 2019)"
    }

    fn hyperparameters(&mut self) -> Vec<Hyperparameter<'_>> {
        let AdamW { beta1, beta2, eps, weight_decay } = self;
        vec![
            decoupled_weight_decay(weight_decay),
            Hyperparameter {
                key: "adam_beta1",
                doc: "decay of the average of gradients",
                range: Range::BelowOne,
                value: beta1,
            },
            Hyperparameter {
                key: "adam_beta2",
                doc: "decay of the average of squared gradients",
                range: Range::BelowOne,
                value: beta2,
            },
            Hyperparameter { key: "adam_epsilon", doc: "added to the denominator", range: Range::Positive, value: eps },
        ]
    }

    fn state(&self, _: usize) -> &'static [StateTensor] {
        const { &[StateTensor::of_elements("exp_avg"), StateTensor::of_elements("exp_avg_sq")] }
    }

    /// The bias corrections `1 - beta1^t` and `1 - beta2^t`.
    fn scalars(&self, t: u64) -> [f64; N_SCALARS] {
        [1.0 - self.beta1.powf(t as f64), 1.0 - self.beta2.powf(t as f64)]
    }
}
