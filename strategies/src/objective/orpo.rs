//! Odds-ratio preference optimisation: the likelihood of preferred answers with their prompts, and the odds of an answer's average token
//! over those of the rejected one's.
//!
//! Source: Hong et al. 2024, eq. 4 to 7 (arXiv:2403.07691). As in TRL, the likelihood covers the prompt.

use super::Unit;
use super::pairs::{CHOSEN, OfPairs, REJECTED, Scalar, Term, length, log_prob, scalars_of, text};
use crate::program::formula::Expr;

/// The objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Orpo {
    /// Weight of the odds.
    pub beta: f64,
}

fn mean(row: u32) -> Expr {
    log_prob(row) / length(row)
}

fn log_odds() -> Expr {
    let odds = |row: u32| mean(row) - (1.0 - mean(row).exp()).ln();
    odds(CHOSEN) - odds(REJECTED)
}

impl OfPairs for Orpo {
    fn has_texts(&self) -> bool {
        true
    }

    fn terms(&self) -> Vec<Term> {
        let odds = Term { formula: -self.beta * log_odds().log_sigmoid(), unit: Unit::Sample };
        vec![odds, Term { formula: -text(CHOSEN), unit: Unit::ChosenText }]
    }

    fn scalars(&self) -> Vec<Scalar> {
        let mut scalars = scalars_of(|row| self.beta * mean(row), mean);
        let scalar = Scalar::of;
        scalars.push(scalar("nll_loss", -text(CHOSEN), Unit::ChosenText));
        scalars.push(scalar("log_odds_ratio", log_odds().log_sigmoid(), Unit::Sample));
        scalars.push(scalar("log_odds_chosen", log_odds(), Unit::Sample));
        scalars
    }
}
