//! What parts of losses are averaged over.

use crate::program::Hyper;
use std::ops::AddAssign;

/// What a part of a loss is averaged over, over all ranks and microbatches of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Predicted tokens.
    Token,
    /// Samples of the data: a pair is one.
    Sample,
    /// Predicted tokens of preferred answers.
    ChosenToken,
    /// Tokens of preferred answers and of their prompts, except the first.
    ChosenText,
}

impl Unit {
    /// The scalar of the step by which gradients of such a part are scaled.
    pub const fn hyper(self) -> usize {
        match self {
            Unit::Token | Unit::Sample => Hyper::LOSS_GRAD_SCALE,
            Unit::ChosenToken | Unit::ChosenText => Hyper::TEXT_GRAD_SCALE,
        }
    }
}

/// How many there are of each unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// [`Unit::Token`].
    pub tokens: u64,
    /// [`Unit::Sample`].
    pub samples: u64,
    /// [`Unit::ChosenToken`].
    pub chosen_tokens: u64,
    /// [`Unit::ChosenText`].
    pub chosen_text: u64,
}

impl Counts {
    /// The number of this unit; at least 1.
    pub fn of(&self, unit: Unit) -> f64 {
        let n = match unit {
            Unit::Token => self.tokens,
            Unit::Sample => self.samples,
            Unit::ChosenToken => self.chosen_tokens,
            Unit::ChosenText => self.chosen_text,
        };
        n.max(1) as f64
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.tokens += other.tokens;
        self.samples += other.samples;
        self.chosen_tokens += other.chosen_tokens;
        self.chosen_text += other.chosen_text;
    }
}
