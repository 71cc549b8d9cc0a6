//! Objectives over pairs of answers: each answer is a row, the preferred one first.

use super::Unit;
use crate::model::{BatchShape, ModelConfig, ModelError};
use crate::program::formula::Expr;
use crate::program::{Column, Program};

/// Rows of a pair.
pub(super) const ROWS: usize = 2;
pub(super) const CHOSEN: u32 = 0;
pub(super) const REJECTED: u32 = 1;

/// A part of the loss: a mean of a formula.
pub(super) struct Term {
    pub(super) formula: Expr,
    pub(super) unit: Unit,
}

/// A number that a step reports beside the loss: a mean of a formula.
pub(super) struct Scalar {
    /// TRL's name.
    pub(super) name: &'static str,
    pub(super) formula: Expr,
    pub(super) unit: Unit,
}

/// An objective over pairs. The log-probability of an answer is [`log_prob`], that of the frozen reference [`reference`], and that of the
/// answer with its prompt [`text`].
pub(super) trait OfPairs {
    /// Whether a formula reads [`reference`].
    fn has_reference(&self) -> bool {
        false
    }

    /// Whether a formula reads [`text`].
    fn has_texts(&self) -> bool {
        false
    }

    /// The parts of the loss, which is their sum.
    fn terms(&self) -> Vec<Term>;

    /// What is reported.
    fn scalars(&self) -> Vec<Scalar>;
}

const MODEL: u32 = 0;
/// The second operand: an objective compares with a reference, or reads texts.
const OTHER: u32 = 1;

/// Log-probability of an answer, summed over its tokens, nats.
pub(super) fn log_prob(row: u32) -> Expr {
    Expr::sum(MODEL, row)
}

/// The same under the frozen reference.
pub(super) fn reference(row: u32) -> Expr {
    Expr::sum(OTHER, row)
}

/// The same of the answer with its prompt.
pub(super) fn text(row: u32) -> Expr {
    Expr::sum(OTHER, row)
}

/// Tokens of an answer.
pub(super) fn length(row: u32) -> Expr {
    Expr::count(MODEL, row)
}

/// The scalars that every objective over pairs reports, from the reward of an answer and what is reported as its log-probability.
pub(super) fn scalars_of(reward: impl Fn(u32) -> Expr, log_prob: impl Fn(u32) -> Expr) -> Vec<Scalar> {
    let margin = || reward(CHOSEN) - reward(REJECTED);
    let scalar = |name, formula| Scalar { name, formula, unit: Unit::Sample };
    vec![
        scalar("rewards/chosen", reward(CHOSEN)),
        scalar("rewards/rejected", reward(REJECTED)),
        scalar("rewards/accuracies", margin().positive()),
        scalar("rewards/margins", margin()),
        scalar("logps/chosen", log_prob(CHOSEN)),
        scalar("logps/rejected", log_prob(REJECTED)),
    ]
}

/// The forward program of one microbatch.
pub(super) fn program(objective: &dyn OfPairs, model: &ModelConfig, batch: BatchShape) -> Result<Program, ModelError> {
    let mut b = model.builder(batch)?;
    let logits = model.logits(&mut b);
    let labels = if objective.has_texts() { Column::NextIds } else { Column::Labels };
    let log_probs = b.log_probs(logits, labels);
    let mut rows = vec![b.row_sums(log_probs, Column::Labels)];
    if objective.has_texts() {
        rows.push(b.row_sums(log_probs, Column::NextIds));
    }
    if objective.has_reference() {
        rows.push(b.reference(|b| {
            let logits = model.logits(b);
            let log_probs = b.log_probs(logits, Column::Labels);
            b.row_sums(log_probs, Column::Labels)
        }));
    }
    let terms: Vec<(Expr, usize)> =
        objective.terms().into_iter().map(|term| (term.formula, term.unit.hyper())).collect();
    let scalars: Vec<Expr> = objective.scalars().into_iter().map(|scalar| scalar.formula).collect();
    Ok(b.finish_formulas(&terms, &scalars, &rows, ROWS))
}
