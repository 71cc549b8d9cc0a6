//! The fused kernels: all operations of a training step except matrix products.
//!
//! Slices in, slices out; row-major. Kernels never allocate: the caller passes scratch of the exact length that the
//! kernel's `*_scratch_len` function returns. Storage is any [`phalanx_device::float::Float`], arithmetic is f32.
//!
//! Every result has the same bits for every number of threads: the division of work into chunks depends on the shape
//! alone, and sums over chunks follow chunk order. Kernels use rayon's current pool, which stays awake while a program runs.
//!
//! Legend of shapes: `N` tokens, `C` width, `H` query heads, `K` key/value heads, `D` head width, `F` feed-forward
//! width, `V` vocabulary, `S` tokens of a row of the batch.
//!
//! Deliberately absent: checks of program shapes (the compiler has done them); the asserts here only keep memory safe.

pub mod activation;
pub mod attention;
pub mod attention_backward;
mod attention_forward;
mod attention_operands;
pub mod attention_part;
pub mod attention_shape;
pub mod cached_attention;
pub mod copy;
pub mod cross_entropy;
pub mod cross_entropy_part;
pub mod elementwise;
pub mod embedding;
pub mod fingerprint;
pub mod head_norm;
pub mod layer_norm;
pub mod log_probs;
pub mod magnitude;
mod math;
pub mod optimizer;
mod parallel;
pub mod qk_norm;
pub mod reduce;
pub mod rms_norm;
pub mod rotary;
mod simd;
mod strided;
#[cfg(test)]
pub(crate) mod testing;
mod tile;
mod tile_pairs;
mod tile_simd;
mod transpose;
pub mod unpack;

/// Geometry of packed `qkv [N, (H + 2 K) D]`: queries, then keys, then values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads `H`.
    pub n_heads: usize,
    /// Key/value heads `K`; divides `H`.
    pub n_kv_heads: usize,
    /// Head width `D`.
    pub head_dim: usize,
}

impl Heads {
    /// Columns of packed qkv.
    pub const fn columns(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }
}
