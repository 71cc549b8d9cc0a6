//! Why a step cannot be compiled.

use crate::passes::backward::BackwardError;
use crate::passes::cache::CacheError;
use crate::passes::context_parallel::CpError;
use crate::passes::lora::LoraError;
use crate::passes::pack::CutBlocks;
use crate::passes::pipeline::PipelineError;
use crate::passes::tensor_parallel::TpError;
use crate::program::blocks::CutState;
use crate::verify::VerifyError;

/// Why a step cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// Adapters that do not fit the model.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// Rows that cannot be shared by context-parallel ranks.
    #[error(transparent)]
    Context(#[from] CpError),
    /// Products that cannot be shared by tensor-parallel ranks.
    #[error(transparent)]
    Tensor(#[from] TpError),
    /// Packed weights that cannot be shared by tensor-parallel ranks.
    #[error(transparent)]
    Packed(#[from] CutBlocks),
    /// State in blocks that the mesh would cut.
    #[error(transparent)]
    State(#[from] CutState),
    /// The bits of the result would depend on this axis.
    #[error("reproducible runs do not support context parallelism: context_parallel_size is {cp}, expected 1")]
    ReproducibleAxis {
        /// Size of the context-parallel axis.
        cp: usize,
    },
    /// More data-parallel ranks than microbatches.
    #[error(
        "{n} microbatches per step are too few for {data_ranks} data-parallel ranks; at least {data_ranks} would fit"
    )]
    LogicalShards {
        /// Microbatches of a step.
        n: usize,
        /// Ranks that share them.
        data_ranks: usize,
    },
    /// Keys and values that cannot be kept.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// More chunks than blocks.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// The program cannot be differentiated.
    #[error(transparent)]
    Backward(#[from] BackwardError),
    /// A pass or a model built an ill-formed program.
    #[error("the compiled program is ill-formed: {0}")]
    Verify(#[from] VerifyError),
}
