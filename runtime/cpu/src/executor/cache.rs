//! Operations of programs that generate text.

use super::operands::{Operands, copy, f32s, heads_of};
use crate::kernels::cached_attention::{self, CacheShape};
use phalanx_device::float::Float;
use phalanx_strategies::program::CachedAttention;

pub(super) const fn shape_of_cache(a: &CachedAttention) -> CacheShape {
    let (heads, capacity) = (heads_of(&a.heads), a.capacity);
    CacheShape { heads, seq_len: a.heads.seq_len, capacity, window: a.heads.window, scale: a.heads.scale }
}

/// # Safety
/// All functions here: the operands belong to a verified instruction, with the aliasing of [`super`].
impl Operands<'_> {
    pub(super) unsafe fn cache_write<T: Float>(&mut self, a: &CachedAttention) {
        // SAFETY: the result may be the cache (operand 2), which is not read after `copy`; no others overlap.
        unsafe {
            let (qkv, positions, cache) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.writes[0]);
            copy(self.reads[2], cache);
            cached_attention::cache_write(&shape_of_cache(a), qkv, positions, cache.slice_mut());
        }
    }

    pub(super) unsafe fn cached_attention<T: Float>(&mut self, a: &CachedAttention) {
        // SAFETY: no results or operands overlap (`Op::in_place_pairs` names no pair).
        unsafe {
            let (qkv, positions, cache) = (self.reads[0].slice::<T>(), self.reads[1].slice(), self.reads[2].slice());
            let (o, lse) = (self.writes[0].slice_mut::<T>(), self.writes[1].slice_mut());
            let scratch = f32s(self.scratch);
            cached_attention::cached_attention(&shape_of_cache(a), qkv, positions, cache, o, lse, scratch);
        }
    }
}
