//! Columns of a matrix, apart and together.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{DType, Op, op};

const N: usize = 37;

/// Columns that fill vectors, and odd ones.
pub(super) fn cases() -> Vec<Case> {
    let parts = [(DType::F32, 64, 2400), (DType::Bf16, 64, 2400), (DType::F16, 33, 7)];
    parts.into_iter().flat_map(|(dtype, left, right)| both(dtype, N, left, right)).collect()
}

/// Every number of rows.
pub(super) fn rows() -> Vec<Case> {
    let types = super::ROWS.into_iter().flat_map(|rows| super::TYPES.map(|dtype| (rows, dtype)));
    types.flat_map(|(rows, dtype)| both(dtype, rows, 80, 96)).collect()
}

fn both(dtype: DType, n: usize, left: usize, right: usize) -> [Case; 2] {
    let x = Operand::random(&[n, left + right], dtype, 1);
    let split =
        Case::new(format!("split {dtype} {n} {left}"), Op::SplitColumns(op::SplitColumns), vec![x], Tolerance::EXACT);
    // A conversion rounds to nearest on both sides.
    let parts = vec![Operand::random(&[n, left], DType::F32, 1), Operand::random(&[n, right], DType::F32, 2)];
    let join = Case::new(format!("join {dtype} {n} {left}"), Op::JoinColumns(op::JoinColumns), parts, Tolerance::EXACT);
    [split.writing(&[n, left], dtype).writing(&[n, right], dtype), join.writing(&[n, left + right], dtype)]
}
