//! The epilogue: storing a finished register tile.

use std::arch::x86_64::*;

use super::lanes::{first16, load, store};
use super::operand::{Storage, TileMut};

/// The epilogue of one stretch of k: `to = alpha · sums + bias + from`.
///
/// The first stretch adds bias and C, the last stretch rounds into C; between them sums stay in f32 (MATMUL-3).
#[derive(Clone, Copy)]
pub(super) struct Store<'a> {
    pub alpha: f32,
    /// The bias of the whole block of C, indexed by its columns.
    pub bias: Option<&'a [f32]>,
    pub from: Option<TileMut>,
    pub to: TileMut,
}

impl Store<'_> {
    /// Stores the leading `rows × cols` of `sums: [_, 32]` at `(row, col)` of the block.
    ///
    /// # Safety
    /// Needs the features of [`super::lanes`]. The tile lies inside `from` and `to`, which no other thread touches, and
    /// its columns lie inside the bias.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,f16c")]
    pub unsafe fn tile(&self, sums: *const f32, row: usize, col: usize, rows: usize, cols: usize) {
        let alpha = _mm512_set1_ps(self.alpha);
        for j in (0..cols).step_by(16) {
            let mask = first16(cols - j);
            // SAFETY: extents by the caller; the mask ends at `cols`.
            unsafe {
                let bias = match self.bias {
                    Some(b) => load(b.as_ptr().add(col + j).cast(), Storage::F32, mask),
                    None => _mm512_setzero_ps(),
                };
                for i in 0..rows {
                    let mut x = _mm512_loadu_ps(sums.add(i * 32 + j));
                    x = _mm512_fmadd_ps(x, alpha, bias);
                    if let Some(from) = self.from {
                        x = _mm512_add_ps(x, load(address(from, row + i, col + j), from.storage, mask));
                    }
                    store(address(self.to, row + i, col + j), self.to.storage, mask, x);
                }
            }
        }
    }
}

/// The address of element `(i, j)`.
///
/// # Safety
/// The element lies inside the tile's buffer.
#[inline(always)]
pub(super) unsafe fn address(tile: TileMut, i: usize, j: usize) -> *mut u8 {
    // SAFETY: by the caller.
    unsafe { tile.ptr.add((i * tile.ld + j) * tile.storage.bytes()) }
}
