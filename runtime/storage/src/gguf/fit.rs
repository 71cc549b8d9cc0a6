//! What the searches for factors of blocks share: rounding, weights of squared errors, and factors in half precision.

use half::f16;

/// Weights of a block in the formats with blocks of blocks.
pub(super) const BLOCK: usize = 256;

/// What the squared error of each weight counts: more for a large one, which moves its output more, and never nothing.
pub(super) fn importance<const N: usize>(x: &[f32; N]) -> [f32; N] {
    let rms = (sum::<N>(|i| x[i] * x[i]) / N as f32).sqrt();
    x.map(|x| rms + x.abs())
}

/// The sum of `N` terms, in eight lanes so that processors add several at once.
#[inline(always)]
pub(super) fn sum<const N: usize>(term: impl Fn(usize) -> f32) -> f32 {
    const LANES: usize = 8;
    const { assert!(N.is_multiple_of(LANES)) };
    let mut lanes = [0f32; LANES];
    for i in (0..N).step_by(LANES) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += term(i + lane);
        }
    }
    lanes.iter().sum()
}

/// The whole number nearest to `x`, of a magnitude below 2^22. Adding 1.5·2^23 leaves no bits for fractions; `round` is a
/// call of a function per number on processors without SSE 4.1.
#[inline(always)]
pub(super) fn rounded(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT) - SHIFT
}

/// A factor as a block begins with it: in half precision. Below the normal numbers, whose steps are wide there, the magnitude
/// is rounded up: multiples of a smaller factor would not reach the largest weight.
pub(super) fn first_factor(d: f32) -> f32 {
    let nearest = f16::from_f32(d);
    let is_short = nearest.to_f32().abs() < d.abs() && d.abs() < f16::MIN_POSITIVE.to_f32();
    if is_short { f16::from_bits(nearest.to_bits() + 1).to_f32() } else { nearest.to_f32() }
}

/// The nearest factor in half precision.
pub(super) fn nearest_factor(d: f32) -> f32 {
    f16::from_f32(d).to_f32()
}
