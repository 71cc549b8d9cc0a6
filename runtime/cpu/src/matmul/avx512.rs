//! The f32 engine: 14 × 32 sums in 28 of the 32 vector registers, fed from packed panels.
//!
//! A panel of width W holds, for every p, W neighbouring elements: 14 of A (one broadcast each) or 32 of B (two
//! vectors).

use std::arch::x86_64::*;

use super::lanes::{first16, load, round_to_bf16, transpose};
use super::store::Store;
use super::tile::{Strip, TileAt};
use crate::prefetch::{prefetch, prefetch_ahead};

/// Rows of the register tile: with two vectors a row, 28 sums leave 4 registers for operands.
pub(super) const MR: usize = 14;
/// Columns of the register tile.
pub(super) const NR: usize = 32;

/// Packs `filled ≤ W` lines of `depth` elements into a panel; missing lines are zero.
///
/// # Safety
/// Needs the features of [`super::lanes`]. `from` covers `filled × depth`, `to` has space for `W × depth`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn pack<const W: usize>(to: *mut f32, from: Strip, filled: usize, depth: usize, round: bool) {
    for half in (0..W).step_by(16) {
        let keep = first16(W - half);
        let lines = filled.saturating_sub(half).min(16);
        // SAFETY: lines and depth stay inside the caller's extents; stores are masked to the panel's width.
        unsafe {
            if from.k_contiguous {
                pack_transposed::<W>(to.add(half), from.at(half, 0), lines, depth, keep, round);
            } else {
                pack_straight::<W>(to.add(half), from.at(half, 0), lines, depth, keep, round);
            }
        }
    }
}

/// Packs adjacent lines: a row of storage holds sixteen lines at one p.
///
/// # Safety
/// As for [`pack`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn pack_straight<const W: usize>(
    to: *mut f32,
    from: Strip,
    lines: usize,
    depth: usize,
    keep: __mmask16,
    round: bool,
) {
    let mask = first16(lines);
    for p in 0..depth {
        // SAFETY: by the caller.
        unsafe {
            let at = from.at(0, p).ptr;
            prefetch_ahead(at);
            let mut x = load(at, from.storage, mask);
            if round {
                x = round_to_bf16(x);
            }
            _mm512_mask_storeu_ps(to.add(p * W), keep, x);
        }
    }
}

/// Packs consecutive lines: transposes sixteen elements of each in registers.
///
/// # Safety
/// As for [`pack`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn pack_transposed<const W: usize>(
    to: *mut f32,
    from: Strip,
    lines: usize,
    depth: usize,
    keep: __mmask16,
    round: bool,
) {
    for p in (0..depth).step_by(16) {
        let count = 16.min(depth - p);
        let mask = first16(count);
        let mut square = [_mm512_setzero_si512(); 16];
        for (x, row) in square.iter_mut().enumerate().take(lines) {
            // SAFETY: by the caller; the mask ends at `depth`.
            let mut line = unsafe {
                let at = from.at(x, p).ptr;
                prefetch_ahead(at);
                load(at, from.storage, mask)
            };
            if round {
                line = round_to_bf16(line);
            }
            *row = _mm512_castps_si512(line);
        }
        transpose(&mut square);
        for (q, row) in square.iter().enumerate().take(count) {
            // SAFETY: row p + q of the panel, masked to its width.
            unsafe { _mm512_mask_storeu_ps(to.add((p + q) * W), keep, _mm512_castsi512_ps(*row)) };
        }
    }
}

/// Elements of a panel of B, 1 KiB, between what is loaded and what is asked for: a panel comes from the second-level cache.
const AHEAD: usize = 256;

/// Multiplies a panel of A by a panel of B over `depth` and stores the tile.
///
/// # Safety
/// Needs the features of [`super::lanes`]. The panels hold `depth`; the tile may be stored, see [`Store::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
pub(super) unsafe fn multiply(depth: usize, a: *const u8, b: *const u8, store: &Store<'_>, at: TileAt) {
    let (mut a, mut b): (*const f32, *const f32) = (a.cast(), b.cast());
    let mut sums = [[_mm512_setzero_ps(); 2]; MR];
    for _ in 0..depth {
        // SAFETY: one of the `depth` rows of each panel.
        unsafe {
            prefetch(b.wrapping_add(AHEAD));
            prefetch(b.wrapping_add(AHEAD + 16));
            let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.add(i));
                sum[0] = _mm512_fmadd_ps(x, b0, sum[0]);
                sum[1] = _mm512_fmadd_ps(x, b1, sum[1]);
            }
            (a, b) = (a.add(MR), b.add(NR));
        }
    }
    // Copied so that the sums of the loop have no address, which would keep them out of registers at its ends.
    let done = sums;
    // SAFETY: by the caller; `done` is MR rows of 32 f32.
    unsafe { store.tile(done.as_ptr().cast(), at.row, at.col, at.rows, at.cols) };
}
