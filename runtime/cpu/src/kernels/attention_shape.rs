//! Shapes of attention: of whole rows, and of parts of the queries and keys.

use crate::kernels::Heads;

/// Geometry and mask of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Heads of the packed qkv.
    pub heads: Heads,
    /// Tokens `S` of a row of the batch.
    pub seq_len: usize,
    /// Token `t` sees only `j > t - window`.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f32,
}

impl Shape {
    /// A whole row as one part.
    pub(super) fn as_part(&self) -> PartShape {
        let Shape { heads, seq_len, window, scale } = *self;
        PartShape { heads, n_queries: seq_len, n_keys: seq_len, window, scale }
    }
}

/// Geometry and mask of attention to a part of the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PartShape {
    /// Heads of queries, and of keys and values.
    pub heads: Heads,
    /// Local queries of each row.
    pub n_queries: usize,
    /// Local keys of each row.
    pub n_keys: usize,
    /// A query sees only indexes above its own minus `window`.
    pub window: Option<usize>,
    /// Factor of the scores.
    pub scale: f32,
}

impl PartShape {
    /// The key/value head of a query head.
    pub(super) fn kv_head(&self, head: usize) -> usize {
        head / (self.heads.n_heads / self.heads.n_kv_heads)
    }
}
