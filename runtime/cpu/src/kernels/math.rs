//! Scalar functions that vectorise, and sums whose order is fixed.

use phalanx_device::float::Float;

/// Number of partial sums: enough to fill two 512-bit registers and to hide the latency of an add.
const LANES: usize = 32;

/// `e^x` to about one unit in the last place; 0 below -87.3, finite above 88; NaN stays NaN.
///
/// Range reduction `x = n ln 2 + r` in two parts, then the Taylor series to the seventh power, whose remainder for
/// `|r| <= ln 2 / 2` is below 6e-9, a tenth of an f32 rounding.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding it rounds to an integer, which appears in the low bits; subtracting it restores the magnitude.
    const SHIFT: f32 = 12_582_912.0;
    // ln 2 in two parts; the first has trailing zeros so that its product with n is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // A comparison instead of `min` propagates NaN.
    let x_bounded = if x > 88.0 { 88.0 } else { x };
    let shifted = x_bounded * std::f32::consts::LOG2_E + SHIFT;
    let n = shifted - SHIFT;
    let r = (x_bounded - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    let y = (p * r * r + r) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(SHIFT.to_bits()).wrapping_add(127);
    let scaled = y * f32::from_bits(exponent << 23);
    if x < -87.3 { 0.0 } else { scaled }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `Σ f(a_i)`.
#[inline(always)]
pub fn sum<A: Float>(a: &[A], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (a, a_tail) = a.as_chunks::<LANES>();
    for a in a {
        for i in 0..LANES {
            lanes[i] += f(a[i].to_f32());
        }
    }
    for (lane, a) in lanes.iter_mut().zip(a_tail) {
        *lane += f(a.to_f32());
    }
    fold(lanes)
}

/// `Σ f(a_i, b_i)` of slices of equal length.
#[inline(always)]
pub fn sum2<A: Float, B: Float>(a: &[A], b: &[B], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] += f(a[i].to_f32(), b[i].to_f32());
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_tail).zip(b_tail) {
        *lane += f(a.to_f32(), b.to_f32());
    }
    fold(lanes)
}

/// `Σ f(a_i, b_i, c_i)` of slices of equal length.
#[inline(always)]
pub fn sum3<A: Float, B: Float>(a: &[A], b: &[B], c: &[f32], f: impl Fn(f32, f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let (c, c_tail) = c.as_chunks::<LANES>();
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for i in 0..LANES {
            lanes[i] += f(a[i].to_f32(), b[i].to_f32(), c[i]);
        }
    }
    for (((lane, a), b), c) in lanes.iter_mut().zip(a_tail).zip(b_tail).zip(c_tail) {
        *lane += f(a.to_f32(), b.to_f32(), *c);
    }
    fold(lanes)
}

/// Largest element; minus infinity for an empty slice. A NaN may be skipped or returned.
#[inline(always)]
pub fn max(a: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (a, tail) = a.as_chunks::<LANES>();
    for a in a {
        for i in 0..LANES {
            lanes[i] = if a[i] > lanes[i] { a[i] } else { lanes[i] };
        }
    }
    lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let exact = (x as f64).exp();

            let error = (exp(x) as f64 - exact).abs() / exact;

            assert!(error < 2.0 * f32::EPSILON as f64, "exp({x}) is off by {error:e}");
        }
    }

    #[test]
    fn exp_of_the_extremes_is_zero_finite_and_nan() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e9), 0.0);
        assert!(exp(1e9).is_finite() && exp(1e9) > 1e38);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn sums_include_the_tail() {
        for n in [0, 1, 31, 32, 33, 100] {
            let ones = vec![1.0f32; n];

            assert_eq!(sum(&ones, |a| a), n as f32);
            assert_eq!(sum2(&ones, &ones, |a, b| a + b), 2.0 * n as f32);
            assert_eq!(sum3(&ones, &ones, &ones, |a, b, c| a + b + c), 3.0 * n as f32);
        }
    }

    #[test]
    fn max_is_found_in_every_position() {
        for n in [1, 31, 33, 70] {
            for at in 0..n {
                let mut a = vec![-5.0; n];
                a[at] = -1.0;

                assert_eq!(max(&a), -1.0);
            }
        }
    }
}
