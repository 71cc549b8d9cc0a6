//! Stochastic gradient descent with momentum, in PyTorch's form: `buffer = momentum buffer + g + weight_decay p`,
//! `p = p - lr buffer`.
//!
//! Source: Sutskever et al. 2013, On the importance of initialization and momentum in deep learning, §2.

use super::{Hyperparameter, Range, Rule, StateTensor, WEIGHT_DECAY};

/// Hyperparameters of SGD.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sgd {
    /// Decay of the momentum buffer; 0 is plain gradient descent.
    pub momentum: f64,
    /// Factor of the L2 term in the gradient.
    pub weight_decay: f64,
}

impl Rule for Sgd {
    fn words(&self) -> &'static [&'static str] {
        &["sgd"]
    }

    fn summary(&self) -> &'static str {
        "stochastic gradient descent, with momentum if set (Sutskever et al. 2013)"
    }

    fn hyperparameters(&mut self) -> Vec<Hyperparameter<'_>> {
        let Sgd { momentum, weight_decay } = self;
        vec![
            Hyperparameter {
                key: WEIGHT_DECAY,
                doc: "an L2 term in the gradient; biases and norms are exempt",
                range: Range::NotNegative,
                value: weight_decay,
            },
            Hyperparameter {
                key: "momentum",
                doc: "share of the last change that is kept; 0 is plain gradient descent",
                range: Range::BelowOne,
                value: momentum,
            },
        ]
    }

    fn state(&self, _: usize) -> &'static [StateTensor] {
        const { &[StateTensor::of_elements("momentum_buffer")] }
    }
}
