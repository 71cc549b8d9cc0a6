//! Matrix products of a program, mapped to [`crate::matmul`].

use super::buffer::Buffer;
use crate::matmul::{Compute, Epilogue, Storage, matmul, scratch_bytes};
use phalanx_strategies::program::{self, DType, MatMul, Program, ValueId};

/// Sizes `(m, n, k)` of a product.
fn sizes(m: &MatMul, a: (usize, usize), c: (usize, usize)) -> (usize, usize, usize) {
    let a_cols = m.a_columns.map_or(a.1, |cols| cols.len);
    let (rows, k) = if m.trans_a { (a_cols, a.0) } else { (a.0, a_cols) };
    (rows, m.c_columns.map_or(c.1, |cols| cols.len), k)
}

const fn compute(m: &MatMul) -> Compute {
    match m.compute {
        program::Compute::F32 => Compute::F32,
        program::Compute::Bf16 => Compute::Bf16,
    }
}

const fn storage(dtype: DType) -> Storage {
    match dtype {
        DType::Bf16 => Storage::Bf16,
        DType::F16 => Storage::F16,
        DType::F32 | DType::F64 | DType::I32 => Storage::F32,
    }
}

/// Bytes of scratch of a product.
pub(super) fn product_scratch(p: &Program, m: &MatMul, a: ValueId, c: ValueId) -> usize {
    let shape = |v: ValueId| (p.value(v).n_rows(), p.value(v).n_columns());
    let (rows, n, k) = sizes(m, shape(a), shape(c));
    scratch_bytes(compute(m), rows, n, k, storage(p.value(c).dtype))
}

/// Runs a product; the residual, if there is one, is already in `c`.
///
/// # Safety
/// The buffers hold live values of the shapes that the verifier checked, and `c` overlaps neither `a` nor `b`.
pub(super) unsafe fn product(m: &MatMul, a: Buffer, b: Buffer, bias: Option<Buffer>, c: Buffer, scratch: &mut [u8]) {
    let (rows, n, k) = sizes(m, (a.rows, a.cols), (c.rows, c.cols));
    // SAFETY: the caller's contract.
    let (a, b, c, bias) = unsafe {
        (a.mat(m.a_columns), b.mat(m.b_columns), c.mat_mut(m.c_columns), bias.map(|bias| bias.slice::<f32>()))
    };
    let a = if m.trans_a { a.t() } else { a };
    let b = if m.trans_b { b.t() } else { b };
    let epilogue = Epilogue { accumulate: m.residual && !m.replaces, bias, alpha: m.alpha };
    matmul(compute(m), rows, n, k, a, b, c, epilogue, scratch);
}
