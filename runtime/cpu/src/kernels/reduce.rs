//! Sums over whole buffers and over columns.

use super::parallel::{CHUNK, PARTS, rows_per_part, rows_per_task, sum_parts};
use super::simd::simd;
use crate::prefetch::prefetch;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// Number of partial sums of squares: enough to hide the latency of an add.
const LANES: usize = 32;

/// `Σ x²` in f64. Finite exactly if all elements are: no square of an f32 overflows an f64.
pub fn sum_squares<T: Float>(x: &[T]) -> f64 {
    let mut parts = [0.0; PARTS];
    // Whole chunks, so that small buffers stay on one thread.
    let len = x.len().div_ceil(PARTS).next_multiple_of(CHUNK).max(1);
    parts.par_iter_mut().zip(x.par_chunks(len)).for_each(|(part, x)| *part = sum_squares_part(x));
    parts.iter().sum()
}

/// `out[i] = Σ x²` over block `i` of `block` elements, the last possibly shorter; each has the bits of [`sum_squares`].
///
/// # Shapes
/// `x: [n]`, `out: [ceil(n / block)]`.
pub fn sum_squares_blocks<T: Float>(x: &[T], block: usize, out: &mut [f64]) {
    assert!(block > 0 && out.len() == x.len().div_ceil(block));
    let blocks = rows_per_task(block);
    out.par_chunks_mut(blocks).zip(x.par_chunks(blocks * block)).for_each(|(out, x)| {
        for (out, x) in out.iter_mut().zip(x.chunks(block)) {
            *out = sum_squares(x);
        }
    });
}

/// Length of the scratch of [`column_sum`] over `n` columns.
pub const fn column_sum_scratch_len(n: usize) -> usize {
    PARTS * n
}

/// `db = Σ_t dy[t, first..first + C]`, or `db +=` if `accumulate`: the gradient of a bias.
///
/// # Shapes
/// `dy: [N, n_columns]`, `db: [C]`, `scratch: [column_sum_scratch_len(C)]`.
pub fn column_sum<T: Float>(
    dy: &[T],
    n_columns: usize,
    first: usize,
    db: &mut [f32],
    accumulate: bool,
    scratch: &mut [f32],
) {
    let (n, c) = (dy.len() / n_columns.max(1), db.len());
    let rows = rows_per_part(n, c);
    assert!(first + c <= n_columns && dy.len() == n * n_columns);
    let scratch = &mut scratch[..PARTS * c];
    let parts = scratch.par_chunks_mut(c.max(1));
    dy.par_chunks(rows * n_columns.max(1)).zip(parts).for_each(|(dy, part)| {
        part.fill(0.0);
        column_sum_rows(dy, n_columns, first, part);
    });
    sum_parts(scratch, n.div_ceil(rows), db, accumulate);
}

simd! {
    fn sum_squares_part<T: Float>(x: &[T]) -> f64 {
        let mut lanes = [0.0; LANES];
        let (x, tail) = x.as_chunks::<LANES>();
        for x in x {
            prefetch(x.as_ptr().wrapping_add(8 * LANES));
            prefetch(x.as_ptr().wrapping_add(8 * LANES + LANES / 2));
            for i in 0..LANES {
                let wide = x[i].to_f32() as f64;
                lanes[i] += wide * wide;
            }
        }
        let tail: f64 = tail.iter().map(|x| x.to_f32() as f64).map(|x| x * x).sum();
        lanes.iter().sum::<f64>() + tail
    }
}

simd! {
    fn column_sum_rows<T: Float>(dy: &[T], n_columns: usize, first: usize, part: &mut [f32]) {
        for row in dy.chunks_exact(n_columns) {
            for (sum, x) in part.iter_mut().zip(&row[first..]) {
                *sum += x.to_f32();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, close, inner, random, same_on_every_number_of_threads, stored, wide};
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn column_sums_match_the_definition(
            n in 1usize..900, first in 0usize..10, c in 1usize..50, after in 0usize..10,
            accumulate in any::<bool>(), seed in any::<u64>(),
        ) {
            let width = first + c + after;
            let dy: Vec<bf16> = stored(&random(n * width, seed));
            let mut db = vec![if accumulate { 2.0 } else { f32::NAN }; c];

            column_sum(&dy, width, first, &mut db, accumulate, &mut vec![f32::NAN; column_sum_scratch_len(c)]);

            let base = if accumulate { 2.0 } else { 0.0 };
            let dy = wide(&dy);
            let expected: Vec<f64> = (0..c).map(|i| base + (0..n).map(|t| dy[t * width + first + i]).sum::<f64>()).collect();
            close(&db, &expected, 1e-5);
        }
    }

    #[test]
    fn sum_of_squares_is_accurate_for_ragged_lengths() {
        for n in [0, 1, 31, 33, CHUNK, 40 * CHUNK + 5] {
            let x = random(n, 1);

            let expected = inner(&wide(&x), &wide(&x));

            assert!((sum_squares(&x) - expected).abs() <= 1e-12 * expected, "{n}");
        }
    }

    #[test]
    fn every_block_has_its_own_sum_of_squares() {
        for (n, block) in
            [(0, 5), (1, 5), (100, 7), (100, 100), (100, 1), (3 * CHUNK + 5, CHUNK / 3), (100_000, 60_000)]
        {
            let x: Vec<bf16> = stored(&random(n, 3));
            let mut out = vec![f64::NAN; n.div_ceil(block)];

            sum_squares_blocks(&x, block, &mut out);

            let expected: Vec<f64> = x.chunks(block).map(|x| inner(&wide(x), &wide(x))).collect();
            assert!(out.iter().zip(&expected).all(|(found, x)| (found - x).abs() <= 1e-12 * x), "{n} {block}");
        }
    }

    #[test]
    fn squares_of_the_largest_numbers_do_not_overflow() {
        assert!(sum_squares(&[f32::MAX; 1000]).is_finite());
        assert!(!sum_squares(&[1.0, f32::INFINITY]).is_finite());
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let x = random(100 * 1000, 2);

        same_on_every_number_of_threads(|| {
            let mut db = vec![0.0; 100];
            column_sum(&x, 100, 0, &mut db, false, &mut vec![0.0; column_sum_scratch_len(100)]);
            let mut blocks = vec![0.0; 10];
            sum_squares_blocks(&x, 10_000, &mut blocks);
            (sum_squares(&x).to_bits(), blocks.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits(&db))
        });
    }
}
