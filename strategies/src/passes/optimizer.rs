//! The parameter update: one fused instruction for each trainable parameter.

use crate::optimizer::OptimizerSpec;
use crate::program::{Binding, DType, Hyper, Kind, Op, Phase, Program, Role, Site, Update, ValueId};

/// Appends the update of every parameter in `grads`.
pub fn optimizer(program: &mut Program, grads: &[(usize, ValueId)], coefficient: ValueId, spec: &OptimizerSpec) {
    let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
    let hyper = hyper(program);
    for (index, grad) in grads {
        let param = program.params[*index].clone();
        let name = program.value(param.value).name.clone();
        // Sharded state is a run of elements; whole state keeps the shape of its parameter.
        let (held, updated) = (param.held.clone(), param.updated.clone());
        let whole = updated.len() == param.shape.iter().product::<usize>();
        let shape = if whole { param.shape.clone() } else { vec![updated.len()] };
        let mut state = vec![param.value];
        for slot in spec.state() {
            state.push(program.add_value(format!("{slot}.{name}"), &shape, DType::F32, Kind::OptimizerState));
        }
        let rule = if param.decay { *spec } else { spec.without_decay() };
        let update = Update { rule, first: updated.start - held.start, n_state: spec.state().len() };
        let reads = state.iter().copied().chain([*grad, hyper, coefficient]).collect();
        program.push(Op::Update(update), reads, state, site);
    }
}

/// The input of the step's scalars, made if the program has none.
pub(super) fn hyper(program: &mut Program) -> ValueId {
    if let Some(value) = program.bound(Role::Hyper).next() {
        return value;
    }
    let value = program.add_value("hyper", &[Hyper::LEN], DType::F64, Kind::Input);
    program.bindings.push(Binding::new(Role::Hyper, value));
    value
}
