//! The second half of another rank's step, for whoever keeps a copy of that rank's state.
//!
//! A shadow gets the reduced gradients of the rank that it stands for and makes the same updates with the same scalars, so
//! its state has the same bits: a replicated log, as in state-machine replication. What it gets are the gradients that
//! [`log`] lists, in this order; the scalars are the same on all ranks.
//!
//! Source: Schneider 1990, Implementing Fault-Tolerant Services Using the State Machine Approach, §2.

use super::commit::Turn;
use crate::program::{Binding, Instr, Kind, Op, Param, Program, Role, Value, ValueId};
use std::collections::BTreeMap;

/// The gradients that the updates of a step read.
pub fn log(step: &Program, turn: &Turn) -> Vec<ValueId> {
    step.instrs[turn.update()].iter().map(|update| operands(update)[0]).collect()
}

/// The factor by which the updates of a step scale gradients, if it has any updates.
pub fn coefficient(step: &Program, turn: &Turn) -> Option<ValueId> {
    step.instrs[turn.update()].first().map(|update| operands(update)[2])
}

/// Updates read the gradient, the step's scalars and the clipping coefficient behind the state.
fn operands(update: &Instr) -> [ValueId; 3] {
    let n = update.reads.len();
    [update.reads[n - 3], update.reads[n - 2], update.reads[n - 1]]
}

/// The updates of a rank's step alone. Of each parameter the shadow holds what the rank updates.
pub fn shadow(step: &Program, turn: &Turn) -> Program {
    let mut program = Program { place: step.place, ..Program::default() };
    let mut copies: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut copy = |program: &mut Program, value: ValueId, shape: &[usize], kind: Kind| {
        *copies.entry(value).or_insert_with(|| {
            let Value { name, dtype, .. } = step.value(value).clone();
            program.add_value(name, shape, dtype, kind)
        })
    };
    for update in &step.instrs[turn.update()] {
        let param = step.param_of(update.reads[0]).expect("an update begins with its parameter").clone();
        let [grad, hyper, coefficient] = operands(update);
        let n_state = update.reads.len() - 3;
        let shape = &step.value(grad).shape;
        let mut reads = Vec::with_capacity(update.reads.len());
        for state in &update.reads[..n_state] {
            reads.push(copy(&mut program, *state, shape, step.value(*state).kind));
        }
        let state = reads.clone();
        for (value, role) in [(grad, Role::Gradient), (hyper, Role::Hyper), (coefficient, Role::ClipCoefficient)] {
            let shape = &step.value(value).shape;
            let input = copy(&mut program, value, shape, Kind::Input);
            reads.push(input);
            if role == Role::Gradient || program.bound(role).next().is_none() {
                program.bindings.push(Binding::new(role, input));
            }
        }
        program.push(from_its_start(&update.op), reads, state.clone(), update.site);
        program.params.push(Param { value: state[0], held: param.updated.clone(), ..param });
    }
    program
}

/// The same update of a parameter that holds nothing else.
fn from_its_start(op: &Op) -> Op {
    match op.clone() {
        Op::AdamW { beta1, beta2, eps, weight_decay, .. } => Op::AdamW { first: 0, beta1, beta2, eps, weight_decay },
        Op::Sgd { momentum, weight_decay, .. } => Op::Sgd { first: 0, momentum, weight_decay },
        other => other,
    }
}
