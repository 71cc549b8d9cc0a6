//! Products and copies of tiles that fit in the first-level cache: the building blocks of attention.
//!
//! If the CPU multiplies bf16 in hardware, tiles from bf16 storage use that hardware: their operands are rounded once
//! more (weights and gradients of scores to bf16, as in FlashAttention on GPUs), sums stay in f32.
#![allow(unsafe_code)] // Calling a version for an instruction set requires a CPU that has it.

use super::simd::simd;
use super::strided::{Strided, VECTOR};
#[cfg(target_arch = "x86_64")]
use super::{tile_pairs, tile_simd};
use crate::isa::{Isa, isa};
#[cfg(target_arch = "x86_64")]
use crate::matmul::has_matrix_unit;
use crate::matmul::{Compute, Epilogue, Storage, TileMut, TileRef, fast_bf16, scratch_bytes, tile_matmul};
use phalanx_device::float::Float;

/// The hardware that multiplies tiles.
pub enum Multiplier<'a> {
    /// The vector units, in f32.
    F32,
    /// The vector units, in bf16, with space for pairs.
    #[cfg(target_arch = "x86_64")]
    Pairs {
        /// Of length [`Multiplier::scratch_len`].
        packed: &'a mut [f32],
    },
    /// The matrix unit, in bf16, with space for packed operands.
    Matrix {
        /// Of length [`Multiplier::scratch_len`].
        packed: &'a mut [f32],
    },
}

impl<'a> Multiplier<'a> {
    /// The fastest multiplier for tiles of this storage.
    pub fn of<T: Float>(packed: &'a mut [f32]) -> Multiplier<'a> {
        if Storage::of::<T>() != Storage::Bf16 || !fast_bf16() {
            return Multiplier::F32;
        }
        #[cfg(target_arch = "x86_64")]
        if !has_matrix_unit() {
            return Multiplier::Pairs { packed };
        }
        Multiplier::Matrix { packed }
    }

    /// Length of the scratch for any product with extents of at most `edge`.
    pub fn scratch_len(edge: usize) -> usize {
        if !fast_bf16() {
            return 0;
        }
        #[cfg(target_arch = "x86_64")]
        if !has_matrix_unit() {
            return tile_pairs::scratch_len(edge);
        }
        scratch_bytes(Compute::Bf16, edge, edge, edge, Storage::F32).div_ceil(size_of::<f32>()).next_multiple_of(VECTOR)
    }

    /// Divides a factor of a product in two: one for the operand when it is packed, one for the sums. An operand in
    /// bf16 gets only powers of two, which do not round.
    pub fn split_factor(&self, factor: f32) -> (f32, f32) {
        const MANTISSA: u32 = (1 << 23) - 1;
        match self {
            Multiplier::F32 => (factor, 1.0),
            _ if factor.to_bits() & MANTISSA == 0 => (factor, 1.0),
            _ => (1.0, factor),
        }
    }

    /// `c = alpha a b`, or `c +=` if `accumulate`.
    ///
    /// # Shapes
    /// `a: [m, k]`, `b: [k, n]` with rows `ldb` apart, `c: [m, n]` with rows `ldc` apart; `n` a multiple of [`VECTOR`].
    ///
    /// # Panics
    /// If a shape exceeds its slice.
    pub fn product(
        &mut self,
        (m, n, k): (usize, usize, usize),
        alpha: f32,
        a: Strided,
        (b, ldb): (&[f32], usize),
        (c, ldc): (&mut [f32], usize),
        accumulate: bool,
    ) {
        if matches!(self, Multiplier::F32) || m == 0 || n == 0 || k == 0 {
            return tile_product((m, n, k), alpha, a, (b, ldb), (c, ldc), accumulate);
        }
        assert!(n.is_multiple_of(VECTOR) && (a.column == 1 || a.row == 1));
        assert!((m - 1) * a.row + (k - 1) * a.column < a.data.len());
        assert!((k - 1) * ldb + n <= b.len() && n <= ldb && (m - 1) * ldc + n <= c.len() && n <= ldc);
        let packed = match self {
            Multiplier::F32 => unreachable!("returned above"),
            #[cfg(target_arch = "x86_64")]
            Multiplier::Pairs { packed } => {
                // SAFETY: only a CPU with the instructions has this multiplier; the asserts keep every access in bounds.
                return unsafe { tile_pairs::product((m, n, k), alpha, a, (b, ldb), (c, ldc), accumulate, packed) };
            }
            Multiplier::Matrix { packed } => packed,
        };
        let left = TileRef::new(a.data.as_ptr(), a.row.max(a.column));
        let left = if a.column == 1 { left } else { left.t() };
        let (right, to) = (TileRef::new(b.as_ptr(), ldb), TileMut::new(c.as_mut_ptr(), ldc));
        let epilogue = Epilogue { accumulate, bias: None, alpha };
        // SAFETY: the asserts keep every access within the slices, whose borrows exclude other writers.
        unsafe {
            let scratch = bytemuck::cast_slice_mut::<f32, u8>(packed);
            tile_matmul(Compute::Bf16, m, n, k, left, right, to, epilogue, scratch);
        }
    }
}

/// `c = alpha a b`, or `c +=` if `accumulate`.
///
/// # Shapes
/// `a: [m, k]`, `b: [k, n]` with rows `ldb` apart, `c: [m, n]` with rows `ldc` apart; `n` a multiple of [`VECTOR`].
///
/// # Panics
/// If a shape exceeds its slice.
fn tile_product(
    (m, n, k): (usize, usize, usize),
    alpha: f32,
    a: Strided,
    (b, ldb): (&[f32], usize),
    (c, ldc): (&mut [f32], usize),
    accumulate: bool,
) {
    if m == 0 || n == 0 || k == 0 {
        assert!(k > 0 || accumulate || m * n == 0, "an empty sum would leave the tile unwritten");
        return;
    }
    assert!(n.is_multiple_of(VECTOR));
    assert!((m - 1) * a.row + (k - 1) * a.column < a.data.len());
    assert!((k - 1) * ldb + n <= b.len() && (m - 1) * ldc + n <= c.len());
    #[cfg(target_arch = "x86_64")]
    {
        if isa() >= Isa::Avx512 {
            // SAFETY: the CPU has AVX-512F; the asserts above keep every access in bounds.
            return unsafe { tile_simd::avx512::product((m, n, k), alpha, a, (b, ldb), (c, ldc), accumulate) };
        }
        if isa() >= Isa::Avx2 {
            // SAFETY: the CPU has AVX2 and FMA; the asserts above keep every access in bounds.
            return unsafe { tile_simd::avx2::product((m, n, k), alpha, a, (b, ldb), (c, ldc), accumulate) };
        }
    }
    plain_product((m, n, k), alpha, a, (b, ldb), (c, ldc), accumulate);
}

simd! {
    fn plain_product(
        shape: (usize, usize, usize),
        alpha: f32,
        a: Strided,
        b: (&[f32], usize),
        c: (&mut [f32], usize),
        accumulate: bool,
    ) {
        let ((m, n, k), (b, ldb), (c, ldc)) = (shape, b, c);
        for i in 0..m {
            let c = &mut c[i * ldc..i * ldc + n];
            if !accumulate {
                c.fill(0.0);
            }
            for j in 0..k {
                let factor = alpha * a.data[i * a.row + j * a.column];
                for (c, b) in c.iter_mut().zip(&b[j * ldb..j * ldb + n]) {
                    *c += factor * b;
                }
            }
        }
    }
}

simd! {
    /// Copies `n_rows` rows of `d` elements, `stride` apart, times `factor`, to rows `ld` apart; zeroes columns
    /// `d..ld`.
    pub fn pack<T: Float>(
        from: &[T],
        stride: usize,
        n_rows: usize,
        d: usize,
        factor: f32,
        to: &mut [f32],
        ld: usize,
    ) {
        for (i, to) in to.chunks_exact_mut(ld).take(n_rows).enumerate() {
            let (kept, padding) = to.split_at_mut(d);
            for (to, from) in kept.iter_mut().zip(&from[i * stride..i * stride + d]) {
                *to = from.to_f32() * factor;
            }
            padding.fill(0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, random};
    use super::*;

    #[test]
    fn products_in_bf16_agree_with_those_in_f32_on_numbers_exact_in_bf16() {
        let eighths = |n, seed| -> Vec<f32> { random(n, seed).iter().map(|x| (x * 8.0).round() / 8.0).collect() };
        for (m, n, k) in [(1, 16, 1), (5, 32, 3), (64, 64, 64), (33, 48, 17), (64, 128, 50)] {
            for (transposed, accumulate, alpha) in [(false, false, 1.0), (true, true, 1.0), (false, true, 0.3)] {
                let (a, b, old) = (eighths(m * k, 1), eighths(k * n, 2), eighths(m * n, 3));
                let left = if transposed { Strided::transposed(&a, m) } else { Strided::rows(&a, k) };
                let mut sums = vec![0.0; m * n];
                tile_product((m, n, k), 1.0, left, (&b, n), (&mut sums, n), false);
                let base = |i: usize| if accumulate { old[i] } else { 0.0 };
                let expected: Vec<f64> =
                    sums.iter().enumerate().map(|(i, x)| (alpha * x) as f64 + base(i) as f64).collect();
                let check = |mut multiplier: Multiplier| {
                    let mut c = old.clone();
                    multiplier.product((m, n, k), alpha, left, (&b, n), (&mut c, n), accumulate);
                    close(&c, &expected, 1e-6);
                };

                check(Multiplier::F32);
                // Also without a matrix unit: then the engine of whole matrices multiplies packed tiles.
                let n_bytes = scratch_bytes(Compute::Bf16, m, n, k, Storage::F32);
                check(Multiplier::Matrix { packed: &mut vec![f32::NAN; n_bytes.div_ceil(4)] });
                #[cfg(target_arch = "x86_64")]
                if isa() >= Isa::Avx512Bf16 {
                    let len = tile_pairs::scratch_len(m.max(n).max(k));
                    check(Multiplier::Pairs { packed: &mut vec![f32::NAN; len] });
                }
            }
        }
    }

    #[test]
    fn product_of_ragged_tiles_matches_a_plain_sum() {
        for (m, n, k) in [(1, 16, 1), (5, 32, 3), (6, 48, 64), (64, 64, 64), (13, 80, 7), (64, 128, 17)] {
            for (transposed, accumulate) in [(false, false), (true, true)] {
                let (a, b, old) = (random(m * k, 1), random(k * n, 2), random(m * n, 3));
                let left = if transposed { Strided::transposed(&a, m) } else { Strided::rows(&a, k) };
                let expected: Vec<f64> = (0..m * n)
                    .map(|e| {
                        let (i, j) = (e / n, e % n);
                        let terms = (0..k).map(|l| a[i * left.row + l * left.column] as f64 * b[l * n + j] as f64);
                        terms.sum::<f64>() + if accumulate { old[e] as f64 } else { 0.0 }
                    })
                    .collect();

                let mut c = old.clone();
                tile_product((m, n, k), 1.0, left, (&b, n), (&mut c, n), accumulate);
                let mut plain = old.clone();
                plain_product((m, n, k), 1.0, left, (&b, n), (&mut plain, n), accumulate);

                close(&c, &expected, 1e-5);
                close(&plain, &expected, 1e-5);
                #[cfg(target_arch = "x86_64")]
                if isa() >= Isa::Avx2 {
                    let mut narrow = old.clone();
                    // SAFETY: the CPU has the features; the slices have the shapes; `n` is a multiple of 16.
                    unsafe { tile_simd::avx2::product((m, n, k), 1.0, left, (&b, n), (&mut narrow, n), accumulate) };
                    close(&narrow, &expected, 1e-5);
                }
            }
        }
    }
}
