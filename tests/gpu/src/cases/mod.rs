//! The cases, one file per family of operations.

mod activation;
mod attention;
mod bias;
mod cache;
mod columns;
mod cross_entropy;
mod elementwise;
mod embedding;
mod fp8;
mod head_norm;
mod magnitude;
mod norm;
mod optimizer;
mod packed;
mod product;
mod qk_norm;
mod rotary;
mod sequences;
mod sums;

use crate::case::Case;
use phalanx_strategies::program::DType;

/// All cases at the sizes of tests.
pub fn all() -> Vec<Case> {
    let families = [
        activation::cases(),
        attention::cases(),
        bias::cases(),
        cache::cases(),
        columns::cases(),
        cross_entropy::cases(),
        elementwise::cases(),
        embedding::cases(),
        fp8::cases(),
        head_norm::cases(),
        magnitude::cases(),
        norm::cases(),
        optimizer::cases(),
        packed::cases(),
        product::cases(),
        qk_norm::cases(),
        rotary::cases(),
        sequences::cases(),
        sums::cases(),
    ];
    families.into_iter().flatten().collect()
}

/// More shapes: all usual head widths, and one row, an odd number and more rows than blocks of all kernels over rows. Each width
/// and type would cost the software GPU a compilation, so these cases are for the interpreter of PTX.
pub fn widths_and_rows() -> Vec<Case> {
    let families = [
        attention::widths(),
        bias::rows(),
        cache::widths(),
        columns::rows(),
        embedding::rows(),
        fp8::rows(),
        head_norm::widths(),
        norm::rows(),
        qk_norm::widths(),
        rotary::widths(),
    ];
    families.into_iter().flatten().collect()
}

/// The usual head widths.
const HEAD_WIDTHS: [usize; 4] = [64, 80, 96, 128];
/// Numbers of rows: one, a few, one more than a warp has threads, one more than a block has.
const ROWS: [usize; 4] = [1, 3, 33, 257];
/// Types of activations.
const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
