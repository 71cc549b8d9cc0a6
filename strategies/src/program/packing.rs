//! Packed weights: frozen weights in fewer bits than f32, as words of 32 bits.
//!
//! A matrix `[R, C]` is packed along its rows into words `[R, C / n_weights * n_words]`. To everything that keeps, moves, compares
//! or saves state, such words are elements like any others; only loading and [`super::Op::Unpack`] know what they mean.

use std::fmt;

/// What weights are divided by before they are rounded to e4m3. Rounding is relative to each weight from 2^-10 to 28, which covers those
/// of language models, so a scale of its own for each row would change nothing: it only moves the range. Larger ones become 28.
pub const E4M3_STEP: f32 = 1.0 / 16.0;

/// The largest weight in FP8: the largest number of e4m3, 448, times [`E4M3_STEP`].
pub const E4M3_WEIGHT_MAX: f32 = 448.0 * E4M3_STEP;

/// How a frozen weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Packing {
    /// Two bf16 numbers in a word, the first in the low half.
    Bf16,
    /// Four e4m3 numbers in a word, the first in the lowest bits, each a weight divided by [`E4M3_STEP`]: what products in FP8
    /// multiply.
    E4m3,
    /// 64 numbers `scale q / 127`: the scale, which is the largest magnitude of the whole row, and 64 signed bytes.
    /// Source: Dettmers et al. 2022, LLM.int8(), §2.1 (arXiv:2208.07339), for weights only.
    Int8,
    /// 64 numbers `scale NF4[q]`: the scale, which is the largest magnitude of the 64, and 64 codes of 4 bits, the first in
    /// the lowest bits of its word. Source: Dettmers et al. 2023, QLoRA, §3 (arXiv:2305.14314).
    Nf4 {
        /// The scales are rounded as by double quantisation; see §3 there.
        double: bool,
    },
}

impl Packing {
    /// Weights of a block.
    pub const fn n_weights(self) -> usize {
        match self {
            Packing::Bf16 => 2,
            Packing::E4m3 => 4,
            Packing::Int8 | Packing::Nf4 { .. } => 64,
        }
    }

    /// Words of a block.
    pub const fn n_words(self) -> usize {
        match self {
            Packing::Bf16 | Packing::E4m3 => 1,
            Packing::Int8 => 17,
            Packing::Nf4 { .. } => 9,
        }
    }

    /// Words of this many weights, which are whole blocks.
    pub const fn words(self, n_weights: usize) -> usize {
        n_weights / self.n_weights() * self.n_words()
    }

    /// Weights of this many words, which are whole blocks.
    pub const fn weights(self, n_words: usize) -> usize {
        n_words / self.n_words() * self.n_weights()
    }

    /// Whether a run of weights begins and ends with blocks.
    pub const fn has_blocks(self, start: usize, end: usize) -> bool {
        start.is_multiple_of(self.n_weights()) && end.is_multiple_of(self.n_weights())
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Packing::Bf16 => "bf16",
            Packing::E4m3 => "fp8",
            Packing::Int8 => "int8",
            Packing::Nf4 { double: false } => "nf4",
            Packing::Nf4 { double: true } => "nf4, double quantised",
        })
    }
}
