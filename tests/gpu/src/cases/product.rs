//! Matrix products: transposes, types, columns, residual, bias.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{Columns, Compute, DType, MatMul, Op};

const M: usize = 33;
const N: usize = 40;
const K: usize = 56;

/// Products of different shapes and types.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for compute in [Compute::F32, Compute::Bf16] {
        for stored in [DType::F32, DType::Bf16, DType::F16] {
            for m in [MatMul::nt(), MatMul::nn(), MatMul::tn()] {
                cases.push(case(MatMul { compute, ..m }, stored, DType::F32));
                cases.push(case(MatMul { compute, residual: true, alpha: 0.5, ..m }, stored, DType::F32));
                cases.push(case(MatMul { compute, bias: true, ..m }, stored, stored));
                cases.push(case(MatMul { compute, residual: true, alpha: 0.5, ..m }, stored, stored));
                cases.push(case(MatMul { compute, residual: true, bias: true, ..m }, stored, stored));
            }
        }
    }
    let columns = Columns { start: 8, len: 24 };
    cases.push(case(MatMul { a_columns: Some(columns), ..MatMul::nt() }, DType::F32, DType::F32));
    cases.push(case(MatMul { a_columns: Some(columns), ..MatMul::tn() }, DType::F32, DType::F32));
    let c_columns = MatMul { c_columns: Some(columns), residual: true, ..MatMul::nt() };
    cases.push(case(c_columns, DType::F32, DType::F32));
    // Adapters of layers that are computed together: gradients of B, and of what all B multiply.
    for (stored, c) in [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16)] {
        let compute = if c == DType::Bf16 { Compute::Bf16 } else { Compute::F32 };
        let of_b = MatMul { compute, a_columns: Some(columns), b_columns: Some(columns), ..MatMul::tn() };
        cases.push(case(of_b, stored, DType::F32));
        let replacing = MatMul { compute, alpha: 0.5, replaces: true, ..c_columns };
        cases.push(case(MatMul { a_columns: Some(columns), ..replacing }, stored, c));
    }
    cases
}

fn case(m: MatMul, a: DType, c: DType) -> Case {
    // The columns of `a` as stored are those of op(a), or its rows if it is transposed.
    let stored = |rows: usize, cols: usize, transposed: bool| if transposed { [cols, rows] } else { [rows, cols] };
    let k = if m.trans_a { K } else { m.a_columns.map_or(K, |columns| columns.len) };
    let rows = if m.trans_a { m.a_columns.map_or(M, |columns| columns.len) } else { M };
    let n = m.c_columns.or(m.b_columns).map_or(N, |columns| columns.len);
    let n_written = if m.c_columns.is_some() { N } else { n };
    let a_shape =
        if m.a_columns.is_some() { stored(M, K, m.trans_a).map(|x| x.max(32)) } else { stored(M, K, m.trans_a) };
    // Columns of `b` are those of op(b).
    let b_shape = if m.b_columns.is_some() { [k, N] } else { stored(k, n, m.trans_b) };
    let mut reads = vec![Operand::random(&a_shape, a, 1), Operand::random(&b_shape, DType::F32, 2)];
    if m.bias {
        reads.push(Operand::random(&[N], DType::F32, 3));
    }
    if m.residual {
        reads.push(Operand::random(&[rows, n_written], c, 4));
    }
    let name = format!("matmul {a} {m:?}");
    // f32 sums in another order; bf16 operands are rounded alike on both sides.
    let tolerance = Tolerance::of(2e-5);
    // Beside a bf16 residual in place, cuBLASLt rounds the product first, whose absolute value is below 16.
    let rounds_twice = m.residual && !m.replaces && !m.bias && c == DType::Bf16;
    let absolute = if rounds_twice { 16.0 / 512.0 } else { tolerance.absolute };
    let case = Case::new(name, Op::MatMul(m), reads, tolerance).writing(&[rows, n_written], c);
    Case { reused_tolerance: Tolerance { absolute, ..tolerance }, ..case }
}
