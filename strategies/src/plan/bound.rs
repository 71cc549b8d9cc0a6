//! A quick estimate of a candidate that errs on the fast and small side: no candidate is thrown away for a bound that
//! its compiled program would beat.
//!
//! Optimistic on purpose: products run at their best rate, only communication that nothing could hide counts, buffers
//! never lie beside each other that could share memory. Sharding counts as perfect.
//!
//! Legend: `T` tokens of a microbatch on one rank, `m` microbatches, `p` stages, `v` chunks.

use super::candidate::{Candidate, MeshSizes, Workload, ZeroStage};
use super::cost::{Placement, collective_seconds};
use super::hardware::Hardware;
use crate::passes::recompute::Recompute;
use crate::pipeline::ScheduleKind;
use crate::world::Kind;
use serde::Serialize;

/// Bytes of an element of parameters, of gradients, and of each of the optimizer's two moments.
const MASTER_BYTES: f64 = 4.0;

/// What a candidate takes at least.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Bytes of the fullest rank.
    pub memory_bytes: u64,
}

/// What all candidates of a mesh have in common.
#[derive(Clone, Copy, Debug)]
pub struct MeshBound<'a> {
    mesh: MeshSizes,
    workload: &'a Workload,
    hardware: &'a Hardware,
    tp: Placement,
    cp: Placement,
    shards: Placement,
    replicas: Placement,
}

/// Seconds of one block on one microbatch.
struct Layer {
    forward: f64,
    backward_input: f64,
    backward_weight: f64,
}

impl<'a> MeshBound<'a> {
    /// Prepares the bounds of a mesh's candidates.
    pub fn new(mesh: MeshSizes, workload: &'a Workload, hardware: &'a Hardware) -> MeshBound<'a> {
        let place = |n: usize, stride: usize| {
            let nodes: Vec<u32> = (0..n).map(|i| hardware.node((i * stride) as u32)).collect();
            Placement::of(&nodes)
        };
        let MeshSizes { tp, cp, dp_replicate, .. } = mesh;
        MeshBound {
            mesh,
            workload,
            hardware,
            tp: place(tp, 1),
            cp: place(cp, tp),
            shards: place(mesh.shards(), tp),
            replicas: place(dp_replicate, tp * mesh.shards()),
        }
    }

    /// Bounds one candidate of the mesh.
    pub fn of(&self, candidate: &Candidate) -> Bound {
        let pipeline = self.pipeline_seconds(candidate);
        let step_seconds = pipeline.max(self.data_parallel_seconds(candidate)) + self.optimizer_seconds(candidate);
        Bound { step_seconds, memory_bytes: self.memory_bytes(candidate) as u64 }
    }

    fn tokens(&self, candidate: &Candidate) -> f64 {
        (candidate.micro_batch_size * self.workload.seq_len) as f64 / self.mesh.cp as f64
    }

    fn layer(&self, candidate: &Candidate) -> Layer {
        let (w, hw) = (self.workload, self.hardware);
        let (tokens, tp) = (self.tokens(candidate), self.mesh.tp as f64);
        let rate = hw.matmul(w.compute);
        let products = 2.0 * w.layer_params as f64 * tokens / tp / rate.best();
        // Causal: a token sees half of the row on the average.
        let mean_keys = (w.seq_len as f64 + 1.0) / 2.0;
        let scores = 4.0 * tokens * mean_keys * (w.n_heads * w.head_dim) as f64 / tp;
        let attention = scores / hw.attention("attention", w.compute);
        let around = self.context_seconds(tokens);
        // The sums behind attention and feed-forward; backward, weight gradients can hide them.
        let bytes = tokens * (w.hidden_size * w.activation_bytes) as f64;
        let sums = 2.0 * collective_seconds(hw, Kind::AllReduce, bytes, self.tp);
        let forward = products + attention.max(around) + sums;
        let again = match candidate.recompute {
            Recompute::None => 0.0,
            Recompute::Selective => products,
            Recompute::Full => products + attention,
        };
        let exposed_sums = (sums - products).max(0.0);
        // Flash attention runs five products backward for two forward.
        let backward_input = products + (2.5 * attention).max(2.0 * around) + exposed_sums + again;
        Layer { forward, backward_input, backward_weight: products * self.trained_fraction() }
    }

    /// Keys and values once around the ring.
    fn context_seconds(&self, tokens: f64) -> f64 {
        let w = self.workload;
        let kv_heads = (w.n_kv_heads as f64 / self.mesh.tp as f64).max(1.0);
        let bytes = 2.0 * tokens * kv_heads * (w.head_dim * w.activation_bytes) as f64;
        (self.mesh.cp as f64 - 1.0) * collective_seconds(self.hardware, Kind::Shift { by: 1 }, bytes, self.cp)
    }

    /// Source of the bubbles: see [`crate::pipeline`].
    fn pipeline_seconds(&self, candidate: &Candidate) -> f64 {
        let w = self.workload;
        let layer = self.layer(candidate);
        let (p, v) = (self.mesh.pp as f64, candidate.schedule.n_chunks() as f64);
        let m = candidate.n_microbatches as f64;
        let both_ways = layer.forward + layer.backward_input;
        let slowest = w.n_layers.div_ceil(self.mesh.pp) as f64 * (both_ways + layer.backward_weight);
        let logits = 2.0 * (w.vocab_size * w.hidden_size) as f64 * self.tokens(candidate);
        let head =
            (2.0 + self.trained_fraction()) * logits / self.mesh.tp as f64 / self.hardware.matmul(w.compute).best();
        // The last stage has the head and may have a block less for it.
        let spread = (w.n_layers as f64 / p * (both_ways + layer.backward_weight)).max(head);
        let busiest = if p == 1.0 { slowest + head } else { slowest.max(spread) };
        let stage_layers = (w.n_layers / self.mesh.pp) as f64;
        let bubble = match candidate.schedule {
            // Each microbatch behind the first has weight gradients to put into the bubble of one stage.
            ScheduleKind::ZeroBubble => (p - 1.0) * both_ways - (m.min(p) - 1.0) * layer.backward_weight,
            _ => (p - 1.0) * (both_ways + layer.backward_weight) / v,
        };
        m * busiest + stage_layers * bubble.max(0.0)
    }

    /// Elements of a stage's parameters on one tensor shard; the mean stage.
    fn local(&self, n_params: usize) -> f64 {
        n_params as f64 / (self.mesh.pp * self.mesh.tp) as f64
    }

    fn trained_fraction(&self) -> f64 {
        (self.workload.trainable_params as f64 / self.workload.n_params() as f64).min(1.0)
    }

    /// What the communication streams carry for gradients and parameters.
    fn data_parallel_seconds(&self, candidate: &Candidate) -> f64 {
        let (w, hw) = (self.workload, self.hardware);
        let trained = self.local(w.trainable_params) * MASTER_BYTES;
        // ZeRO-3 gathers everything, for the forward and again for the backward pass; in half width, if it can.
        let gathered = match candidate.zero {
            ZeroStage::Zero0 => 0.0,
            ZeroStage::Zero1 | ZeroStage::Zero2 => trained / 2.0,
            ZeroStage::Zero3 => 2.0 * self.local(w.n_params()) * MASTER_BYTES / 2.0,
        };
        collective_seconds(hw, Kind::AllGather, gathered, self.shards)
            + collective_seconds(hw, Kind::ReduceScatter, trained, self.shards)
            + collective_seconds(hw, Kind::AllReduce, trained / self.mesh.shards() as f64, self.replicas)
    }

    /// Parameter, both moments read and written, gradient read.
    fn optimizer_seconds(&self, candidate: &Candidate) -> f64 {
        let sharded = if candidate.zero == ZeroStage::Zero0 { 1.0 } else { self.mesh.shards() as f64 };
        let trained = self.local(self.workload.trainable_params) * MASTER_BYTES;
        trained / sharded * 7.0 / self.hardware.streaming("adamw")
    }

    /// State of the mean stage, activations of the first.
    fn memory_bytes(&self, candidate: &Candidate) -> f64 {
        let w = self.workload;
        let shards = self.mesh.shards() as f64;
        let over = |from: ZeroStage| if candidate.zero >= from { shards } else { 1.0 };
        let trained = 1.0 / over(ZeroStage::Zero2) + 2.0 / over(ZeroStage::Zero1);
        let state = self.local(w.n_params()) / over(ZeroStage::Zero3) + self.local(w.trainable_params) * trained;
        let state = state * MASTER_BYTES;
        let stream = w.hidden_size * w.activation_bytes;
        let kept = match candidate.recompute {
            Recompute::None => w.layer_kept_bytes.max(stream),
            Recompute::Selective => stream + w.n_heads * w.head_dim * w.activation_bytes,
            Recompute::Full => stream,
        };
        let (pp, n_chunks) = (self.mesh.pp, candidate.schedule.n_chunks());
        let in_flight = candidate.schedule.max_in_flight(pp, 0, candidate.n_microbatches) as f64;
        let layers = (w.n_layers / (pp * n_chunks)) as f64;
        let tokens = self.tokens(candidate);
        state + in_flight * layers * tokens * kept as f64 / self.mesh.tp as f64
    }
}
