//! Biases: vectors that are added to every row.

use super::adjoints::{Adjoints, NoAdjoint};
use super::columns::Columns;
use super::operation::Operation;
use super::signature::{Signature, columns};
use super::width::Width;
use crate::program::{DType, Instr, ValueId};
use std::ops::Range;

/// `[x [N, C], bias [C]] -> [x + bias]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AddBias;

impl Operation for AddBias {
    fn name(&self) -> &'static str {
        "add_bias"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2, 1)?;
        let (_, c) = s.matrix(s.reads[0])?;
        s.shape(s.reads[1], &[c], Some(DType::F32))?;
        s.same_shape(&[s.reads[0], s.writes[0]])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        adjoints.give(instr.reads[0], dy);
        adjoint_of_bias(instr.reads[1], None, dy, adjoints);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::OfOperands
    }

    fn wide_operands(&self, is_wide: bool, n_reads: usize) -> Range<usize> {
        if is_wide { 0..n_reads } else { 0..0 }
    }
}

/// `[dy [N, C], (residual [C])] -> [db [C]]`: gradient of a bias.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ColumnSum {
    /// A residual is added.
    pub residual: bool,
    /// Use only these columns of `dy`.
    pub columns: Option<Columns>,
}

impl Operation for ColumnSum {
    fn name(&self) -> &'static str {
        "column_sum"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1 + usize::from(self.residual), 1)?;
        let (_, stored) = s.matrix(s.reads[0])?;
        let c = columns(self.columns, stored)?;
        s.shape(s.writes[0], &[c], Some(DType::F32))?;
        s.reads.get(1).map_or(Ok(()), |r| s.shape(r, &[c], Some(DType::F32)))
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if self.residual { vec![(1, 0)] } else { Vec::new() }
    }
}

/// Appends the gradient of a bias that was added to these columns.
pub(super) fn adjoint_of_bias(bias: ValueId, columns: Option<Columns>, dy: ValueId, adjoints: &mut Adjoints) {
    if adjoints.needs(bias) {
        let carried = adjoints.take(bias);
        let db = adjoints.grad_of(bias);
        let op = ColumnSum { residual: carried.is_some(), columns };
        adjoints.emit(op, [dy].into_iter().chain(carried).collect(), &[db]);
        adjoints.give(bias, db);
    }
}
