//! Adafactor, in PyTorch's form. As in AdamW, the gradient is divided by the root of its averaged squares. The averages of
//! a matrix are the product of row averages and column averages, and the RMS of an update is relative to its tensor's.
//!
//! With `t` counting updates from 1, `w = t^beta2_decay`, and RMS the root of the mean square of a whole tensor:
//! - matrices: `r = (1 - w) r + w mean(g²)` over each row, `c = (1 - w) c + w mean(g²)` over each column,
//!   `v = r c / max(mean(r), eps1)`; vectors: `v = (1 - w) v + w g²`;
//! - `u = g / sqrt(max(v, eps1²))`, `u = u / max(1, RMS(u) / d)`;
//! - `p = p (1 - lr weight_decay) - max(eps2, RMS(p)) min(lr, 1 / sqrt(t)) u`.
//!
//! Source: Shazeer and Stern 2018, Adafactor, algorithms 4 and 5 (arXiv:1804.04235), in the form of
//! `torch.optim.Adafactor`: `eps1` bounds the averages and is not added to the squares.

use super::{Extent, Hyperparameter, N_SCALARS, Range, Rule, StateTensor, decoupled_weight_decay};

/// Hyperparameters of Adafactor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Exponent of `t` in the weight of a new gradient.
    pub beta2_decay: f64,
    /// Lower bound of the root of an averaged square.
    pub eps1: f64,
    /// Lower bound of the tensor's RMS that scales an update.
    pub eps2: f64,
    /// Updates with a larger RMS are scaled down to it.
    pub d: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for Adafactor {
    fn default() -> Adafactor {
        Adafactor { beta2_decay: -0.8, eps1: f32::EPSILON as f64, eps2: 1e-3, d: 1.0, weight_decay: 0.0 }
    }
}

impl Rule for Adafactor {
    fn words(&self) -> &'static [&'static str] {
        &["adafactor"]
    }

    fn summary(&self) -> &'static str {
        "Adam with averages of rows and columns, as `torch.optim.Adafactor` (Shazeer and Stern 2018)"
    }

    fn hyperparameters(&mut self) -> Vec<Hyperparameter<'_>> {
        let Adafactor { beta2_decay, eps1, eps2, d, weight_decay } = self;
        vec![
            decoupled_weight_decay(weight_decay),
            Hyperparameter {
                key: "adafactor_beta2_decay",
                doc: "a new gradient has the weight t to this power in the averages at update t",
                range: Range::NotPositive,
                value: beta2_decay,
            },
            Hyperparameter {
                key: "adafactor_eps1",
                doc: "least root of an averaged square of the gradient",
                range: Range::Positive,
                value: eps1,
            },
            Hyperparameter {
                key: "adafactor_eps2",
                doc: "the length of an update is relative to the RMS of its tensor, or to this where that is smaller",
                range: Range::NotNegative,
                value: eps2,
            },
            Hyperparameter {
                key: "adafactor_d",
                doc: "updates with a larger RMS are scaled down to this",
                range: Range::Positive,
                value: d,
            },
        ]
    }

    fn state(&self, n_dims: usize) -> &'static [StateTensor] {
        const MATRIX: &[StateTensor] = &[
            StateTensor { name: "row_var", extent: Extent::Rows },
            StateTensor { name: "col_var", extent: Extent::Columns },
        ];
        const VECTOR: &[StateTensor] = &[StateTensor { name: "variance", extent: Extent::Columns }];
        if n_dims >= 2 { MATRIX } else { VECTOR }
    }

    /// Round 1 sums the squares of the gradient and of the tensor, round 2 those of the update, which needs the averages.
    fn sums(&self, n_dims: usize) -> &'static [&'static [Extent]] {
        const OF_UPDATE: &[Extent] = &[Extent::Tensor];
        const MATRIX: &[&[Extent]] = &[&[Extent::Rows, Extent::Columns, Extent::Tensor], OF_UPDATE];
        const VECTOR: &[&[Extent]] = &[&[Extent::Columns, Extent::Tensor], OF_UPDATE];
        if n_dims >= 2 { MATRIX } else { VECTOR }
    }

    /// Weight of the new gradient in the averages, and the largest relative length of an update.
    fn scalars(&self, t: u64) -> [f64; N_SCALARS] {
        [(t as f64).powf(self.beta2_decay), 1.0 / (t as f64).sqrt()]
    }
}
