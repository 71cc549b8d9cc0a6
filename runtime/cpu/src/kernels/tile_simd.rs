//! The product of tiles with its sums in registers: in f32 for AVX-512 and for AVX2, and of bf16 pairs for AVX-512.
#![allow(unsafe_code)] // Sums stay in registers only with intrinsics, which read and write through raw pointers.
#![cfg(target_arch = "x86_64")]

use crate::kernels::strided::Strided;
use std::arch::x86_64::*;

/// Defines one version of `product`: its CPU features, vector operations, rows of a block of sums, and possible widths
/// of a block in vectors, widest first.
macro_rules! product {
    (
        $(#[$meta:meta])*
        $module:ident, features: $features:literal, rows: $rows:literal, widths: [$widest:literal $(, $width:literal)*],
        lanes: $lanes:literal, zero: $zero:ident, load: $load:ident, store: $store:ident, broadcast: $broadcast:ident,
        multiply_add: $multiply_add:ident, multiply: $multiply:ident, add: $add:ident
    ) => {
        $(#[$meta])*
        pub mod $module {
            use super::*;

            /// See [`super::super::tile::tile_product`]; the sums are multiplied by `alpha`.
            ///
            /// # Safety
            /// The CPU has the features, the slices contain the shapes, `n` is a multiple of 16, and no extent is 0.
            #[target_feature(enable = $features)]
            pub unsafe fn product(
                (m, n, k): (usize, usize, usize),
                alpha: f32,
                a: Strided,
                (b, ldb): (&[f32], usize),
                (c, ldc): (&mut [f32], usize),
                accumulate: bool,
            ) {
                let mut column = 0;
                while column < n {
                    let width = ((n - column) / $lanes).min($widest);
                    let mut row = 0;
                    while row < m {
                        let rows = (m - row).min($rows);
                        // SAFETY: `row + rows <= m` and `column + width * lanes <= n`: all accesses are within the
                        // shapes.
                        unsafe {
                            let (a_start, b_start) = (a.data.as_ptr().add(row * a.row), b.as_ptr().add(column));
                            let block = Block { k, alpha, a: a_start, a_strides: (a.row, a.column), b: b_start, ldb };
                            let to = c.as_mut_ptr().add(row * ldc + column);
                            match width {
                                $widest => of_width::<$widest>(&block, rows, to, ldc, accumulate),
                                $($width => of_width::<$width>(&block, rows, to, ldc, accumulate),)*
                                _ => unreachable!("n is a multiple of 16"),
                            }
                        }
                        row += rows;
                    }
                    column += width * $lanes;
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn of_width<const V: usize>(
                block: &Block,
                rows: usize,
                c: *mut f32,
                ldc: usize,
                accumulate: bool,
            ) {
                // SAFETY: the caller's promise, passed on.
                unsafe {
                    match rows {
                        6 => sums::<6, V>(block, c, ldc, accumulate),
                        5 => sums::<5, V>(block, c, ldc, accumulate),
                        4 => sums::<4, V>(block, c, ldc, accumulate),
                        3 => sums::<3, V>(block, c, ldc, accumulate),
                        2 => sums::<2, V>(block, c, ldc, accumulate),
                        _ => sums::<1, V>(block, c, ldc, accumulate),
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn sums<const R: usize, const V: usize>(block: &Block, c: *mut f32, ldc: usize, accumulate: bool) {
                let mut sums = [[$zero(); V]; R];
                let (mut a, mut b) = (block.a, block.b);
                let (row, column) = block.a_strides;
                for _ in 0..block.k {
                    let mut right = [$zero(); V];
                    for v in 0..V {
                        // SAFETY: `V` vectors of a row of `b`, in bounds by the caller's promise.
                        right[v] = unsafe { $load(b.add(v * $lanes)) };
                    }
                    for r in 0..R {
                        // SAFETY: an element of row `r` of `a`, in bounds by the caller's promise.
                        let left = $broadcast(unsafe { *a.add(r * row) });
                        for v in 0..V {
                            sums[r][v] = $multiply_add(left, right[v], sums[r][v]);
                        }
                    }
                    (a, b) = (a.wrapping_add(column), b.wrapping_add(block.ldb));
                }
                let alpha = $broadcast(block.alpha);
                for r in 0..R {
                    for v in 0..V {
                        // SAFETY: vector `v` of row `r` of `c`, in bounds by the caller's promise.
                        unsafe {
                            let to = c.add(r * ldc + v * $lanes);
                            let old = if accumulate { $load(to) } else { $zero() };
                            $store(to, $add(old, $multiply(alpha, sums[r][v])));
                        }
                    }
                }
            }
        }
    };
}

/// The operands of a block of sums.
struct Block {
    k: usize,
    alpha: f32,
    a: *const f32,
    a_strides: (usize, usize),
    b: *const f32,
    ldb: usize,
}

product! {
    /// 24 of 32 registers hold sums; a step of the inner loop does 24 multiply-adds for 10 loads.
    avx512, features: "avx512f", rows: 6, widths: [4, 3, 2, 1],
    lanes: 16, zero: _mm512_setzero_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps, broadcast: _mm512_set1_ps,
    multiply_add: _mm512_fmadd_ps, multiply: _mm512_mul_ps, add: _mm512_add_ps
}

product! {
    /// 12 of 16 registers hold sums; a step of the inner loop does 12 multiply-adds for 8 loads.
    avx2, features: "avx2,fma", rows: 6, widths: [2],
    lanes: 8, zero: _mm256_setzero_ps, load: _mm256_loadu_ps, store: _mm256_storeu_ps, broadcast: _mm256_set1_ps,
    multiply_add: _mm256_fmadd_ps, multiply: _mm256_mul_ps, add: _mm256_add_ps
}

product! {
    /// As [`avx512`], but every 32-bit lane of the operands is a pair of bf16, so `k` and the strides count pairs: twice the rate.
    /// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, `VDPBF16PS`.
    avx512_pairs, features: "avx512f,avx512bf16", rows: 6, widths: [4, 3, 2, 1],
    lanes: 16, zero: _mm512_setzero_ps, load: _mm512_loadu_ps, store: _mm512_storeu_ps, broadcast: _mm512_set1_ps,
    multiply_add: multiply_add_pairs, multiply: _mm512_mul_ps, add: _mm512_add_ps
}

#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_add_pairs(a: __m512, b: __m512, sum: __m512) -> __m512 {
    // SAFETY: all types are 512 plain bits.
    unsafe {
        _mm512_dpbf16_ps(sum, std::mem::transmute::<__m512, __m512bh>(a), std::mem::transmute::<__m512, __m512bh>(b))
    }
}
