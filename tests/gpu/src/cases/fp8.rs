//! Products in FP8: how weights are stored, transposes, odd numbers of rows, rows of every length, columns, residual, bias.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{Columns, Compute, DType, MatMul, Op};

const NT: MatMul = MatMul { compute: Compute::Fp8, ..MatMul::nt() };
const NN: MatMul = MatMul { compute: Compute::Fp8, ..MatMul::nn() };

/// Products of different shapes and types.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for m in [NT, NN] {
        for b in [DType::F32, DType::Bf16, DType::E4m3] {
            cases.push(case(m, DType::Bf16, b, DType::F32, [33, 48, 80]));
            cases.push(case(MatMul { residual: true, alpha: 0.5, ..m }, DType::Bf16, b, DType::Bf16, [33, 48, 80]));
        }
        cases.push(case(m, DType::F32, DType::Bf16, DType::Bf16, [5, 80, 48]));
        cases.push(case(MatMul { bias: true, ..m }, DType::Bf16, DType::E4m3, DType::F32, [7, 48, 80]));
        cases.push(case(
            MatMul { bias: true, residual: true, ..m },
            DType::Bf16,
            DType::E4m3,
            DType::Bf16,
            [7, 48, 80],
        ));
        cases.push(case(MatMul { residual: true, ..m }, DType::Bf16, DType::E4m3, DType::F32, [130, 272, 144]));
        let columns = Columns { start: 8, len: 48 };
        cases.push(case(MatMul { a_columns: Some(columns), ..m }, DType::Bf16, DType::E4m3, DType::F32, [3, 48, 16]));
        let columns = Columns { start: 3, len: 48 };
        cases.push(case(MatMul { a_columns: Some(columns), ..m }, DType::Bf16, DType::E4m3, DType::Bf16, [3, 48, 16]));
    }
    cases
}

/// Rows of one element more than a warp, than a block, than the registers of a block hold.
pub(super) fn rows() -> Vec<Case> {
    let of = |rows, k| case(NT, DType::Bf16, DType::E4m3, DType::F32, [rows, k, 16]);
    [(1, 16), (1, 272), (2, 4112), (3, 8208), (1, 32784)].map(|(rows, k)| of(rows, k)).to_vec()
}

fn case(m: MatMul, a: DType, b: DType, c: DType, [rows, k, n]: [usize; 3]) -> Case {
    let n_stored = m.a_columns.map_or(k, |columns| columns.start + columns.len + 5);
    let b_shape = if m.trans_b { [n, k] } else { [k, n] };
    // Rows of very different sizes, one of zeros among them, and weights that are beyond the largest number.
    let size = |i: usize| if i == 1 { 0.0 } else { 10f64.powi(i as i32 % 5 - 2) };
    let mut left = Operand::random(&[rows, n_stored], a, 1);
    left.elements.iter_mut().enumerate().for_each(|(i, x)| *x *= size(i / n_stored));
    let mut right = Operand::random(&b_shape, b, 2);
    right.elements[3] *= 100.0;
    let mut reads = vec![left.rounded(), right.rounded()];
    if m.bias {
        reads.push(Operand::random(&[n], DType::F32, 3));
    }
    if m.residual {
        reads.push(Operand::random(&[rows, n], c, 4));
    }
    // The operands are rounded alike, to numbers whose products are exact; sums are f32 in another order.
    let sum = 100.0 * (k as f64).sqrt();
    let tolerance = Tolerance { absolute: 2e-6 * sum, relative: 2e-5 };
    // Beside a bf16 residual in place, cuBLASLt rounds the product first.
    let rounds_twice = m.residual && !m.bias && c == DType::Bf16;
    let absolute = if rounds_twice { sum / 64.0 } else { tolerance.absolute };
    let name = format!("matmul in fp8 {a} {b} {rows}x{k}x{n} {m:?}");
    let case = Case::new(name, Op::MatMul(m), reads, tolerance).writing(&[rows, n], c);
    Case { reused_tolerance: Tolerance { absolute, ..tolerance }, ..case }
}
