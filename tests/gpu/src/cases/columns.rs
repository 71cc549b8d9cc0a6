//! Columns of a matrix, apart and together.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{DType, Op};

const N: usize = 37;

/// Columns that fill vectors, and odd ones.
pub(super) fn cases() -> Vec<Case> {
    let (f32, bf16, f16) = (DType::F32, DType::Bf16, DType::F16);
    let mut cases = Vec::new();
    for (dtype, left, right) in [(f32, 64, 2400), (bf16, 64, 2400), (f16, 33, 7)] {
        let x = Operand::random(&[N, left + right], dtype, 1);
        let case = Case::new(format!("split {dtype} {left}"), Op::SplitColumns, vec![x], Tolerance::EXACT);
        cases.push(case.writing(&[N, left], dtype).writing(&[N, right], dtype));
        // A conversion rounds to nearest on both sides.
        let parts = vec![Operand::random(&[N, left], f32, 1), Operand::random(&[N, right], f32, 2)];
        let case = Case::new(format!("join {dtype} {left}"), Op::JoinColumns, parts, Tolerance::EXACT);
        cases.push(case.writing(&[N, left + right], dtype));
    }
    cases
}
