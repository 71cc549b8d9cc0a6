//! Compiles a forward program to the program of a step by applying the passes in order.

mod begin;
mod compiled;
mod error;
mod finish;
mod spec;

pub use crate::passes::offload::Offload;
pub use compiled::{Compiled, Identity};
pub use error::CompileError;
pub use spec::{Parallel, StepSpec};

use crate::mesh::Axis;
use crate::passes::accumulate::{Chunk, accumulate};
use crate::passes::again::again;
use crate::passes::backward::{Carry, Differentiated, backward, needs_grad};
use crate::passes::cache::{CacheUse, cache};
use crate::passes::clip::{clip, complete_loss};
use crate::passes::commit::StepPhases;
use crate::passes::data_parallel::{complete, data_parallel, reduces_each_microbatch};
use crate::passes::enter::erase;
use crate::passes::fully_sharded::{GROUP as SHARDS, ZeroStage, fully_sharded, gather_updated};
use crate::passes::head_chunks::head_chunks;
use crate::passes::launch_order::launch_order;
use crate::passes::lora::LoraSpec;
use crate::passes::memory::memory;
use crate::passes::optimizer::optimizer;
use crate::passes::pack::pack_halves;
use crate::passes::pipeline::pipeline;
use crate::passes::recompute::recompute;
use crate::passes::reproducible::{clip_and_loss, sum_along_tree};
use crate::passes::shadow::shadow;
use crate::pipeline::{Slot, Work, message_order, order};
use crate::program::{Program, Role};
use crate::target::Target;
use crate::verify::verify;
use begin::prepare;
use finish::finish;
use spec::check_reproducible;

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
    if forward.bound(Role::LossSum).next().is_some() {
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

/// Ranks without the loss take part in its sum.
fn shape_of_loss(forward: &Program) -> Vec<usize> {
    forward.bound(Role::LossSum).next().map(|loss| forward.value(loss).shape.clone()).unwrap_or_default()
}

fn cut_head(program: &mut Program, target: &dyn Target) {
    if let Some(tokens) = target.head_chunk_tokens() {
        head_chunks(program, tokens);
    }
}
