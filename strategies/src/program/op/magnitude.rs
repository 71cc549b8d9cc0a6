//! Weights whose rows have trained lengths (DoRA).

use super::Columns;
use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::signature::{Signature, columns};
use super::weight_use::WeightUse;
use super::width::Width;
use crate::program::{DType, Instr, ValueId};
use std::ops::Range;

/// Rows of an adapted weight, one for each column of its product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptedRows {
    /// The columns of the product.
    pub columns: Columns,
    /// Factor of the product of the adapter's matrices.
    pub factor: f32,
    /// The weight is stored `[out, in]`, so its rows are rows; otherwise its columns are.
    pub trans_b: bool,
}

/// `[w, a [r, I], b [K, r]] -> [lengths K]`: the lengths of rows of `w + factor b a`, f32. They count as constants: nothing
/// has a gradient through them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowLengths(pub AdaptedRows);

impl Operation for RowLengths {
    fn name(&self) -> &'static str {
        "row_lengths"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        let RowLengths(rows) = self;
        s.count(3, 1)?;
        let stored = s.matrix(s.reads[0])?;
        let (n_out, n_in) = if rows.trans_b { stored } else { (stored.1, stored.0) };
        let n = columns(Some(rows.columns), n_out)?;
        let (rank, _) = s.matrix(s.reads[1])?;
        let shapes = [vec![stored.0, stored.1], vec![rank, n_in], vec![n, rank]];
        s.reads.iter().zip(shapes).try_for_each(|(v, shape)| s.shape(v, &shape, Some(DType::F32)))?;
        s.shape(s.writes[0], &[n], Some(DType::F32))
    }

    fn weight(&self) -> Option<(usize, WeightUse)> {
        Some((0, WeightUse::Matrix))
    }
}

/// `[x [N, C], magnitude K, lengths K] -> [y]`: these columns times `magnitude / length`, and the others as they are.
/// Source: Liu et al. 2024, DoRA, §4 (arXiv:2402.09353).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Magnitude(pub Columns);

impl Operation for Magnitude {
    fn name(&self) -> &'static str {
        "magnitude"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(3, 1)?;
        check_operands(s, self.0)?;
        s.like(s.writes[0], s.reads[0])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let [x, magnitude, lengths] = instr.reads[..] else { unreachable!("the verifier counts operands") };
        let carried = adjoints.take(magnitude);
        let reads = [x, magnitude, lengths, dy].into_iter().chain(carried).collect();
        let writes = [x, magnitude].map(|v| adjoints.grad_of(v));
        adjoints.emit(MagnitudeBackward { columns: self.0, residual: carried.is_some() }, reads, &writes);
        adjoints.give(magnitude, writes[1]);
        adjoints.give(x, writes[0]);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::OfOperands
    }

    fn wide_operands(&self, is_wide: bool, n_reads: usize) -> Range<usize> {
        if is_wide { 0..n_reads } else { 0..0 }
    }
}

/// `[x, magnitude, lengths, dy, (dmagnitude0)] -> [dx, dmagnitude]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MagnitudeBackward {
    /// The columns.
    pub columns: Columns,
    /// A previous gradient is added to that of the magnitude.
    pub residual: bool,
}

impl Operation for MagnitudeBackward {
    fn name(&self) -> &'static str {
        "magnitude_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(4 + usize::from(self.residual), 2)?;
        let n = check_operands(s, self.columns)?;
        let grads = s.reads.get(4).into_iter().chain(s.writes.get(1));
        grads.into_iter().try_for_each(|v| s.shape(v, &[n], Some(DType::F32)))?;
        s.like(s.reads[3], s.reads[0])?;
        s.like(s.writes[0], s.reads[0])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if self.residual { vec![(4, 1)] } else { Vec::new() }
    }
}

/// Checks the magnitudes and the lengths of these columns, and returns their number.
fn check_operands(s: &Signature<'_>, cols: Columns) -> Result<usize, String> {
    let (_, stored) = s.matrix(s.reads[0])?;
    let n = columns(Some(cols), stored)?;
    s.reads[1..3].iter().try_for_each(|v| s.shape(v, &[n], Some(DType::F32)))?;
    Ok(n)
}
