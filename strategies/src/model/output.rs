//! What a model gives.

use super::Tensor;

/// The output of the last norm.
#[derive(Clone, Copy, Debug)]
pub struct Hidden {
    /// `[N, C]`.
    pub states: Tensor,
    /// The table of the embedding, `[V, C]`, which a head may share.
    pub table: Tensor,
}

/// What a head gives for each token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// Logits of the next token, `[N, V]`.
    #[default]
    Logits,
    /// One number, `[N, 1]`; that of the last token of a text is its score. In transformers, a classifier of sequences with one label.
    Score,
}
