//! What a run minimises: an objective appends its loss to the passes of a model that it needs.
//!
//! An objective over pairs is a file of this folder and an entry of [`Objective`]. It says whether it compares the model with a frozen
//! reference, and gives its loss and the scalars that it reports as formulas over the rows of a pair ([`crate::program::formula`]).
//! The compiler differentiates the formulas, and every device evaluates them, so neither knows an objective.

mod cpo;
mod dpo;
mod kto;
mod orpo;
mod pairs;
mod report;
mod reward;
mod unit;
mod weighted;

pub use cpo::Cpo;
pub use dpo::{Dpo, DpoLoss};
pub use kto::Kto;
pub use orpo::Orpo;
pub use pairs::SecondRow;
pub use report::{Report, Sums};
pub use reward::Reward;
pub use unit::{Counts, Unit, WEIGHT_MAX, WEIGHT_ONE};
pub use weighted::Weighted;

use crate::model::{BatchShape, Head, ModelConfig, ModelError};
use crate::program::Program;
use pairs::OfPairs;

/// What is minimised.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Objective {
    /// The negative log-likelihood of the labels, averaged over predicted tokens.
    #[default]
    Supervised,
    /// The same, averaged over the weights of these tokens.
    Weighted(Weighted),
    /// That preferred answers become more likely than rejected ones, relative to a reference.
    Dpo(Dpo),
    /// The same without a reference.
    Cpo(Cpo),
    /// The likelihood of preferred answers, and the ratio of the odds of both.
    Orpo(Orpo),
    /// That desirable answers become more likely than under a reference, and undesirable ones less.
    Kto(Kto),
    /// That preferred answers have greater scores than rejected ones.
    Reward(Reward),
}

impl Objective {
    fn of_pairs(&self) -> Option<&dyn OfPairs> {
        match self {
            Objective::Supervised => None,
            Objective::Weighted(weighted) => Some(weighted),
            Objective::Dpo(dpo) => Some(dpo),
            Objective::Cpo(cpo) => Some(cpo),
            Objective::Orpo(orpo) => Some(orpo),
            Objective::Kto(kto) => Some(kto),
            Objective::Reward(reward) => Some(reward),
        }
    }

    /// Rows of a microbatch that belong to one sample of the data.
    pub fn rows_per_sample(&self) -> usize {
        self.of_pairs().map_or(1, OfPairs::rows)
    }

    /// What the second of these rows is, if there is one.
    pub fn second_row(&self) -> Option<SecondRow> {
        self.of_pairs().and_then(OfPairs::second_row)
    }

    /// Whether it compares the model with the one that it begins with.
    pub fn has_reference(&self) -> bool {
        self.of_pairs().is_some_and(OfPairs::has_reference)
    }

    /// Whether the log-probabilities of that model are computed once, by [`Objective::reference`].
    pub fn has_computed_reference(&self) -> bool {
        self.of_pairs().is_some_and(OfPairs::has_computed_reference)
    }

    /// The same objective, which computes them in every pass.
    pub fn with_reference_in_passes(self) -> Objective {
        match self {
            Objective::Dpo(dpo) => Objective::Dpo(Dpo { computed_before: false, ..dpo }),
            other => other,
        }
    }

    /// Whether it needs a model that gives scores.
    pub fn has_scores(&self) -> bool {
        self.of_pairs().is_some_and(OfPairs::has_scores)
    }

    /// What its sums mean.
    pub fn report(&self) -> Report {
        let Some(objective) = self.of_pairs() else {
            return Report { units: vec![Unit::Token], scalars: Vec::new() };
        };
        let units_of = |scalar: &pairs::Scalar| (scalar.name, scalar.terms.iter().map(|term| term.unit).collect());
        Report {
            units: objective.terms().iter().map(|term| term.unit).collect(),
            scalars: objective.scalars().iter().map(units_of).collect(),
        }
    }

    /// The program that computes the log-probabilities of the reference for one microbatch, if they are computed once: with the weights
    /// before the first step.
    ///
    /// # Errors
    /// As [`ModelConfig::forward`].
    pub fn reference(&self, model: &ModelConfig, batch: BatchShape) -> Result<Option<Program>, ModelError> {
        self.has_computed_reference().then(|| pairs::reference_program(model, batch)).transpose()
    }

    /// The forward program of one microbatch, up to the loss.
    ///
    /// # Errors
    /// As [`ModelConfig::forward`].
    pub fn program(&self, model: &ModelConfig, batch: BatchShape) -> Result<Program, ModelError> {
        match self.of_pairs() {
            None => model.forward(batch, Head::Loss),
            Some(objective) => pairs::program(objective, model, batch),
        }
    }
}
