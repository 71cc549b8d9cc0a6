//! Contrastive preference optimisation: a preferred answer becomes more likely than a rejected one, without a reference.
//!
//! Source: Xu et al. 2024, §3 (arXiv:2401.08417); Meng et al. 2024, SimPO, §2 (arXiv:2405.14734), for average tokens and a margin.

use super::Unit;
use super::pairs::{CHOSEN, OfPairs, REJECTED, Scalar, Term, length, log_prob, scalars_of};
use crate::program::formula::Expr;

/// The objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cpo {
    /// Scale of the difference of log-probabilities.
    pub beta: f64,
    /// Margin by which the preferred answer wins, and log-probabilities averaged over tokens: SimPO.
    pub margin: Option<f64>,
    /// Weight of the likelihood of preferred answers.
    pub alpha: f64,
    /// Probability that a label of a pair is wrong.
    pub label_smoothing: f64,
}

impl Cpo {
    fn score(&self, row: u32) -> Expr {
        if self.margin.is_some() { log_prob(row) / length(row) } else { log_prob(row) }
    }
}

/// The negative log-likelihood of preferred answers, averaged over their tokens.
pub(super) fn likelihood() -> (Expr, Unit) {
    (-log_prob(CHOSEN), Unit::ChosenToken)
}

impl OfPairs for Cpo {
    fn terms(&self) -> Vec<Term> {
        let x = self.beta * (self.score(CHOSEN) - self.score(REJECTED)) - self.margin.unwrap_or(0.0);
        let wrong = self.label_smoothing;
        let formula = -((1.0 - wrong) * x.clone().log_sigmoid() + wrong * (-x).log_sigmoid());
        let (of_text, unit) = likelihood();
        let text = Term { formula: self.alpha * of_text, unit };
        [Some(Term { formula, unit: Unit::Sample }), (self.alpha > 0.0).then_some(text)].into_iter().flatten().collect()
    }

    fn scalars(&self) -> Vec<Scalar> {
        let mut scalars = scalars_of(|row| self.beta * self.score(row), |row| self.score(row));
        if self.alpha > 0.0 {
            let (formula, unit) = likelihood();
            scalars.push(Scalar::of("nll_loss", formula, unit));
        }
        scalars
    }
}
