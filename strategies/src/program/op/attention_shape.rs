//! The geometry of attention.

/// `[qkv, doc_start N] -> [o [N, H D], lse [N, H]]`: causal grouped-query attention over packed qkv.
/// Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads `H`.
    pub n_heads: usize,
    /// Key/value heads `K`; divides `H`.
    pub n_kv_heads: usize,
    /// Head width `D`.
    pub head_dim: usize,
    /// Tokens of one row of the batch.
    pub seq_len: usize,
    /// Sliding window: token `t` sees `j > t - window`.
    pub window: Option<usize>,
    /// Factor of the scores, usually `1 / sqrt(D)`.
    pub scale: f32,
}

impl Attention {
    /// Columns of packed qkv.
    pub const fn qkv_columns(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }
}
