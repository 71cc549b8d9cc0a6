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
use std::collections::BTreeMap;

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

/// What a loss is averaged over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Predicted tokens.
    Token,
    /// Samples of the data: a pair is one.
    Sample,
}

impl Objective {
    /// What the loss and the scalars are averaged over.
    pub fn unit(&self) -> Unit {
        match self {
            Objective::Supervised => Unit::Token,
            Objective::Dpo(_) => Unit::Sample,
        }
    }

    /// The means of the scalars by name, from their sums over `n_units`.
    pub fn named(&self, sums: &[f64], n_units: f64) -> BTreeMap<String, f64> {
        let names = self.scalars().into_iter().map(str::to_owned);
        names.zip(sums.iter().map(|sum| sum / n_units)).collect()
    }

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
