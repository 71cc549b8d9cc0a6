//! Rows of adapted weights with trained lengths: the lengths that they have, columns of products scaled to other ones, and the
//! gradient of these.
//!
//! Source: Liu et al. 2024, DoRA, §4 (arXiv:2402.09353).

use super::parallel::rows_per_task;
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// Elements that a task keeps at a time.
const WIDTH: usize = 256;

/// An adapted weight.
#[derive(Clone, Copy, Debug)]
pub struct Adapted<'a> {
    /// The weight: `[O, I]`, or `[I, O]` if `is_transposed`.
    pub weight: &'a [f32],
    /// `[r, I]`.
    pub a: &'a [f32],
    /// `[K, r]`.
    pub b: &'a [f32],
    /// Number of inputs `I`.
    pub n_in: usize,
    /// Factor of `b a`.
    pub factor: f32,
    /// Whether inputs are rows.
    pub is_transposed: bool,
}

/// The lengths of the rows of `weight + factor b a`, from row `first` of the weight on.
///
/// # Shapes
/// `lengths: [K]`, with `first + K <= O`.
pub fn row_lengths(adapted: &Adapted<'_>, first: usize, lengths: &mut [f32]) {
    let Adapted { weight, a, b, n_in, .. } = *adapted;
    let (n_out, rank) = (weight.len() / n_in.max(1), a.len() / n_in.max(1));
    assert!(first + lengths.len() <= n_out && b.len() == lengths.len() * rank);
    let of_task = if adapted.is_transposed { WIDTH } else { rows_per_task(n_in).min(WIDTH) };
    lengths.par_chunks_mut(of_task).enumerate().for_each(|(task, lengths)| {
        let o = task * of_task;
        match adapted.is_transposed {
            true => lengths_of_columns(adapted, n_out, first, o, lengths),
            false => lengths.iter_mut().enumerate().for_each(|(i, x)| *x = length_of_row(adapted, first, o + i)),
        }
    });
}

fn length_of_row(adapted: &Adapted<'_>, first: usize, o: usize) -> f32 {
    let Adapted { weight, a, b, n_in, factor, .. } = *adapted;
    let rank = a.len() / n_in.max(1);
    let (mut row, mut squares) = ([0.0; WIDTH], 0.0);
    for at in (0..n_in).step_by(WIDTH) {
        let n = WIDTH.min(n_in - at);
        let row = &mut row[..n];
        row.copy_from_slice(&weight[(first + o) * n_in + at..][..n]);
        (0..rank).for_each(|r| add_scaled(row, &a[r * n_in + at..][..n], factor * b[o * rank + r]));
        squares += sum_squares(row);
    }
    squares.sqrt() as f32
}

/// Lengths of at most [`WIDTH`] neighbouring columns.
fn lengths_of_columns(adapted: &Adapted<'_>, n_out: usize, first: usize, o: usize, lengths: &mut [f32]) {
    let Adapted { weight, a, b, n_in, factor, .. } = *adapted;
    let rank = a.len() / n_in.max(1);
    let (mut row, mut squares) = ([0.0; WIDTH], [0f64; WIDTH]);
    for i in 0..n_in {
        let row = &mut row[..lengths.len()];
        row.copy_from_slice(&weight[i * n_out + first + o..][..lengths.len()]);
        for (column, x) in row.iter_mut().enumerate() {
            (0..rank).for_each(|r| *x += factor * b[(o + column) * rank + r] * a[r * n_in + i]);
        }
        squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x) * f64::from(*x));
    }
    lengths.iter_mut().zip(squares).for_each(|(length, squares)| *length = squares.sqrt() as f32);
}

/// `y[:, first..first + K] *= magnitude / lengths`.
///
/// # Shapes
/// `y: [N, n_columns]`, `magnitude`, `lengths`: `[K]`.
pub fn scale_columns<X: Float>(y: &mut [X], n_columns: usize, first: usize, magnitude: &[f32], lengths: &[f32]) {
    assert!(magnitude.len() == lengths.len() && first + lengths.len() <= n_columns);
    let columns = n_columns.max(1);
    y.par_chunks_mut(rows_per_task(columns) * columns).for_each(|y| {
        y.chunks_mut(columns).for_each(|row| scale_row(&mut row[first..first + lengths.len()], magnitude, lengths));
    });
}

/// `dmagnitude = Σ_n dy x / lengths` over the columns from `first` on, or `dmagnitude +=` if `accumulate`.
///
/// # Shapes
/// `x`, `dy`: `[N, n_columns]`, `lengths`, `dmagnitude`: `[K]`.
pub fn magnitude_backward<X: Float>(
    x: &[X],
    dy: &[X],
    n_columns: usize,
    first: usize,
    lengths: &[f32],
    dmagnitude: &mut [f32],
    accumulate: bool,
) {
    assert!(x.len() == dy.len() && dmagnitude.len() == lengths.len() && first + lengths.len() <= n_columns);
    dmagnitude.par_chunks_mut(WIDTH).zip(lengths.par_chunks(WIDTH)).enumerate().for_each(|(task, (out, lengths))| {
        let columns = first + task * WIDTH..first + task * WIDTH + out.len();
        let mut sums = [0.0; WIDTH];
        for (x, dy) in x.chunks(n_columns).zip(dy.chunks(n_columns)) {
            add_products(&mut sums[..out.len()], &x[columns.clone()], &dy[columns.clone()]);
        }
        for ((out, sum), length) in out.iter_mut().zip(sums).zip(lengths) {
            *out = sum / length + if accumulate { *out } else { 0.0 };
        }
    });
}

simd! {
    fn add_scaled(to: &mut [f32], x: &[f32], factor: f32) {
        for (to, x) in to.iter_mut().zip(x) {
            *to += factor * *x;
        }
    }
}

simd! {
    fn sum_squares(x: &[f32]) -> f64 {
        let mut sums = [0f64; 16];
        for x in x.chunks(16) {
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum += f64::from(*x) * f64::from(*x);
            }
        }
        sums.iter().sum()
    }
}

simd! {
    fn scale_row<X: Float>(y: &mut [X], magnitude: &[f32], lengths: &[f32]) {
        for ((y, magnitude), length) in y.iter_mut().zip(magnitude).zip(lengths) {
            *y = X::from_f32(y.to_f32() * (*magnitude / *length));
        }
    }
}

simd! {
    fn add_products<X: Float>(sums: &mut [f32], x: &[X], dy: &[X]) {
        for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
            *sum += x.to_f32() * dy.to_f32();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, finite_differences, inner, random, same_on_every_number_of_threads, wide};
    use super::*;

    const N: usize = 37;
    const COLUMNS: usize = 700;
    /// Columns that are scaled.
    const FIRST: usize = 5;
    const K: usize = 600;

    fn lengths_in_f64(weight: &[f32], a: &[f32], b: &[f32], [n_in, n_out, rank]: [usize; 3], first: usize) -> Vec<f64> {
        let of = |o: usize| {
            let element = |i: usize| {
                let product: f64 = (0..rank).map(|r| f64::from(b[o * rank + r]) * f64::from(a[r * n_in + i])).sum();
                f64::from(weight[(first + o) * n_in + i]) + 0.7 * product
            };
            (0..n_in).map(|i| element(i).powi(2)).sum::<f64>().sqrt()
        };
        (0..n_out).map(of).collect()
    }

    #[test]
    fn lengths_are_those_of_the_adapted_rows_in_both_orientations() {
        for [n_in, n_out, rank] in [[300, 530, 3], [7, 20, 1]] {
            let (first, all) = (4, n_out + 9);
            let (weight, a, b) = (random(all * n_in, 1), random(rank * n_in, 2), random(n_out * rank, 3));
            let transposed: Vec<f32> = (0..n_in * all).map(|i| weight[i % all * n_in + i / all]).collect();
            let expected = lengths_in_f64(&weight, &a, &b, [n_in, n_out, rank], first);
            for (weight, is_transposed) in [(&weight, false), (&transposed, true)] {
                let adapted = Adapted { weight, a: &a, b: &b, n_in, factor: 0.7, is_transposed };
                let lengths = || {
                    let mut lengths = vec![f32::NAN; n_out];
                    row_lengths(&adapted, first, &mut lengths);
                    lengths
                };

                close(&lengths(), &expected, 1e-6);
                same_on_every_number_of_threads(lengths);
            }
        }
    }

    #[test]
    fn gradients_of_scaled_columns_are_those_of_finite_differences() {
        let (x, dy) = (random(N * COLUMNS, 1), random(N * COLUMNS, 2));
        let [magnitude, lengths] = [3, 4].map(|seed| random(K, seed).iter().map(|x| 2.0 + x).collect::<Vec<f32>>());
        let of = |magnitude: &[f64]| {
            let mut y = wide(&x);
            for row in y.chunks_mut(COLUMNS) {
                for (i, magnitude) in magnitude.iter().enumerate() {
                    row[FIRST + i] *= magnitude / f64::from(lengths[i]);
                }
            }
            y
        };
        let mut y = x.clone();
        scale_columns(&mut y, COLUMNS, FIRST, &magnitude, &lengths);
        close(&y, &of(&wide(&magnitude)), 1e-6);

        let before = random(K, 5);
        let mut gradient = before.clone();
        magnitude_backward(&x, &dy, COLUMNS, FIRST, &lengths, &mut gradient, true);

        let expected = finite_differences(&wide(&magnitude), |magnitude| inner(&of(magnitude), &wide(&dy)));
        let expected: Vec<f64> = expected.iter().zip(&before).map(|(x, before)| x + f64::from(*before)).collect();
        close(&gradient, &expected, 1e-5);
        same_on_every_number_of_threads(|| {
            let mut gradient = vec![f32::NAN; K];
            magnitude_backward(&x, &dy, COLUMNS, FIRST, &lengths, &mut gradient, false);
            gradient
        });
    }
}
