//! The negative log-likelihood of texts whose tokens count more or less: the mean over the weights of predicted tokens, as PyTorch's cross-entropy
//! with weights and the reduction `mean`.

use super::Unit;
use super::pairs::{OfPairs, Scalar, Term, log_prob};
use crate::program::Column;

/// The objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weighted;

impl OfPairs for Weighted {
    fn rows(&self) -> usize {
        1
    }

    fn weights(&self) -> Option<Column> {
        Some(Column::LossWeights)
    }

    fn terms(&self) -> Vec<Term> {
        vec![Term { formula: -log_prob(0), unit: Unit::Weight }]
    }

    fn scalars(&self) -> Vec<Scalar> {
        Vec::new()
    }
}
