//! Compiles a forward program to the program of a step by applying the passes in order.

use crate::mesh::{Axis, MeshRank};
use crate::optimizer::{OptimizerSpec, STATE_BLOCK};
use crate::passes::accumulate::{Chunk, accumulate};
use crate::passes::again::again;
use crate::passes::backward::{BackwardError, Carry, Differentiated, backward, needs_grad};
use crate::passes::cache::{CacheError, CacheUse, cache};
use crate::passes::clip::{clip, complete_loss};
use crate::passes::commit::{StepPhases, commit};
use crate::passes::compact::compact;
use crate::passes::context_parallel::{CpComm, CpError, exchange_keys, shard_tokens, sum_rows};
use crate::passes::data_parallel::{complete, data_parallel, reduces_each_microbatch};
use crate::passes::enter::erase;
use crate::passes::fp8::{fp8, fp8_of_whole_vectors};
use crate::passes::fully_sharded::{GROUP as SHARDS, UNIT, ZeroStage, fully_sharded, gather_updated};
use crate::passes::fuse::fuse;
use crate::passes::half_copies::half_copies;
use crate::passes::head_chunks::head_chunks;
use crate::passes::launch_order::launch_order;
use crate::passes::lora::{LoraError, LoraSpec, lora};
use crate::passes::memory::{Layout, memory};
use crate::passes::offload::offload;
use crate::passes::optimizer::optimizer;
use crate::passes::overlap::overlap;
use crate::passes::pack::{CutBlocks, pack, pack_halves, unpack};
use crate::passes::pipeline::{PipelineError, pipeline};
use crate::passes::precision::{Precision, precision};
use crate::passes::recompute::{Recompute, recompute};
use crate::passes::reference::{is_copy, reference};
use crate::passes::reproducible::{BLOCK, clip_and_loss, sum_along_tree};
use crate::passes::shadow::shadow;
use crate::passes::split_weights::split_weights;
use crate::passes::tensor_parallel::{TpError, tensor_parallel};
use crate::passes::tensor_sums::Exchange;
use crate::pipeline::{ScheduleKind, Slot, Work, message_order, order};
use crate::program::blocks::CutState;
use crate::program::{Param, Program, Role};
use crate::target::Target;
use crate::verify::{VerifyError, verify};
use std::sync::Arc;

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
    /// Whether the optimizer state lies outside device memory.
    pub offload_optimizer: bool,
    /// How ranks share the work; the mesh itself is part of the forward program.
    pub parallel: Parallel,
}

impl StepSpec {
    /// Every shard begins at a multiple of this number of elements; a reproducible run cuts at blocks of the norm, and state in
    /// blocks is not cut within one.
    fn shard_unit(&self) -> usize {
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
    fn schedule(&self, mesh_rank: &MeshRank) -> ScheduleKind {
        if mesh_rank.mesh.pp == 1 { ScheduleKind::OneF1B } else { self.schedule }
    }

    /// How ranks obtain the sums that optimizers need.
    fn exchange_of_sums(&self, unit: usize) -> Exchange {
        let weights = self.zero_stage != ZeroStage::One;
        match self.logical_shards {
            None => Exchange::Sums,
            Some(_) => Exchange::Elements { unit, bucket_bytes: self.bucket_bytes, weights },
        }
    }

    fn chunks(&self, mesh_rank: &MeshRank) -> usize {
        self.schedule(mesh_rank).n_chunks()
    }
}

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

fn check_reproducible(parallel: &Parallel, mesh_rank: &MeshRank) -> Result<(), CompileError> {
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

/// A program with its memory layout. It is not changed once it is compiled.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The program.
    pub program: Program,
    /// Locations of its values.
    pub layout: Layout,
    /// Its phases, which separate changes of state from the rest.
    pub phases: StepPhases,
    /// Which compiled program this is.
    pub identity: Identity,
}

impl Compiled {
    /// A program that is placed.
    pub fn new(program: Program, layout: Layout, phases: StepPhases) -> Compiled {
        Compiled { program, layout, phases, identity: Identity::default() }
    }
}

/// Tells compiled programs apart without comparing them: clones have the same identity, and every other program has another
/// one, for as long as the identity exists.
#[derive(Clone, Debug, Default)]
pub struct Identity(Arc<()>);

impl PartialEq for Identity {
    fn eq(&self, other: &Identity) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Identity {}

/// Compiles the training step of a forward program that ends at a loss.
///
/// `target` is the device that will run it.
///
/// # Errors
/// See [`CompileError`].
pub fn compile_step(mut forward: Program, spec: &StepSpec, target: &dyn Target) -> Result<Compiled, CompileError> {
    prepare(&mut forward, spec)?;
    let (mesh_rank, parallel, unit) = (forward.mesh_rank, &spec.parallel, spec.shard_unit());
    let needs = needs_grad(&forward)?;
    let loss = shape_of_loss(&forward);
    check_reproducible(parallel, &mesh_rank)?;
    let apart = parallel.logical_shards.is_some();
    let grads = !apart && !reduces_each_microbatch(parallel.zero_stage, mesh_rank.group_size(SHARDS));
    let differentiate = |chunk: &Program, carry| -> Result<Differentiated, CompileError> {
        let mut both = backward(chunk, &needs, carry)?;
        erase(&mut both.program);
        recompute(&mut both.program, spec.recompute);
        again(&mut both.program);
        cut_head(&mut both.program, target);
        Ok(both)
    };
    let mut chunks = Vec::new();
    for chunk in pipeline(&forward, parallel.chunks(&mesh_rank))? {
        let rest = differentiate(&chunk, Carry { loss: !apart, grads, apart })?;
        chunks.push(Chunk { first: differentiate(&chunk, Carry { apart, ..Carry::NOTHING })?, rest });
    }
    let order = order(parallel.schedule(&mesh_rank), mesh_rank.mesh.pp, mesh_rank.on(Axis::Pp), spec.n_microbatches);
    let step = accumulate(&forward, &chunks, &order);
    let mut program = step.program;
    launch_order(&mut program, &message_order(parallel.schedule(&mesh_rank), mesh_rank.mesh.pp, spec.n_microbatches));
    fully_sharded(&mut program, parallel.zero_stage, parallel.prefetch, unit);
    let mut grads = match parallel.logical_shards {
        None => data_parallel(&mut program, &step.grads, parallel.bucket_bytes, unit),
        Some(n_leaves) => sum_along_tree(&mut program, &step.grads, n_leaves, parallel.bucket_bytes),
    };
    complete(&mut program, &mut grads, parallel.bucket_bytes);
    let coefficient = match parallel.logical_shards {
        None => clip(&mut program, &grads, &loss, spec.max_grad_norm),
        Some(n_leaves) => {
            program.bindings.retain(|b| b.role != Role::LossSum);
            clip_and_loss(&mut program, &grads, &step.losses, &loss, n_leaves, spec.max_grad_norm)
        }
    };
    optimizer(&mut program, &grads, coefficient, &spec.optimizer, &parallel.exchange_of_sums(unit))?;
    let trained: Vec<usize> = grads.iter().map(|(param, _)| *param).collect();
    if parallel.zero_stage == ZeroStage::One {
        gather_updated(&mut program, &trained, parallel.bucket_bytes, unit);
    }
    if spec.offload_optimizer {
        offload(&mut program);
    }
    let messages = parallel.schedule(&mesh_rank).messages_in_flight(mesh_rank.mesh.pp, spec.n_microbatches);
    finish(program, messages, spec, target)
}

/// Compiles a forward program for evaluation: the same weights and the same numbers, no gradients.
///
/// # Errors
/// See [`CompileError`].
pub fn compile_forward(forward: Program, spec: &StepSpec, target: &dyn Target) -> Result<Compiled, CompileError> {
    finish(without_gradients(forward, spec, target)?, 1, spec, target)
}

/// As [`compile_forward`], for generation: the program also writes the keys and values of its tokens to a cache, which programs of
/// other lengths over the same model share, or reads earlier ones from there.
///
/// # Errors
/// See [`CompileError`].
pub fn compile_cached(
    forward: Program,
    spec: &StepSpec,
    use_of_cache: CacheUse,
    is_half: &dyn Fn(&str) -> bool,
    target: &dyn Target,
) -> Result<Compiled, CompileError> {
    let mut program = without_gradients(forward, spec, target)?;
    cache(&mut program, use_of_cache)?;
    if target.widens_operands() {
        pack_halves(&mut program, is_half);
    }
    finish(program, 1, spec, target)
}

fn without_gradients(mut forward: Program, spec: &StepSpec, target: &dyn Target) -> Result<Program, CompileError> {
    let lora = spec.lora.as_ref().map(LoraSpec::evaluated);
    prepare(&mut forward, &StepSpec { lora, ..spec.clone() })?;
    erase(&mut forward);
    let (mesh_rank, parallel) = (forward.mesh_rank, &spec.parallel);
    let mut chunks = Vec::new();
    for mut program in pipeline(&forward, parallel.chunks(&mesh_rank))? {
        cut_head(&mut program, target);
        let alone = Differentiated { program, grads: vec![], carried_grads: vec![], carried_loss: None };
        chunks.push(Chunk { first: alone.clone(), rest: alone });
    }
    let slot = |chunk| Slot { chunk, microbatch: 0, work: Work::Forward };
    let order: Vec<Slot> = (0..chunks.len() as u32).map(slot).collect();
    let mut program = accumulate(&forward, &chunks, &order).program;
    fully_sharded(&mut program, parallel.zero_stage, parallel.prefetch, spec.shard_unit());
    if program.bound(Role::Logits).next().is_none() {
        complete_loss(&mut program, &shape_of_loss(&forward));
    }
    Ok(program)
}

/// Compiles the program of a shadow: a rank that keeps a copy of the state of the rank that runs `step`.
///
/// # Errors
/// [`CompileError::Verify`] if a pass built an ill-formed program.
pub fn compile_shadow(step: &Compiled, target: &dyn Target) -> Result<Compiled, CompileError> {
    let program = shadow(&step.program, &step.phases);
    verify(&program)?;
    let layout = memory(&program, target);
    let end = program.instrs.len();
    Ok(Compiled::new(program, layout, StepPhases { apply: 0, gather: end, end }))
}

fn prepare(forward: &mut Program, spec: &StepSpec) -> Result<(), CompileError> {
    verify(forward)?;
    shard_tokens(forward)?;
    // Fusing comes before adapters: the base then computes the same bits as without adapters, and an adapter after a
    // fused product adds directly to the residual stream.
    fuse(forward);
    // Adapters are too small to gain: it comes before them.
    if spec.precision == Precision::Fp8 {
        fp8(forward);
    }
    if let Some(adapters) = &spec.lora {
        lora(forward, adapters)?;
    }
    reference(forward);
    tensor_parallel(forward, spec.parallel.sequence_parallel)?;
    exchange_keys(forward, spec.parallel.cp_comm);
    sum_rows(forward);
    precision(forward, spec.precision);
    // Without adapters, a run exports frozen weights, with all bits that they began with.
    let is_kept = |param: &Param| spec.lora.is_none() && !param.parts.iter().all(|part| is_copy(&part.name));
    pack(forward, spec.lora.as_ref().and_then(|adapters| adapters.packing), spec.precision, is_kept)?;
    fp8_of_whole_vectors(forward);
    Ok(())
}

/// Ranks without the loss take part in its sum.
fn shape_of_loss(forward: &Program) -> Vec<usize> {
    forward.bound(Role::LossSum).next().map(|loss| forward.value(loss).shape.clone()).unwrap_or_default()
}

fn cut_head(program: &mut Program, target: &dyn Target) {
    if let Some(tokens) = target.head_chunk_tokens() {
        head_chunks(program, tokens);
    }
}

/// Whether programs of this kind may have split weights on this rank. Rules with sums over whole tensors read weights in f32, and so
/// do ranks that gather updated weights. A reproducible run has the same bits on every mesh, and some meshes have to convert, which
/// rounds ties to even.
fn splits(spec: &StepSpec, mesh_rank: &MeshRank, target: &dyn Target) -> bool {
    let gathers_updated = spec.parallel.zero_stage == ZeroStage::One && mesh_rank.group_size(SHARDS) > 1;
    let reads_whole = [1, 2].iter().any(|n_dims| !spec.optimizer.sums(*n_dims).is_empty());
    target.split_weights() && spec.parallel.logical_shards.is_none() && !gathers_updated && !reads_whole
}

fn finish(
    mut program: Program,
    messages: usize,
    spec: &StepSpec,
    target: &dyn Target,
) -> Result<Compiled, CompileError> {
    unpack(&mut program, target.widens_operands());
    if splits(spec, &program.mesh_rank, target) {
        split_weights(&mut program);
    }
    if target.half_copies() {
        half_copies(&mut program);
    }
    overlap(&mut program, messages);
    let phases = commit(&mut program);
    compact(&mut program);
    verify(&program)?;
    let layout = memory(&program, target);
    Ok(Compiled::new(program, layout, phases))
}
