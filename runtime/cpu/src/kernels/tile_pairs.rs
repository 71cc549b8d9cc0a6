//! Products of tiles in bf16 on the vector units, for CPUs with `VDPBF16PS` and without a matrix unit.
//!
//! A pair holds two neighbours in k. The product broadcasts pairs of A, which may therefore lie in rows or in columns, and reads vectors
//! of pairs of B along its rows. So both operands are rounded in the order in which they lie: no transposition, no panels.
#![allow(unsafe_code)] // Calling a version for an instruction set requires a CPU that has it; vectors are stored through raw pointers.
#![cfg(target_arch = "x86_64")]

use super::strided::{Strided, VECTOR};
use super::tile_simd::avx512_pairs;
use crate::matmul::lanes::first16;
use crate::matmul::pairs::{interleave, narrow};
use std::arch::x86_64::*;

/// Length of the scratch of a product with extents of at most `edge`: each operand in pairs, one per f32.
pub const fn scratch_len(edge: usize) -> usize {
    let edge = edge.next_multiple_of(VECTOR);
    2 * edge * (edge / 2).next_multiple_of(VECTOR)
}

/// `c = alpha a b`, or `c +=` if `accumulate`, of operands that are rounded to bf16.
///
/// # Shapes
/// As for [`super::tile::Multiplier::product`]. One stride of `a` is 1.
///
/// # Safety
/// The CPU multiplies pairs ([`crate::matmul::avx512_bf16::available`]). The slices contain the shapes, `n` is a multiple of [`VECTOR`], and no extent is 0.
///
/// # Panics
/// If the scratch is shorter than [`scratch_len`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn product(
    (m, n, k): (usize, usize, usize),
    alpha: f32,
    a: Strided,
    (b, ldb): (&[f32], usize),
    c: (&mut [f32], usize),
    accumulate: bool,
    scratch: &mut [f32],
) {
    let n_pairs = k.div_ceil(2);
    let (in_row, in_column) = (n_pairs.next_multiple_of(VECTOR), m.next_multiple_of(VECTOR));
    let len = if a.column == 1 { m * in_row } else { n_pairs * in_column };
    let (left, right) = scratch.split_at_mut(len);
    let right = &mut right[..n_pairs * n];
    // SAFETY: the slices contain the shapes, by the caller; the scratch was cut to whole vectors of pairs.
    unsafe {
        let left = if a.column == 1 {
            pairs_in_rows(a.data.as_ptr(), a.row, m, k, left.as_mut_ptr(), in_row);
            Strided { data: left, row: in_row, column: 1 }
        } else {
            pairs_in_columns(a.data.as_ptr(), a.column, k, m, left.as_mut_ptr(), in_column);
            Strided { data: left, row: 1, column: in_column }
        };
        pairs_in_columns(b.as_ptr(), ldb, k, n, right.as_mut_ptr(), n);
        avx512_pairs::product((m, n, n_pairs), alpha, left, (right, n), c, accumulate);
    }
}

/// Pairs of neighbours in a row of `[n_rows, n_columns]`: `[n_rows, n_columns / 2]`, rows `to_ld` apart; an odd one is paired with 0.
///
/// # Safety
/// `from` has the rows, `ld` apart, and `to` has space for rows of whole vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pairs_in_rows(from: *const f32, ld: usize, n_rows: usize, n_columns: usize, to: *mut f32, to_ld: usize) {
    for i in 0..n_rows {
        for j in (0..n_columns).step_by(2 * VECTOR) {
            // SAFETY: within row `i`, by the caller; a masked element is not read, so its address may lie outside.
            unsafe {
                let from = from.add(i * ld + j);
                let low = _mm512_maskz_loadu_ps(first16(n_columns - j), from);
                let high =
                    _mm512_maskz_loadu_ps(first16((n_columns - j).saturating_sub(VECTOR)), from.wrapping_add(VECTOR));
                put(to.add(i * to_ld + j / 2), narrow(low, high));
            }
        }
    }
}

/// Pairs of neighbours in a column of `[n_rows, n_columns]`: `[n_rows / 2, n_columns]`, rows `to_ld` apart; an odd one is paired with 0.
///
/// # Safety
/// As for [`pairs_in_rows`].
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pairs_in_columns(from: *const f32, ld: usize, n_rows: usize, n_columns: usize, to: *mut f32, to_ld: usize) {
    let order = interleave();
    for i in (0..n_rows).step_by(2) {
        for j in (0..n_columns).step_by(VECTOR) {
            let even = first16(n_columns - j);
            let odd = if i + 1 < n_rows { even } else { 0 };
            // SAFETY: within rows `i` and `i + 1`, by the caller; a masked element is not read, so its address may lie outside.
            unsafe {
                let from = from.add(i * ld + j);
                let both = narrow(_mm512_maskz_loadu_ps(even, from), _mm512_maskz_loadu_ps(odd, from.wrapping_add(ld)));
                put(to.add(i / 2 * to_ld + j), _mm512_permutexvar_epi16(order, both));
            }
        }
    }
}

/// # Safety
/// `to` has space for a vector.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put(to: *mut f32, pairs: __m512i) {
    // SAFETY: by the caller.
    unsafe { _mm512_storeu_si512(to.cast(), pairs) }
}
