//! Blocks of `Q6_K`: 256 weights in sixteen groups of 16, each with a signed scale of 8 bits.
//!
//! A weight is `d · s · (q - 32)`, with `q` of 6 bits, `s` of its group, and `d` of the block in half precision. In bytes:
//!
//! | bytes | what |
//! |---|---|
//! | 128 | low 4 bits: of each half of the block, byte `64 h + i` has weights `i` and `i + 64`, the first below |
//! | 64 | high 2 bits: byte `32 h + i` has those of weights `i`, `i + 32`, `i + 64` and `i + 96` of half `h`, from the lowest |
//! | 16 | `s` |
//! | 2 | `d` |
//!
//! Source: ggml-org/ggml, `block_q6_K` of src/ggml-common.h. The search for the numbers is ours: scales from several ranges
//! of each group, then rounds of integers and the factor by least squares.

use super::fit::{BLOCK, first_factor, importance, nearest_factor, rounded, sum};
use half::f16;

/// Weights of a group.
const GROUP: usize = 16;
const N_GROUPS: usize = BLOCK / GROUP;
/// The lowest level. It is one further from zero than the highest one, so scales have the sign that gives it to the largest
/// weight, unless the other sign turns out better.
const LOWEST: f32 = -32.0;
const HIGHEST: f32 = 31.0;
const SCALE_LOWEST: f32 = -128.0;
const SCALE_HIGHEST: f32 = 127.0;
/// Levels at which the largest weight of a group begins. Those beyond the range cut it off for finer steps.
const ENDS: [f32; 10] = [-32.9, -32.6, -32.3, -32.0, -31.7, -31.3, 30.7, 31.0, 31.3, 31.6];
/// Rounds of least squares; a third one lowers the error by less than 0.1%.
const ROUNDS: usize = 2;

type Group = [f32; GROUP];

#[inline(always)]
fn levels(x: &Group, scale: f32) -> Group {
    let inverse = 1.0 / scale;
    // Scales of zero, or so small that the inverse is infinite, have no levels but zero.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    x.map(|x| rounded((x * inverse).clamp(LOWEST, HIGHEST)))
}

#[inline(always)]
fn error(x: &Group, w: &Group, scale: f32, q: &Group) -> f32 {
    sum::<GROUP>(|i| {
        let distance = scale * q[i] - x[i];
        w[i] * distance * distance
    })
}

/// The best scale that is found for a group.
fn scale_of(x: &Group, w: &Group) -> f32 {
    let largest = x.iter().fold(0f32, |largest, x| if x.abs() > largest.abs() { *x } else { largest });
    if largest == 0.0 {
        return 0.0;
    }
    let mut best = (f32::INFINITY, largest / LOWEST);
    let consider = |start: f32, best: &mut (f32, f32)| {
        let q = levels(x, start);
        let squares = sum::<GROUP>(|i| w[i] * q[i] * q[i]);
        let scale = if squares > 0.0 { sum::<GROUP>(|i| w[i] * q[i] * x[i]) / squares } else { 0.0 };
        let error = error(x, w, scale, &q);
        let is_better = error < best.0;
        if is_better {
            *best = (error, scale);
        }
        is_better
    };
    for end in ENDS {
        consider(largest / end, &mut best);
    }
    for _ in 0..ROUNDS {
        if !consider(best.1, &mut best) {
            break;
        }
    }
    best.1
}

/// The numbers of a block.
#[derive(Clone)]
struct Block {
    /// As half precision has it.
    d: f32,
    scales: [f32; N_GROUPS],
    levels: [Group; N_GROUPS],
}

impl Block {
    fn of(x: &[Group; N_GROUPS]) -> Self {
        let w = x.each_ref().map(importance);
        let scales: [f32; N_GROUPS] = std::array::from_fn(|group| scale_of(&x[group], &w[group]));
        let largest = scales.iter().fold(0f32, |largest, s| if s.abs() > largest.abs() { *s } else { largest });
        let d = first_factor(largest / SCALE_LOWEST);
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let scales = scales.map(|s| rounded((s * inverse).clamp(SCALE_LOWEST, SCALE_HIGHEST)));
        let mut block = Block { d, scales, levels: [[0.0; GROUP]; N_GROUPS] };
        let mut error = block.improve_groups(x, &w);
        for _ in 0..ROUNDS {
            let mut next = block.clone();
            next.improve_factor(x, &w);
            let error_next = next.improve_groups(x, &w);
            if error_next.is_nan() || error_next >= error {
                break;
            }
            (block, error) = (next, error_next);
        }
        block
    }

    /// The best of neighbouring scales of each group, with the levels that belong to them; their error.
    fn improve_groups(&mut self, x: &[Group; N_GROUPS], w: &[Group; N_GROUPS]) -> f32 {
        let mut total = 0.0;
        for group in 0..N_GROUPS {
            let scale = self.scales[group];
            let mut best = f32::INFINITY;
            for scale in [scale, scale - 1.0, scale + 1.0] {
                if !(SCALE_LOWEST..=SCALE_HIGHEST).contains(&scale) {
                    continue;
                }
                let q = levels(&x[group], self.d * scale);
                let error = error(&x[group], &w[group], self.d * scale, &q);
                if error < best {
                    best = error;
                    (self.scales[group], self.levels[group]) = (scale, q);
                }
            }
            total += best;
        }
        total
    }

    /// The factor of least squares for the integers as they are.
    fn improve_factor(&mut self, x: &[Group; N_GROUPS], w: &[Group; N_GROUPS]) {
        let (mut squares, mut products) = (0f32, 0f32);
        for group in 0..N_GROUPS {
            let (x, w, q, s) = (&x[group], &w[group], &self.levels[group], self.scales[group]);
            squares += s * s * sum::<GROUP>(|i| w[i] * q[i] * q[i]);
            products += s * sum::<GROUP>(|i| w[i] * q[i] * x[i]);
        }
        if squares > 0.0 {
            self.d = nearest_factor(products / squares);
        }
    }
}

/// Writes a block of 256 weights.
pub(super) fn quantise(x: &[f32; BLOCK], to: &mut [u8]) {
    let (groups, _) = x.as_chunks::<GROUP>();
    let block = Block::of(groups.try_into().expect("a block has sixteen groups"));
    to.fill(0);
    let (low, rest) = to.split_at_mut(BLOCK / 2);
    let (high, rest) = rest.split_at_mut(BLOCK / 4);
    let (scales, d) = rest.split_at_mut(N_GROUPS);
    for (i, level) in block.levels.as_flattened().iter().enumerate() {
        let level = (level - LOWEST) as u8;
        let (half, i) = (i / 128, i % 128);
        low[half * 64 + i % 64] |= (level & 15) << (i / 64 * 4);
        high[half * 32 + i % 32] |= level >> 4 << (i / 32 * 2);
    }
    for (byte, scale) in scales.iter_mut().zip(block.scales) {
        *byte = scale as i8 as u8;
    }
    d.copy_from_slice(&f16::from_f32(block.d).to_le_bytes());
}
