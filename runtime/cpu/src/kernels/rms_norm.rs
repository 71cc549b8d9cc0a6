//! Root-mean-square norm of rows. Source: Zhang and Sennrich 2019 (arXiv:1910.07467).

use super::math::{sum, sum3};
use super::parallel::{PARTS, rows_per_part, rows_per_task, sum_parts};
use super::simd::simd;
use crate::prefetch::prefetch;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// Elements of a row between two requests for the next row: one or two cache lines.
const LANES: usize = 32;

/// `y = x rstd gain`, `rstd = 1 / sqrt(mean(x²) + eps)`.
///
/// # Shapes
/// `x, y: [N, C]`, `gain: [C]`, `rstd: [N]`.
pub fn rms_norm<X: Float, Y: Float>(x: &[X], gain: &[f32], eps: f32, y: &mut [Y], rstd: &mut [f32]) {
    let c = gain.len();
    let rows = rows_per_task(c);
    assert!(x.len() == rstd.len() * c && y.len() == x.len());
    let x = x.par_chunks(rows * c.max(1));
    let y = y.par_chunks_mut(rows * c.max(1));
    x.zip(y).zip(rstd.par_chunks_mut(rows)).for_each(|((x, y), rstd)| forward_rows(x, gain, eps, y, rstd));
}

/// Length of the scratch of [`rms_norm_backward`].
pub const fn rms_norm_backward_scratch_len(n_columns: usize) -> usize {
    PARTS * n_columns
}

/// `dx = rstd (dy gain) - x rstd³ mean(dy gain x)` and `dgain = Σ_t dy x rstd`.
///
/// With `accumulate_x`, adds to `dx`; with `accumulate_gain`, adds to `dgain`.
///
/// # Shapes
/// `x, dy, dx: [N, C]`, `gain, dgain: [C]`, `rstd: [N]`, `scratch: [rms_norm_backward_scratch_len(C)]`.
pub fn rms_norm_backward<X: Float, Y: Float>(
    x: &[X],
    gain: &[f32],
    rstd: &[f32],
    dy: &[Y],
    dx: &mut [X],
    accumulate_x: bool,
    dgain: &mut [f32],
    accumulate_gain: bool,
    scratch: &mut [f32],
) {
    let (n, c) = (rstd.len(), gain.len());
    let rows = rows_per_part(n, c);
    assert!(x.len() == n * c && dy.len() == x.len() && dx.len() == x.len() && dgain.len() == c);
    let len = rows * c.max(1);
    let operands = x.par_chunks(len).zip(dx.par_chunks_mut(len)).zip(rstd.par_chunks(rows)).zip(dy.par_chunks(len));
    in_parts(operands, dgain, accumulate_gain, scratch, |(((x, dx), rstd), dy), dgain| {
        backward_rows(x, gain, rstd, dy, dx, accumulate_x, dgain);
    });
}

/// [`rms_norm_backward`] that overwrites `dy` with `y`, the result of [`rms_norm`].
pub fn rms_norm_backward_again<X: Float, Y: Float>(
    x: &[X],
    gain: &[f32],
    rstd: &[f32],
    dy: &mut [Y],
    dx: &mut [X],
    accumulate_x: bool,
    dgain: &mut [f32],
    accumulate_gain: bool,
    scratch: &mut [f32],
) {
    let (n, c) = (rstd.len(), gain.len());
    let rows = rows_per_part(n, c);
    assert!(x.len() == n * c && dy.len() == x.len() && dx.len() == x.len() && dgain.len() == c);
    let len = rows * c.max(1);
    let operands = x.par_chunks(len).zip(dx.par_chunks_mut(len)).zip(rstd.par_chunks(rows)).zip(dy.par_chunks_mut(len));
    in_parts(operands, dgain, accumulate_gain, scratch, |(((x, dx), rstd), dy), dgain| {
        backward_rows_again(x, gain, rstd, dy, dx, accumulate_x, dgain);
    });
}

/// Runs `part` on the operands of each part of the rows, with a sum of its own for `dgain`; adds these sums.
fn in_parts<T: Tasks>(
    operands: T,
    dgain: &mut [f32],
    accumulate: bool,
    scratch: &mut [f32],
    part: impl Fn(T::Operands, &mut [f32]) + Sync,
) {
    let (n_parts, c) = (operands.len(), dgain.len());
    let scratch = &mut scratch[..PARTS * c];
    operands.zip(scratch.par_chunks_mut(c.max(1))).for_each(|(operands, dgain)| {
        dgain.fill(0.0);
        part(operands, dgain);
    });
    sum_parts(scratch, n_parts, dgain, accumulate);
}

#[inline(always)]
fn normed(x: f32, rstd: f32, gain: f32) -> f32 {
    x * rstd * gain
}

/// The gradient of a row; adds the row's term to `dgain`.
#[inline(always)]
fn backward_row<X: Float, Y: Float>(
    x: &[X],
    gain: &[f32],
    r: f32,
    dy: &[Y],
    dx: &mut [X],
    accumulate: bool,
    dgain: &mut [f32],
) {
    let c = gain.len();
    let (x, dy, dx, dgain) = (&x[..c], &dy[..c], &mut dx[..c], &mut dgain[..c]);
    let along = sum3(x, dy, gain, |x, dy, gain| dy * gain * x) * r * r * r / c as f32;
    if !accumulate {
        dx.fill(X::ZERO);
    }
    for i in 0..c {
        let (x, dy) = (x[i].to_f32(), dy[i].to_f32());
        dx[i] = X::from_f32(dx[i].to_f32() + (dy * gain[i] * r - x * along));
        dgain[i] += dy * x * r;
    }
}

simd! {
    fn forward_rows<X: Float, Y: Float>(x: &[X], gain: &[f32], eps: f32, y: &mut [Y], rstd: &mut [f32]) {
        let c = gain.len();
        for ((x, y), rstd) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(rstd) {
            let r = 1.0 / (sum(x, |x| x * x) / c as f32 + eps).sqrt();
            *rstd = r;
            for ((y, x), gain) in y.chunks_mut(LANES).zip(x.chunks(LANES)).zip(gain.chunks(LANES)) {
                prefetch(x.as_ptr().wrapping_add(c));
                for ((y, x), gain) in y.iter_mut().zip(x).zip(gain) {
                    *y = Y::from_f32(normed(x.to_f32(), r, *gain));
                }
            }
        }
    }
}

simd! {
    fn backward_rows<X: Float, Y: Float>(
        x: &[X],
        gain: &[f32],
        rstd: &[f32],
        dy: &[Y],
        dx: &mut [X],
        accumulate: bool,
        dgain: &mut [f32],
    ) {
        let c = gain.len();
        for (((x, dy), dx), r) in x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c)).zip(rstd) {
            backward_row(x, gain, *r, dy, dx, accumulate, dgain);
        }
    }
}

simd! {
    fn backward_rows_again<X: Float, Y: Float>(
        x: &[X],
        gain: &[f32],
        rstd: &[f32],
        dy: &mut [Y],
        dx: &mut [X],
        accumulate: bool,
        dgain: &mut [f32],
    ) {
        let c = gain.len();
        for (((x, dy), dx), r) in x.chunks_exact(c).zip(dy.chunks_exact_mut(c)).zip(dx.chunks_exact_mut(c)).zip(rstd) {
            backward_row(x, gain, *r, dy, dx, accumulate, dgain);
            // The row is in the cache.
            for ((y, x), gain) in dy.iter_mut().zip(x).zip(gain) {
                *y = Y::from_f32(normed(x.to_f32(), *r, *gain));
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

    const EPS: f32 = 1e-5;

    fn reference(x: &[f64], gain: &[f64]) -> Vec<f64> {
        let c = gain.len();
        let row = |x: &[f64]| {
            let rstd = 1.0 / (inner(x, x) / c as f64 + EPS as f64).sqrt();
            x.iter().zip(gain).map(|(x, g)| x * rstd * g).collect::<Vec<_>>()
        };
        x.chunks(c).flat_map(row).collect()
    }

    /// Results of a backward pass that adds to `old`: `dx`, `dgain`.
    fn backward<X: Float, Y: Float>(x: &[X], gain: &[f32], dy: &[Y], old: Option<f32>) -> (Vec<X>, Vec<f32>) {
        let (n, c) = (x.len() / gain.len(), gain.len());
        let (mut y, mut rstd) = (vec![Y::ZERO; n * c], vec![f32::NAN; n]);
        rms_norm(x, gain, EPS, &mut y, &mut rstd);
        let start = old.unwrap_or(f32::NAN);
        let (mut dx, mut dgain) = (vec![X::from_f32(start); n * c], vec![start; c]);
        let mut scratch = vec![f32::NAN; rms_norm_backward_scratch_len(c)];
        let accumulate = old.is_some();
        rms_norm_backward(x, gain, &rstd, dy, &mut dx, accumulate, &mut dgain, accumulate, &mut scratch);
        (dx, dgain)
    }

    #[test]
    fn adjoint_that_writes_the_result_again_gives_the_bits_of_both() {
        let (x, gain) = (stored::<bf16>(&random(70 * 33, 1)), random(33, 2));
        let dy = stored::<bf16>(&random(70 * 33, 3));
        let (mut y, mut rstd) = (vec![bf16::ZERO; x.len()], vec![f32::NAN; 70]);
        rms_norm(&x, &gain, EPS, &mut y, &mut rstd);

        let (mut dy_then_y, mut dx, mut dgain) = (dy.clone(), vec![bf16::ONE; x.len()], vec![1.0; 33]);
        let mut scratch = vec![f32::NAN; rms_norm_backward_scratch_len(33)];
        rms_norm_backward_again(&x, &gain, &rstd, &mut dy_then_y, &mut dx, true, &mut dgain, true, &mut scratch);

        assert_eq!((dx, dgain), backward(&x, &gain, &dy, Some(1.0)));
        assert_eq!(dy_then_y, y);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn both_directions_match_the_definition(n in 1usize..40, c in 1usize..40, seed in any::<u64>()) {
            let (x, gain, dy) = (random(n * c, seed), random(c, seed ^ 1), random(n * c, seed ^ 2));
            let (mut y, mut rstd) = (vec![f32::NAN; n * c], vec![f32::NAN; n]);

            rms_norm(&x, &gain, EPS, &mut y, &mut rstd);
            let (dx, dgain) = backward(&x, &gain, &dy, None);

            close(&y, &reference(&wide(&x), &wide(&gain)), 2e-6);
            let of_x = finite_differences(&wide(&x), |x| inner(&reference(x, &wide(&gain)), &wide(&dy)));
            let of_gain = finite_differences(&wide(&gain), |g| inner(&reference(&wide(&x), g), &wide(&dy)));
            // A row near zero has derivatives up to 1/sqrt(eps), and its third derivative affects the differences.
            let steep = rstd.iter().any(|r| *r > 20.0);
            close(&dx, &of_x, if steep { 1e-3 } else { 1e-5 });
            close(&dgain, &of_gain, 1e-5);
        }
    }

    #[test]
    fn accumulation_adds_to_existing_values() {
        let (x, gain, dy) = (random(70 * 33, 1), random(33, 2), random(70 * 33, 3));

        let (dx, dgain) = backward(&x, &gain, &dy, None);
        let (dx_added, dgain_added) = backward(&x, &gain, &dy, Some(2.0));

        // A sum that starts at 2 is rounded to the spacing of 2 or 4 at each of its parts.
        close(&dx_added, &wide(&dx).iter().map(|x| x + 2.0).collect::<Vec<_>>(), 1e-5);
        close(&dgain_added, &wide(&dgain).iter().map(|x| x + 2.0).collect::<Vec<_>>(), 1e-5);
    }

    #[test]
    fn half_width_storage_differs_by_its_rounding_only() {
        let (x, gain, dy) = (random(70 * 33, 4), random(33, 5), stored::<bf16>(&random(70 * 33, 6)));
        let dy_wide: Vec<f32> = dy.iter().map(|x| Float::to_f32(*x)).collect();
        let (mut y, mut rstd) = (vec![bf16::ZERO; x.len()], vec![0.0; 70]);

        rms_norm(&x, &gain, EPS, &mut y, &mut rstd);

        close(&y, &reference(&wide(&x), &wide(&gain)), 1.0 / 256.0);
        assert_eq!(backward(&x, &gain, &dy, None), backward(&x, &gain, &dy_wide, None));
    }

    #[test]
    fn gradients_of_the_gain_are_summed_over_all_parts() {
        let (x, gain, dy) = (random(500 * 40, 10), random(40, 11), random(500 * 40, 12));
        assert!(rows_per_part(500, 40) < 250);

        let (_, dgain) = backward(&x, &gain, &dy, None);

        let loss = |g: &[f64]| inner(&reference(&wide(&x), g), &wide(&dy));
        close(&dgain, &finite_differences(&wide(&gain), loss), 1e-5);
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let (x, gain, dy) = (random(300 * 100, 7), random(100, 8), random(300 * 100, 9));

        same_on_every_number_of_threads(|| {
            let (dx, dgain) = backward(&x, &gain, &dy, Some(1.0));
            (bits(&dx), bits(&dgain))
        });
    }
}
