//! Norm over all queries and over all keys of a token.

use super::norm::of_sum;
use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{DType, Op, QkColumns, QkNorm, op};

/// f32 sums of up to 8,200 squares in two orders.
const SQUARES: Tolerance = Tolerance::of(3e-6);

/// Columns of one warp and of several, tokens for several rounds of blocks, odd columns, and more than one launch has.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dtype, n, q, k) in [
        (DType::Bf16, 2500, 48, 16),
        (DType::F32, 1100, 520, 132),
        (DType::F16, 37, 33, 11),
        (DType::F32, 3, 8200, 1000),
    ] {
        let columns = QkColumns { q, k };
        cases.extend([squares(dtype, n, columns), forward(dtype, n, columns)]);
        for residual in [false, true] {
            cases.extend([squares_backward(dtype, n, columns, residual), backward(dtype, n, columns, residual)]);
        }
    }
    cases
}

/// Heads of the usual widths in every type, on a few tokens.
pub(super) fn widths() -> Vec<Case> {
    let mut cases = Vec::new();
    for (d, dtype) in super::HEAD_WIDTHS.into_iter().flat_map(|d| super::TYPES.map(|dtype| (d, dtype))) {
        let columns = QkColumns { q: 3 * d, k: d };
        cases.extend([squares(dtype, 33, columns), squares_backward(dtype, 33, columns, true)]);
        cases.extend([forward(dtype, 33, columns), backward(dtype, 33, columns, true)]);
    }
    cases
}

fn shape(n: usize, columns: QkColumns) -> [usize; 2] {
    [n, columns.q + 2 * columns.k]
}

fn norm(columns: QkColumns) -> QkNorm {
    // As on the first of two tensor-parallel ranks that share the keys.
    QkNorm { columns, summed: QkColumns { q: 2 * columns.q, k: 2 * columns.k }, eps: 1e-5 }
}

fn gains(columns: QkColumns, seed: u64) -> [Operand; 2] {
    [Operand::random(&[columns.q], DType::F32, seed), Operand::random(&[columns.k], DType::F32, seed + 1)]
}

/// Squares of about a hundred columns, so that the norm is of order 1.
fn some_squares(n: usize, columns: QkColumns) -> Operand {
    Operand::random(&[n, 2], DType::F32, 4).map(|s| 2.0 * columns.q as f64 * (1.0 + s.abs()))
}

fn squares(dtype: DType, n: usize, columns: QkColumns) -> Case {
    let reads = vec![Operand::random(&shape(n, columns), dtype, 1)];
    let name = format!("qk squares {dtype} {columns:?}");
    Case::new(name, Op::QkSquares(op::QkSquares(columns)), reads, SQUARES).writing(&[n, 2], DType::F32)
}

fn squares_backward(dtype: DType, n: usize, columns: QkColumns, residual: bool) -> Case {
    let shape = shape(n, columns);
    let mut reads = vec![Operand::random(&shape, dtype, 1), Operand::random(&[n, 2], DType::F32, 2)];
    reads.extend(residual.then(|| Operand::random(&shape, dtype, 3)));
    let name = format!("qk squares backward {dtype} {columns:?} {residual}");
    Case::new(name, Op::QkSquaresBackward(op::QkSquaresBackward { columns, residual }), reads, Tolerance::EXACT)
        .writing(&shape, dtype)
}

fn forward(dtype: DType, n: usize, columns: QkColumns) -> Case {
    let mut reads = vec![Operand::random(&shape(n, columns), dtype, 1)];
    reads.extend(gains(columns, 2));
    reads.push(some_squares(n, columns));
    let name = format!("qk norm {dtype} {columns:?}");
    Case::new(name, Op::QkNorm(norm(columns)), reads, Tolerance::EXACT).writing(&shape(n, columns), dtype)
}

fn backward(dtype: DType, n: usize, columns: QkColumns, residual: bool) -> Case {
    let mut reads = vec![Operand::random(&shape(n, columns), dtype, 1)];
    reads.extend(gains(columns, 2));
    reads.extend([some_squares(n, columns), Operand::random(&shape(n, columns), dtype, 5)]);
    reads.extend(gains(columns, 6).into_iter().filter(|_| residual));
    let name = format!("qk norm backward {dtype} {columns:?} {residual}");
    let case =
        Case::new(name, Op::QkNormBackward(op::QkNormBackward { norm: norm(columns), residual }), reads, of_sum(n));
    let case = case.writing(&shape(n, columns), dtype).writing(&[n, 2], DType::F32);
    case.writing(&[columns.q], DType::F32).writing(&[columns.k], DType::F32)
}
