//! What decides the program of a step, besides the model.

use super::error::CompileError;
use crate::mesh::MeshRank;
use crate::optimizer::{OptimizerSpec, STATE_BLOCK};
use crate::passes::context_parallel::CpComm;
use crate::passes::fully_sharded::{UNIT, ZeroStage};
use crate::passes::lora::LoraSpec;
use crate::passes::offload::Offload;
use crate::passes::precision::Precision;
use crate::passes::recompute::Recompute;
use crate::passes::reproducible::BLOCK;
use crate::passes::tensor_sums::Exchange;
use crate::pipeline::ScheduleKind;

/// Everything that decides the program of a training step, besides the model.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSpec {
    /// Microbatches whose gradients are summed before an update.
    pub n_microbatches: usize,
    /// Which values are stored and multiplied in half width.
    pub precision: Precision,
    /// Which activations are recomputed instead of kept.
    pub recompute: Recompute,
    /// Adapters; `None` trains every weight.
    pub lora: Option<LoraSpec>,
    /// The update rule.
    pub optimizer: OptimizerSpec,
    /// Gradients with a larger norm are clipped to it; `None` disables clipping.
    pub max_grad_norm: Option<f64>,
    /// What lies outside device memory.
    pub offload: Offload,
    /// How ranks share the work; the mesh itself is part of the forward program.
    pub parallel: Parallel,
}

impl StepSpec {
    /// Every shard begins at a multiple of this number of elements; a reproducible run cuts at blocks of the norm, and state in
    /// blocks is not cut within one.
    pub(super) fn shard_unit(&self) -> usize {
        const { assert!(BLOCK.is_multiple_of(STATE_BLOCK)) };
        if self.parallel.logical_shards.is_some() || self.optimizer.has_blocks() { BLOCK } else { UNIT }
    }
}

/// How the axes of the mesh are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// What is sharded over the ranks of `dp_shard x cp`.
    pub zero_stage: ZeroStage,
    /// How many uses ahead weights are gathered.
    pub prefetch: usize,
    /// Order of work of pipeline stages.
    pub schedule: ScheduleKind,
    /// Whether tensor-parallel ranks split tokens where they do not split columns.
    pub sequence_parallel: bool,
    /// How keys and values reach other context-parallel ranks.
    pub cp_comm: CpComm,
    /// Bytes of gradients that one collective sums.
    pub bucket_bytes: usize,
    /// Microbatches of a step over all ranks. Their gradients are summed along a fixed tree, so the result has the same
    /// bits for every number of ranks that share the data, the state and the layers. `None` sums in the fastest order.
    pub logical_shards: Option<usize>,
}

impl Default for Parallel {
    fn default() -> Parallel {
        Parallel {
            zero_stage: ZeroStage::default(),
            prefetch: 1,
            schedule: ScheduleKind::default(),
            sequence_parallel: false,
            cp_comm: CpComm::default(),
            bucket_bytes: 25 << 20,
            logical_shards: None,
        }
    }
}

impl Parallel {
    /// The schedule; a single stage needs none.
    pub(super) fn schedule(&self, mesh_rank: &MeshRank) -> ScheduleKind {
        if mesh_rank.mesh.pp == 1 { ScheduleKind::OneF1B } else { self.schedule }
    }

    /// How ranks obtain the sums that optimizers need.
    pub(super) fn exchange_of_sums(&self, unit: usize) -> Exchange {
        let weights = self.zero_stage != ZeroStage::One;
        match self.logical_shards {
            None => Exchange::Sums,
            Some(_) => Exchange::Elements { unit, bucket_bytes: self.bucket_bytes, weights },
        }
    }

    pub(super) fn chunks(&self, mesh_rank: &MeshRank) -> usize {
        self.schedule(mesh_rank).n_chunks()
    }
}

pub(super) fn check_reproducible(parallel: &Parallel, mesh_rank: &MeshRank) -> Result<(), CompileError> {
    let Some(n) = parallel.logical_shards else { return Ok(()) };
    let (mesh, data_ranks) = (mesh_rank.mesh, mesh_rank.mesh.data_ranks());
    if mesh.cp > 1 {
        return Err(CompileError::ReproducibleAxis { cp: mesh.cp });
    }
    if n < data_ranks {
        return Err(CompileError::LogicalShards { n, data_ranks });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{AdamW, AdamW8bit};

    #[test]
    fn shards_of_state_in_blocks_begin_at_blocks() {
        let unit_of = |optimizer| {
            let spec = StepSpec {
                n_microbatches: 1,
                precision: Precision::F32,
                recompute: Recompute::None,
                lora: None,
                optimizer,
                max_grad_norm: None,
                offload: Offload::default(),
                parallel: Parallel::default(),
            };
            spec.shard_unit()
        };

        assert!(unit_of(OptimizerSpec::AdamW8bit(AdamW8bit::default())).is_multiple_of(STATE_BLOCK));
        assert!(!unit_of(OptimizerSpec::AdamW(AdamW::default())).is_multiple_of(STATE_BLOCK), "cut more finely");
    }
}
