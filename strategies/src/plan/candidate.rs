//! The choices of a plan, and all candidates worth trying.

use super::hardware::Hardware;
use super::reason::Reason;
use super::workload::Workload;
use crate::compile::{Parallel, StepSpec};
use crate::mesh::Mesh;
use crate::passes::fully_sharded::ZeroStage as Sharding;
use crate::passes::recompute::Recompute;
use crate::pipeline::ScheduleKind;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Sizes of the mesh's axes, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MeshSizes {
    /// Pipeline stages.
    pub pp: usize,
    /// Replicas of the parameters.
    pub dp_replicate: usize,
    /// Shards of parameters, gradients or optimizer state.
    pub dp_shard: usize,
    /// Context shards.
    pub cp: usize,
    /// Tensor shards.
    pub tp: usize,
}

/// What is sharded over `dp_shard x cp`. Source: Rajbhandari et al. 2020, ZeRO, §5 (arXiv:1910.02054).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ZeroStage {
    /// Nothing.
    #[serde(rename = "0")]
    Zero0,
    /// Optimizer state.
    #[serde(rename = "1")]
    Zero1,
    /// Gradients, too.
    #[serde(rename = "2")]
    Zero2,
    /// Parameters, too.
    #[serde(rename = "3")]
    Zero3,
}

/// One way to train.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// How ranks are arranged.
    pub mesh: MeshSizes,
    /// What is sharded.
    pub zero: ZeroStage,
    /// Order of microbatches in the pipeline.
    pub schedule: ScheduleKind,
    /// Which activations are recomputed.
    pub recompute: Recompute,
    /// Rows of a microbatch.
    pub micro_batch_size: usize,
    /// Microbatches of a replica in a step.
    pub n_microbatches: usize,
}

impl MeshSizes {
    /// Number of ranks.
    pub const fn world_size(&self) -> usize {
        self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp
    }

    /// Replicas that train on different rows.
    pub const fn replicas(&self) -> usize {
        self.dp_replicate * self.dp_shard
    }

    /// Ranks that parameters are sharded over.
    pub const fn shards(&self) -> usize {
        self.dp_shard * self.cp
    }

    /// Every mesh of `world_size` ranks, in a fixed order.
    pub fn all(world_size: usize) -> Vec<MeshSizes> {
        let mut meshes = Vec::new();
        for pp in divisors(world_size) {
            for dp_replicate in divisors(world_size / pp) {
                for dp_shard in divisors(world_size / pp / dp_replicate) {
                    let rest = world_size / pp / dp_replicate / dp_shard;
                    let with = |cp| MeshSizes { pp, dp_replicate, dp_shard, cp, tp: rest / cp };
                    meshes.extend(divisors(rest).into_iter().map(with));
                }
            }
        }
        meshes
    }

    /// Checks the mesh against the model and the machines, independent of the other choices.
    ///
    /// # Errors The first reason found.
    pub fn fits(&self, workload: &Workload, hardware: &Hardware) -> Result<(), Reason> {
        let MeshSizes { pp, cp, tp, .. } = *self;
        let (n_heads, n_kv_heads, seq_len) = (workload.n_heads, workload.n_kv_heads, workload.seq_len);
        let refused = if !n_heads.is_multiple_of(tp) {
            Reason::Heads { n_heads, tp }
        } else if !n_kv_heads.is_multiple_of(tp) && !tp.is_multiple_of(n_kv_heads) {
            Reason::KvHeads { n_kv_heads, tp }
        } else if !workload.intermediate_size.is_multiple_of(tp) {
            Reason::FeedForward { intermediate_size: workload.intermediate_size, tp }
        } else if tp > hardware.devices_per_node as usize {
            Reason::TensorAcrossNodes { tp, devices_per_node: hardware.devices_per_node }
        } else if cp > 1 && !seq_len.is_multiple_of(2 * cp) {
            Reason::Context { seq_len, cp }
        } else if pp > workload.n_layers {
            Reason::Layers { n_parts: pp, n_layers: workload.n_layers }
        } else if !workload.global_batch_rows.is_multiple_of(self.replicas()) {
            Reason::Batch { rows: workload.global_batch_rows, replicas: self.replicas(), micro: 1 }
        } else {
            return Ok(());
        };
        Err(refused)
    }
}

impl From<MeshSizes> for Mesh {
    fn from(sizes: MeshSizes) -> Mesh {
        let MeshSizes { pp, dp_replicate, dp_shard, cp, tp } = sizes;
        Mesh { pp, dp_replicate, dp_shard, cp, tp }
    }
}

impl Candidate {
    /// The step that its ranks compile, with all other settings from `job`.
    #[must_use]
    pub fn spec(&self, job: &StepSpec) -> StepSpec {
        let zero_stage = match self.zero {
            ZeroStage::Zero3 => Sharding::Three,
            ZeroStage::Zero2 => Sharding::Two,
            // A single rank has nothing to shard.
            ZeroStage::Zero1 | ZeroStage::Zero0 => Sharding::One,
        };
        let parallel = Parallel { zero_stage, schedule: self.schedule, ..job.parallel };
        StepSpec { n_microbatches: self.n_microbatches, recompute: self.recompute, parallel, ..job.clone() }
    }

    /// Numbers of microbatches of two shorter steps from which this step can be extrapolated: while the pipeline is full,
    /// each run of `pp` microbatches takes the same time. `None` if the step itself is short.
    pub fn samples(&self) -> Option<[usize; 2]> {
        let (pp, m) = (self.mesh.pp, self.n_microbatches);
        // Chunks alternate in runs of `pp` microbatches, and a remainder changes their order. In a full pipeline, deferred
        // weight gradients and collectives still shift for a few runs.
        let first = (self.schedule.n_chunks() + 3) * pp + m % pp;
        let second = first + pp;
        (m > second).then_some([first, second])
    }

    /// All candidates worth trying on a valid mesh. `micro_batch_max` bounds the rows of a microbatch, which are powers of
    /// two that divide the batch.
    pub fn all(mesh: MeshSizes, workload: &Workload, micro_batch_max: usize) -> Vec<Candidate> {
        let rows = workload.global_batch_rows / mesh.replicas();
        let sizes = (0..).map(|i| 1usize << i).take_while(|b| *b <= micro_batch_max.min(rows));
        let stages: &[ZeroStage] = match mesh.shards() {
            1 => &[ZeroStage::Zero0],
            _ => &[ZeroStage::Zero1, ZeroStage::Zero2, ZeroStage::Zero3],
        };
        let mut all = Vec::new();
        for micro_batch_size in sizes.filter(|b| rows.is_multiple_of(*b)) {
            for schedule in schedules(mesh.pp, workload.n_layers) {
                for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
                    let n_microbatches = rows / micro_batch_size;
                    let with = |zero: &ZeroStage| Candidate {
                        mesh,
                        zero: *zero,
                        schedule,
                        recompute,
                        micro_batch_size,
                        n_microbatches,
                    };
                    all.extend(stages.iter().map(with));
                }
            }
        }
        all
    }

    /// Checks the schedule against the model and the number of microbatches.
    ///
    /// # Errors The first reason found.
    pub fn fits(&self, workload: &Workload) -> Result<(), Reason> {
        let (pp, n_chunks) = (self.mesh.pp, self.schedule.n_chunks());
        if pp * n_chunks > workload.n_layers {
            return Err(Reason::Layers { n_parts: pp * n_chunks, n_layers: workload.n_layers });
        }
        // GPipe never takes less time or memory than 1F1B; chunks help only once microbatches fill the pipeline.
        let idle_chunks = n_chunks > 1 && self.n_microbatches < pp;
        if pp > 1 && (self.schedule == ScheduleKind::GPipe || idle_chunks) {
            let (schedule, n_microbatches) = (self.schedule, self.n_microbatches);
            return Err(Reason::Schedule { schedule, n_microbatches, pp });
        }
        Ok(())
    }
}

/// Writes the axes with more than one rank.
impl fmt::Display for MeshSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes = [
            ("pp", self.pp),
            ("dp_replicate", self.dp_replicate),
            ("dp_shard", self.dp_shard),
            ("cp", self.cp),
            ("tp", self.tp),
        ];
        let used: Vec<String> =
            axes.iter().filter(|(_, size)| *size > 1).map(|(axis, size)| format!("{axis} {size}")).collect();
        f.write_str(if used.is_empty() { "one rank" } else { "" })?;
        f.write_str(&used.join(" x "))
    }
}

/// Schedules worth trying; on one stage they are all the same.
fn schedules(pp: usize, n_layers: usize) -> Vec<ScheduleKind> {
    if pp == 1 {
        return vec![ScheduleKind::OneF1B];
    }
    let chunks = [2, 4, 8].into_iter().filter(|chunks| pp * chunks <= n_layers);
    let interleaved = chunks.map(|chunks| ScheduleKind::Interleaved { chunks });
    [ScheduleKind::GPipe, ScheduleKind::OneF1B, ScheduleKind::ZeroBubble].into_iter().chain(interleaved).collect()
}

fn divisors(n: usize) -> Vec<usize> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}
