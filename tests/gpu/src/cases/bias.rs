//! A bias and its gradient.

use super::norm::of_sum;
use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{Columns, DType, Op, op};

/// Matrices of one warp and of many, odd ones, and runs of columns that begin at odd places.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dtype, n, cols) in [(DType::F32, 37, 1100), (DType::Bf16, 3000, 72), (DType::F16, 300, 33)] {
        cases.push(add(dtype, [n, cols]));
        // The second run begins where no vector does.
        let runs = [(8, 24), (5, 16)].map(|(start, len)| Some(Columns { start, len }));
        let n_runs = if dtype == DType::Bf16 { 1 } else { 2 };
        for columns in [None].into_iter().chain(runs.into_iter().take(n_runs)) {
            cases.extend([false, true].map(|residual| sum(dtype, [n, cols], columns, residual)));
        }
    }
    cases
}

/// Every number of rows, with columns that fill vectors and with odd ones.
pub(super) fn rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, dtype) in super::ROWS.into_iter().flat_map(|rows| super::TYPES.map(|dtype| (rows, dtype))) {
        cases.extend([40, 51].map(|cols| add(dtype, [rows, cols])));
        cases.extend([40, 51].map(|cols| sum(dtype, [rows, cols], None, true)));
    }
    cases
}

fn add(dtype: DType, [n, cols]: [usize; 2]) -> Case {
    let reads = vec![Operand::random(&[n, cols], dtype, 1), Operand::random(&[cols], DType::F32, 2)];
    let name = format!("add bias {dtype} {n} {cols}");
    Case::new(name, Op::AddBias(op::AddBias), reads, Tolerance::EXACT).writing(&[n, cols], dtype)
}

fn sum(dtype: DType, shape: [usize; 2], columns: Option<Columns>, residual: bool) -> Case {
    let len = columns.map_or(shape[1], |columns| columns.len);
    let mut reads = vec![Operand::random(&shape, dtype, 1)];
    reads.extend(residual.then(|| Operand::random(&[len], DType::F32, 2)));
    let name = format!("column sum {dtype} {shape:?} {columns:?} {residual}");
    Case::new(name, Op::ColumnSum(op::ColumnSum { residual, columns }), reads, of_sum(shape[0]))
        .writing(&[len], DType::F32)
}
