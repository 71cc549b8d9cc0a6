//! Products and copies of tiles that fit in the first-level cache: the building blocks of attention.
#![allow(unsafe_code)] // The AVX-512 product keeps its sums in registers, which needs intrinsics on raw pointers.

use super::simd::simd;
use crate::cpu::element::Element;

/// Tile edges and leading dims of right-hand sides are multiples of this: one 512-bit register of f32.
pub const VECTOR: usize = 16;

/// A read-only matrix with any strides.
#[derive(Clone, Copy)]
pub struct Strided<'a> {
    /// Its memory, element (0, 0) first.
    pub data: &'a [f32],
    /// Elements from a row to the next.
    pub row: usize,
    /// Elements from a column to the next.
    pub column: usize,
}

impl<'a> Strided<'a> {
    /// Row-major with `n_columns` columns.
    pub fn rows(data: &'a [f32], n_columns: usize) -> Strided<'a> {
        Strided { data, row: n_columns, column: 1 }
    }

    /// The transpose of a row-major matrix with `n_columns` columns.
    pub fn transposed(data: &'a [f32], n_columns: usize) -> Strided<'a> {
        Strided { data, row: 1, column: n_columns }
    }
}

/// `c = a b`, added to what is there if `accumulate`.
///
/// # Shapes
/// `a: [m, k]`, `b: [k, n]` with rows `ldb` apart, `c: [m, n]` with rows `ldc` apart; `n` a multiple of [`VECTOR`].
///
/// # Panics
/// If a shape goes beyond its slice.
pub fn tile_product(
    (m, n, k): (usize, usize, usize),
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
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has AVX-512F; the asserts above keep every access in bounds.
        return unsafe { avx512::product((m, n, k), a, (b, ldb), (c, ldc), accumulate) };
    }
    plain_product((m, n, k), a, (b, ldb), (c, ldc), accumulate);
}

simd! {
    fn plain_product(
        shape: (usize, usize, usize),
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
                let factor = a.data[i * a.row + j * a.column];
                for (c, b) in c.iter_mut().zip(&b[j * ldb..j * ldb + n]) {
                    *c += factor * b;
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::{Strided, VECTOR};
    use std::arch::x86_64::*;

    /// Rows of a block of sums. With four registers a row, 24 of the 32 registers hold sums, and a step of the inner
    /// loop does 24 multiply-adds for 10 loads.
    const ROWS: usize = 6;

    /// # Safety
    /// The shapes are within the slices, `n` is a multiple of [`VECTOR`], no extent is 0.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn product(
        (m, n, k): (usize, usize, usize),
        a: Strided,
        (b, ldb): (&[f32], usize),
        (c, ldc): (&mut [f32], usize),
        accumulate: bool,
    ) {
        let mut column = 0;
        while column < n {
            let vectors = ((n - column) / VECTOR).min(4);
            let mut row = 0;
            while row < m {
                let rows = (m - row).min(ROWS);
                // SAFETY: `row + rows <= m` and `column + vectors * VECTOR <= n`, so all accesses are of the shapes.
                unsafe {
                    let a_start = a.data.as_ptr().add(row * a.row);
                    let b_start = b.as_ptr().add(column);
                    let c_start = c.as_mut_ptr().add(row * ldc + column);
                    let block = Block { k, a: a_start, a_strides: (a.row, a.column), b: b_start, ldb };
                    match vectors {
                        4 => block.rows::<4>(rows, c_start, ldc, accumulate),
                        3 => block.rows::<3>(rows, c_start, ldc, accumulate),
                        2 => block.rows::<2>(rows, c_start, ldc, accumulate),
                        _ => block.rows::<1>(rows, c_start, ldc, accumulate),
                    }
                }
                row += rows;
            }
            column += vectors * VECTOR;
        }
    }

    struct Block {
        k: usize,
        a: *const f32,
        a_strides: (usize, usize),
        b: *const f32,
        ldb: usize,
    }

    impl Block {
        #[target_feature(enable = "avx512f")]
        unsafe fn rows<const V: usize>(&self, rows: usize, c: *mut f32, ldc: usize, accumulate: bool) {
            // SAFETY: the caller's promise, passed on.
            unsafe {
                match rows {
                    6 => self.sums::<6, V>(c, ldc, accumulate),
                    5 => self.sums::<5, V>(c, ldc, accumulate),
                    4 => self.sums::<4, V>(c, ldc, accumulate),
                    3 => self.sums::<3, V>(c, ldc, accumulate),
                    2 => self.sums::<2, V>(c, ldc, accumulate),
                    _ => self.sums::<1, V>(c, ldc, accumulate),
                }
            }
        }

        #[target_feature(enable = "avx512f")]
        unsafe fn sums<const R: usize, const V: usize>(&self, c: *mut f32, ldc: usize, accumulate: bool) {
            let mut sums = [[_mm512_setzero_ps(); V]; R];
            let (mut a, mut b) = (self.a, self.b);
            let (row, column) = self.a_strides;
            for _ in 0..self.k {
                let mut right = [_mm512_setzero_ps(); V];
                for v in 0..V {
                    // SAFETY: `V` vectors of row `k` of `b`, in bounds by the caller's promise.
                    right[v] = unsafe { _mm512_loadu_ps(b.add(v * VECTOR)) };
                }
                for r in 0..R {
                    // SAFETY: element `(r, k)` of `a`, in bounds by the caller's promise.
                    let left = _mm512_set1_ps(unsafe { *a.add(r * row) });
                    for v in 0..V {
                        sums[r][v] = _mm512_fmadd_ps(left, right[v], sums[r][v]);
                    }
                }
                (a, b) = (a.wrapping_add(column), b.wrapping_add(self.ldb));
            }
            for r in 0..R {
                for v in 0..V {
                    // SAFETY: vector `v` of row `r` of `c`, in bounds by the caller's promise.
                    unsafe {
                        let place = c.add(r * ldc + v * VECTOR);
                        let old = if accumulate { _mm512_loadu_ps(place) } else { _mm512_setzero_ps() };
                        _mm512_storeu_ps(place, _mm512_add_ps(old, sums[r][v]));
                    }
                }
            }
        }
    }
}

simd! {
    /// Copies `n_rows` rows of `d` elements that lie `stride` apart, times `factor`, to rows `ld` apart; columns from
    /// `d` to `ld` are zeroed.
    pub fn pack<T: Element>(
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
                tile_product((m, n, k), left, (&b, n), (&mut c, n), accumulate);
                let mut plain = old.clone();
                plain_product((m, n, k), left, (&b, n), (&mut plain, n), accumulate);

                close(&c, &expected, 1e-5);
                close(&plain, &expected, 1e-5);
            }
        }
    }
}
