//! How ranks share the work: the sizes and options of the axes of the mesh.

use super::at::At;
use super::error::ConfigError;
use super::section::{choices, section};
use super::setting::{COUNT, MEBIBYTES, RANKS, Range, SPARES, Setting};
use super::yaml_1_1::whole;
use phalanx_strategies::compile::Parallel;
use phalanx_strategies::mesh::Mesh;
use phalanx_strategies::passes::context_parallel::CpComm;
use phalanx_strategies::passes::fully_sharded::ZeroStage;
use phalanx_strategies::pipeline::ScheduleKind;
use serde_yaml_ng::Value;

const ONE_TO_THREE: Range = Range { fits: "1, 2 or 3", holds: |x| (1.0..=3.0).contains(&x) };

section! {
    /// The mesh of ranks, outermost axis first: pp, dp_replicate, dp_shard, cp, tp. Its product is the number of ranks.
    pub struct ParallelSection {
        /// Ranks on each machine; if not set, the ranks of the mesh divided by `nnodes`.
        pub nproc_per_node: Option<usize> = None => RANKS;
        /// Machines with nproc_per_node ranks each; set by `phalanx train --slurm` and `--torchrun`.
        pub nnodes: usize = 1 => RANKS;
        /// Copies of the model that train on different data.
        pub dp_replicate_size: usize = 1 => RANKS;
        /// Ranks that share the state of one copy and train on different data; auto uses the ranks that the other sizes
        /// leave.
        pub dp_shard_size: AxisSize = AxisSize::Ranks(1);
        /// Ranks that share each matrix product.
        pub tensor_parallel_size ["tp_size"]: usize = 1 => RANKS;
        /// Ranks that share one sequence.
        pub context_parallel_size ["cp_size", "sequence_parallel_degree"]: usize = 1 => RANKS;
        /// Ranks that share the layers; each rank has consecutive layers.
        pub pipeline_parallel_size ["pp_size"]: usize = 1 => RANKS;
        /// State that ranks of dp_shard and cp share: 1 optimizer state, 2 also gradients and weights, 3 as 2, and
        /// gathered weights are dropped after each use.
        pub zero_stage: usize = 3 => ONE_TO_THREE;
        /// Number of uses ahead at which sharded weights are gathered.
        pub zero_prefetch: usize = 1 => SPARES;
        /// Size of the gradients that one collective sums, in MiB.
        pub bucket_cap_mb ["ddp_bucket_cap_mb"]: usize = 25 => MEBIBYTES;
        /// Tensor-parallel ranks also share the tokens between matrix products.
        pub sequence_parallel: bool = false;
        /// How keys and values reach the other context-parallel ranks: ring or allgather.
        pub cp_comm_strategy: CpCommChoice = CpCommChoice::Ring;
        /// Schedule of the pipeline stages: 1f1b, gpipe, interleaved or zero_bubble.
        pub pipeline_schedule: PipelineSchedule = PipelineSchedule::OneF1B;
        /// Make the weights bit-identical for any number of ranks along pp, dp_replicate and dp_shard. Each
        /// `tensor_parallel_size` has bits of its own, and a running job keeps it; `context_parallel_size` must be 1.
        pub reproducible: bool = false;
        /// Groups of consecutive layers in each stage, for `pipeline_schedule: interleaved`.
        pub pipeline_chunks: usize = 2 => COUNT;
    }
}

choices! {
    /// How keys and values reach other context-parallel ranks.
    pub enum CpCommChoice {
        /// From neighbour to neighbour.
        Ring = "ring";
        /// All at once.
        AllGather = "allgather";
    }
}

choices! {
    /// The schedule of the pipeline stages.
    pub enum PipelineSchedule {
        /// The fewest microbatches in flight that keep the pipeline full.
        OneF1B = "1f1b" | "1F1B";
        /// All forwards, then all backwards.
        GPipe = "gpipe" | "GPipe";
        /// 1F1B with several groups of consecutive layers per stage.
        Interleaved = "interleaved" | "Interleaved1F1B" | "interleaved_1f1b";
        /// 1F1B with its bubbles filled by weight gradients (ZB-H1).
        ZeroBubble = "zero_bubble" | "zbh1";
    }
}

/// Size of an axis that can use the ranks left by the other axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisSize {
    /// This many ranks.
    Ranks(usize),
    /// The ranks left by the other axes.
    Auto,
}

impl Setting for AxisSize {
    fn fits() -> String {
        format!("{}, or auto", RANKS.fits)
    }
    fn read(value: &Value, at: &At<'_>) -> Result<Self, ConfigError> {
        match value {
            Value::String(word) if word == "auto" => Ok(AxisSize::Auto),
            // As other tools write it.
            Value::Number(number) if number.as_i64() == Some(-1) => Ok(AxisSize::Auto),
            _ => match whole(value).and_then(|n| usize::try_from(n).ok()) {
                Some(n) if (RANKS.holds)(n as f64) => Ok(AxisSize::Ranks(n)),
                _ => Err(at.mismatch(value, Self::fits())),
            },
        }
    }
    fn write(&self) -> Value {
        match self {
            AxisSize::Ranks(n) => Value::Number((*n).into()),
            AxisSize::Auto => Value::String("auto".into()),
        }
    }
}

impl ParallelSection {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let axes = [
            self.pipeline_parallel_size,
            self.dp_replicate_size,
            if let AxisSize::Ranks(n) = self.dp_shard_size { n } else { 1 },
            self.context_parallel_size,
            self.tensor_parallel_size,
        ];
        let n_ranks = axes.iter().try_fold(1usize, |product, n| product.checked_mul(*n));
        if n_ranks.is_none_or(|n| !(RANKS.holds)(n as f64)) {
            let axes = axes.map(|n| n.to_string()).join(" x ");
            return Err(ConfigError::TooManyRanks { axes, fits: RANKS.fits });
        }
        self.mesh().map(drop)
    }

    /// The mesh of all ranks.
    ///
    /// # Errors
    /// When its product is not the number of ranks.
    pub fn mesh(&self) -> Result<Mesh, ConfigError> {
        let auto = self.dp_shard_size == AxisSize::Auto;
        let mesh = Mesh {
            pp: self.pipeline_parallel_size,
            dp_replicate: self.dp_replicate_size,
            dp_shard: if let AxisSize::Ranks(n) = self.dp_shard_size { n } else { 1 },
            cp: self.context_parallel_size,
            tp: self.tensor_parallel_size,
        };
        let of_all = self.nproc_per_node.map(|n| n.saturating_mul(self.nnodes));
        let Some(world) = of_all.or((!auto).then(|| mesh.size())) else {
            return Err(ConfigError::AutoAxis);
        };
        Ok(mesh.fit(world, auto)?)
    }

    /// The parallel configuration for a number of microbatches per step over all ranks.
    pub fn parallel(&self, microbatches_per_step: usize) -> Parallel {
        Parallel {
            zero_stage: match self.zero_stage {
                1 => ZeroStage::One,
                2 => ZeroStage::Two,
                _ => ZeroStage::Three,
            },
            prefetch: self.zero_prefetch,
            schedule: match self.pipeline_schedule {
                PipelineSchedule::OneF1B => ScheduleKind::OneF1B,
                PipelineSchedule::GPipe => ScheduleKind::GPipe,
                PipelineSchedule::Interleaved => ScheduleKind::Interleaved { chunks: self.pipeline_chunks },
                PipelineSchedule::ZeroBubble => ScheduleKind::ZeroBubble,
            },
            sequence_parallel: self.sequence_parallel,
            cp_comm: match self.cp_comm_strategy {
                CpCommChoice::Ring => CpComm::Ring,
                CpCommChoice::AllGather => CpComm::AllGather,
            },
            bucket_bytes: self.bucket_cap_mb << 20,
            logical_shards: self.reproducible.then_some(microbatches_per_step),
        }
    }
}
