//! From a forward program to the program of a step: the passes in their order.

use crate::passes::accumulate::accumulate;
use crate::passes::backward::{BackwardError, Carry, backward, needs_grad};
use crate::passes::clip::clip;
use crate::passes::fuse::fuse;
use crate::passes::lora::{LoraError, LoraSpec, lora};
use crate::passes::memory::{Layout, memory};
use crate::passes::optimizer::{OptimizerSpec, optimizer};
use crate::passes::precision::{Precision, precision};
use crate::passes::recompute::{Recompute, recompute};
use crate::program::{Instr, Program};
use crate::verify::{VerifyError, verify};

/// Everything that decides the program of a training step, besides the model.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSpec {
    /// Microbatches whose gradients are summed before an update.
    pub n_microbatches: usize,
    /// What is stored and multiplied in half width.
    pub precision: Precision,
    /// What is computed twice instead of kept.
    pub recompute: Recompute,
    /// Adapters; `None` trains every weight.
    pub lora: Option<LoraSpec>,
    /// The update.
    pub optimizer: OptimizerSpec,
    /// Largest gradient norm that is left alone.
    pub max_grad_norm: Option<f64>,
}

/// Why a step cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// Adapters that do not fit the model.
    #[error(transparent)]
    Lora(#[from] LoraError),
    /// The program cannot be differentiated.
    #[error(transparent)]
    Backward(#[from] BackwardError),
    /// A pass or a model built an ill-formed program.
    #[error("the compiled program is ill-formed: {0}")]
    Verify(#[from] VerifyError),
}

/// A program and where its values lie.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// What runs.
    pub program: Program,
    /// Where it runs.
    pub layout: Layout,
}

/// Compiles the training step of a forward program that ends at a loss.
///
/// `scratch_bytes` is the machine's answer to how much working space an instruction needs.
///
/// # Errors
/// See [`CompileError`].
pub fn compile_step(
    mut forward: Program,
    spec: &StepSpec,
    scratch_bytes: impl Fn(&Program, &Instr) -> usize,
) -> Result<Compiled, CompileError> {
    prepare(&mut forward, spec)?;
    let needs = needs_grad(&forward)?;
    let mut first = backward(&forward, &needs, Carry::NOTHING)?;
    let mut rest = backward(&forward, &needs, Carry { loss: true, grads: true })?;
    recompute(&mut first.program, spec.recompute);
    recompute(&mut rest.program, spec.recompute);
    let step = accumulate(&first, &rest, spec.n_microbatches);
    let mut program = step.program;
    let coefficient = clip(&mut program, &step.grads, spec.max_grad_norm);
    optimizer(&mut program, &step.grads, coefficient, &spec.optimizer);
    finish(program, scratch_bytes)
}

/// Compiles a forward program for evaluation: the same weights and the same numbers, no gradients.
///
/// # Errors
/// See [`CompileError`].
pub fn compile_forward(
    mut forward: Program,
    spec: &StepSpec,
    scratch_bytes: impl Fn(&Program, &Instr) -> usize,
) -> Result<Compiled, CompileError> {
    prepare(&mut forward, spec)?;
    finish(forward, scratch_bytes)
}

fn prepare(forward: &mut Program, spec: &StepSpec) -> Result<(), CompileError> {
    verify(forward)?;
    // Fused before adapters are added: the base then runs the same products as without them, to the last bit, and an
    // adapter behind such a product adds to the residual stream directly.
    fuse(forward);
    if let Some(adapters) = &spec.lora {
        lora(forward, adapters)?;
    }
    precision(forward, spec.precision);
    Ok(())
}

fn finish(program: Program, scratch_bytes: impl Fn(&Program, &Instr) -> usize) -> Result<Compiled, CompileError> {
    verify(&program)?;
    let layout = memory(&program, scratch_bytes);
    Ok(Compiled { program, layout })
}
