//! Kahneman-Tversky optimisation: answers that are labelled one by one become more or less likely, relative to a frozen reference and to
//! how far the model has moved from it.
//!
//! Source: Ethayarajh et al. 2024, §3.2 (arXiv:2402.01306). As in TRL, the distance from the reference is estimated over a microbatch,
//! from each prompt with the answer to another one, and has no gradient.

use super::Unit;
use super::pairs::{OfPairs, Scalar, SecondRow, Term, log_prob, reference};
use crate::program::Column;
use crate::program::formula::Expr;

/// The objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kto {
    /// How closely the model stays to the reference.
    pub beta: f64,
    /// Weight of desirable answers.
    pub desirable_weight: f64,
    /// Weight of undesirable answers.
    pub undesirable_weight: f64,
}

const ANSWER: u32 = 0;
const MISMATCHED: u32 = 1;
/// The operand behind the two of the model and the reference.
const DESIRABLE: u32 = 2;

/// Log-ratio, model over reference.
fn ratio(row: u32) -> Expr {
    log_prob(row) - reference(row)
}

/// 1 of a desirable answer, otherwise 0.
fn is_desirable() -> Expr {
    Expr::count(DESIRABLE, ANSWER).positive()
}

fn is_undesirable() -> Expr {
    1.0 - is_desirable()
}

/// The estimate of the divergence from the reference.
fn divergence() -> Expr {
    (Expr::given(0) / Expr::given(1)).relu()
}

impl OfPairs for Kto {
    fn second_row(&self) -> Option<SecondRow> {
        Some(SecondRow::Mismatched)
    }

    fn has_reference(&self) -> bool {
        true
    }

    fn labels(&self) -> Option<Column> {
        Some(Column::DesirableLabels)
    }

    /// The sum of the log-ratios of mismatched answers, and their number.
    fn totals(&self) -> Vec<Expr> {
        vec![ratio(MISMATCHED), Expr::from(1.0)]
    }

    fn terms(&self) -> Vec<Term> {
        let x = || self.beta * (ratio(ANSWER) - divergence());
        let desirable = self.desirable_weight * is_desirable() * (1.0 - x().sigmoid());
        let undesirable = self.undesirable_weight * is_undesirable() * (1.0 - (-x()).sigmoid());
        vec![Term { formula: desirable + undesirable, unit: Unit::Sample }]
    }

    fn scalars(&self) -> Vec<Scalar> {
        let reward = || self.beta * ratio(ANSWER);
        let desirable = |value: Expr| Term { formula: is_desirable() * value, unit: Unit::Desirable };
        let undesirable = |value: Expr| Term { formula: is_undesirable() * value, unit: Unit::Undesirable };
        vec![
            Scalar { name: "rewards/chosen", terms: vec![desirable(reward())] },
            Scalar { name: "rewards/rejected", terms: vec![undesirable(reward())] },
            Scalar { name: "rewards/margins", terms: vec![desirable(reward()), undesirable(-reward())] },
            Scalar { name: "logps/chosen", terms: vec![desirable(log_prob(ANSWER))] },
            Scalar { name: "logps/rejected", terms: vec![undesirable(log_prob(ANSWER))] },
            Scalar::of("kl", divergence(), Unit::Sample),
        ]
    }
}
