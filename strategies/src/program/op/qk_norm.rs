//! Norms over all queries and over all keys of a token, whose heads may be on several tensor-parallel ranks.

use super::adjoints::{Adjoints, NoAdjoint};
use super::operation::Operation;
use super::shares::{Pieces, Share, inside};
use super::signature::Signature;
use super::width::Width;
use crate::program::{DType, Instr, Value, ValueId};

/// Columns of packed qkv that hold queries and keys; the columns after them hold values, as many as keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QkColumns {
    /// Columns of queries, the first ones.
    pub q: usize,
    /// Columns of keys, which follow.
    pub k: usize,
}

impl QkColumns {
    /// Tokens of packed qkv with these columns.
    fn check_tokens(&self, s: &Signature<'_>) -> Result<usize, String> {
        let (n, c) = s.matrix(s.reads[0])?;
        if c == self.q + 2 * self.k {
            return Ok(n);
        }
        Err(format!("{c} columns are not {} of queries and {} each of keys and values", self.q, self.k))
    }
}

/// `[qkv] -> [squares [N, 2]]`: the sums of squares of the queries and of the keys of each token, f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkSquares(pub QkColumns);

impl Operation for QkSquares {
    fn name(&self) -> &'static str {
        "qk_squares"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(1, 1)?;
        let n = self.0.check_tokens(s)?;
        s.shape(s.writes[0], &[n, 2], Some(DType::F32))
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let qkv = instr.reads[0];
        if adjoints.needs(qkv) {
            let carried = adjoints.take(qkv);
            let reads = [qkv, dy].into_iter().chain(carried).collect();
            let dqkv = adjoints.grad_of(qkv);
            adjoints.emit(QkSquaresBackward { columns: self.0, residual: carried.is_some() }, reads, &[dqkv]);
            adjoints.give(qkv, dqkv);
        }
        Ok(())
    }
}

/// `[qkv, dsquares [N, 2], (dqkv0)] -> [dqkv]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkSquaresBackward {
    /// Columns of queries and keys.
    pub columns: QkColumns,
    /// A previous gradient is added.
    pub residual: bool,
}

impl Operation for QkSquaresBackward {
    fn name(&self) -> &'static str {
        "qk_squares_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(2 + usize::from(self.residual), 1)?;
        let n = self.columns.check_tokens(s)?;
        s.shape(s.reads[1], &[n, 2], Some(DType::F32))?;
        s.reads[2..].iter().chain(s.writes).try_for_each(|v| s.like(v, s.reads[0]))
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if self.residual { vec![(2, 0)] } else { Vec::new() }
    }
}

/// `[qkv, gain_q [H D], gain_k [K D], squares [N, 2]] -> [qkv']`: RMS norm over all queries and over all keys of a
/// token, whose squares [`QkSquares`] sums. Source: OLMo Team 2024, OLMo 2 (arXiv:2501.00656).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// This rank's columns.
    pub columns: QkColumns,
    /// Columns whose squares are summed: those of all tensor-parallel ranks, counted on each rank that holds them.
    pub summed: QkColumns,
    /// Added to the mean of the squares.
    pub eps: f32,
}

impl QkNorm {
    /// Checks gains of queries and of keys, or their gradients.
    fn check_gains(&self, s: &Signature<'_>, gains: &[&Value]) -> Result<(), String> {
        let extents = [self.columns.q, self.columns.k];
        gains.iter().zip(extents).try_for_each(|(g, extent)| s.shape(g, &[extent], Some(DType::F32)))
    }
}

impl Operation for QkNorm {
    fn name(&self) -> &'static str {
        "qk_norm"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(4, 1)?;
        let n = self.columns.check_tokens(s)?;
        self.check_gains(s, &s.reads[1..3])?;
        s.shape(s.reads[3], &[n, 2], Some(DType::F32))?;
        s.like(s.writes[0], s.reads[0])
    }

    fn adjoint(&self, instr: &Instr, dy: ValueId, adjoints: &mut Adjoints) -> Result<(), NoAdjoint> {
        let (qkv, gains, squares) = (instr.reads[0], &instr.reads[1..3], instr.reads[3]);
        let carried: Vec<ValueId> = gains.iter().filter_map(|g| adjoints.take(*g)).collect();
        let reads = [qkv, gains[0], gains[1], squares, dy].into_iter().chain(carried.iter().copied()).collect();
        let writes = [qkv, squares, gains[0], gains[1]].map(|v| adjoints.grad_of(v));
        adjoints.emit(QkNormBackward { norm: *self, residual: !carried.is_empty() }, reads, &writes);
        adjoints.give_all(gains, &writes[2..]);
        adjoints.give(squares, writes[1]);
        adjoints.give(qkv, writes[0]);
        Ok(())
    }

    fn width(&self) -> Width {
        Width::Half
    }

    fn operands_of(&self, columns: &Pieces) -> Option<Vec<(usize, Share)>> {
        let QkColumns { q, k } = self.columns;
        let gains = |range| Share::Param { dim: 0, pieces: inside(columns, range) };
        Some(vec![(1, gains(0..q)), (2, gains(q..q + k)), (0, Share::Columns(columns.clone()))])
    }
}

/// `[qkv, gain_q, gain_k, squares, dqkv', (dgain_q0, dgain_k0)] -> [dqkv, dsquares [N, 2], dgain_q, dgain_k]`: the
/// gradient of qkv for given squares, and the gradient of the squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormBackward {
    /// The norm.
    pub norm: QkNorm,
    /// Previous gradients are added to those of the gains.
    pub residual: bool,
}

impl Operation for QkNormBackward {
    fn name(&self) -> &'static str {
        "qk_norm_backward"
    }

    fn check(&self, s: &Signature<'_>) -> Result<(), String> {
        s.count(5 + 2 * usize::from(self.residual), 4)?;
        let n = self.norm.columns.check_tokens(s)?;
        for gains in [&s.reads[1..3], &s.reads[5..], &s.writes[2..]] {
            self.norm.check_gains(s, gains)?;
        }
        s.shape(s.reads[3], &[n, 2], Some(DType::F32))?;
        s.shape(s.writes[1], &[n, 2], Some(DType::F32))?;
        s.like(s.reads[4], s.reads[0])?;
        s.like(s.writes[0], s.reads[0])
    }

    fn in_place_pairs(&self, _n_reads: usize) -> Vec<(usize, usize)> {
        if self.residual { vec![(5, 2), (6, 3)] } else { Vec::new() }
    }
}
