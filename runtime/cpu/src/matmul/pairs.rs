//! Panels of bf16 pairs, for both the tiles of AMX and the pair products of AVX-512.
//!
//! A step covers 32 of k. Its panel of A has, for each row, 32 neighbours in k; its panel of B has, for each half of 16
//! columns, 16 rows, where row q holds the pair (2q, 2q + 1) of k for every column. As matrices of 32-bit pairs these
//! are `[x][pair]` and `[pair][x]`, like the two layouts in memory, so each packing is either a copy or one 16 × 16
//! transpose.

use std::arch::x86_64::*;

use super::lanes::{first16, first32, load, transpose};
use super::operand::Storage;
use super::store::{Store, address};
use super::tile::{Side, Strip, TileAt};
use crate::prefetch::prefetch_ahead;
use half::{bf16, f16};
use phalanx_device::float::Float;

/// Elements of k in one step.
pub(super) const STEP: usize = 32;

/// Packs `filled ≤ HALVES × LINES` lines of `depth` elements, step after step and half after half; missing elements are zero. Panels of B
/// have halves of 16 lines.
///
/// # Safety
/// The CPU has the features below. `from` covers `filled × depth`, `to` has space for all lines × (`depth` rounded up to 32).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c")]
pub(super) unsafe fn pack<const HALVES: usize, const LINES: usize>(
    to: *mut u8,
    from: Strip,
    filled: usize,
    depth: usize,
    side: Side,
) {
    // SAFETY: by the caller.
    unsafe {
        match from.storage {
            Storage::F32 => pack_from::<f32, HALVES, LINES>(to, from, filled, depth, side),
            Storage::Bf16 => pack_from::<bf16, HALVES, LINES>(to, from, filled, depth, side),
            Storage::F16 => pack_from::<f16, HALVES, LINES>(to, from, filled, depth, side),
        }
    }
}

/// [`pack`] of elements of type `T`. Whole halves, nearly all, are packed by code without masks.
///
/// # Safety
/// As for [`pack`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c")]
unsafe fn pack_from<T: Float, const HALVES: usize, const LINES: usize>(
    to: *mut u8,
    from: Strip,
    filled: usize,
    depth: usize,
    side: Side,
) {
    const { assert!(LINES <= 16) };
    let mut to: *mut __m512i = to.cast();
    for p in (0..depth).step_by(STEP) {
        let count = STEP.min(depth - p);
        for first in (0..HALVES * LINES).step_by(LINES) {
            let filled = filled.saturating_sub(first).min(LINES);
            let is_whole = filled == LINES && count == STEP;
            // SAFETY: by the caller; `(·, p)` is inside the strip.
            unsafe {
                let from = from.at(first, p);
                let mut half = match (from.k_contiguous, is_whole) {
                    (true, true) => lines::<T, LINES, true>(from, LINES, STEP),
                    (true, false) => lines::<T, LINES, false>(from, filled, count),
                    (false, true) => pairs::<T, LINES, true>(from, LINES, STEP),
                    (false, false) => pairs::<T, LINES, false>(from, filled, count),
                };
                if from.k_contiguous == (side == Side::B) {
                    transpose(&mut half);
                }
                for row in &half[..LINES] {
                    _mm512_store_si512(to, *row);
                    to = to.add(1);
                }
            }
        }
    }
}

/// The lines of a half as `[x][pair]`.
///
/// # Safety
/// As for [`pack`]; if `WHOLE`, all lines have a whole step.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c")]
unsafe fn lines<T: Float, const LINES: usize, const WHOLE: bool>(
    from: Strip,
    filled: usize,
    count: usize,
) -> [__m512i; 16] {
    let (storage, count) = (Storage::of::<T>(), if WHOLE { STEP } else { count });
    let mut rows = [_mm512_setzero_si512(); 16];
    for (r, row) in rows.iter_mut().enumerate().take(if WHOLE { LINES } else { filled }) {
        // SAFETY: line r < filled; masks end at `count`.
        unsafe {
            let at = from.at(r, 0).ptr;
            prefetch_ahead(at);
            *row = if storage == Storage::Bf16 {
                _mm512_maskz_loadu_epi16(first32(count), at.cast())
            } else {
                let (low, high) = load_wide(at, storage, count);
                narrow(low, high)
            };
        }
    }
    rows
}

/// The lines of a half, which are adjacent, as `[pair][x]`.
///
/// # Safety
/// As for [`lines`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c")]
unsafe fn pairs<T: Float, const LINES: usize, const WHOLE: bool>(
    from: Strip,
    filled: usize,
    count: usize,
) -> [__m512i; 16] {
    let (storage, count) = (Storage::of::<T>(), if WHOLE { STEP } else { count });
    let mut rows = [_mm512_setzero_si512(); 16];
    let order = interleave();
    for (q, row) in rows.iter_mut().enumerate().take(count.div_ceil(2)) {
        let filled = if WHOLE { LINES } else { filled };
        // An odd depth ends with half a pair, whose second row is masked out.
        let second = if WHOLE || 2 * q + 1 < count { filled } else { 0 };
        // SAFETY: rows 2q and, unless masked, 2q + 1 are inside the strip; masks end at `filled`.
        unsafe {
            let (at, next) = (from.at(0, 2 * q).ptr, from.at(0, 2 * q + 1).ptr);
            prefetch_ahead(at);
            prefetch_ahead(next);
            let both = if storage == Storage::Bf16 {
                let even = _mm256_maskz_loadu_epi16(first16(filled), at.cast());
                let odd = _mm256_maskz_loadu_epi16(first16(second), next.cast());
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(even), odd)
            } else {
                let even = load(at, storage, first16(filled));
                narrow(even, load(next, storage, first16(second)))
            };
            *row = _mm512_permutexvar_epi16(order, both);
        }
    }
    rows
}

/// The permutation `0, 16, 1, 17, …` of 16-bit lanes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn interleave() -> __m512i {
    let even = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let odd = _mm512_slli_epi32::<16>(_mm512_add_epi32(even, _mm512_set1_epi32(16)));
    _mm512_or_si512(even, odd)
}

/// Loads the first `count` of 32 elements as f32.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
unsafe fn load_wide(at: *const u8, storage: Storage, count: usize) -> (__m512, __m512) {
    // SAFETY: by the caller; a fully masked load accesses no memory, so its address may lie outside.
    unsafe {
        let high = at.wrapping_add(16 * storage.bytes());
        (load(at, storage, first16(count)), load(high, storage, first16(count.saturating_sub(16))))
    }
}

/// Rounds two vectors to bf16, `low` into the first sixteen lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) fn narrow(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both types are 512 plain bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// [`Store::tile`] for bf16 without bias, with the conversion instruction, which takes two vectors and flushes
/// subnormals like the products. The sums are aligned.
///
/// # Safety
/// As for [`Store::tile`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c")]
pub(super) unsafe fn store_narrow(sums: *const f32, store: &Store<'_>, at: TileAt) {
    let (alpha, mask) = (_mm512_set1_ps(store.alpha), first32(at.cols));
    for i in 0..at.rows {
        // SAFETY: by the caller; the mask ends at the last column.
        unsafe {
            let mut low = _mm512_mul_ps(alpha, _mm512_load_ps(sums.add(32 * i)));
            let mut high = _mm512_mul_ps(alpha, _mm512_load_ps(sums.add(32 * i + 16)));
            if let Some(from) = store.from {
                let before = load_wide(address(from, at.row + i, at.col), from.storage, at.cols);
                (low, high) = (_mm512_add_ps(low, before.0), _mm512_add_ps(high, before.1));
            }
            let to = address(store.to, at.row + i, at.col);
            _mm512_mask_storeu_epi16(to.cast(), mask, narrow(low, high));
        }
    }
}
