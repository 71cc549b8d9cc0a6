//! How many ranks share the work along each axis of the mesh.

use super::error::ConfigError;
use super::section::section;
use super::setting::AT_LEAST_ONE;

section! {
    /// The mesh. This build trains on one rank, so every size is 1.
    pub struct ParallelSection {
        /// Copies of the model that learn from different data.
        pub dp_replicate_size: usize = 1 => AT_LEAST_ONE;
        /// Ranks that share the weights of one copy and learn from different data (ZeRO-3).
        pub dp_shard_size: usize = 1 => AT_LEAST_ONE;
        /// Ranks that share each matrix product.
        pub tensor_parallel_size ["tp_size"]: usize = 1 => AT_LEAST_ONE;
        /// Ranks that share one sequence.
        pub context_parallel_size ["cp_size"]: usize = 1 => AT_LEAST_ONE;
        /// Ranks that share the layers, one run of layers each.
        pub pipeline_parallel_size ["pp_size"]: usize = 1 => AT_LEAST_ONE;
    }
}

impl ParallelSection {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("pipeline_parallel_size", self.pipeline_parallel_size),
            ("dp_replicate_size", self.dp_replicate_size),
            ("dp_shard_size", self.dp_shard_size),
            ("context_parallel_size", self.context_parallel_size),
            ("tensor_parallel_size", self.tensor_parallel_size),
        ];
        match sizes.into_iter().find(|&(_, size)| size > 1) {
            Some((key, size)) => Err(ConfigError::OneRankOnly { key, size }),
            None => Ok(()),
        }
    }
}
