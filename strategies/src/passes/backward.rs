//! Reverse-mode differentiation of a forward program: every operation has an adjoint, so no model has a backward pass
//! of its own. Source: Griewank and Walther 2008, Evaluating Derivatives, §3.
//!
//! Collectives have adjoints like everything else, so the parallel backward pass needs no code of its own: a sum over a
//! group passes its gradient on, and where a value enters a group its gradient is summed; gathering and scattering are
//! adjoint to each other, and so are sending and receiving.

use crate::program::op::adjoints::{Adjoints, Loss, NoAdjoint};
use crate::program::{Binding, DType, Kind, Param, Phase, Program, Role, Site, ValueId};

/// Why a program cannot be differentiated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackwardError {
    /// The program has no loss.
    #[error("the program computes no loss to differentiate")]
    NoLoss,
    /// Nothing is trainable.
    #[error("no parameter is trainable")]
    NothingTrainable,
    /// An operation that only occurs after this pass.
    #[error("operation `{op}` has no adjoint in a forward program")]
    NoAdjoint {
        /// Its name.
        op: &'static str,
    },
}

impl From<NoAdjoint> for BackwardError {
    fn from(NoAdjoint { op }: NoAdjoint) -> BackwardError {
        BackwardError::NoAdjoint { op }
    }
}

/// Results of an earlier microbatch that a backward pass continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carry {
    /// The loss.
    pub loss: bool,
    /// The gradients of parameters.
    pub grads: bool,
    /// Each use of a parameter has a separate gradient, even within a microbatch.
    pub apart: bool,
}

impl Carry {
    /// Nothing to continue: a first microbatch.
    pub const NOTHING: Carry = Carry { loss: false, grads: false, apart: false };
}

/// A forward program, or a pipeline stage of one, followed by its backward pass.
#[derive(Clone, Debug)]
pub struct Differentiated {
    /// The program; its loss, if it has one, is bound to [`Role::LossSum`].
    pub program: Program,
    /// Gradient of each trainable parameter: `(index in Program::params, value)`; with [`Carry::apart`], one for each use,
    /// in forward order.
    pub grads: Vec<(usize, ValueId)>,
    /// Initial values of gradients that continue an earlier microbatch: `(index, value)` as in `grads`. These values are
    /// read but never written here; [`super::accumulate`] supplies them.
    pub carried_grads: Vec<(usize, ValueId)>,
    /// Initial value of a loss that continues an earlier microbatch.
    pub carried_loss: Option<ValueId>,
}

/// Marks the values of a whole forward program that receive a gradient: those that a trainable parameter influences.
///
/// # Errors
/// When the program has no loss, or no trainable parameter influences it.
pub fn needs_grad(program: &Program) -> Result<Vec<bool>, BackwardError> {
    let loss = program.bound(Role::LossSum).next().ok_or(BackwardError::NoLoss)?;
    let mut needs = vec![false; program.values.len()];
    program.params.iter().filter(|p| p.trainable).for_each(|p| needs[p.value.0 as usize] = true);
    for instr in &program.instrs {
        if instr.reads.iter().any(|v| needs[v.0 as usize]) {
            instr.writes.iter().for_each(|v| needs[v.0 as usize] = true);
        }
    }
    if needs[loss.0 as usize] { Ok(needs) } else { Err(BackwardError::NothingTrainable) }
}

/// Appends the backward pass of a program or of one of its stages; `needs` comes from [`needs_grad`].
///
/// # Errors
/// When an operation has no adjoint.
pub fn backward(forward: &Program, needs: &[bool], carry: Carry) -> Result<Differentiated, BackwardError> {
    let mut adjoints = Adjoints::of(forward, needs, carry.apart);
    let carried_grads = if carry.grads { carry_grads(forward, &mut adjoints) } else { Vec::new() };
    let value = forward.bound(Role::LossSum).next();
    let carried = value.filter(|_| carry.loss);
    let carried = carried.map(|loss| {
        let shape = &forward.value(loss).shape;
        adjoints.out.add_value("loss_carry", shape, DType::F64, Kind::Activation)
    });
    for instr in &forward.instrs {
        let instr = instr.op.operation().in_training(instr.clone(), Loss { value, carried }, &mut adjoints);
        adjoints.out.instrs.push(instr);
    }
    for i in (0..forward.instrs.len()).rev() {
        let instr = adjoints.out.instrs[i].clone();
        adjoints.site = Site { phase: Phase::Backward, ..instr.site };
        instr.op.operation().backward(&instr, &mut adjoints)?;
    }
    let trained = || forward.params.iter().enumerate().filter(|(_, p)| p.trainable);
    let grads = match adjoints.take_apart() {
        None => trained().filter_map(|(i, p)| Some((i, adjoints.grad(p.value)?))).collect(),
        Some(apart) => {
            let uses = |p: ValueId| apart.iter().rev().filter(move |(of, _)| *of == p).map(|(_, g)| *g);
            trained().flat_map(|(i, p)| uses(p.value).map(move |g| (i, g))).collect()
        }
    };
    Ok(Differentiated { program: adjoints.out, grads, carried_grads, carried_loss: carried })
}

/// Begins the gradients of trained parameters with those of earlier microbatches: `(index in Program::params, value)`.
fn carry_grads(forward: &Program, adjoints: &mut Adjoints) -> Vec<(usize, ValueId)> {
    let mut read = vec![false; forward.values.len()];
    forward.instrs.iter().flat_map(|i| &i.reads).for_each(|v| read[v.0 as usize] = true);
    let mut carried = Vec::new();
    let trained = |p: &Param| p.trainable && read[p.value.0 as usize];
    for (i, param) in forward.params.iter().enumerate().filter(|(_, p)| trained(p)) {
        let shape = &forward.value(param.value).shape;
        let value = adjoints.out.add_value("grad_carry", shape, DType::F32, Kind::Gradient);
        adjoints.begin(param.value, value);
        carried.push((i, value));
    }
    carried
}

impl Differentiated {
    /// The binding of the loss.
    pub fn loss(&self) -> Option<Binding> {
        self.program.bindings.iter().copied().find(|b| b.role == Role::LossSum)
    }
}
