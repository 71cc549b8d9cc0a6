//! RMS norm over all queries of a token and over all its keys, as in OLMo-2; values pass through.
//!
//! Two steps, so that ranks with a part of the heads each can sum the squares over ranks: [`qk_squares`], then
//! [`qk_norm`] for given squares.

use super::math::{sum, sum3};
use super::parallel::{PARTS, rows_per_part, rows_per_task, sum_parts};
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;
use phalanx_strategies::program::{QkColumns, QkNorm};

/// Columns of packed qkv.
const fn width(columns: QkColumns) -> usize {
    columns.q + 2 * columns.k
}

/// `squares = [Σ q², Σ k²]` of each token.
///
/// # Shapes
/// `qkv: [N, Q + 2 K]`, `squares: [N, 2]`.
pub fn qk_squares<T: Float>(columns: QkColumns, qkv: &[T], squares: &mut [f32]) {
    let rows = rows_per_task(width(columns));
    assert_eq!(qkv.len() * 2, squares.len() * width(columns));
    let tasks = qkv.par_chunks(rows * width(columns)).zip(squares.par_chunks_mut(rows * 2));
    tasks.for_each(|(qkv, squares)| square_rows(columns, qkv, squares));
}

/// Adjoint of [`qk_squares`]: `dq += 2 q dsquares`; keys likewise.
///
/// # Shapes
/// `qkv, dqkv: [N, Q + 2 K]`, `dsquares: [N, 2]`.
pub fn qk_squares_backward<T: Float>(columns: QkColumns, qkv: &[T], dsquares: &[f32], dqkv: &mut [T]) {
    let rows = rows_per_task(width(columns));
    assert!(qkv.len() == dqkv.len() && qkv.len() * 2 == dsquares.len() * width(columns));
    let tasks = qkv.par_chunks(rows * width(columns)).zip(dqkv.par_chunks_mut(rows * width(columns)));
    tasks.zip(dsquares.par_chunks(rows * 2)).for_each(|((qkv, dqkv), d)| square_rows_backward(columns, qkv, d, dqkv));
}

/// `out = q rstd gain_q` with `rstd = 1 / sqrt(squares / n + eps)`; keys likewise.
///
/// # Shapes
/// `qkv, out: [N, Q + 2 K]`, `gain_q: [Q]`, `gain_k: [K]`, `squares: [N, 2]`.
pub fn qk_norm<T: Float>(norm: QkNorm, qkv: &[T], gain_q: &[f32], gain_k: &[f32], squares: &[f32], out: &mut [T]) {
    let width = width(norm.columns);
    let rows = rows_per_task(width);
    assert!(qkv.len() == out.len() && qkv.len() * 2 == squares.len() * width);
    assert!(gain_q.len() == norm.columns.q && gain_k.len() == norm.columns.k);
    let tasks = qkv.par_chunks(rows * width).zip(out.par_chunks_mut(rows * width)).zip(squares.par_chunks(rows * 2));
    tasks.for_each(|((qkv, out), squares)| norm_rows(norm, qkv, gain_q, gain_k, squares, out));
}

/// Length of the scratch of [`qk_norm_backward`].
pub const fn qk_norm_backward_scratch_len(columns: QkColumns) -> usize {
    PARTS * (columns.q + columns.k)
}

/// Adjoint of [`qk_norm`]; adds to `dgain_q` and `dgain_k` if `accumulate`.
///
/// # Shapes
/// `qkv, dout, dqkv: [N, Q + 2 K]`, `squares, dsquares: [N, 2]`, `gain_q, dgain_q: [Q]`, `gain_k, dgain_k: [K]`,
/// `scratch: [qk_norm_backward_scratch_len]`.
pub fn qk_norm_backward<T: Float>(
    norm: QkNorm,
    qkv: &[T],
    gain_q: &[f32],
    gain_k: &[f32],
    squares: &[f32],
    dout: &[T],
    dqkv: &mut [T],
    dsquares: &mut [f32],
    dgain_q: &mut [f32],
    dgain_k: &mut [f32],
    accumulate: bool,
    scratch: &mut [f32],
) {
    let (QkColumns { q, k }, width) = (norm.columns, width(norm.columns));
    let n = qkv.len() / width;
    let rows = rows_per_part(n, width);
    assert!(dout.len() == qkv.len() && dqkv.len() == qkv.len() && squares.len() == 2 * n && dsquares.len() == 2 * n);
    assert!(gain_q.len() == q && gain_k.len() == k && dgain_q.len() == q && dgain_k.len() == k);
    let (of_q, of_k) = scratch[..PARTS * (q + k)].split_at_mut(PARTS * q);
    let operands = qkv.par_chunks(rows * width).zip(dout.par_chunks(rows * width)).zip(squares.par_chunks(rows * 2));
    let results = dqkv.par_chunks_mut(rows * width).zip(dsquares.par_chunks_mut(rows * 2));
    let parts = of_q.par_chunks_mut(q).zip(of_k.par_chunks_mut(k));
    operands.zip(results).zip(parts).for_each(|((((qkv, dout), squares), (dqkv, dsquares)), (dgain_q, dgain_k))| {
        dgain_q.fill(0.0);
        dgain_k.fill(0.0);
        norm_rows_backward(norm, qkv, gain_q, gain_k, squares, dout, dqkv, dsquares, dgain_q, dgain_k);
    });
    sum_parts(of_q, n.div_ceil(rows), dgain_q, accumulate);
    sum_parts(of_k, n.div_ceil(rows), dgain_k, accumulate);
}

simd! {
    fn square_rows<T: Float>(columns: QkColumns, qkv: &[T], squares: &mut [f32]) {
        for (row, squares) in qkv.chunks_exact(columns.q + 2 * columns.k).zip(squares.chunks_exact_mut(2)) {
            let (q, k) = row[..columns.q + columns.k].split_at(columns.q);
            squares[0] = sum(q, |x| x * x);
            squares[1] = sum(k, |x| x * x);
        }
    }
}

simd! {
    fn square_rows_backward<T: Float>(columns: QkColumns, qkv: &[T], dsquares: &[f32], dqkv: &mut [T]) {
        let width = columns.q + 2 * columns.k;
        let rows = qkv.chunks_exact(width).zip(dqkv.chunks_exact_mut(width)).zip(dsquares.chunks_exact(2));
        for ((row, drow), d) in rows {
            for (range, d) in [(0..columns.q, d[0]), (columns.q..columns.q + columns.k, d[1])] {
                let (x, dx) = (&row[range.clone()], &mut drow[range]);
                for i in 0..x.len() {
                    dx[i] = T::from_f32(dx[i].to_f32() + 2.0 * d * x[i].to_f32());
                }
            }
        }
    }
}

simd! {
    fn norm_rows<T: Float>(
        norm: QkNorm,
        qkv: &[T],
        gain_q: &[f32],
        gain_k: &[f32],
        squares: &[f32],
        out: &mut [T],
    ) {
        let QkColumns { q, k } = norm.columns;
        let rows = qkv.chunks_exact(q + 2 * k).zip(out.chunks_exact_mut(q + 2 * k)).zip(squares.chunks_exact(2));
        for ((row, out), squares) in rows {
            let of_q = (0..q, gain_q, squares[0] / norm.summed.q as f32);
            let of_k = (q..q + k, gain_k, squares[1] / norm.summed.k as f32);
            for (range, gain, mean) in [of_q, of_k] {
                let r = 1.0 / (mean + norm.eps).sqrt();
                let (x, y, gain) = (&row[range.clone()], &mut out[range], gain);
                for i in 0..gain.len() {
                    y[i] = T::from_f32(x[i].to_f32() * r * gain[i]);
                }
            }
            out[q + k..].copy_from_slice(&row[q + k..]);
        }
    }
}

simd! {
    fn norm_rows_backward<T: Float>(
        norm: QkNorm,
        qkv: &[T],
        gain_q: &[f32],
        gain_k: &[f32],
        squares: &[f32],
        dout: &[T],
        dqkv: &mut [T],
        dsquares: &mut [f32],
        dgain_q: &mut [f32],
        dgain_k: &mut [f32],
    ) {
        let QkColumns { q, k } = norm.columns;
        let width = q + 2 * k;
        let rows = qkv.chunks_exact(width).zip(dout.chunks_exact(width)).zip(dqkv.chunks_exact_mut(width));
        let stats = squares.chunks_exact(2).zip(dsquares.chunks_exact_mut(2));
        for (((row, dout), dqkv), (squares, dsquares)) in rows.zip(stats) {
            let of_q = (0..q, gain_q, &mut *dgain_q, norm.summed.q as f32);
            let of_k = (q..q + k, gain_k, &mut *dgain_k, norm.summed.k as f32);
            for (s, (range, gain, dgain, n)) in [of_q, of_k].into_iter().enumerate() {
                let r = 1.0 / (squares[s] / n + norm.eps).sqrt();
                let (x, dy, dx) = (&row[range.clone()], &dout[range.clone()], &mut dqkv[range]);
                // d rstd / d squares = -rstd³ / (2 n)
                dsquares[s] = sum3(x, dy, gain, |x, dy, gain| dy * gain * x) * r * r * r / (-2.0 * n);
                for i in 0..gain.len() {
                    let (x, dy) = (x[i].to_f32(), dy[i].to_f32());
                    dx[i] = T::from_f32(dy * gain[i] * r);
                    dgain[i] += dy * x * r;
                }
            }
            dqkv[q + k..].copy_from_slice(&dout[q + k..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{
        bits, close, finite_differences, inner, random, same_on_every_number_of_threads, stored, wide,
    };
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    const EPS: f32 = 1e-2;

    fn norm_of(columns: QkColumns) -> QkNorm {
        QkNorm { columns, summed: columns, eps: EPS }
    }

    fn reference(columns: QkColumns, qkv: &[f64], gain_q: &[f64], gain_k: &[f64]) -> Vec<f64> {
        let normed = |x: &[f64], gain: &[f64]| {
            let rstd = 1.0 / (inner(x, x) / x.len() as f64 + EPS as f64).sqrt();
            x.iter().zip(gain).map(|(x, g)| x * rstd * g).collect::<Vec<_>>()
        };
        let row = |row: &[f64]| {
            let (q, rest) = row.split_at(columns.q);
            let (k, v) = rest.split_at(columns.k);
            [normed(q, gain_q), normed(k, gain_k), v.to_vec()].concat()
        };
        qkv.chunks(width(columns)).flat_map(row).collect()
    }

    fn forward<T: Float>(columns: QkColumns, qkv: &[T], gain_q: &[f32], gain_k: &[f32]) -> (Vec<T>, Vec<f32>) {
        let mut squares = vec![f32::NAN; 2 * qkv.len() / width(columns)];
        let mut out = vec![T::ZERO; qkv.len()];
        qk_squares(columns, qkv, &mut squares);
        qk_norm(norm_of(columns), qkv, gain_q, gain_k, &squares, &mut out);
        (out, squares)
    }

    /// Both adjoints one after the other, as the program runs them.
    fn backward<T: Float>(
        columns: QkColumns,
        qkv: &[T],
        gain_q: &[f32],
        gain_k: &[f32],
        dout: &[T],
        old: Option<f32>,
    ) -> (Vec<T>, Vec<f32>, Vec<f32>) {
        let (_, squares) = forward(columns, qkv, gain_q, gain_k);
        let start = old.unwrap_or(f32::NAN);
        let (mut dq, mut dk) = (vec![start; columns.q], vec![start; columns.k]);
        let (mut dqkv, mut dsquares) = (vec![T::ZERO; qkv.len()], vec![f32::NAN; squares.len()]);
        let mut scratch = vec![f32::NAN; qk_norm_backward_scratch_len(columns)];
        qk_norm_backward(
            norm_of(columns),
            qkv,
            gain_q,
            gain_k,
            &squares,
            dout,
            &mut dqkv,
            &mut dsquares,
            &mut dq,
            &mut dk,
            old.is_some(),
            &mut scratch,
        );
        qk_squares_backward(columns, qkv, &dsquares, &mut dqkv);
        (dqkv, dq, dk)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn both_directions_match_the_definition(n in 1usize..40, q in 1usize..40, k in 1usize..40, seed in any::<u64>()) {
            let columns = QkColumns { q, k };
            let (qkv, dout) = (random(n * width(columns), seed), random(n * width(columns), seed ^ 1));
            let (gain_q, gain_k) = (random(q, seed ^ 2), random(k, seed ^ 3));

            let (out, _) = forward(columns, &qkv, &gain_q, &gain_k);
            let (dqkv, dgain_q, dgain_k) = backward(columns, &qkv, &gain_q, &gain_k, &dout, None);

            let (qkv, q, k, dout) = (wide(&qkv), wide(&gain_q), wide(&gain_k), wide(&dout));
            close(&out, &reference(columns, &qkv, &q, &k), 2e-6);
            close(&dqkv, &finite_differences(&qkv, |x| inner(&reference(columns, x, &q, &k), &dout)), 1e-5);
            close(&dgain_q, &finite_differences(&q, |q| inner(&reference(columns, &qkv, q, &k), &dout)), 1e-5);
            close(&dgain_k, &finite_differences(&k, |k| inner(&reference(columns, &qkv, &q, k), &dout)), 1e-5);
        }

        /// Two ranks with half of the queries each and the same keys.
        #[test]
        fn norm_of_a_part_of_the_heads_with_summed_squares_equals_the_part_of_the_whole_norm(n in 1usize..10, half in 1usize..9, seed in any::<u64>()) {
            let (whole, part) = (QkColumns { q: 2 * half, k: 3 }, QkColumns { q: half, k: 3 });
            let qkv = random(n * width(whole), seed);
            let (gain_q, gain_k) = (random(2 * half, seed ^ 2), random(3, seed ^ 3));
            let of_rank = |rank: usize, rows: &[f32]| -> Vec<f32> {
                rows.chunks(width(whole))
                    .flat_map(|row| [&row[rank * half..(rank + 1) * half], &row[2 * half..]].concat())
                    .collect()
            };
            let parts = [0, 1].map(|rank| of_rank(rank, &qkv));
            let mut squares = [vec![0.0; 2 * n], vec![0.0; 2 * n]];
            parts.iter().zip(&mut squares).for_each(|(qkv, squares)| qk_squares(part, qkv, squares));
            let sum: Vec<f32> = squares[0].iter().zip(&squares[1]).map(|(a, b)| a + b).collect();

            let (expected, _) = forward(whole, &qkv, &gain_q, &gain_k);

            for (rank, qkv) in parts.iter().enumerate() {
                let norm = QkNorm { columns: part, summed: QkColumns { q: 2 * half, k: 6 }, eps: EPS };
                let mut out = vec![f32::NAN; qkv.len()];
                qk_norm(norm, qkv, &gain_q[rank * half..(rank + 1) * half], &gain_k, &sum, &mut out);
                close(&out, &wide(&of_rank(rank, &expected)), 2e-6);
            }
        }
    }

    #[test]
    fn half_width_storage_differs_by_its_rounding_only() {
        let columns = QkColumns { q: 132, k: 66 };
        let qkv: Vec<bf16> = stored(&random(50 * width(columns), 1));
        let dout: Vec<bf16> = stored(&random(50 * width(columns), 2));
        let (gain_q, gain_k) = (random(132, 3), random(66, 4));
        let widened = |x: &[bf16]| x.iter().map(|x| Float::to_f32(*x)).collect::<Vec<f32>>();

        let (out, _) = forward(columns, &qkv, &gain_q, &gain_k);
        let (dqkv, dgain_q, dgain_k) = backward(columns, &qkv, &gain_q, &gain_k, &dout, None);

        let (expected, expected_q, expected_k) =
            backward(columns, &widened(&qkv), &gain_q, &gain_k, &widened(&dout), None);
        close(&out, &reference(columns, &wide(&qkv), &wide(&gain_q), &wide(&gain_k)), 1.0 / 256.0);
        // Each of the two adjoints rounds once.
        close(&dqkv, &wide(&expected), 2.0 / 256.0);
        assert_eq!((dgain_q, dgain_k), (expected_q, expected_k));
    }

    #[test]
    fn accumulation_and_threads_keep_the_bits_in_order() {
        let columns = QkColumns { q: 64, k: 32 };
        let (qkv, dout) = (random(300 * width(columns), 5), random(300 * width(columns), 6));
        let (gain_q, gain_k) = (random(64, 7), random(32, 8));
        assert!(rows_per_part(300, width(columns)) < 150);

        let (_, fresh_q, fresh_k) = backward(columns, &qkv, &gain_q, &gain_k, &dout, None);
        let (_, added_q, added_k) = backward(columns, &qkv, &gain_q, &gain_k, &dout, Some(2.0));

        // A sum that starts at 2 is rounded to the spacing of 2 or 4 at each of its parts.
        close(&added_q, &wide(&fresh_q).iter().map(|x| x + 2.0).collect::<Vec<_>>(), 1e-5);
        close(&added_k, &wide(&fresh_k).iter().map(|x| x + 2.0).collect::<Vec<_>>(), 1e-5);
        same_on_every_number_of_threads(|| {
            let (dqkv, dq, dk) = backward(columns, &qkv, &gain_q, &gain_k, &dout, Some(2.0));
            (bits(&dqkv), bits(&dq), bits(&dk))
        });
    }
}
