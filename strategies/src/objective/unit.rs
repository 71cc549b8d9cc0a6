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
    /// Predicted tokens, each as much as its weight says: [`WEIGHT_ONE`] of this unit are a weight of 1.
    Weight,
}

/// Weights are multiples of `1 / WEIGHT_ONE`. Their sums are sums of whole numbers, which are the same in any order, so that runs on other meshes divide
/// by the same number.
pub const WEIGHT_ONE: u64 = 1 << 24;

/// The greatest weight of a token.
pub const WEIGHT_MAX: f32 = (1 << 20) as f32;

impl Unit {
    /// How many there are.
    pub const N: usize = Unit::Weight as usize + 1;

    /// The scalar of the step by which gradients of such a part are scaled.
    pub const fn hyper(self) -> usize {
        match self {
            Unit::Token | Unit::Sample | Unit::Desirable | Unit::Undesirable | Unit::Weight => Hyper::LOSS_GRAD_SCALE,
            Unit::ChosenToken | Unit::ChosenText => Hyper::TEXT_GRAD_SCALE,
        }
    }
}

/// How many there are of each unit, by its place in [`Unit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts(pub [u64; Unit::N]);

impl Counts {
    /// Adds some of a unit. No step has more than fit; only sums of greatest weights over more than 2^20 tokens would.
    pub fn add(&mut self, unit: Unit, n: u64) {
        let all = &mut self.0[unit as usize];
        *all = all.saturating_add(n);
    }

    /// The number of a unit.
    pub const fn number(&self, unit: Unit) -> u64 {
        self.0[unit as usize]
    }

    /// What sums are divided by: the number of a unit, or the sum of weights; 1 if there is nothing.
    pub fn of(&self, unit: Unit) -> f64 {
        match (self.number(unit), unit) {
            (0, _) => 1.0,
            (n, Unit::Weight) => n as f64 / WEIGHT_ONE as f64,
            (n, _) => n as f64,
        }
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.0.iter_mut().zip(other.0).for_each(|(n, others)| *n = n.saturating_add(others));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_divided_by_weights_and_never_by_nothing() {
        let mut counts = Counts::default();
        assert_eq!((counts.of(Unit::Weight), counts.of(Unit::Token)), (1.0, 1.0));

        counts.add(Unit::Weight, WEIGHT_ONE / 4);
        counts.add(Unit::Token, 3);

        assert_eq!((counts.of(Unit::Weight), counts.of(Unit::Token)), (0.25, 3.0));
    }
}
