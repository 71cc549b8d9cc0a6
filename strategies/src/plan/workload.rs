//! The model and its batch, as far as a plan depends on them.

use crate::compile::{CompileError, StepSpec, compile_step};
use crate::cost::instr_cost;
use crate::model::{BatchShape, ModelConfig};
use crate::optimizer::OptimizerSpec;
use crate::passes::precision::Precision;
use crate::passes::recompute::Recompute;
use crate::program::{Compute, Kind, Op, Phase, Program, ValueId};
use crate::target::{ALIGN_BYTES, Nowhere, Target};
use std::collections::BTreeSet;

/// The model and its batch, as far as a plan depends on them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Transformer blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward part.
    pub intermediate_size: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Parameters of a block.
    pub layer_params: usize,
    /// Parameters before the first block.
    pub embedding_params: usize,
    /// Parameters after the last block; 0 if the head shares the embedding's.
    pub head_params: usize,
    /// Parameters that are trained, adapters included; all of them unless some are frozen.
    pub trainable_params: usize,
    /// Blocks differ in the number of their adapters, so that their costs differ.
    pub uneven_blocks: bool,
    /// The update rule.
    pub optimizer: OptimizerSpec,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Rows of a step, over all ranks.
    pub global_batch_rows: usize,
    /// Precision of products.
    pub compute: Compute,
    /// Bytes of an element of an activation.
    pub activation_bytes: usize,
    /// Bytes of an element of a gathered weight, at least.
    pub gathered_bytes: usize,
    /// Bits of a weight in memory, at least.
    pub stored_bits: usize,
    /// Tokens whose logits exist at once, if not all of a microbatch.
    pub head_tokens_max: Option<usize>,
    /// Bytes of a logit, at least.
    pub logit_bytes: usize,
    /// Bytes of activations per token that kernels of a block other than products and attention touch, forward and
    /// backward, with nothing recomputed or sharded.
    pub layer_streamed_bytes: [usize; 2],
    /// The same around the blocks.
    pub head_streamed_bytes: [usize; 2],
    /// Bytes per token that a block keeps for its backward pass, by policy: [`Recompute::None`], [`Recompute::Selective`],
    /// [`Recompute::Full`].
    pub layer_kept_bytes: [Kept; 3],
}

/// Bytes kept per token on a single rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Values as wide as the residual stream; each tensor-parallel rank keeps all of them, unless ranks share the tokens.
    pub stream: usize,
    /// Values that tensor-parallel ranks share.
    pub shared: usize,
}

impl Workload {
    /// The workload of a model whose forward program on one rank is `forward`, with `global_batch_rows` rows per step.
    ///
    /// # Errors
    /// When the step cannot be compiled.
    pub fn of(
        model: &ModelConfig,
        forward: &Program,
        batch: BatchShape,
        spec: &StepSpec,
        global_batch_rows: usize,
    ) -> Result<Workload, CompileError> {
        let compile = |recompute| {
            let plain = StepSpec { recompute, n_microbatches: 1, ..spec.clone() };
            compile_step(forward.clone(), &plain, &Nowhere::default()).map(|compiled| compiled.program)
        };
        let step = compile(Recompute::None)?;
        let keeps = |step: &Program| kept_bytes(step, model, batch.n_tokens(), spec.parallel.sequence_parallel);
        let kept = [&step, &compile(Recompute::Selective)?, &compile(Recompute::Full)?].map(keeps);
        let [embedding_params, layer_params, head_params] = parameters(forward);
        let activation_bytes = if spec.precision == Precision::F32 { 4 } else { 2 };
        // The fewest bits: the bound of a candidate is below what its program needs.
        let packings = step.params.iter().filter_map(|param| param.packing);
        let packing = packings.min_by_key(|packing| 32 * packing.n_words() / packing.n_weights());
        let blocks = streamed_bytes(&step, batch.n_tokens(), true);
        Ok(Workload {
            n_layers: model.n_layers,
            n_heads: model.n_heads,
            n_kv_heads: model.n_kv_heads,
            head_dim: model.head_dim,
            hidden_size: model.hidden_size,
            intermediate_size: model.intermediate_size,
            vocab_size: model.vocab_size,
            layer_params,
            embedding_params,
            head_params,
            trainable_params: step.n_trainable(),
            uneven_blocks: uneven_blocks(&step, model.n_layers),
            optimizer: spec.optimizer,
            seq_len: batch.seq_len,
            global_batch_rows,
            compute: spec.precision.compute(),
            activation_bytes,
            // Whole bytes: those of nf4 have less than one each.
            gathered_bytes: packing.map_or(4, |packing| 4 * packing.n_words() / packing.n_weights()),
            stored_bits: packing.map_or(32, |packing| 32 * packing.n_words() / packing.n_weights()),
            head_tokens_max: None,
            logit_bytes: 4,
            layer_streamed_bytes: blocks.map(|bytes| bytes / model.n_layers),
            head_streamed_bytes: streamed_bytes(&step, batch.n_tokens(), false),
            layer_kept_bytes: kept,
        })
    }

    /// Whether some parameters are frozen.
    pub const fn has_adapters(&self) -> bool {
        self.trainable_params < self.n_params()
    }

    /// The workload on a device that asks for other programs than the host.
    #[must_use]
    pub fn on(self, target: &dyn Target) -> Workload {
        let has_copies = target.half_copies() && self.activation_bytes == 2;
        let gathered_bytes = if has_copies { self.gathered_bytes.min(2) } else { self.gathered_bytes };
        // Such devices store logits in half width. The rest of the head is small beside them, so half of all bytes is a bound.
        let (logit_bytes, part) = if has_copies { (2, 2) } else { (self.logit_bytes, 1) };
        let head_streamed_bytes = self.head_streamed_bytes.map(|bytes| bytes / part);
        let head_tokens_max = target.head_chunk_tokens();
        Workload { gathered_bytes, logit_bytes, head_streamed_bytes, head_tokens_max, ..self }
    }

    /// Parameters of the model.
    pub const fn n_params(&self) -> usize {
        self.n_layers * self.layer_params + self.embedding_params + self.head_params
    }
}

/// Bytes of the inputs of the first microbatch of a step.
pub fn input_bytes(program: &Program) -> u64 {
    let first = program.bindings.iter().filter(|b| b.microbatch == 0);
    let inputs = first.map(|b| program.value(b.value)).filter(|v| v.kind == Kind::Input && !v.shape.is_empty());
    inputs.map(|v| v.size_bytes().next_multiple_of(ALIGN_BYTES) as u64).sum()
}

fn uneven_blocks(step: &Program, n_layers: usize) -> bool {
    let mut trained = vec![BTreeSet::<ValueId>::new(); n_layers];
    for instr in &step.instrs {
        let Some(block) = instr.site.block.and_then(|block| trained.get_mut(block as usize)) else { continue };
        block.extend(instr.reads.iter().filter(|v| step.param_of(**v).is_some_and(|param| param.trainable)));
    }
    trained.iter().any(|block| block.len() != trained[0].len())
}

/// Elements of the parameters before the first block, of one block, and after the last.
fn parameters(forward: &Program) -> [usize; 3] {
    let mut sizes = [0; 3];
    for param in &forward.params {
        let reader = forward.instrs.iter().find(|i| i.reads.contains(&param.value));
        let group = match reader.map(|i| (i.site.block, &i.op)) {
            Some((Some(0), _)) => 1,
            Some((Some(_), _)) => continue,
            Some((None, Op::Embedding(_))) => 0,
            _ => 2,
        };
        sizes[group] += forward.value(param.value).n_elements();
    }
    sizes
}

/// Bytes of activations per token that kernels other than products and attention touch, forward and backward, in all
/// blocks or around them. Values whose size does not depend on the tokens do not count.
fn streamed_bytes(program: &Program, n_tokens: usize, in_blocks: bool) -> [usize; 2] {
    let of = |phase: Phase| {
        let here = program.instrs.iter().filter(|i| i.site.phase == phase && i.site.block.is_some() == in_blocks);
        let streams = here.filter(|i| instr_cost(program, i).streamed_bytes > 0.0 && !computes(&i.op));
        let touched = streams.flat_map(|i| i.reads.iter().chain(&i.writes)).map(|v| program.value(*v));
        let per_token = touched.filter(|v| v.kind == Kind::Activation && v.shape.first() == Some(&n_tokens));
        per_token.map(|v| v.size_bytes() / n_tokens).sum()
    };
    [of(Phase::Forward), of(Phase::Backward)]
}

/// Products and attention, and gradients of biases and tables, which a pipeline may defer.
const fn computes(op: &Op) -> bool {
    matches!(op, Op::MatMul(_) | Op::Attention(_) | Op::AttentionBackward(_) | Op::ColumnSum(_))
        || matches!(op, Op::EmbeddingBackward(_))
}

/// Bytes that the backward pass of a block reads from its forward pass, mean of all blocks.
fn kept_bytes(program: &Program, model: &ModelConfig, n_tokens: usize, sequence_parallel: bool) -> Kept {
    let mut makers: Vec<Option<&Op>> = vec![None; program.values.len()];
    for instr in program.instrs.iter().filter(|i| i.site.phase == Phase::Forward) {
        instr.writes.iter().for_each(|v| makers[v.0 as usize] = Some(&instr.op));
    }
    let backward = program.instrs.iter().filter(|i| i.site.phase == Phase::Backward && i.site.block.is_some());
    let read: BTreeSet<ValueId> = backward.flat_map(|i| &i.reads).copied().collect();
    let (mut stream, mut shared) = (0, 0);
    for v in read {
        let (value, maker) = (program.value(v), makers[v.0 as usize]);
        if value.kind != Kind::Activation || value.shape.first() != Some(&n_tokens) {
            continue;
        }
        // Heads and feed-forward columns are shared, regardless of their width.
        let is_wide = value.n_columns() == model.hidden_size && model.hidden_size != model.intermediate_size;
        match maker {
            None => {}
            Some(Op::Attention(_)) => shared += value.size_bytes(),
            Some(_) if is_wide && !sequence_parallel => stream += value.size_bytes(),
            Some(_) => shared += value.size_bytes(),
        }
    }
    let per_token = |bytes: usize| bytes / (n_tokens * model.n_layers);
    Kept { stream: per_token(stream), shared: per_token(shared) }
}
