//! Rows of adapted weights with trained lengths.

use super::norm::of_sum;
use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{AdaptedRows, Columns, DType, Op, op};

/// Columns that begin at odd places, of one block and of many; weights in both orientations.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for trans_b in [true, false] {
        cases.push(lengths([70, 300], 3, Columns { start: 5, len: 61 }, trans_b));
        cases.push(lengths([9, 7], 1, Columns { start: 0, len: 9 }, trans_b));
    }
    for (dtype, n, cols) in [(DType::F32, 37, 110), (DType::Bf16, 300, 72), (DType::F16, 30, 33)] {
        let columns = Columns { start: 3, len: cols - 5 };
        cases.push(scale([n, cols], dtype, columns));
        cases.extend([false, true].map(|residual| adjoint([n, cols], dtype, columns, residual)));
    }
    cases
}

fn lengths([n_out, n_in]: [usize; 2], rank: usize, columns: Columns, trans_b: bool) -> Case {
    let shape = if trans_b { [n_out, n_in] } else { [n_in, n_out] };
    let shapes = [shape, [rank, n_in], [columns.len, rank]];
    let reads = shapes.iter().zip(1..).map(|(shape, seed)| Operand::random(shape, DType::F32, seed)).collect();
    let op = Op::RowLengths(op::RowLengths(AdaptedRows { columns, factor: 0.7, trans_b }));
    // A sum of f64 in another order, rounded once; terms of f32 are rounded a few times.
    let case = Case::new(format!("row lengths {shape:?} {trans_b}"), op, reads, Tolerance::of(1e-6));
    case.writing(&[columns.len], DType::F32)
}

/// A matrix, and numbers like lengths.
fn operands(shape: [usize; 2], dtype: DType, columns: Columns) -> Vec<Operand> {
    let vector = |seed| Operand::random(&[columns.len], DType::F32, seed).map(|x| f64::from((1.0 + x.abs()) as f32));
    vec![Operand::random(&shape, dtype, 1), vector(2), vector(3)]
}

fn scale(shape: [usize; 2], dtype: DType, columns: Columns) -> Case {
    let reads = operands(shape, dtype, columns);
    Case::new(format!("magnitude {dtype} {shape:?}"), Op::Magnitude(op::Magnitude(columns)), reads, Tolerance::EXACT)
        .writing(&shape, dtype)
}

fn adjoint(shape: [usize; 2], dtype: DType, columns: Columns, residual: bool) -> Case {
    let mut reads = operands(shape, dtype, columns);
    reads.push(Operand::random(&shape, dtype, 4));
    reads.extend(residual.then(|| Operand::random(&[columns.len], DType::F32, 5)));
    let name = format!("adjoint of magnitude {dtype} {shape:?} {residual}");
    Case::new(name, Op::MagnitudeBackward(op::MagnitudeBackward { columns, residual }), reads, of_sum(shape[0]))
        .writing(&shape, dtype)
        .writing(&[columns.len], DType::F32)
}
