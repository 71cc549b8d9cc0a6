//! Matrix products of a program, mapped to [`crate::matmul`].

use super::buffer::Buffer;
use crate::matmul::{Compute, Epilogue, Mat, Slice, Storage, matmul, scratch_bytes};
use crate::tasks::{Cut, Tasks};
use bytemuck::Pod;
use half::{bf16, f16};
use phalanx_device::e4m3;
use phalanx_device::float::Float;
use phalanx_strategies::program::packing::E4M3_STEP;
use phalanx_strategies::program::{self, DType, MatMul, Program, ValueId};
use phalanx_strategies::target::ALIGN_BYTES;

/// Sizes `(m, n, k)` of a product.
fn sizes(m: &MatMul, a: (usize, usize), c: (usize, usize)) -> (usize, usize, usize) {
    let a_cols = m.a_columns.map_or(a.1, |cols| cols.len);
    let (rows, k) = if m.trans_a { (a_cols, a.0) } else { (a.0, a_cols) };
    (rows, m.c_columns.map_or(c.1, |cols| cols.len), k)
}

const fn compute(m: &MatMul) -> Compute {
    match m.compute {
        program::Compute::F32 => Compute::F32,
        // Numbers of e4m3 are exact in bf16, and so are their products with powers of two.
        program::Compute::Bf16 | program::Compute::Fp8 => Compute::Bf16,
    }
}

const fn storage(dtype: DType) -> Storage {
    match dtype {
        DType::Bf16 => Storage::Bf16,
        DType::F16 => Storage::F16,
        DType::F32 | DType::F64 | DType::I32 | DType::E4m3 => Storage::F32,
    }
}

/// Bytes of scratch of a product.
pub(super) fn product_scratch(p: &Program, m: &MatMul, a: ValueId, c: ValueId) -> usize {
    let shape = |v: ValueId| (p.value(v).n_rows(), p.value(v).n_columns());
    let (rows, n, k) = sizes(m, shape(a), shape(c));
    let rounded = if m.compute == program::Compute::Fp8 { rounded_bytes(rows, n, k) } else { 0 };
    rounded + scratch_bytes(compute(m), rows, n, k, storage(p.value(c).dtype))
}

/// Runs a product; the residual, if there is one, is already in `c`.
///
/// # Safety
/// The buffers hold live values of the shapes that the verifier checked, and `c` overlaps neither `a` nor `b`.
pub(super) unsafe fn product(m: &MatMul, a: Buffer, b: Buffer, bias: Option<Buffer>, c: Buffer, scratch: &mut [u8]) {
    let (rows, n, k) = sizes(m, (a.rows, a.cols), (c.rows, c.cols));
    let is_fp8 = m.compute == program::Compute::Fp8;
    let (rounded, scratch) = scratch.split_at_mut(if is_fp8 { rounded_bytes(rows, n, k) } else { 0 });
    // SAFETY: the caller's contract.
    let (c, bias) = unsafe { (c.mat_mut(m.c_columns), bias.map(|bias| bias.slice::<f32>())) };
    let (a, b) = if is_fp8 {
        let (of_a, of_b) = bytemuck::cast_slice_mut(rounded).split_at_mut(rows * k);
        // SAFETY: the caller's contract.
        unsafe {
            round_rows(a, m.a_columns.map_or(0, |columns| columns.start), k, of_a);
            round_weight(b, &mut of_b[..n * k]);
        }
        (Mat::new(Slice::Bf16(of_a), k), Mat::new(Slice::Bf16(&of_b[..n * k]), b.cols))
    } else {
        // SAFETY: the caller's contract.
        unsafe { (a.mat(m.a_columns), b.mat(m.b_columns)) }
    };
    let a = if m.trans_a { a.t() } else { a };
    let b = if m.trans_b { b.t() } else { b };
    let epilogue = Epilogue { accumulate: m.residual && !m.replaces, bias, alpha: m.alpha };
    matmul(compute(m), rows, n, k, a, b, c, epilogue, scratch);
}

/// Bytes of both rounded operands of a product in FP8.
const fn rounded_bytes(m: usize, n: usize, k: usize) -> usize {
    ((m + n) * k * size_of::<bf16>()).next_multiple_of(ALIGN_BYTES)
}

/// `k` columns of `a` from `first` on, each row rounded as products in FP8 round it.
///
/// # Safety
/// As for [`Buffer::slice`].
unsafe fn round_rows(a: Buffer, first: usize, k: usize, out: &mut [bf16]) {
    fn round<T: Float>(a: &[T], cols: usize, first: usize, k: usize, out: &mut [bf16]) {
        out.par_chunks_mut(k).zip(a.par_chunks(cols)).for_each(|(out, row)| {
            out.iter_mut().zip(&row[first..]).for_each(|(y, x)| *y = <bf16 as Float>::from_f32(x.to_f32()));
            e4m3::round_row(out);
        });
    }
    // SAFETY: the caller's contract.
    unsafe {
        match a.dtype {
            DType::Bf16 => round::<bf16>(a.slice(), a.cols, first, k, out),
            DType::F16 => round::<f16>(a.slice(), a.cols, first, k, out),
            _ => round::<f32>(a.slice(), a.cols, first, k, out),
        }
    }
}

/// A weight, rounded as products in FP8 round it.
///
/// # Safety
/// As for [`Buffer::slice`].
unsafe fn round_weight(b: Buffer, out: &mut [bf16]) {
    fn round<T: Pod + Sync>(b: &[T], out: &mut [bf16], rounded: impl Fn(T) -> bf16 + Sync) {
        const CHUNK: usize = 1 << 14;
        let tasks = out.par_chunks_mut(CHUNK).zip(b.par_chunks(CHUNK));
        tasks.for_each(|(out, b)| out.iter_mut().zip(b).for_each(|(y, x)| *y = rounded(*x)));
    }
    let of_code = |x: u8| <bf16 as Float>::from_f32(e4m3::decode(x) * E4M3_STEP);
    let of_f32 = |x: f32| e4m3::rounded(<bf16 as Float>::from_f32(x), E4M3_STEP);
    // SAFETY: the caller's contract.
    unsafe {
        match b.dtype {
            DType::E4m3 => round::<u8>(b.slice(), out, of_code),
            DType::Bf16 => round::<bf16>(b.slice(), out, |x| e4m3::rounded(x, E4M3_STEP)),
            DType::F16 => round::<f16>(b.slice(), out, |x| of_f32(x.to_f32())),
            _ => round::<f32>(b.slice(), out, of_f32),
        }
    }
}
