//! Products of one row, `c = alpha · x B + bias (+ c)`: those of a token in generation.
//!
//! Each element of B is used once, so the time is that of reading B; packing B first would take another pass over it.
//! Columns of C are divided among tasks, and the sum of an element does not depend on the division (MATMUL-1).

use super::operand::{Epilogue, Storage, TileMut, TileRef};
use crate::isa::{Isa, isa};
use crate::tasks::{Cut, Tasks};
use half::{bf16, f16};
use phalanx_device::float::Float;

/// Partial sums of an element where k is contiguous.
const LANES: usize = 32;
/// Rows of stored B that are read at once.
const ROWS: usize = 4;
/// Columns whose sums are in registers where k is not contiguous.
const COLUMNS: usize = 128;
/// Least elements of B of a task: they take longer than its distribution.
const ELEMENTS_PER_TASK: usize = 1 << 15;

/// Whether the CPU has fused vector multiplications, and the operands are those of a token.
pub(super) fn fits(m: usize, k: usize, a: TileRef, c: TileMut) -> bool {
    isa() >= Isa::Avx2 && m == 1 && k > 0 && !a.transposed && a.storage == Storage::F32 && c.storage == Storage::F32
}

/// Runs a product of one row on the threads of the current pool.
///
/// # Safety
/// As for [`super::tile_matmul`], and [`fits`] holds.
pub(super) unsafe fn run(n: usize, k: usize, a: TileRef, b: TileRef, c: TileMut, epilogue: Epilogue<'_>) {
    // SAFETY: the caller guarantees these extents; C overlaps neither operand.
    unsafe {
        let x = std::slice::from_raw_parts(a.ptr.cast::<f32>(), k);
        let c = std::slice::from_raw_parts_mut(c.ptr.cast::<f32>(), n);
        let (rows, columns) = if b.transposed { (n, k) } else { (k, n) };
        let len = (rows.max(1) - 1) * b.ld + columns;
        match b.storage {
            Storage::F32 => of(x, std::slice::from_raw_parts(b.ptr.cast::<f32>(), len), b, c, epilogue),
            Storage::Bf16 => of(x, std::slice::from_raw_parts(b.ptr.cast::<bf16>(), len), b, c, epilogue),
            Storage::F16 => of(x, std::slice::from_raw_parts(b.ptr.cast::<f16>(), len), b, c, epilogue),
        }
    }
}

fn of<T: Float>(x: &[f32], b: &[T], tile: TileRef, c: &mut [f32], epilogue: Epilogue<'_>) {
    // Not whole blocks of columns where k is contiguous: the rows of a deep product are long enough for a task.
    let unit = if tile.transposed { ROWS } else { COLUMNS };
    let columns = ELEMENTS_PER_TASK.div_ceil(x.len()).next_multiple_of(unit);
    if let Some(bias) = epilogue.bias {
        assert!(bias.len() == c.len(), "bias of {} elements for {} columns", bias.len(), c.len());
    }
    c.par_chunks_mut(columns).enumerate().for_each(|(task, c)| {
        let first = task * columns;
        let bias = epilogue.bias.map(|bias| &bias[first..][..c.len()]);
        let epilogue = Epilogue { bias, ..epilogue };
        match tile.transposed {
            true => by_rows(x, &b[first * tile.ld..], tile.ld, c, epilogue),
            false => by_columns(x, &b[first..], tile.ld, c, epilogue),
        }
    });
}

/// Defines a function whose body is compiled for AVX-512 and for AVX2, with fused multiplications; [`fits`] holds.
macro_rules! fused {
    ($(#[$meta:meta])* fn $name:ident<T: Float>($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $(#[$meta])*
        fn $name<T: Float>($($arg: $ty),*) {
            #[inline(always)]
            fn body<T: Float>($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")]
                fn avx512<T: Float>($($arg: $ty),*) {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2<T: Float>($($arg: $ty),*) {
                    body($($arg),*)
                }
                // SAFETY: the CPU has the features that each is compiled for.
                unsafe {
                    match isa() >= Isa::Avx512 {
                        true => avx512($($arg),*),
                        false => avx2($($arg),*),
                    }
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            body($($arg),*)
        }
    };
}

fused! {
    /// `c[j] = alpha · x · b[j] + …`; the rows of `b` begin every `ld` elements.
    fn by_rows<T: Float>(x: &[f32], b: &[T], ld: usize, c: &mut [f32], epilogue: Epilogue<'_>) {
        let whole = c.len() / ROWS * ROWS;
        for first in (0..whole).step_by(ROWS) {
            for (i, sum) in dots::<T, ROWS>(x, &b[first * ld..], ld).into_iter().enumerate() {
                finish(&mut c[first + i], sum, first + i, &epilogue);
            }
        }
        for j in whole..c.len() {
            finish(&mut c[j], dots::<T, 1>(x, &b[j * ld..], ld)[0], j, &epilogue);
        }
    }
}

fused! {
    /// `c[j] = alpha · Σ_p x[p] b[p, j] + …`; the rows of `b` begin every `ld` elements.
    fn by_columns<T: Float>(x: &[f32], b: &[T], ld: usize, c: &mut [f32], epilogue: Epilogue<'_>) {
        for (block, c) in c.chunks_mut(COLUMNS).enumerate() {
            let first = block * COLUMNS;
            let mut sums = [0f32; COLUMNS];
            for (p, x) in x.iter().enumerate() {
                let row = &b[p * ld + first..][..c.len()];
                match <&[T; COLUMNS]>::try_from(row) {
                    Ok(row) => {
                        let row = row.map(T::to_f32);
                        (0..COLUMNS).for_each(|j| sums[j] = x.mul_add(row[j], sums[j]));
                    }
                    Err(_) => sums.iter_mut().zip(row).for_each(|(sum, b)| *sum = x.mul_add(b.to_f32(), *sum)),
                }
            }
            for (j, (c, sum)) in c.iter_mut().zip(sums).enumerate() {
                finish(c, sum, first + j, &epilogue);
            }
        }
    }
}

#[inline(always)]
fn finish(c: &mut f32, sum: f32, j: usize, epilogue: &Epilogue<'_>) {
    let old = if epilogue.accumulate { *c } else { 0.0 };
    *c = sum.mul_add(epilogue.alpha, epilogue.bias.map_or(0.0, |bias| bias[j])) + old;
}

/// Products of `x` with `N` rows.
#[inline(always)]
fn dots<T: Float, const N: usize>(x: &[f32], b: &[T], ld: usize) -> [f32; N] {
    let rows: [&[T]; N] = std::array::from_fn(|i| &b[i * ld..][..x.len()]);
    let parts = rows.map(|row| row.as_chunks::<LANES>());
    let (whole, rest) = x.as_chunks::<LANES>();
    let mut sums = [[0f32; LANES]; N];
    for (p, x) in whole.iter().enumerate() {
        for (sums, (row, _)) in sums.iter_mut().zip(&parts) {
            let row = row[p].map(T::to_f32);
            (0..LANES).for_each(|i| sums[i] = x[i].mul_add(row[i], sums[i]));
        }
    }
    for (sums, (_, row)) in sums.iter_mut().zip(&parts) {
        for (sum, (x, b)) in sums.iter_mut().zip(rest.iter().zip(*row)) {
            *sum = x.mul_add(b.to_f32(), *sum);
        }
    }
    sums.map(|sums| {
        let half: [f32; LANES / 2] = std::array::from_fn(|i| sums[i] + sums[i + LANES / 2]);
        let quarter: [f32; LANES / 4] = std::array::from_fn(|i| half[i] + half[i + LANES / 4]);
        quarter.iter().sum()
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Compute, Mat, MatMut, Slice, SliceMut, matmul, scratch_bytes};
    use super::*;
    use proptest::prelude::*;

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
    }

    /// One row of sizes `k` and `n` on `n_threads` threads, and its definition in f64. Padding of B is NaN.
    fn row(
        k: usize,
        n: usize,
        transposed: bool,
        gap: usize,
        accumulate: bool,
        n_threads: usize,
    ) -> (Vec<f32>, Vec<f64>) {
        let (x, bias, mut c) = (values(k, 1), values(n, 3), values(n, 4));
        let (rows, columns) = if transposed { (n, k) } else { (k, n) };
        let mut b = values(rows * (columns + gap), 2);
        b.chunks_mut(columns + gap).for_each(|row| row[columns..].fill(f32::NAN));
        let at = |p: usize, j: usize| {
            f64::from(if transposed { b[j * (columns + gap) + p] } else { b[p * (columns + gap) + j] })
        };
        let sum = |j: usize| (0..k).map(|p| f64::from(x[p]) * at(p, j)).sum::<f64>();
        let old = |j: usize| if accumulate { f64::from(c[j]) } else { 0.0 };
        let expected = (0..n).map(|j| 0.5 * sum(j) + f64::from(bias[j]) + old(j)).collect();
        let operand = Mat { data: Slice::F32(&b), ld: columns + gap, transposed };
        let epilogue = Epilogue { accumulate, bias: Some(&bias), alpha: 0.5 };
        let mut scratch = vec![0; scratch_bytes(Compute::F32, 1, n, k, Storage::F32)];
        let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).build().unwrap();
        pool.install(|| {
            let to = MatMut { data: SliceMut::F32(&mut c), ld: n };
            matmul(Compute::F32, 1, n, k, Mat::new(Slice::F32(&x), k), operand, to, epilogue, &mut scratch);
        });
        (c, expected)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn one_row_is_the_product_by_definition_on_any_number_of_threads(
            k in 1usize..900, n in 1usize..700, transposed: bool, gap in 0usize..3, accumulate: bool,
        ) {
            let (found, expected) = row(k, n, transposed, gap, accumulate, 1);

            for (found, expected) in found.iter().zip(&expected) {
                prop_assert!((f64::from(*found) - expected).abs() < 1e-6 * k as f64, "{found} {expected}");
            }
            let (again, _) = row(k, n, transposed, gap, accumulate, 3);
            prop_assert_eq!(found, again);
        }
    }
}
