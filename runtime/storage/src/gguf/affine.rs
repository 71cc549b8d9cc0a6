//! Blocks of `Q4_K` and `Q5_K`: 256 weights in eight groups of 32, each with a scale and a minimum of 6 bits.
//!
//! A weight is `d · s · q - m_d · m`, with `q` of 4 or 5 bits, `s` and `m` of its group, and `d` and `m_d` of the block in
//! half precision. In bytes:
//!
//! | bytes | what |
//! |---|---|
//! | 2, 2 | `d`, `m_d` |
//! | 12 | `s` and `m`: bytes 0 to 3 and 4 to 7 have those of groups 0 to 3 in their low 6 bits; bytes 8 to 11 have the low 4 bits of those of groups 4 to 7, `s` below `m`, and the high 2 bits of bytes 0 to 7 have the rest |
//! | 32 | `Q5_K` only: bit `g` of byte `i` is the highest bit of weight `i` of group `g` |
//! | 128 | low 4 bits: byte `32 k + i` has weight `i` of groups `2 k` and `2 k + 1`, the first below |
//!
//! Source: ggml-org/ggml, `block_q4_K` and `block_q5_K` of src/ggml-common.h. The search for the numbers is ours: lines
//! through the weights of each group from several ranges, then rounds of integers and factors by least squares.

use super::fit::{BLOCK, first_factor, importance, nearest_factor, rounded, sum};
use half::f16;

/// Weights of a group.
const GROUP: usize = 32;
const N_GROUPS: usize = BLOCK / GROUP;
/// The largest scale and minimum of a group.
const FACTOR_MAX: f32 = 63.0;
/// Steps by which the range of levels is narrower than that of the weights, at its lower and its upper end: a weight at an
/// end that is cut off is worth finer steps for the others. With five of them in place of three, the error of normal and of
/// long-tailed weights falls by 0.2%, and the search takes half as long again.
const CUTS: [f32; 3] = [0.0, 0.4, 0.8];
/// Rounds of least squares; a third one lowers the error by 0.1%.
const ROUNDS: usize = 2;

type Group = [f32; GROUP];

/// Weights as `scale · q - min` of whole numbers `q`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    scale: f32,
    min: f32,
}

impl Line {
    /// The nearest level of each weight, from 0 to `top`.
    #[inline(always)]
    fn levels(self, x: &Group, top: f32) -> Group {
        let inverse = if self.scale > 0.0 { 1.0 / self.scale } else { 0.0 };
        // A scale so small that its inverse is infinite fits no better than none.
        let inverse = if inverse.is_finite() { inverse } else { 0.0 };
        x.map(|x| rounded(((x + self.min) * inverse).clamp(0.0, top)))
    }

    /// The squared error of weights at levels `q`.
    #[inline(always)]
    fn error(self, x: &Group, w: &Group, q: &Group) -> f32 {
        sum::<GROUP>(|i| {
            let distance = self.scale * q[i] - self.min - x[i];
            w[i] * distance * distance
        })
    }

    /// The line of least squares through weights at levels `q`; its minimum is not negative, as files have no sign for it.
    #[inline(always)]
    fn through(x: &Group, w: &Group, q: &Group) -> Self {
        // Levels that are all the same have deviations from their mean of its rounding, and others of a part in a million.
        const SAME: f32 = 1e-9;
        let n = sum::<GROUP>(|i| w[i]);
        let (mean_q, mean_x) = (sum::<GROUP>(|i| w[i] * q[i]) / n, sum::<GROUP>(|i| w[i] * x[i]) / n);
        let variance = sum::<GROUP>(|i| w[i] * (q[i] - mean_q) * (q[i] - mean_q));
        if variance > SAME * n * mean_q * mean_q {
            let scale = sum::<GROUP>(|i| w[i] * (q[i] - mean_q) * (x[i] - mean_x)) / variance;
            let min = scale * mean_q - mean_x;
            if min >= 0.0 && scale >= 0.0 {
                return Line { scale, min };
            }
        }
        let squares = sum::<GROUP>(|i| w[i] * q[i] * q[i]);
        let products = sum::<GROUP>(|i| w[i] * q[i] * x[i]);
        Line { scale: if squares > 0.0 { (products / squares).max(0.0) } else { 0.0 }, min: 0.0 }
    }

    /// The best line that is found for a group.
    fn of(x: &Group, w: &Group, top: f32) -> Self {
        let low = x.iter().fold(0f32, |low, x| low.min(*x));
        let high = x.iter().fold(low, |high, x| high.max(*x));
        if x.iter().all(|x| *x == low) {
            return Line { scale: 0.0, min: -low };
        }
        let mut best = (f32::INFINITY, Line { scale: (high - low) / top, min: -low });
        let consider = |start: Line, best: &mut (f32, Line)| {
            let q = start.levels(x, top);
            let line = Line::through(x, w, &q);
            let error = line.error(x, w, &q);
            let is_better = error < best.0;
            if is_better {
                *best = (error, line);
            }
            is_better
        };
        // A range that begins at zero, because minima are not negative, is not cut there.
        for below in if low < 0.0 { &CUTS[..] } else { &[0.0] } {
            for above in CUTS {
                let scale = (high - low) / (top + below + above);
                consider(Line { scale, min: (-low - below * scale).max(0.0) }, &mut best);
            }
        }
        for _ in 0..ROUNDS {
            if !consider(best.1, &mut best) {
                break;
            }
        }
        best.1
    }
}

/// The numbers of a block.
#[derive(Clone)]
struct Block {
    /// As half precision has them.
    d: f32,
    min_d: f32,
    scales: [f32; N_GROUPS],
    mins: [f32; N_GROUPS],
    levels: [Group; N_GROUPS],
}

impl Block {
    fn of(x: &[Group; N_GROUPS], top: f32) -> Self {
        let w = x.each_ref().map(importance);
        let lines: [Line; N_GROUPS] = std::array::from_fn(|group| Line::of(&x[group], &w[group], top));
        let largest = |of: fn(&Line) -> f32| lines.iter().map(of).fold(0f32, f32::max);
        let (d, min_d) = (largest(|line| line.scale) / FACTOR_MAX, largest(|line| line.min) / FACTOR_MAX);
        let (d, min_d) = (first_factor(d), first_factor(min_d));
        let zeros = [0.0; N_GROUPS];
        let mut block = Block { d, min_d, scales: zeros, mins: zeros, levels: [[0.0; GROUP]; N_GROUPS] };
        for (group, line) in lines.iter().enumerate() {
            block.scales[group] = whole_multiple(line.scale, d);
            block.mins[group] = whole_multiple(line.min, min_d);
        }
        let mut error = block.improve_groups(x, &w, top);
        for _ in 0..ROUNDS {
            let mut next = block.clone();
            next.improve_factors(x, &w);
            let error_next = next.improve_groups(x, &w, top);
            if error_next.is_nan() || error_next >= error {
                break;
            }
            (block, error) = (next, error_next);
        }
        block
    }

    /// The best of neighbouring scales and minima of each group, with the levels that belong to them; their error.
    fn improve_groups(&mut self, x: &[Group; N_GROUPS], w: &[Group; N_GROUPS], top: f32) -> f32 {
        let mut total = 0.0;
        for group in 0..N_GROUPS {
            let (x, w) = (&x[group], &w[group]);
            let (scale, min) = (self.scales[group], self.mins[group]);
            let mut best = f32::INFINITY;
            for scale in [scale, scale - 1.0, scale + 1.0] {
                for min in [min, min - 1.0, min + 1.0] {
                    if !(0.0..=FACTOR_MAX).contains(&scale) || !(0.0..=FACTOR_MAX).contains(&min) {
                        continue;
                    }
                    let line = Line { scale: self.d * scale, min: self.min_d * min };
                    let q = line.levels(x, top);
                    let error = line.error(x, w, &q);
                    if error < best {
                        best = error;
                        (self.scales[group], self.mins[group], self.levels[group]) = (scale, min, q);
                    }
                }
            }
            total += best;
        }
        total
    }

    /// The factors of least squares for the integers as they are.
    fn improve_factors(&mut self, x: &[Group; N_GROUPS], w: &[Group; N_GROUPS]) {
        let mut sums = [0f32; 5];
        for group in 0..N_GROUPS {
            let (x, w, q) = (&x[group], &w[group], &self.levels[group]);
            let (s, m) = (self.scales[group], self.mins[group]);
            sums[0] += s * s * sum::<GROUP>(|i| w[i] * q[i] * q[i]);
            sums[1] += s * m * sum::<GROUP>(|i| w[i] * q[i]);
            sums[2] += m * m * sum::<GROUP>(|i| w[i]);
            sums[3] += s * sum::<GROUP>(|i| w[i] * q[i] * x[i]);
            sums[4] += m * sum::<GROUP>(|i| w[i] * x[i]);
        }
        let [ss, sm, mm, sx, mx] = sums;
        let det = ss * mm - sm * sm;
        let (d, min_d) =
            if det > 0.0 { ((mm * sx - sm * mx) / det, (sm * sx - ss * mx) / det) } else { (sx / ss, 0.0) };
        if d >= 0.0 && min_d >= 0.0 {
            (self.d, self.min_d) = (nearest_factor(d), nearest_factor(min_d));
        }
    }
}

/// `x` in whole steps of `d`, at most [`FACTOR_MAX`] of them.
fn whole_multiple(x: f32, d: f32) -> f32 {
    if d > 0.0 { rounded((x / d).min(FACTOR_MAX)) } else { 0.0 }
}

/// Writes a block of 256 weights with levels of 4 bits, or of 5.
pub(super) fn quantise<const BITS: u32>(x: &[f32; BLOCK], to: &mut [u8]) {
    let (groups, _) = x.as_chunks::<GROUP>();
    let groups: &[Group; N_GROUPS] = groups.try_into().expect("a block has eight groups");
    let block = Block::of(groups, ((1u32 << BITS) - 1) as f32);
    to.fill(0);
    let (factors, rest) = to.split_at_mut(4);
    factors[..2].copy_from_slice(&f16::from_f32(block.d).to_le_bytes());
    factors[2..].copy_from_slice(&f16::from_f32(block.min_d).to_le_bytes());
    let (packed, rest) = rest.split_at_mut(12);
    for group in 0..N_GROUPS {
        let (s, m) = (block.scales[group] as u8, block.mins[group] as u8);
        if group < 4 {
            packed[group] |= s;
            packed[group + 4] |= m;
        } else {
            packed[group + 4] = s & 15 | m << 4;
            packed[group - 4] |= s >> 4 << 6;
            packed[group] |= m >> 4 << 6;
        }
    }
    let (high, low) = rest.split_at_mut(if BITS == 5 { GROUP } else { 0 });
    for (group, levels) in block.levels.iter().enumerate() {
        for (i, level) in levels.iter().enumerate() {
            let level = *level as u8;
            low[group / 2 * GROUP + i] |= (level & 15) << (group % 2 * 4);
            if BITS == 5 {
                high[i] |= level >> 4 << group;
            }
        }
    }
}
