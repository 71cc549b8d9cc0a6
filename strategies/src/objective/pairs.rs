//! Objectives over pairs of rows: a preferred answer and a rejected one, or an answer and that to another prompt; and over single rows.

use super::Unit;
use crate::model::{BatchShape, ForwardBuilder, ModelConfig, ModelError, Tensor};
use crate::program::formula::Expr;
use crate::program::{Column, Program};

/// The first row of a pair, and the only one of a sample that is no pair.
pub(super) const CHOSEN: u32 = 0;
pub(super) const REJECTED: u32 = 1;

/// A part of the loss: a mean of a formula.
pub(super) struct Term {
    pub(super) formula: Expr,
    pub(super) unit: Unit,
}

/// A number that a step reports beside the loss: a mean of a formula, or a sum of such means.
pub(super) struct Scalar {
    /// TRL's name.
    pub(super) name: &'static str,
    pub(super) terms: Vec<Term>,
}

impl Scalar {
    pub(super) fn of(name: &'static str, formula: Expr, unit: Unit) -> Scalar {
        Scalar { name, terms: vec![Term { formula, unit }] }
    }
}

/// What the second row of a pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecondRow {
    /// The rejected answer of the sample.
    Rejected,
    /// The prompt of the sample with the answer of the one before it in the microbatch; before the first comes the last.
    Mismatched,
}

/// An objective over pairs, or over rows one by one. The log-probability of an answer is [`log_prob`], that of the frozen reference [`reference`], and that of the
/// answer with its prompt [`text`].
pub(super) trait OfPairs {
    /// Rows of a sample: those of a pair, or one.
    fn rows(&self) -> usize {
        2
    }

    /// What the second row is, if there is one.
    fn second_row(&self) -> Option<SecondRow> {
        (self.rows() == 2).then_some(SecondRow::Rejected)
    }

    /// The column that says how much each label counts in [`log_prob`] and [`length`]; if there is none, each counts once.
    fn weights(&self) -> Option<Column> {
        None
    }

    /// Another column of labels, for which sums and numbers of tokens of the model are the last operand.
    fn labels(&self) -> Option<Column> {
        None
    }

    /// Formulas whose sums over the microbatch the others read as [`Expr::given`], without a derivative.
    fn totals(&self) -> Vec<Expr> {
        Vec::new()
    }

    /// Whether a formula reads [`reference`].
    fn has_reference(&self) -> bool {
        false
    }

    /// Whether what [`reference`] reads was computed before the run.
    fn has_computed_reference(&self) -> bool {
        false
    }

    /// Whether a formula reads [`text`].
    fn has_texts(&self) -> bool {
        false
    }

    /// Whether a formula reads [`score`] instead of log-probabilities.
    fn has_scores(&self) -> bool {
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

/// Score of an answer with its prompt.
pub(super) fn score(row: u32) -> Expr {
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
    let scalar = |name, formula| Scalar::of(name, formula, Unit::Sample);
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
    if objective.has_scores() {
        let scores = model.scores(&mut b);
        let rows = b.row_sums(scores, Column::LastId);
        return Ok(finished(objective, b, &[rows]));
    }
    let logits = model.logits(&mut b);
    let labels = if objective.has_texts() { Column::NextIds } else { Column::Labels };
    let log_probs = b.log_probs(logits, labels);
    let mut rows = vec![match objective.weights() {
        Some(weights) => b.weighted_row_sums(log_probs, Column::Labels, weights),
        None => b.row_sums(log_probs, Column::Labels),
    }];
    if objective.has_texts() {
        rows.push(b.row_sums(log_probs, Column::NextIds));
    }
    if objective.has_computed_reference() {
        rows.push(b.reference_sums());
    } else if objective.has_reference() {
        rows.push(b.reference(|b| answers(model, b)));
    }
    if let Some(labels) = objective.labels() {
        rows.push(b.row_sums(log_probs, labels));
    }
    Ok(finished(objective, b, &rows))
}

/// The program that computes what objectives read of a reference, which is the model before the first step.
pub(super) fn reference_program(model: &ModelConfig, batch: BatchShape) -> Result<Program, ModelError> {
    let mut b = model.builder(batch)?;
    let sums = answers(model, &mut b);
    Ok(b.finish_reference(sums))
}

/// Log-probabilities of the answers.
fn answers(model: &ModelConfig, b: &mut ForwardBuilder) -> Tensor {
    let logits = model.logits(b);
    let log_probs = b.log_probs(logits, Column::Labels);
    b.row_sums(log_probs, Column::Labels)
}

fn finished(objective: &dyn OfPairs, mut b: ForwardBuilder, rows: &[Tensor]) -> Program {
    let totals = objective.totals();
    let given = (!totals.is_empty()).then(|| b.totals(&totals, rows, objective.rows()));
    let terms: Vec<(Expr, usize)> =
        objective.terms().into_iter().map(|term| (term.formula, term.unit.hyper())).collect();
    let scalars = objective.scalars().into_iter().flat_map(|scalar| scalar.terms);
    let scalars: Vec<Expr> = scalars.map(|term| term.formula).collect();
    b.finish_formulas(&terms, &scalars, (rows, given), objective.rows())
}
