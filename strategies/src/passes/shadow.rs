//! The updates of another rank's step, for a shadow that keeps a copy of that rank's state.
//!
//! A shadow receives the reduced gradients of the rank that it copies and makes the same updates with the same scalars, so
//! its state has the same bits: a replicated log, as in state-machine replication. [`log`] lists the gradients and sums
//! that it receives, in order; the scalars are the same on all ranks.
//!
//! Source: Schneider 1990, Implementing Fault-Tolerant Services Using the State Machine Approach, §2.

use super::commit::StepPhases;
use crate::program::{Binding, Instr, Kind, Op, Param, Program, Role, Update, Value, ValueId};
use std::collections::BTreeMap;

/// The gradients that the updates of a step read, each followed by the sums over whole tensors of its update.
pub fn log(step: &Program, phases: &StepPhases) -> Vec<ValueId> {
    let of = |(update, instr): (&Update, &Instr)| -> Vec<ValueId> {
        let of = update.operands(&instr.reads);
        std::iter::once(*of.grad).chain(of.sums.iter().copied()).collect()
    };
    updates(step, phases).flat_map(of).collect()
}

fn updates<'a>(step: &'a Program, phases: &StepPhases) -> impl Iterator<Item = (&'a Update, &'a Instr)> {
    step.instrs[phases.apply()].iter().map(|instr| match &instr.op {
        Op::Update(update) => (update, instr),
        _ => unreachable!("the apply phase contains only updates"),
    })
}

/// The updates of a rank's step alone. The shadow holds the elements of each parameter that the rank updates.
pub fn shadow(step: &Program, phases: &StepPhases) -> Program {
    let mut program = Program { mesh_rank: step.mesh_rank, ..Program::default() };
    let mut copies: BTreeMap<ValueId, ValueId> = BTreeMap::new();
    let mut copy = |program: &mut Program, value: ValueId, shape: &[usize], kind: Kind| {
        *copies.entry(value).or_insert_with(|| {
            let Value { name, dtype, .. } = step.value(value).clone();
            program.add_value(name, shape, dtype, kind)
        })
    };
    for (update, instr) in updates(step, phases) {
        let of = update.operands(&instr.reads);
        let param = step.param_of(*of.param).expect("an update begins with its parameter").clone();
        let mut reads = Vec::with_capacity(instr.reads.len());
        for state in std::iter::once(of.param).chain(of.state) {
            // Here the parameter holds only the updated elements.
            let like = if state == of.param { of.grad } else { state };
            reads.push(copy(&mut program, *state, &step.value(*like).shape, step.value(*state).kind));
        }
        let state = reads.clone();
        let log = std::iter::once(of.grad).chain(of.sums).map(|value| (value, Role::Gradient));
        for (value, role) in log.chain([(of.hyper, Role::Hyper), (of.coefficient, Role::ClipCoefficient)]) {
            let shape = &step.value(*value).shape;
            let input = copy(&mut program, *value, shape, Kind::Input);
            reads.push(input);
            if role == Role::Gradient || program.bound(role).next().is_none() {
                program.bindings.push(Binding::new(role, input));
            }
        }
        program.push(Op::Update(Update { first: 0, ..update.clone() }), reads, state.clone(), instr.site);
        program.params.push(Param { value: state[0], held: param.updated.clone(), ..param });
    }
    program
}
