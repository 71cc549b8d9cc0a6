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
    /// Samples whose answer is labelled desirable.
    Desirable,
    /// The other samples.
    Undesirable,
}

impl Unit {
    /// How many there are.
    pub const N: usize = Unit::Undesirable as usize + 1;

    /// The scalar of the step by which gradients of such a part are scaled.
    pub const fn hyper(self) -> usize {
        match self {
            Unit::Token | Unit::Sample | Unit::Desirable | Unit::Undesirable => Hyper::LOSS_GRAD_SCALE,
            Unit::ChosenToken | Unit::ChosenText => Hyper::TEXT_GRAD_SCALE,
        }
    }
}

/// How many there are of each unit, by its place in [`Unit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts(pub [u64; Unit::N]);

impl Counts {
    /// Adds some of a unit.
    pub fn add(&mut self, unit: Unit, n: u64) {
        self.0[unit as usize] += n;
    }

    /// The number of a unit.
    pub const fn number(&self, unit: Unit) -> u64 {
        self.0[unit as usize]
    }

    /// The number of a unit, at least 1: what sums are divided by.
    pub fn of(&self, unit: Unit) -> f64 {
        self.number(unit).max(1) as f64
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.0.iter_mut().zip(other.0).for_each(|(n, others)| *n += others);
    }
}
