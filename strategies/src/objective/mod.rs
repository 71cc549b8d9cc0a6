//! What a run minimises: an objective appends its loss to the passes of a model that it needs.
//!
//! An objective is a file of this folder. It says how many rows of a microbatch belong to one sample of the data, which passes over the
//! model it needs, and its loss and the scalars that it reports as formulas over the rows of a sample ([`crate::program::formula`]).
//! The compiler differentiates the formulas, and every device evaluates them, so neither knows an objective.

mod dpo;

pub use dpo::{Dpo, DpoLoss};

use crate::model::{BatchShape, Head, ModelConfig, ModelError};
use crate::program::Program;
use crate::program::formula::Expr;

/// What is minimised.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Objective {
    /// The negative log-likelihood of the labels, averaged over predicted tokens.
    #[default]
    Supervised,
    /// That preferred answers are more likely than rejected ones, averaged over pairs.
    Dpo(Dpo),
}

/// A number that a step reports beside the loss: a mean over samples.
#[derive(Clone)]
pub struct Scalar {
    /// Its name in metrics, that of TRL.
    pub name: &'static str,
    /// Its value for one sample.
    pub formula: Expr,
}

impl Objective {
    /// Name in configurations.
    pub fn name(&self) -> &'static str {
        match self {
            Objective::Supervised => "supervised",
            Objective::Dpo(_) => "dpo",
        }
    }

    /// Rows of a microbatch that belong to one sample of the data.
    pub fn rows_per_sample(&self) -> usize {
        match self {
            Objective::Supervised => 1,
            Objective::Dpo(_) => 2,
        }
    }

    /// Names of the scalars that follow the loss in [`crate::program::Role::LossSum`]: sums over samples.
    pub fn scalars(&self) -> Vec<&'static str> {
        match self {
            Objective::Supervised => Vec::new(),
            Objective::Dpo(dpo) => dpo.scalars().iter().map(|scalar| scalar.name).collect(),
        }
    }

    /// The forward program of one microbatch, up to the loss.
    ///
    /// # Errors
    /// As [`ModelConfig::forward`].
    pub fn program(&self, model: &ModelConfig, batch: BatchShape) -> Result<Program, ModelError> {
        match self {
            Objective::Supervised => model.forward(batch, Head::Loss),
            Objective::Dpo(dpo) => dpo.program(model, batch),
        }
    }
}
