//! The f32 engine of CPUs with AVX2 and without AVX-512: 6 × 16 sums in 12 of the 16 vector registers, fed from packed
//! panels.
//!
//! A panel of width W holds, for every p, W neighbouring elements: 6 of A (one broadcast each) or 16 of B (two vectors).

use std::arch::x86_64::*;

use super::lanes8::{LANES, load, round_to_bf16, store, transpose};
use super::operand::Storage;
use super::store::{Store, address};
use super::tile::{Strip, TileAt};
use crate::prefetch::{prefetch, prefetch_ahead};

/// Rows of the register tile: with two vectors a row, 12 sums leave 4 registers for operands.
pub(super) const MR: usize = 6;
/// Columns of the register tile.
pub(super) const NR: usize = 16;

/// Packs `filled ≤ W` lines of `depth` elements into a panel; missing lines are zero.
///
/// # Safety
/// Needs the features of [`super::lanes8`]. `from` covers `filled × depth`, `to` has space for `W × depth`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn pack<const W: usize>(to: *mut f32, from: Strip, filled: usize, depth: usize, round: bool) {
    const { assert!(W == MR || W.is_multiple_of(LANES)) };
    for first in (0..W).step_by(LANES) {
        let lines = filled.saturating_sub(first).min(LANES);
        // SAFETY: lines and depth stay inside the caller's extents; rows are stored as wide as the panel.
        unsafe {
            if from.k_contiguous {
                pack_transposed::<W>(to.add(first), from.at(first, 0), lines, depth, round);
            } else {
                pack_straight::<W>(to.add(first), from.at(first, 0), lines, depth, round);
            }
        }
    }
}

/// Packs adjacent lines: a row of storage holds eight lines at one p.
///
/// # Safety
/// As for [`pack`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pack_straight<const W: usize>(to: *mut f32, from: Strip, lines: usize, depth: usize, round: bool) {
    for p in 0..depth {
        // SAFETY: by the caller.
        unsafe {
            let at = from.at(0, p).ptr;
            prefetch_ahead(at);
            let x = load(at, from.storage, lines);
            store_row::<W>(to.add(p * W), if round { round_to_bf16(x) } else { x });
        }
    }
}

/// Packs consecutive lines: transposes eight elements of each in registers.
///
/// # Safety
/// As for [`pack`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pack_transposed<const W: usize>(to: *mut f32, from: Strip, lines: usize, depth: usize, round: bool) {
    for p in (0..depth).step_by(LANES) {
        let count = LANES.min(depth - p);
        let mut square = [_mm256_setzero_ps(); LANES];
        for (x, row) in square.iter_mut().enumerate().take(lines) {
            // SAFETY: by the caller; `count` ends at `depth`.
            let line = unsafe {
                let at = from.at(x, p).ptr;
                prefetch_ahead(at);
                load(at, from.storage, count)
            };
            *row = if round { round_to_bf16(line) } else { line };
        }
        transpose(&mut square);
        for (q, row) in square.iter().enumerate().take(count) {
            // SAFETY: row p + q of the panel.
            unsafe { store_row::<W>(to.add((p + q) * W), *row) };
        }
    }
}

/// Stores eight lanes of a row of a panel, or the six of a panel of A.
///
/// # Safety
/// `to` has space for them.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store_row<const W: usize>(to: *mut f32, x: __m256) {
    // SAFETY: by the caller.
    unsafe {
        if W == MR {
            _mm_storeu_ps(to, _mm256_castps256_ps128(x));
            _mm_storel_epi64(to.add(4).cast(), _mm256_extracti128_si256::<1>(_mm256_castps_si256(x)));
        } else {
            _mm256_storeu_ps(to, x);
        }
    }
}

/// Elements of a panel of B, 1 KiB, between what is loaded and what is asked for: a panel comes from the second-level cache.
const AHEAD: usize = 256;

/// Multiplies a panel of A by a panel of B over `depth` and stores the tile.
///
/// # Safety
/// Needs the features of [`super::lanes8`]. The panels hold `depth`; the tile may be stored, see [`store_tile`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn multiply(depth: usize, a: *const u8, b: *const u8, store: &Store<'_>, at: TileAt) {
    let (mut a, mut b): (*const f32, *const f32) = (a.cast(), b.cast());
    let mut sums = [[_mm256_setzero_ps(); 2]; MR];
    for _ in 0..depth {
        // SAFETY: one of the `depth` rows of each panel.
        unsafe {
            prefetch(b.wrapping_add(AHEAD));
            let (b0, b1) = (_mm256_loadu_ps(b), _mm256_loadu_ps(b.add(LANES)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = _mm256_broadcast_ss(&*a.add(i));
                sum[0] = _mm256_fmadd_ps(x, b0, sum[0]);
                sum[1] = _mm256_fmadd_ps(x, b1, sum[1]);
            }
            (a, b) = (a.add(MR), b.add(NR));
        }
    }
    // Copied so that the sums of the loop have no address, which would keep them out of registers at its ends.
    let done = sums;
    // SAFETY: by the caller.
    unsafe { store_tile(store, &done, at) };
}

/// Stores the leading `rows × cols` of a tile by the epilogue of its stretch; see [`Store`].
///
/// # Safety
/// Needs the features of [`super::lanes8`]. The tile lies inside `from` and `to`, which no other thread touches, and its
/// columns lie inside the bias.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store_tile(epilogue: &Store<'_>, sums: &[[__m256; 2]; MR], at: TileAt) {
    let alpha = _mm256_set1_ps(epilogue.alpha);
    for half in 0..at.cols.div_ceil(LANES) {
        let (col, n) = (at.col + half * LANES, at.cols - half * LANES);
        // SAFETY: extents by the caller; loads and stores end at `cols`.
        unsafe {
            let bias = match epilogue.bias {
                Some(b) => load(b.as_ptr().add(col).cast(), Storage::F32, n),
                None => _mm256_setzero_ps(),
            };
            for (i, sum) in sums.iter().enumerate().take(at.rows) {
                let mut x = _mm256_fmadd_ps(sum[half], alpha, bias);
                if let Some(from) = epilogue.from {
                    x = _mm256_add_ps(x, load(address(from, at.row + i, col), from.storage, n));
                }
                store(address(epilogue.to, at.row + i, col), epilogue.to.storage, n, x);
            }
        }
    }
}
