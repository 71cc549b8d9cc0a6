//! Operations on each element for itself.

use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::shares::{Pieces, Share};
use super::signature::Signature;
use super::width::Width;
use crate::program::{Instr, ValueId};
use std::ops::Range;

/// `[a, b] -> [a + b]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Add;

impl Operation for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 1)?;
        s.same_shape(&[s.reads[0], s.reads[1], s.writes[0]])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(0, 0), (1, 0)]
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        instr.reads.iter().for_each(|x| adjoints.give(*x, dy));
        Ok(())
    }

    // Terms of the residual stream.
    fn wide_operands(&self, _is_wide: bool, n_reads: usize) -> Range<usize> {
        0..n_reads
    }
}

/// `[x] -> [factor x]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// The factor.
    pub factor: f32,
}

impl Operation for Scale {
    fn name(&self) -> &'static str {
        "scale"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1, 1)?;
        s.like(s.writes[0], s.reads[0])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        adjoints.simple(*self, instr.reads[0], vec![dy]);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::OfOperands
    }

    fn wide_operands(&self, is_wide: bool, n_reads: usize) -> Range<usize> {
        if is_wide { 0..n_reads } else { 0..0 }
    }

    fn operands_of(&self, columns: &Pieces) -> Option<Vec<(usize, Share)>> {
        Some(vec![(0, Share::Columns(columns.clone()))])
    }
}

/// `[x] -> [y]`: conversion to the element type of `y`; a copy, of any bits, if it is that of `x`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cast;

impl Operation for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1, 1)?;
        match s.reads[0].dtype == s.writes[0].dtype {
            true => s.like(s.writes[0], s.reads[0]),
            false => s.same_shape(&[s.reads[0], s.writes[0]]),
        }
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        adjoints.simple(Cast, instr.reads[0], vec![dy]);
        Ok(())
    }
}

impl Adjoints {
    /// Appends a sum of two gradients.
    pub(super) fn add(&mut self, a: ValueId, b: ValueId, sum: ValueId) {
        self.emit(Add, vec![a, b], &[sum]);
    }
}
