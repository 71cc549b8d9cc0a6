//! A cache of keys and values: writing new tokens to it, and their attention to it.

use super::{Lowering, THREADS, type_name};
use crate::command::Args;
use crate::kernels::{CACHE, Instance};
use phalanx_strategies::program::{CachedAttention, DType};

/// Keys of a block of attention; `SPAN` of the kernels.
const SPAN: usize = 256;
/// Query heads of a block of attention; `HEADS` of the kernels.
const HEADS: usize = 8;

impl Lowering {
    /// Replaces rows of the cache, each element by a thread.
    pub(super) fn cache_write(&mut self, a: &CachedAttention) {
        let (qkv, positions, cache) = (self.reads[0], self.reads[1], self.writes[0]);
        self.copy(self.reads[2], cache);
        let kernel = Instance::of(CACHE, "cache_write").with("X", type_name(qkv.dtype));
        let args = Args::new().ptr(qkv).ptr(positions).ptr(cache).int(a.heads.seq_len).int(a.capacity);
        let args = args.int(qkv.cols).int(cache.cols).long(qkv.rows);
        self.launch_strided(kernel, qkv.rows * cache.cols, args);
    }

    /// One block for each span of the cache, whether or not the token sees any of it, since a launch does not depend on positions.
    pub(super) fn cached_attention(&mut self, a: &CachedAttention) {
        let (qkv, positions, cache) = (self.reads[0], self.reads[1], self.reads[2]);
        let (o, lse) = (self.writes[0], self.writes[1]);
        let heads = &a.heads;
        let (spans, rows) = (a.capacity.div_ceil(SPAN), qkv.rows * heads.n_heads);
        let sums = self.take(rows * spans, heads.head_dim, DType::F32);
        let stats = self.take(rows * spans, 2, DType::F32);
        let group = heads.n_heads / heads.n_kv_heads;
        let parts = group.div_ceil(HEADS);
        // Positions have 31 bits.
        let window = heads.window.unwrap_or(usize::MAX).min(i32::MAX as usize);
        let typed = |name| Instance::of(CACHE, name).with("X", type_name(qkv.dtype));

        let args = Args::new().ptr(qkv).ptr(positions).ptr(cache).ptr(sums).ptr(stats);
        let args = args.int(heads.seq_len).int(heads.n_heads).int(heads.n_kv_heads).int(heads.head_dim);
        let args = args.int(a.capacity).int(window).int(parts).float(heads.scale);
        let grid = [(qkv.rows * heads.n_kv_heads * parts) as u32, spans as u32, 1];
        let shared_bytes = group.min(HEADS) * (heads.head_dim + SPAN) * size_of::<f32>();
        self.launch(typed("cached_attention"), grid, THREADS, shared_bytes as u32, args);

        let args = Args::new().ptr(sums).ptr(stats).ptr(o).ptr(lse).int(spans).int(heads.head_dim).long(rows);
        self.launch_strided(typed("merge_spans"), rows * heads.head_dim, args);
    }
}
