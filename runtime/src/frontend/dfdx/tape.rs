//! What a user's model computes with: a tape of operations, and a batch of rows.

use dfdx::prelude::{Cpu, OwnedTape, Rank0, Tensor};

/// The tape on which a loss is recorded.
pub type Tape = OwnedTape<f32, Cpu>;

/// A loss with the tape that leads to it.
pub type Loss = Tensor<Rank0, f32, Cpu, Tape>;

/// One microbatch; `n_rows * seq_len` tokens, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch<'a> {
    /// Token ids.
    pub ids: &'a [i32],
    /// The id to be predicted at each position, already shifted; -100 where none is.
    pub labels: &'a [i32],
    /// Position of each token inside its document.
    pub positions: &'a [i32],
    /// Index within the row of the first token of each token's document, where attention begins.
    pub doc_start: &'a [i32],
    /// Rows.
    pub n_rows: usize,
    /// Tokens of a row.
    pub seq_len: usize,
}
