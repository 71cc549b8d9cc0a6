//! SwiGLU and GELU.

use super::math::sigmoid;
use super::parallel::{CHUNK, rows_per_task};
use super::simd::simd;
use crate::prefetch::prefetch;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// `act = silu(gate) up`, `silu(x) = x sigmoid(x)`. Source: Shazeer 2020 (arXiv:2002.05202).
///
/// # Shapes
/// `gate_up: [N, 2 F]`, gate first; `act: [N, F]`, `F = n_columns`.
pub fn swiglu<X: Float, Y: Float>(gate_up: &[X], n_columns: usize, act: &mut [Y]) {
    let len = rows_per_task(n_columns) * n_columns.max(1);
    assert_eq!(gate_up.len(), 2 * act.len());
    act.par_chunks_mut(len)
        .zip(gate_up.par_chunks(2 * len))
        .for_each(|(act, gate_up)| swiglu_rows(gate_up, n_columns, act));
}

/// `dgate = dact up (s + silu(gate) (1 - s))` with `s = sigmoid(gate)`, and `dup = dact silu(gate)`.
///
/// # Shapes
/// `gate_up, dgate_up: [N, 2 F]`, `dact: [N, F]`, `F = n_columns`.
pub fn swiglu_backward<X: Float, Y: Float>(gate_up: &[X], dact: &[Y], n_columns: usize, dgate_up: &mut [X]) {
    let len = rows_per_task(n_columns) * n_columns.max(1);
    assert!(gate_up.len() == 2 * dact.len() && dgate_up.len() == gate_up.len());
    dgate_up
        .par_chunks_mut(2 * len)
        .zip(gate_up.par_chunks(2 * len))
        .zip(dact.par_chunks(len))
        .for_each(|((dgate_up, gate_up), dact)| swiglu_backward_rows(gate_up, dact, n_columns, dgate_up));
}

/// [`swiglu_backward`] whose result overwrites `gate_up`.
pub fn swiglu_backward_in_place<X: Float, Y: Float>(gate_up: &mut [X], dact: &[Y], n_columns: usize) {
    let len = rows_per_task(n_columns) * n_columns.max(1);
    assert_eq!(gate_up.len(), 2 * dact.len());
    gate_up
        .par_chunks_mut(2 * len)
        .zip(dact.par_chunks(len))
        .for_each(|(gate_up, dact)| swiglu_backward_rows_in_place(gate_up, dact, n_columns));
}

/// [`swiglu_backward_in_place`] that also overwrites `dact` with `act`, the result of [`swiglu`].
pub fn swiglu_backward_again<X: Float, Y: Float>(gate_up: &mut [X], dact: &mut [Y], n_columns: usize) {
    let len = rows_per_task(n_columns) * n_columns.max(1);
    assert_eq!(gate_up.len(), 2 * dact.len());
    gate_up
        .par_chunks_mut(2 * len)
        .zip(dact.par_chunks_mut(len))
        .for_each(|(gate_up, dact)| swiglu_backward_again_rows(gate_up, dact, n_columns));
}

/// `y = x/2 (1 + tanh(u))`, `u = sqrt(2/π) (x + 0.044715 x³)`. Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415).
///
/// # Shapes
/// `x, y`: any, equal.
pub fn gelu<X: Float, Y: Float>(x: &[X], y: &mut [Y]) {
    assert_eq!(x.len(), y.len());
    y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(y, x)| gelu_chunk(x, y));
}

/// Adjoint of [`gelu`].
///
/// # Shapes
/// `x, dy, dx`: any, equal.
pub fn gelu_backward<X: Float, Y: Float>(x: &[X], dy: &[Y], dx: &mut [X]) {
    assert!(x.len() == dy.len() && x.len() == dx.len());
    let operands = x.par_chunks(CHUNK).zip(dy.par_chunks(CHUNK));
    dx.par_chunks_mut(CHUNK).zip(operands).for_each(|(dx, (x, dy))| gelu_backward_chunk(x, dy, dx));
}

/// [`gelu_backward`] that overwrites `x` with `dx`, and `dy` with `y`, the result of [`gelu`].
pub fn gelu_backward_again<X: Float, Y: Float>(x: &mut [X], dy: &mut [Y]) {
    assert_eq!(x.len(), dy.len());
    x.par_chunks_mut(CHUNK).zip(dy.par_chunks_mut(CHUNK)).for_each(|(x, dy)| gelu_backward_again_chunk(x, dy));
}

/// Most f32 elements of one vector.
const LANES: usize = 16;

/// The gradients of gate and up, and the activation.
#[inline(always)]
fn swiglu_gradient(gate: f32, up: f32, dact: f32) -> (f32, f32, f32) {
    let s = sigmoid(gate);
    let silu = gate * s;
    (dact * up * (s + silu * (1.0 - s)), dact * silu, silu * up)
}

/// `(2 u, 2 du/dx)`: as `1 + tanh(u) = 2 sigmoid(2 u)`, forward and backward need twice the argument.
#[inline(always)]
fn gelu_argument(x: f32) -> (f32, f32) {
    // 2 sqrt(2/π) = (2/sqrt(π)) sqrt(2)
    const SCALE: f32 = (std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::SQRT_2) as f32;
    const CUBIC: f32 = 0.044715;
    (SCALE * (x + CUBIC * x * x * x), SCALE * (1.0 + 3.0 * CUBIC * x * x))
}

/// The gradient of `x`, and the activation.
#[inline(always)]
fn gelu_gradient(x: f32, dy: f32) -> (f32, f32) {
    let (argument, slope) = gelu_argument(x);
    let s = sigmoid(argument);
    (dy * (s + x * s * (1.0 - s) * slope), x * s)
}

simd! {
    fn swiglu_rows<X: Float, Y: Float>(gate_up: &[X], f: usize, act: &mut [Y]) {
        for (gate_up, act) in gate_up.chunks_exact(2 * f).zip(act.chunks_exact_mut(f)) {
            let (gate, up) = gate_up.split_at(f);
            let lanes = act.chunks_mut(LANES).zip(gate.chunks(LANES)).zip(up.chunks(LANES));
            for ((act, gate), up) in lanes {
                prefetch(gate.as_ptr().wrapping_add(2 * f));
                prefetch(up.as_ptr().wrapping_add(2 * f));
                for ((act, gate), up) in act.iter_mut().zip(gate).zip(up) {
                    let gate = gate.to_f32();
                    *act = Y::from_f32(gate * sigmoid(gate) * up.to_f32());
                }
            }
        }
    }
}

simd! {
    fn swiglu_backward_rows<X: Float, Y: Float>(gate_up: &[X], dact: &[Y], f: usize, dgate_up: &mut [X]) {
        let rows = gate_up.chunks_exact(2 * f).zip(dact.chunks_exact(f));
        for ((gate_up, dact), dgate_up) in rows.zip(dgate_up.chunks_exact_mut(2 * f)) {
            let ((gate, up), (dgate, dup)) = (gate_up.split_at(f), dgate_up.split_at_mut(f));
            for ((((dgate, dup), gate), up), dact) in dgate.iter_mut().zip(dup).zip(gate).zip(up).zip(dact) {
                let (a, b, _) = swiglu_gradient(gate.to_f32(), up.to_f32(), dact.to_f32());
                (*dgate, *dup) = (X::from_f32(a), X::from_f32(b));
            }
        }
    }
}

simd! {
    fn swiglu_backward_rows_in_place<X: Float, Y: Float>(gate_up: &mut [X], dact: &[Y], f: usize) {
        for (gate_up, dact) in gate_up.chunks_exact_mut(2 * f).zip(dact.chunks_exact(f)) {
            let (gate, up) = gate_up.split_at_mut(f);
            // Arrays of a fixed length: with three slices read and two of them written, the compiler vectorises no
            // simpler form.
            let whole = f - f % LANES;
            let lanes = gate[..whole].chunks_exact_mut(LANES).zip(up[..whole].chunks_exact_mut(LANES));
            for ((gate, up), dact) in lanes.zip(dact.chunks_exact(LANES)) {
                prefetch(gate.as_ptr().wrapping_add(2 * f));
                prefetch(up.as_ptr().wrapping_add(2 * f));
                prefetch(dact.as_ptr().wrapping_add(f));
                let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
                for i in 0..LANES {
                    (a[i], b[i], _) = swiglu_gradient(gate[i].to_f32(), up[i].to_f32(), dact[i].to_f32());
                }
                for i in 0..LANES {
                    (gate[i], up[i]) = (X::from_f32(a[i]), X::from_f32(b[i]));
                }
            }
            for ((gate, up), dact) in gate[whole..].iter_mut().zip(&mut up[whole..]).zip(&dact[whole..]) {
                let (a, b, _) = swiglu_gradient(gate.to_f32(), up.to_f32(), dact.to_f32());
                (*gate, *up) = (X::from_f32(a), X::from_f32(b));
            }
        }
    }
}

simd! {
    fn swiglu_backward_again_rows<X: Float, Y: Float>(gate_up: &mut [X], dact: &mut [Y], f: usize) {
        for (gate_up, dact) in gate_up.chunks_exact_mut(2 * f).zip(dact.chunks_exact_mut(f)) {
            let (gate, up) = gate_up.split_at_mut(f);
            // As in `swiglu_backward_rows_in_place`.
            let whole = f - f % LANES;
            let lanes = gate[..whole].chunks_exact_mut(LANES).zip(up[..whole].chunks_exact_mut(LANES));
            for ((gate, up), dact) in lanes.zip(dact[..whole].chunks_exact_mut(LANES)) {
                prefetch(gate.as_ptr().wrapping_add(2 * f));
                prefetch(up.as_ptr().wrapping_add(2 * f));
                prefetch(dact.as_ptr().wrapping_add(f));
                let (mut a, mut b, mut act) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
                for i in 0..LANES {
                    (a[i], b[i], act[i]) = swiglu_gradient(gate[i].to_f32(), up[i].to_f32(), dact[i].to_f32());
                }
                for i in 0..LANES {
                    (gate[i], up[i], dact[i]) = (X::from_f32(a[i]), X::from_f32(b[i]), Y::from_f32(act[i]));
                }
            }
            for ((gate, up), dact) in gate[whole..].iter_mut().zip(&mut up[whole..]).zip(&mut dact[whole..]) {
                let (a, b, act) = swiglu_gradient(gate.to_f32(), up.to_f32(), dact.to_f32());
                (*gate, *up, *dact) = (X::from_f32(a), X::from_f32(b), Y::from_f32(act));
            }
        }
    }
}

simd! {
    fn gelu_chunk<X: Float, Y: Float>(x: &[X], y: &mut [Y]) {
        for (y, x) in y.iter_mut().zip(x) {
            let x = x.to_f32();
            *y = Y::from_f32(x * sigmoid(gelu_argument(x).0));
        }
    }
}

simd! {
    fn gelu_backward_chunk<X: Float, Y: Float>(x: &[X], dy: &[Y], dx: &mut [X]) {
        for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = X::from_f32(gelu_gradient(x.to_f32(), dy.to_f32()).0);
        }
    }
}

simd! {
    fn gelu_backward_again_chunk<X: Float, Y: Float>(x: &mut [X], dy: &mut [Y]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            let (dx, y) = gelu_gradient(x.to_f32(), dy.to_f32());
            (*x, *dy) = (X::from_f32(dx), Y::from_f32(y));
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

    fn swiglu_reference(gate_up: &[f64], f: usize) -> Vec<f64> {
        let row = |row: &[f64]| (0..f).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[f + i]).collect::<Vec<_>>();
        gate_up.chunks(2 * f).flat_map(row).collect()
    }

    fn gelu_reference(x: &[f64]) -> Vec<f64> {
        let u = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        x.iter().map(|x| 0.5 * x * (1.0 + u(*x).tanh())).collect()
    }

    fn spread(n: usize, seed: u64) -> Vec<f32> {
        random(n, seed).iter().map(|x| 6.0 * x).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn swiglu_and_its_adjoint_match_the_definition(n in 1usize..8, f in 1usize..40, seed in any::<u64>()) {
            let (x, dy) = (spread(2 * n * f, seed), random(n * f, seed ^ 1));
            let (mut y, mut dx, mut in_place) = (vec![f32::NAN; n * f], vec![f32::NAN; 2 * n * f], x.clone());

            swiglu(&x, f, &mut y);
            swiglu_backward(&x, &dy, f, &mut dx);
            swiglu_backward_in_place(&mut in_place, &dy, f);

            close(&y, &swiglu_reference(&wide(&x), f), 1e-6);
            close(&dx, &finite_differences(&wide(&x), |x| inner(&swiglu_reference(x, f), &wide(&dy))), 2e-6);
            prop_assert_eq!(&dx, &in_place);
            let (mut x_then_dx, mut dy_then_y) = (x, dy);
            swiglu_backward_again(&mut x_then_dx, &mut dy_then_y, f);
            prop_assert_eq!((bits(&x_then_dx), bits(&dy_then_y)), (bits(&dx), bits(&y)));
        }

        #[test]
        fn gelu_and_its_adjoint_match_the_definition(n in 1usize..80, seed in any::<u64>()) {
            let (x, dy) = (spread(n, seed), random(n, seed ^ 1));
            let (mut y, mut dx) = (vec![f32::NAN; n], vec![f32::NAN; n]);

            gelu(&x, &mut y);
            gelu_backward(&x, &dy, &mut dx);

            close(&y, &gelu_reference(&wide(&x)), 1e-6);
            close(&dx, &finite_differences(&wide(&x), |x| inner(&gelu_reference(x), &wide(&dy))), 2e-6);
            let (mut x_then_dx, mut dy_then_y) = (x, dy);
            gelu_backward_again(&mut x_then_dx, &mut dy_then_y);
            prop_assert_eq!((bits(&x_then_dx), bits(&dy_then_y)), (bits(&dx), bits(&y)));
        }
    }

    #[test]
    fn half_width_storage_differs_by_its_rounding_only() {
        let x: Vec<bf16> = stored(&spread(1000, 1));
        let dy: Vec<bf16> = stored(&random(500, 2));
        let (mut y, mut dx) = (vec![bf16::ZERO; 500], vec![bf16::ZERO; 1000]);

        swiglu(&x, 50, &mut y);
        swiglu_backward(&x, &dy, 50, &mut dx);

        close(&y, &swiglu_reference(&wide(&x), 50), 1.0 / 256.0);
        let loss = |x: &[f64]| inner(&swiglu_reference(x, 50), &wide(&dy));
        close(&dx, &finite_differences(&wide(&x), loss), 1.0 / 256.0);
        gelu(&x[..500], &mut y);
        close(&y, &gelu_reference(&wide(&x[..500])), 1.0 / 256.0);
    }

    #[test]
    fn saturated_gates_stay_finite() {
        let (x, mut y) = (vec![-1e30f32, -200.0, 200.0, 0.0, 1.0, 1.0, 1.0, 1.0], vec![f32::NAN; 4]);

        swiglu(&x, 4, &mut y);

        assert_eq!(y[2..], [200.0, 0.0]);
        assert!(y[0].abs() < 1e-5 && y[1].abs() < 1e-30, "{y:?}");
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let (x, dy) = (spread(2 * 300 * 100, 3), random(300 * 100, 4));

        same_on_every_number_of_threads(|| {
            let (mut y, mut dx) = (vec![0.0f32; dy.len()], vec![0.0f32; x.len()]);
            swiglu(&x, 100, &mut y);
            swiglu_backward(&x, &dy, 100, &mut dx);
            (bits(&y), bits(&dx))
        });
    }
}
