//! A quick lower bound on the time and memory of a candidate: no candidate is discarded for a bound that its compiled
//! program would beat.
//!
//! A step takes at least as long as the longest of three, followed by the update:
//! - the *pipeline*: products at their best rate, attention, kernels at memory speed, communication that the next kernel
//!   waits for, and bubbles;
//! - the *link* of a rank, which carries one collective at a time: sums of activations, weights that are gathered for
//!   each microbatch (ZeRO-3), gradients that are scattered for each (ZeRO-2, ZeRO-3) or at the end;
//! - the *end*: gradients of the last microbatch cannot be summed before its backward pass.
//!
//! The bound is optimistic on purpose: it assumes perfect sharding, and that buffers share memory whenever they can.
//!
//! Legend: `T` tokens of a microbatch on one rank, `m` microbatches, `p` stages, `v` chunks.

use super::candidate::{Candidate, MeshSizes, ZeroStage};
use super::cost::{NodeSpan, collective_seconds};
use super::hardware::Hardware;
use super::overhead::Overhead;
use super::workload::Workload;
use crate::passes::recompute::Recompute;
use crate::pipeline::ScheduleKind;
use crate::world::Kind;
use serde::Serialize;

/// Bytes of an element of parameters, of gradients, and of each tensor of the optimizer's state.
const MASTER_BYTES: f64 = 4.0;

/// Lower bounds of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Bytes of the fullest rank.
    pub memory_bytes: u64,
}

/// The part of the bounds that all candidates of a mesh share.
#[derive(Clone, Copy, Debug)]
pub struct MeshBound<'a> {
    mesh: MeshSizes,
    workload: &'a Workload,
    hardware: &'a Hardware,
    tp: NodeSpan,
    cp: NodeSpan,
    shards: NodeSpan,
    replicas: NodeSpan,
}

/// Seconds of one block, or of the head, on one microbatch.
struct Layer {
    forward: f64,
    backward_input: f64,
    backward_weight: f64,
    /// Recomputed products, which the backward pass runs without data from another stage.
    again: f64,
    /// Transfers of sums and of keys and values, hidden or not.
    link: f64,
}

impl Layer {
    fn backward(&self) -> f64 {
        self.backward_input + self.backward_weight
    }

    fn both_ways(&self) -> f64 {
        self.forward + self.backward_input
    }

    fn total(&self) -> f64 {
        self.forward + self.backward()
    }
}

impl<'a> MeshBound<'a> {
    /// Prepares the bounds of a mesh's candidates.
    pub fn new(mesh: MeshSizes, workload: &'a Workload, hardware: &'a Hardware) -> MeshBound<'a> {
        let span = |n: usize, stride: usize| {
            let nodes: Vec<u32> = (0..n).map(|i| hardware.node((i * stride) as u32)).collect();
            NodeSpan::of(&nodes)
        };
        let MeshSizes { tp, cp, dp_replicate, .. } = mesh;
        MeshBound {
            mesh,
            workload,
            hardware,
            tp: span(tp, 1),
            cp: span(cp, tp),
            shards: span(mesh.shards(), tp),
            replicas: span(dp_replicate, tp * mesh.shards()),
        }
    }

    /// Bounds one candidate of the mesh.
    pub fn of(&self, candidate: &Candidate) -> Bound {
        let (layer, head) = (self.layer(candidate), self.head(candidate));
        let pipeline = self.pipeline_seconds(candidate, &layer, &head);
        let m = candidate.n_microbatches as f64;
        let blocks = self.workload.n_layers as f64 / self.mesh.pp as f64;
        let gradients = self.gradients(candidate);
        let link = m * blocks * layer.link + self.gathers(candidate) + gradients.0 + gradients.1;
        let seconds = pipeline.max(link).max(self.end_seconds(candidate, pipeline, &layer, &head, gradients.1));
        let step_seconds = seconds + self.update_seconds(candidate);
        let outside = Overhead::least(self.hardware, self.mesh.world_size());
        Bound { step_seconds, memory_bytes: self.memory_bytes(candidate) as u64 + outside.bytes() }
    }

    fn tokens(&self, candidate: &Candidate) -> f64 {
        (candidate.micro_batch_size * self.workload.seq_len) as f64 / self.mesh.cp as f64
    }

    fn layer(&self, candidate: &Candidate) -> Layer {
        let (w, hw) = (self.workload, self.hardware);
        let (tokens, tp) = (self.tokens(candidate), self.mesh.tp as f64);
        let products = |n_params: usize| 2.0 * n_params as f64 * tokens / tp / hw.matmul(w.compute).best();
        // Where blocks differ, none counts for more than its products in the forward pass.
        let streamed = if w.uneven_blocks { [0; 2] } else { w.layer_streamed_bytes };
        let streams = streamed.map(|bytes| bytes as f64 * tokens / tp / hw.fastest_stream());
        // Causal: a token sees half of the row on average.
        let mean_keys = (w.seq_len as f64 + 1.0) / 2.0;
        let scores = 4.0 * tokens * mean_keys * (w.n_heads * w.head_dim) as f64 / tp;
        let rate = hw.attention("attention", w.compute).max(hw.attention("attention_backward", w.compute));
        let attention = scores / rate;
        let around = self.context_seconds(tokens);
        // The sums after attention and feed-forward; in the backward pass, weight gradients can hide them.
        let bytes = tokens * (w.hidden_size * w.activation_bytes) as f64;
        let sum = collective_seconds(hw, Kind::AllReduce, bytes, self.tp);
        let all = products(w.layer_params);
        // The output of the block is kept: its last product and sum are not recomputed.
        let lost = products(w.layer_params - w.hidden_size * w.intermediate_size) + sum;
        let again = match candidate.recompute {
            Recompute::None => 0.0,
            Recompute::Selective => lost,
            Recompute::Full => lost + attention,
        };
        let exposed_sums = (2.0 * sum - all).max(0.0);
        // With adapters, operations before the first of them have no gradient: at most one block.
        let differentiated = match (w.uneven_blocks, w.has_adapters()) {
            (true, _) => 0.0,
            (false, true) => 1.0 - 1.0 / w.n_layers as f64,
            (false, false) => 1.0,
        };
        let backward = all + streams[1] + (2.5 * attention).max(around) + exposed_sums + again;
        Layer {
            forward: all + streams[0] + attention.max(around) + 2.0 * sum,
            // Flash attention runs five products backward for two forward.
            backward_input: differentiated * backward,
            backward_weight: all * self.trained_fraction(),
            again: differentiated * again,
            link: (1.0 + differentiated) * (2.0 * sum + around),
        }
    }

    /// The operations around the blocks, mainly logits and loss.
    fn head(&self, candidate: &Candidate) -> Layer {
        let (w, hw) = (self.workload, self.hardware);
        let (tokens, tp) = (self.tokens(candidate), self.mesh.tp as f64);
        let logits = 2.0 * (w.vocab_size * w.hidden_size) as f64 * tokens / tp / hw.matmul(w.compute).best();
        let streams = w.head_streamed_bytes.map(|bytes| bytes as f64 * tokens / tp / hw.fastest_stream());
        Layer {
            forward: logits + streams[0],
            backward_input: logits + streams[1],
            backward_weight: logits * self.trained_fraction(),
            again: 0.0,
            link: 0.0,
        }
    }

    /// Keys and values of all other ranks; a gather takes no longer than a ring.
    fn context_seconds(&self, tokens: f64) -> f64 {
        let w = self.workload;
        let kv_heads = (w.n_kv_heads as f64 / self.mesh.tp as f64).max(1.0);
        let bytes = 2.0 * tokens * kv_heads * (w.head_dim * w.activation_bytes) as f64;
        collective_seconds(self.hardware, Kind::AllGather, self.mesh.cp as f64 * bytes, self.cp)
    }

    /// A stage begins when the first microbatch has reached it, and the first stage ends when the last microbatch has
    /// returned. Among stages with equally many blocks, the last has the longest path.
    fn pipeline_seconds(&self, candidate: &Candidate, layer: &Layer, head: &Layer) -> f64 {
        let (p, v, m) = (self.mesh.pp, candidate.schedule.n_chunks(), candidate.n_microbatches);
        // The first `more` of all chunks have one more block; see [`crate::passes::pipeline::blocks_of_chunk`].
        let (each, more) = (self.workload.n_layers / (p * v), self.workload.n_layers % (p * v));
        let seconds = |stage: usize| {
            // Each earlier stage may recompute the products of a block before the gradient arrives.
            let above = (stage * each + stage.min(more)) as f64;
            let early = stage as f64 * layer.again;
            let blocks = (v * each + more / p + usize::from(stage < more % p)) as f64;
            let with_head = if stage + 1 == p { 1.0 } else { 0.0 };
            let of = |part: fn(&Layer) -> f64| blocks * part(layer) + with_head * part(head);
            if candidate.schedule != ScheduleKind::ZeroBubble {
                return m as f64 * of(Layer::total) + above * layer.total() - early;
            }
            // Weight gradients are deferred: those of all `p` microbatches in flight may remain.
            let (both_ways, weights) = (of(Layer::both_ways), of(|l| l.backward_weight));
            let left = m as f64 * both_ways + m.saturating_sub(p) as f64 * weights;
            let alone = above * layer.forward + m as f64 * (both_ways + weights);
            alone.max(left + above * layer.both_ways() - early + each as f64 * layer.backward_weight)
        };
        (more % p).checked_sub(1).into_iter().chain([p - 1]).map(seconds).fold(0.0, f64::max)
    }

    /// The pipeline up to the last backward pass of the first stage, which is the last of all, and the sums after it.
    /// Stages with several chunks begin to sum earlier.
    fn end_seconds(&self, candidate: &Candidate, pipeline: f64, layer: &Layer, head: &Layer, sums: f64) -> f64 {
        let own = self.workload.n_layers.div_ceil(self.mesh.pp) as f64 * layer.backward() + head.backward();
        if candidate.schedule.n_chunks() > 1 { 0.0 } else { pipeline - own + sums }
    }

    /// Elements of a stage's parameters on one tensor shard, mean of all stages.
    fn local(&self, n_params: usize) -> f64 {
        n_params as f64 / (self.mesh.pp * self.mesh.tp) as f64
    }

    /// Which layers are trained is unknown with adapters, so counted as none.
    fn trained_fraction(&self) -> f64 {
        if self.workload.has_adapters() { 0.0 } else { 1.0 }
    }

    /// Seconds of gathering weights: once per step, or for the forward and the backward pass of each microbatch.
    fn gathers(&self, candidate: &Candidate) -> f64 {
        let w = self.workload;
        let seconds = |n_params| {
            let bytes = self.local(n_params) * w.gathered_bytes as f64;
            collective_seconds(self.hardware, Kind::AllGather, bytes, self.shards)
        };
        // Possibly nothing before the first block is trained; the backward pass does not read the embedding.
        let backward = if w.uneven_blocks { 0 } else { (w.n_layers - 1) * w.layer_params };
        match candidate.zero {
            ZeroStage::Zero0 | ZeroStage::Zero1 => 0.0,
            ZeroStage::Zero2 => seconds(w.n_params()),
            ZeroStage::Zero3 => candidate.n_microbatches as f64 * (seconds(w.n_params()) + seconds(backward)),
        }
    }

    /// Seconds of summing gradients: while microbatches run, and after the last one.
    fn gradients(&self, candidate: &Candidate) -> (f64, f64) {
        let hw = self.hardware;
        let trained = self.local(self.workload.trainable_params) * MASTER_BYTES;
        let scatter = collective_seconds(hw, Kind::ReduceScatter, trained, self.shards);
        let replicas = collective_seconds(hw, Kind::AllReduce, trained / self.mesh.shards() as f64, self.replicas);
        let n_before = if candidate.zero >= ZeroStage::Zero2 { candidate.n_microbatches - 1 } else { 0 };
        (n_before as f64 * scatter, scatter + replicas)
    }

    /// Seconds of reading and writing parameters and state, of reading gradients, and of gathering updated parts.
    fn update_seconds(&self, candidate: &Candidate) -> f64 {
        let trained = self.local(self.workload.trainable_params) * MASTER_BYTES;
        let gather = match candidate.zero {
            ZeroStage::Zero1 => collective_seconds(self.hardware, Kind::AllGather, trained, self.shards),
            _ => 0.0,
        };
        let streams = 3.0 + 2.0 * self.workload.optimizer.words_of_element();
        let rate = self.hardware.streaming(self.workload.optimizer.name());
        trained / self.mesh.shards() as f64 * streams / rate + gather
    }

    /// State of the mean stage; plus activations of the first stage, or of one microbatch and its logits on the last.
    /// Gradients coexist with activations from the second microbatch on, and always exist in the update.
    fn memory_bytes(&self, candidate: &Candidate) -> f64 {
        let w = self.workload;
        let (pp, n_chunks) = (self.mesh.pp, candidate.schedule.n_chunks());
        let shards = self.mesh.shards() as f64;
        let over = |from: ZeroStage| if candidate.zero >= from { shards } else { 1.0 };
        // Gradients that no later microbatch adds to are scattered as soon as they exist.
        let scattered = if candidate.n_microbatches == 1 { ZeroStage::Zero1 } else { ZeroStage::Zero2 };
        let n_state = w.optimizer.words_of_element();
        let (gradients, moments) = (1.0 / over(scattered), n_state / over(ZeroStage::Zero1));
        let state = |n_params: f64, with_gradients: bool| {
            let trained = moments + if with_gradients { gradients } else { 0.0 };
            let stored = w.stored_bits as f64 / 8.0 / over(ZeroStage::Zero2);
            n_params / self.mesh.tp as f64 * (stored + self.trained_fraction() * trained * MASTER_BYTES)
        };
        let outside = w.head_params + if pp == 1 { w.embedding_params } else { 0 };
        let of_last = (w.n_layers / pp * w.layer_params + outside) as f64;
        let kept = w.layer_kept_bytes[candidate.recompute as usize];
        let per_token = kept.stream as f64 + kept.shared as f64 / self.mesh.tp as f64;
        let m = candidate.n_microbatches;
        let per_layer = self.tokens(candidate) * per_token;
        // The first block keeps nothing for the operations before its first adapter.
        let kept_blocks = |stage: usize| match w.uneven_blocks {
            true => 0.0,
            false => (w.n_layers / (pp * n_chunks) - usize::from(w.has_adapters() && stage == 0)) as f64,
        };
        // Their gradient overwrites the logits.
        let tokens = w.head_tokens_max.map_or(f64::INFINITY, |max| max as f64).min(self.tokens(candidate));
        let logits = tokens * (w.vocab_size * w.logit_bytes) as f64 / self.mesh.tp as f64;
        let mean = w.n_params() as f64 / pp as f64;
        // A block keeps its weights along with its activations if ZeRO-2 has gathered them.
        let kept_weights = candidate.zero == ZeroStage::Zero2 && !w.uneven_blocks && n_chunks == 1 && shards > 1.0;
        let blocks = (w.n_layers / pp * w.layer_params) as f64;
        let gathered = if kept_weights { blocks / self.mesh.tp as f64 * w.gathered_bytes as f64 } else { 0.0 };
        let in_flight = candidate.schedule.max_in_flight(pp, 0, m);
        let first = gathered + state(mean, m * n_chunks > in_flight) + in_flight as f64 * kept_blocks(0) * per_layer;
        let last = gathered + state(of_last, m > 1) + kept_blocks(pp - 1) * per_layer + logits;
        state(mean, true).max(first).max(last)
    }
}
