//! The bf16 engine for CPUs without tiles: 14 × 32 sums in 28 of the 32 vector registers, fed from panels of pairs.
//!
//! One instruction multiplies 16 pairs by 16 pairs and adds both products of each: twice the rate of f32.
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, `VDPBF16PS`.

use std::arch::x86_64::*;

use super::operand::Storage;
use super::pairs::{STEP, store_narrow};
use super::store::Store;
use super::tile::TileAt;

/// Rows of the register tile: with two vectors a row, 28 sums leave 4 registers for operands.
pub(super) const MR: usize = 14;
/// Columns of the register tile.
pub(super) const NR: usize = 32;

/// Multiplies a panel of A by a panel of B over `depth` and stores the tile.
///
/// # Safety
/// The CPU has [`Isa::Avx512Bf16`](crate::isa::Isa). The panels were packed by [`super::pairs::pack`] and hold `depth`; the tile may be
/// stored, see [`Store::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c")]
pub(super) unsafe fn multiply(depth: usize, a: *const u8, b: *const u8, store: &Store<'_>, at: TileAt) {
    const PAIRS: usize = STEP / 2;
    let (mut a, mut b): (*const i32, *const __m512i) = (a.cast(), b.cast());
    let mut sums = [[_mm512_setzero_ps(); 2]; MR];
    for _ in 0..depth.div_ceil(STEP) {
        for pair in 0..PAIRS {
            // SAFETY: a step of each panel, and the panels hold `depth`; both types of vectors are plain bits.
            unsafe {
                let b0: __m512bh = std::mem::transmute(_mm512_load_si512(b.add(pair)));
                let b1: __m512bh = std::mem::transmute(_mm512_load_si512(b.add(PAIRS + pair)));
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x: __m512bh = std::mem::transmute(_mm512_set1_epi32(*a.add(i * PAIRS + pair)));
                    sum[0] = _mm512_dpbf16_ps(sum[0], x, b0);
                    sum[1] = _mm512_dpbf16_ps(sum[1], x, b1);
                }
            }
        }
        (a, b) = (a.wrapping_add(MR * PAIRS), b.wrapping_add(2 * PAIRS));
    }
    // Copied so that the sums of the loop have no address, which would keep them out of registers at its ends.
    let done = sums;
    // SAFETY: by the caller; `done` is MR aligned rows of 32 f32.
    unsafe {
        if store.to.storage == Storage::Bf16 && store.bias.is_none() {
            store_narrow(done.as_ptr().cast(), store, at);
        } else {
            store.tile(done.as_ptr().cast(), at.row, at.col, at.rows, at.cols);
        }
    }
}
