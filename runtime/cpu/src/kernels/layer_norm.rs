//! Layer norm of rows. Source: Ba et al. 2016 (arXiv:1607.06450).

use super::math::{sum, sum2, sum3};
use super::parallel::{PARTS, rows_per_part, rows_per_task, sum_parts};
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// `y = (x - mean) rstd gain + bias`, `rstd = 1 / sqrt(variance + eps)`.
///
/// # Shapes
/// `x, y: [N, C]`, `gain, bias: [C]`, `rstd, mean: [N]`.
pub fn layer_norm<X: Float, Y: Float>(
    x: &[X],
    gain: &[f32],
    bias: &[f32],
    eps: f32,
    y: &mut [Y],
    rstd: &mut [f32],
    mean: &mut [f32],
) {
    let c = gain.len();
    let rows = rows_per_task(c);
    assert!(x.len() == rstd.len() * c && y.len() == x.len() && mean.len() == rstd.len() && bias.len() == c);
    let rows_of_x = x.par_chunks(rows * c.max(1)).zip(y.par_chunks_mut(rows * c.max(1)));
    let statistics = rstd.par_chunks_mut(rows).zip(mean.par_chunks_mut(rows));
    rows_of_x.zip(statistics).for_each(|((x, y), (rstd, mean))| forward_rows(x, gain, bias, eps, y, rstd, mean));
}

/// Length of the scratch of [`layer_norm_backward`].
pub const fn layer_norm_backward_scratch_len(n_columns: usize) -> usize {
    2 * PARTS * n_columns
}

/// With `z = (x - mean) rstd` and `a = dy gain`: `dx = rstd (a - mean(a) - z mean(a z))`, `dgain = Σ_t dy z`,
/// `dbias = Σ_t dy`.
///
/// With `accumulate_x`, adds to `dx`; with `accumulate_params`, adds to `dgain` and `dbias`.
///
/// # Shapes
/// `x, dy, dx: [N, C]`, `gain, dgain, dbias: [C]`, `rstd, mean: [N]`,
/// `scratch: [layer_norm_backward_scratch_len(C)]`.
pub fn layer_norm_backward<X: Float, Y: Float>(
    x: &[X],
    gain: &[f32],
    rstd: &[f32],
    mean: &[f32],
    dy: &[Y],
    dx: &mut [X],
    accumulate_x: bool,
    dgain: &mut [f32],
    dbias: &mut [f32],
    accumulate_params: bool,
    scratch: &mut [f32],
) {
    let (n, c) = (rstd.len(), gain.len());
    let rows = rows_per_part(n, c);
    assert!(x.len() == n * c && dy.len() == x.len() && dx.len() == x.len() && mean.len() == n);
    let len = rows * c.max(1);
    let statistics = rstd.par_chunks(rows).zip(mean.par_chunks(rows));
    let operands = x.par_chunks(len).zip(dx.par_chunks_mut(len)).zip(statistics).zip(dy.par_chunks(len));
    in_parts(operands, dgain, dbias, accumulate_params, scratch, |(((x, dx), (rstd, mean)), dy), dgain, dbias| {
        backward_rows(x, gain, rstd, mean, dy, dx, accumulate_x, dgain, dbias);
    });
}

/// [`layer_norm_backward`] that overwrites `dy` with `y`, the result of [`layer_norm`].
pub fn layer_norm_backward_again<X: Float, Y: Float>(
    x: &[X],
    gain: &[f32],
    bias: &[f32],
    rstd: &[f32],
    mean: &[f32],
    dy: &mut [Y],
    dx: &mut [X],
    accumulate_x: bool,
    dgain: &mut [f32],
    dbias: &mut [f32],
    accumulate_params: bool,
    scratch: &mut [f32],
) {
    let (n, c) = (rstd.len(), gain.len());
    let rows = rows_per_part(n, c);
    assert!(x.len() == n * c && dy.len() == x.len() && dx.len() == x.len() && mean.len() == n && bias.len() == c);
    let len = rows * c.max(1);
    let statistics = rstd.par_chunks(rows).zip(mean.par_chunks(rows));
    let operands = x.par_chunks(len).zip(dx.par_chunks_mut(len)).zip(statistics).zip(dy.par_chunks_mut(len));
    in_parts(operands, dgain, dbias, accumulate_params, scratch, |(((x, dx), (rstd, mean)), dy), dgain, dbias| {
        backward_rows_again(x, gain, bias, rstd, mean, dy, dx, accumulate_x, dgain, dbias);
    });
}

/// Runs `part` on the operands of each part of the rows, with sums of its own for `dgain` and `dbias`; adds these sums.
fn in_parts<T: Tasks>(
    operands: T,
    dgain: &mut [f32],
    dbias: &mut [f32],
    accumulate: bool,
    scratch: &mut [f32],
    part: impl Fn(T::Operands, &mut [f32], &mut [f32]) + Sync,
) {
    let (n_parts, c) = (operands.len(), dgain.len());
    assert_eq!(dbias.len(), c);
    let (gains, biases) = scratch[..2 * PARTS * c].split_at_mut(PARTS * c);
    let params = gains.par_chunks_mut(c.max(1)).zip(biases.par_chunks_mut(c.max(1)));
    operands.zip(params).for_each(|(operands, (dgain, dbias))| {
        dgain.fill(0.0);
        dbias.fill(0.0);
        part(operands, dgain, dbias);
    });
    sum_parts(gains, n_parts, dgain, accumulate);
    sum_parts(biases, n_parts, dbias, accumulate);
}

#[inline(always)]
fn normed(x: f32, mean: f32, rstd: f32, gain: f32, bias: f32) -> f32 {
    (x - mean) * rstd * gain + bias
}

/// The gradient of a row with statistics `r` and `m`; adds the row's terms to `dgain` and `dbias`.
#[inline(always)]
fn backward_row<X: Float, Y: Float>(
    x: &[X],
    gain: &[f32],
    (r, m): (f32, f32),
    dy: &[Y],
    dx: &mut [X],
    accumulate: bool,
    dgain: &mut [f32],
    dbias: &mut [f32],
) {
    let c = gain.len();
    let (x, dy, dx, dgain, dbias) = (&x[..c], &dy[..c], &mut dx[..c], &mut dgain[..c], &mut dbias[..c]);
    let mean_a = sum2(dy, gain, |dy, gain| dy * gain) / c as f32;
    let mean_az = sum3(x, dy, gain, |x, dy, gain| dy * gain * (x - m) * r) / c as f32;
    if !accumulate {
        dx.fill(X::ZERO);
    }
    for i in 0..c {
        let (z, dy) = ((x[i].to_f32() - m) * r, dy[i].to_f32());
        dx[i] = X::from_f32(dx[i].to_f32() + r * (dy * gain[i] - mean_a - z * mean_az));
        dgain[i] += dy * z;
        dbias[i] += dy;
    }
}

simd! {
    fn forward_rows<X: Float, Y: Float>(
        x: &[X],
        gain: &[f32],
        bias: &[f32],
        eps: f32,
        y: &mut [Y],
        rstd: &mut [f32],
        mean: &mut [f32],
    ) {
        let c = gain.len();
        let bias = &bias[..c];
        for (((x, y), rstd), mean) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(rstd).zip(mean) {
            let m = sum(x, |x| x) / c as f32;
            let r = 1.0 / (sum(x, |x| (x - m) * (x - m)) / c as f32 + eps).sqrt();
            (*rstd, *mean) = (r, m);
            for i in 0..c {
                y[i] = Y::from_f32(normed(x[i].to_f32(), m, r, gain[i], bias[i]));
            }
        }
    }
}

simd! {
    fn backward_rows<X: Float, Y: Float>(
        x: &[X],
        gain: &[f32],
        rstd: &[f32],
        mean: &[f32],
        dy: &[Y],
        dx: &mut [X],
        accumulate: bool,
        dgain: &mut [f32],
        dbias: &mut [f32],
    ) {
        let c = gain.len();
        let rows = x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c));
        for ((((x, dy), dx), r), m) in rows.zip(rstd).zip(mean) {
            backward_row(x, gain, (*r, *m), dy, dx, accumulate, dgain, dbias);
        }
    }
}

simd! {
    fn backward_rows_again<X: Float, Y: Float>(
        x: &[X],
        gain: &[f32],
        bias: &[f32],
        rstd: &[f32],
        mean: &[f32],
        dy: &mut [Y],
        dx: &mut [X],
        accumulate: bool,
        dgain: &mut [f32],
        dbias: &mut [f32],
    ) {
        let c = gain.len();
        let bias = &bias[..c];
        let rows = x.chunks_exact(c).zip(dy.chunks_exact_mut(c)).zip(dx.chunks_exact_mut(c));
        for ((((x, dy), dx), r), m) in rows.zip(rstd).zip(mean) {
            backward_row(x, gain, (*r, *m), dy, dx, accumulate, dgain, dbias);
            // The row is in the cache.
            for i in 0..c {
                dy[i] = Y::from_f32(normed(x[i].to_f32(), *m, *r, gain[i], bias[i]));
            }
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

    // Larger than the eps of any model, so that nearly constant rows stay smooth enough for finite differences.
    const EPS: f32 = 1e-2;

    fn reference(x: &[f64], gain: &[f64], bias: &[f64]) -> Vec<f64> {
        let c = gain.len();
        let row = |x: &[f64]| {
            let mean = x.iter().sum::<f64>() / c as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c as f64;
            let rstd = 1.0 / (variance + EPS as f64).sqrt();
            (0..c).map(|i| (x[i] - mean) * rstd * gain[i] + bias[i]).collect::<Vec<_>>()
        };
        x.chunks(c).flat_map(row).collect()
    }

    fn forward<Y: Float>(x: &[f32], gain: &[f32], bias: &[f32]) -> (Vec<Y>, Vec<f32>, Vec<f32>) {
        let n = x.len() / gain.len();
        let (mut y, mut rstd, mut mean) = (vec![Y::ZERO; x.len()], vec![f32::NAN; n], vec![f32::NAN; n]);
        layer_norm(x, gain, bias, EPS, &mut y, &mut rstd, &mut mean);
        (y, rstd, mean)
    }

    /// Results of a backward pass that adds to `old`: `dx`, `dgain`, `dbias`.
    fn backward<Y: Float>(x: &[f32], gain: &[f32], dy: &[Y], old: Option<f32>) -> [Vec<f32>; 3] {
        let c = gain.len();
        let (_, rstd, mean) = forward::<Y>(x, gain, gain);
        let start = old.unwrap_or(f32::NAN);
        let (mut dx, mut dgain, mut dbias) = (vec![start; x.len()], vec![start; c], vec![start; c]);
        let mut scratch = vec![f32::NAN; layer_norm_backward_scratch_len(c)];
        let add = old.is_some();
        layer_norm_backward(x, gain, &rstd, &mean, dy, &mut dx, add, &mut dgain, &mut dbias, add, &mut scratch);
        [dx, dgain, dbias]
    }

    #[test]
    fn adjoint_that_writes_the_result_again_gives_the_bits_of_both() {
        let (x, gain, dy) = (random(70 * 33, 1), random(33, 2), random(70 * 33, 3));
        let (y, rstd, mean) = forward::<f32>(&x, &gain, &gain);

        let (mut dy_then_y, mut dx) = (dy.clone(), vec![1.0; x.len()]);
        let (mut dgain, mut dbias) = (vec![1.0; 33], vec![1.0; 33]);
        let mut scratch = vec![f32::NAN; layer_norm_backward_scratch_len(33)];
        let (sums, scratch) = ((&mut dgain, &mut dbias), &mut scratch);
        layer_norm_backward_again(
            &x,
            &gain,
            &gain,
            &rstd,
            &mean,
            &mut dy_then_y,
            &mut dx,
            true,
            sums.0,
            sums.1,
            true,
            scratch,
        );

        assert_eq!([dx, dgain, dbias], backward(&x, &gain, &dy, Some(1.0)));
        assert_eq!(dy_then_y, y);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn both_directions_match_the_definition(n in 1usize..40, c in 1usize..40, seed in any::<u64>()) {
            let (x, gain, bias) = (random(n * c, seed), random(c, seed ^ 1), random(c, seed ^ 2));
            let dy = random(n * c, seed ^ 3);

            let (y, ..) = forward::<f32>(&x, &gain, &bias);
            let [dx, dgain, dbias] = backward(&x, &gain, &dy, None);

            let (x, gain, bias, dy) = (wide(&x), wide(&gain), wide(&bias), wide(&dy));
            close(&y, &reference(&x, &gain, &bias), 2e-6);
            close(&dx, &finite_differences(&x, |x| inner(&reference(x, &gain, &bias), &dy)), 1e-5);
            close(&dgain, &finite_differences(&gain, |g| inner(&reference(&x, g, &bias), &dy)), 1e-5);
            close(&dbias, &finite_differences(&bias, |b| inner(&reference(&x, &gain, b), &dy)), 1e-5);
        }
    }

    #[test]
    fn accumulation_adds_to_existing_values() {
        let (x, gain, dy) = (random(70 * 33, 1), random(33, 2), random(70 * 33, 3));

        let fresh = backward(&x, &gain, &dy, None);
        let added = backward(&x, &gain, &dy, Some(2.0));

        // A sum that starts at 2 is rounded to the spacing of 2 or 4 at each of its parts.
        for (fresh, added) in fresh.iter().zip(&added) {
            close(added, &wide(fresh).iter().map(|x| x + 2.0).collect::<Vec<_>>(), 1e-5);
        }
    }

    #[test]
    fn half_width_storage_differs_by_its_rounding_only() {
        let (x, gain, dy) = (random(70 * 33, 4), random(33, 5), stored::<bf16>(&random(70 * 33, 6)));
        let dy_wide: Vec<f32> = dy.iter().map(|x| Float::to_f32(*x)).collect();

        let (y, ..) = forward::<bf16>(&x, &gain, &gain);

        close(&y, &reference(&wide(&x), &wide(&gain), &wide(&gain)), 1.0 / 256.0);
        assert_eq!(backward(&x, &gain, &dy, None), backward(&x, &gain, &dy_wide, None));
    }

    #[test]
    fn gradients_of_the_parameters_are_summed_over_all_parts() {
        let (x, gain, dy) = (random(500 * 40, 10), random(40, 11), random(500 * 40, 12));
        assert!(rows_per_part(500, 40) < 250);

        let [_, dgain, dbias] = backward(&x, &gain, &dy, None);

        let (x, gain, dy) = (wide(&x), wide(&gain), wide(&dy));
        close(&dgain, &finite_differences(&gain, |g| inner(&reference(&x, g, &gain), &dy)), 1e-5);
        close(&dbias, &finite_differences(&gain, |b| inner(&reference(&x, &gain, b), &dy)), 1e-5);
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let (x, gain, dy) = (random(300 * 100, 7), random(100, 8), random(300 * 100, 9));

        same_on_every_number_of_threads(|| backward(&x, &gain, &dy, Some(1.0)).map(|x| bits(&x)));
    }
}
