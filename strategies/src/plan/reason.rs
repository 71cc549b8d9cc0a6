//! Why a candidate is rejected, as a sentence.

use crate::pipeline::ScheduleKind;
use serde::{Serialize, Serializer};

/// Why a candidate is rejected. Serialised as a sentence.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Reason {
    /// Query heads do not divide.
    #[error("{n_heads} attention heads do not divide by tp = {tp}")]
    Heads {
        /// Query heads.
        n_heads: usize,
        /// Tensor shards.
        tp: usize,
    },
    /// Key/value heads neither divide nor can be repeated evenly.
    #[error("{n_kv_heads} key/value heads can be neither divided by tp = {tp} nor repeated evenly")]
    KvHeads {
        /// Key/value heads.
        n_kv_heads: usize,
        /// Tensor shards.
        tp: usize,
    },
    /// The feed-forward part does not divide.
    #[error("a feed-forward width of {intermediate_size} does not divide by tp = {tp}")]
    FeedForward {
        /// Width.
        intermediate_size: usize,
        /// Tensor shards.
        tp: usize,
    },
    /// A tensor-parallel group over several nodes.
    #[error("tp = {tp} would sum activations between nodes of {devices_per_node} devices")]
    TensorAcrossNodes {
        /// Tensor shards.
        tp: usize,
        /// Devices of a node.
        devices_per_node: u32,
    },
    /// Rows do not divide into the chunks of the zigzag order.
    #[error("rows of {seq_len} tokens do not divide into 2 x cp = {} chunks", 2 * .cp)]
    Context {
        /// Tokens of a row.
        seq_len: usize,
        /// Context shards.
        cp: usize,
    },
    /// More pieces of the model than layers.
    #[error("{n_parts} pipeline parts are more than {n_layers} layers")]
    Layers {
        /// Stages times chunks.
        n_parts: usize,
        /// Layers.
        n_layers: usize,
    },
    /// The batch does not divide among replicas.
    #[error("a global batch of {rows} rows does not divide among {replicas} replicas in microbatches of {micro}")]
    Batch {
        /// Rows of a step.
        rows: usize,
        /// Data-parallel replicas.
        replicas: usize,
        /// Rows of a microbatch.
        micro: usize,
    },
    /// The schedule has no benefit here.
    #[error("{schedule} gains nothing with {n_microbatches} microbatches on {pp} stages")]
    Schedule {
        /// The schedule.
        schedule: ScheduleKind,
        /// Microbatches of a replica.
        n_microbatches: usize,
        /// Stages.
        pp: usize,
    },
    /// It exceeds the memory of a device.
    #[error("needs {} of {} GiB, {} GiB too much", gib(*.needed), gib(*.available), gib(.needed - .available))]
    Memory {
        /// Bytes at the peak of the fullest rank.
        needed: u64,
        /// Bytes of a device; less than `needed`.
        available: u64,
    },
    /// It takes at least as long as every candidate that is kept.
    #[error("takes at least {:.3} s per step; faster candidates take at most {:.3} s", .at_least_s, .best_s)]
    Slower {
        /// Lower bound of its step.
        at_least_s: f64,
        /// Step of the worst candidate that is kept.
        best_s: f64,
    },
    /// The search reached its limit of evaluations.
    #[error("not evaluated: the limit of {n_evaluated} evaluations went to candidates with a better bound")]
    NotReached {
        /// Evaluated candidates.
        n_evaluated: usize,
    },
    /// The compiler or the cross-rank check rejects it.
    #[error("refused by the compiler: {why}")]
    Refused {
        /// Its error text.
        why: String,
    },
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Reason {
    /// The kind of reason, for a summary.
    pub const fn kind(&self) -> &'static str {
        match self {
            Reason::Heads { .. } | Reason::KvHeads { .. } => "heads do not divide",
            Reason::FeedForward { .. } => "feed-forward width does not divide",
            Reason::TensorAcrossNodes { .. } => "tensor parallelism between nodes",
            Reason::Context { .. } => "rows do not divide",
            Reason::Layers { .. } => "more pipeline parts than layers",
            Reason::Batch { .. } => "batch does not divide",
            Reason::Schedule { .. } => "schedule gains nothing",
            Reason::Memory { .. } => "does not fit in memory",
            Reason::Slower { .. } => "slower than the candidates found",
            Reason::NotReached { .. } => "not evaluated",
            Reason::Refused { .. } => "refused by the compiler",
        }
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1u64 << 30) as f64)
}
