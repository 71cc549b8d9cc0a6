//! The instruction set: coarse operations, their adjoints, and the collectives. A family of operations is a file of this folder, which
//! says all that is true of it alone, and a line of the list below; the verifier and the passes ask the operations.
//!
//! Legend of shapes: `N` tokens (batch times sequence length), `C` model width, `H` query heads, `K` key/value heads,
//! `D` head width, `F` feed-forward width, `V` vocabulary. `qkv` is packed `[N, (H + 2 K) D]`: queries, keys, values.
//! Operands are listed as `[reads] -> [writes]`. One in parentheses is present if the attribute of that name is set.

mod activation;
pub(crate) mod adjoints;
mod attention;
mod attention_part;
mod attention_shape;
mod bias;
mod cached_attention;
mod collective;
mod columns;
pub(crate) mod cost;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod formulas;
mod head_norm;
mod log_probs;
mod magnitude;
mod matmul;
mod norm;
mod opaque;
pub(crate) mod operation;
mod qk_norm;
pub(crate) mod recomputation;
mod rotary;
mod row_sums;
pub(crate) mod shares;
pub(crate) mod signature;
mod slices;
mod sums;
mod unpack;
mod update;
pub(crate) mod weight_use;
pub(crate) mod width;

pub use activation::{Activation, ActivationBackward, ActivationFn};
pub use attention::AttentionBackward;
pub use attention_part::{AttentionPart, AttentionPartBackward, JoinColumns, SplitColumns};
pub use attention_shape::Attention;
pub use bias::{AddBias, ColumnSum};
pub use cached_attention::{CacheWrite, CachedAttention};
pub use collective::{Await, Enter, Start};
pub use columns::Columns;
pub use cost::Cost;
pub use cross_entropy::{CrossEntropy, CrossEntropyStats, VocabShard};
pub use dropout::Dropout;
pub use elementwise::{Add, Cast, Scale};
pub use embedding::{Embedding, EmbeddingBackward};
pub use formulas::Formulas;
pub use head_norm::{HeadNorm, HeadNormBackward};
pub use log_probs::{LogProbs, LogProbsBackward};
pub use magnitude::{AdaptedRows, Magnitude, MagnitudeBackward, RowLengths};
pub use matmul::{Compute, MatMul};
pub use norm::{Norm, NormBackward, NormKind};
pub use opaque::Opaque;
pub use qk_norm::{QkColumns, QkNorm, QkNormBackward, QkSquares, QkSquaresBackward};
pub use rotary::Rotary;
pub use row_sums::{RowSums, RowSumsBackward};
pub use slices::{Paste, Slice};
pub use sums::{Assemble, ClipCoefficient, Sum, SumSquares, SumSquaresBlocks, TreeSum};
pub use unpack::Unpack;
pub use update::{Update, UpdateOperands, UpdateSums};

use operation::Operation;

/// Makes [`Op`] of the operations' names, and the way from an [`Op`] to its properties.
macro_rules! operations {
    ($($name:ident)*) => {
        /// One operation. Each variant is documented at its type.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op {
            $(#[doc = concat!("See [`", stringify!($name), "`].")] $name($name),)*
        }

        impl Op {
            /// What is true of this operation alone.
            pub(crate) fn operation(&self) -> &dyn Operation {
                match self {
                    $(Op::$name(operation) => operation,)*
                }
            }

            /// As [`Op::operation`], to change its attributes.
            pub(crate) fn operation_mut(&mut self) -> &mut dyn Operation {
                match self {
                    $(Op::$name(operation) => operation,)*
                }
            }
        }

        $(impl From<$name> for Op {
            fn from(operation: $name) -> Op {
                Op::$name(operation)
            }
        })*
    };
}

operations! {
    Embedding EmbeddingBackward
    MatMul
    AddBias ColumnSum
    Norm NormBackward
    HeadNorm HeadNormBackward
    QkSquares QkSquaresBackward QkNorm QkNormBackward
    Rotary
    Attention AttentionBackward
    CacheWrite CachedAttention
    SplitColumns JoinColumns AttentionPart AttentionPartBackward
    Activation ActivationBackward
    Add Scale Cast
    Dropout
    RowLengths Magnitude MagnitudeBackward
    Slice Paste
    Sum Assemble TreeSum SumSquares SumSquaresBlocks ClipCoefficient
    Unpack
    CrossEntropy CrossEntropyStats
    LogProbs LogProbsBackward RowSums RowSumsBackward Formulas
    Opaque
    UpdateSums Update
    Start Await Enter
}
