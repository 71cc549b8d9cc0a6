//! Tensor parallelism: products are cut along their outputs where heads, feed-forward columns or the vocabulary begin, and
//! along their inputs where these end, so that ranks exchange only one sum per attention and one per feed-forward part.
//!
//! Source: Shoeybi et al. 2019, Megatron-LM, §3 (arXiv:1909.08053); Korthikanti et al. 2022, §4.2.2, for sequence
//! parallelism (arXiv:2205.05198): between these regions each rank has some of the tokens instead of all, and a
//! reduce-scatter at the end of a region and an all-gather at the beginning of the next replace the sum.
//!
//! We differ in that the model declares nothing: `regions` finds the regions from the operations, so any model made with
//! the builder can be cut. Extents that the degree does not divide are cut unevenly. With more ranks than key/value heads,
//! neighbours hold the same head and sum its gradient.

mod regions;
mod rewrite;

use crate::program::Program;

/// Why a model cannot be cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TpError {
    /// Heads that cannot be shared.
    #[error(
        "{n_heads} attention heads with {n_kv_heads} key/value heads cannot be shared by tensor_parallel_size {tp}; {} would fit",
        fits.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    Heads {
        /// Query heads.
        n_heads: usize,
        /// Key/value heads.
        n_kv_heads: usize,
        /// Size of the axis.
        tp: usize,
        /// Sizes that fit.
        fits: Vec<usize>,
    },
    /// Fewer columns than ranks.
    #[error("{extent} {what} are fewer than tensor_parallel_size {tp}")]
    TooSmall {
        /// What is too small.
        what: &'static str,
        /// Found length.
        extent: usize,
        /// Size of the axis.
        tp: usize,
    },
    /// An operation at a position where it cannot be cut.
    #[error("`{value}` cannot be shared by tensor_parallel_size {tp}: {reason}")]
    Shape {
        /// The value.
        value: String,
        /// Size of the axis.
        tp: usize,
        /// Why.
        reason: &'static str,
    },
}

/// Reduces a forward program to this rank's part.
///
/// # Errors
/// When the model cannot be cut into this many parts; the program is then unchanged.
pub fn tensor_parallel(program: &mut Program, sequence_parallel: bool) -> Result<(), TpError> {
    if program.mesh_rank.mesh.tp == 1 {
        return Ok(());
    }
    let cut = regions::find(program)?;
    rewrite::rewrite(program, &cut, sequence_parallel);
    Ok(())
}
