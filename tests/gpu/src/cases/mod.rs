//! The cases, one file per family of operations.

mod activation;
mod attention;
mod bias;
mod columns;
mod cross_entropy;
mod elementwise;
mod embedding;
mod head_norm;
mod norm;
mod optimizer;
mod product;
mod qk_norm;
mod rotary;
mod sums;

use crate::case::Case;

/// All cases at the sizes of tests.
pub fn all() -> Vec<Case> {
    let families = [
        activation::cases(),
        attention::cases(),
        bias::cases(),
        columns::cases(),
        cross_entropy::cases(),
        elementwise::cases(),
        embedding::cases(),
        head_norm::cases(),
        norm::cases(),
        optimizer::cases(),
        product::cases(),
        qk_norm::cases(),
        rotary::cases(),
        sums::cases(),
    ];
    families.into_iter().flatten().collect()
}
