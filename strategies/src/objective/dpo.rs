//! Direct preference optimisation: a preferred answer becomes more likely than a rejected one, relative to a frozen reference.
//!
//! Source: Rafailov et al. 2023, §4 (arXiv:2305.18290); Mitchell 2023 for smoothed labels; Zhao et al. 2023, SLiC, for the hinge
//! (arXiv:2305.10425); Azar et al. 2023, §5, for IPO (arXiv:2310.12036).

use super::Scalar;
use crate::model::{BatchShape, ModelConfig, ModelError};
use crate::program::Program;
use crate::program::formula::Expr;

/// The function of the difference of the log-ratios.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DpoLoss {
    /// `-ln sigmoid(beta x)`.
    #[default]
    Sigmoid,
    /// `max(0, 1 - beta x)`.
    Hinge,
    /// `(x - 1 / (2 beta))²`, with log-probabilities averaged over the tokens of an answer.
    Ipo,
}

/// The objective; its pairs are two rows, the preferred answer first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dpo {
    /// How closely the model stays to the reference.
    pub beta: f64,
    /// The loss.
    pub loss: DpoLoss,
    /// Probability that a label of a pair is wrong, with [`DpoLoss::Sigmoid`].
    pub label_smoothing: f64,
}

/// Rows of a pair.
const CHOSEN: u32 = 0;
const REJECTED: u32 = 1;
/// Operands of the formulas: rows of the model, and of the reference.
const MODEL: u32 = 0;
const REFERENCE: u32 = 1;

impl Dpo {
    /// Log-probability of an answer; for IPO, that of its average token.
    fn log_prob(&self, pass: u32, row: u32) -> Expr {
        match self.loss {
            DpoLoss::Ipo => Expr::sum(pass, row) / Expr::count(pass, row),
            DpoLoss::Sigmoid | DpoLoss::Hinge => Expr::sum(pass, row),
        }
    }

    fn loss(&self) -> Expr {
        let ratio = |row| self.log_prob(MODEL, row) - self.log_prob(REFERENCE, row);
        let x = ratio(CHOSEN) - ratio(REJECTED);
        match self.loss {
            DpoLoss::Sigmoid => {
                let (right, wrong) = ((self.beta * x.clone()).log_sigmoid(), (-self.beta * x).log_sigmoid());
                -((1.0 - self.label_smoothing) * right + self.label_smoothing * wrong)
            }
            DpoLoss::Hinge => (1.0 - self.beta * x).relu(),
            DpoLoss::Ipo => {
                let distance = x - 1.0 / (2.0 * self.beta);
                distance.clone() * distance
            }
        }
    }

    /// What a step reports beside the loss.
    pub(super) fn scalars(&self) -> Vec<Scalar> {
        let reward = |row| self.beta * (self.log_prob(MODEL, row) - self.log_prob(REFERENCE, row));
        let margin = || reward(CHOSEN) - reward(REJECTED);
        let scalar = |name, formula| Scalar { name, formula };
        vec![
            scalar("rewards/chosen", reward(CHOSEN)),
            scalar("rewards/rejected", reward(REJECTED)),
            scalar("rewards/accuracies", margin().positive()),
            scalar("rewards/margins", margin()),
            scalar("logps/chosen", self.log_prob(MODEL, CHOSEN)),
            scalar("logps/rejected", self.log_prob(MODEL, REJECTED)),
        ]
    }

    pub(super) fn program(&self, model: &ModelConfig, batch: BatchShape) -> Result<Program, ModelError> {
        let mut b = model.builder(batch)?;
        let logits = model.logits(&mut b);
        let rows = b.row_log_probs(logits);
        let of_reference = b.reference(|b| {
            let logits = model.logits(b);
            b.row_log_probs(logits)
        });
        let scalars = self.scalars().into_iter().map(|scalar| scalar.formula);
        let formulas: Vec<Expr> = std::iter::once(self.loss()).chain(scalars).collect();
        Ok(b.finish_formulas(&formulas, &[rows, of_reference], 2))
    }
}
