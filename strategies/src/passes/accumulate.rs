//! Gradient accumulation: the program of one microbatch, run for each microbatch of the step, each continuing the loss
//! and the gradients of the one before.

use super::backward::Differentiated;
use crate::program::{Binding, Kind, Program, Role, ValueId};

/// The whole forward and backward part of a step.
#[derive(Clone, Debug)]
pub struct Accumulated {
    /// The program; its inputs are bound once for each microbatch.
    pub program: Program,
    /// Gradient of each trainable parameter over all microbatches: `(index in Program::params, value)`.
    pub grads: Vec<(usize, ValueId)>,
}

/// Runs `first`, then `rest` (the same program, made to carry) `n_microbatches - 1` times.
///
/// # Panics
/// If `n_microbatches` is 0.
pub fn accumulate(first: &Differentiated, rest: &Differentiated, n_microbatches: usize) -> Accumulated {
    assert!(n_microbatches > 0, "a step has at least one microbatch");
    let mut program = first.program.clone();
    program.bindings.retain(|b| b.role != Role::LossSum);
    let mut grads = first.grads.clone();
    let mut loss = first.loss();
    for microbatch in 1..n_microbatches as u32 {
        let carried = rest
            .carried_grads
            .iter()
            .filter_map(|(param, hole)| grads.iter().find(|(p, _)| p == param).map(|(_, grad)| (*hole, *grad)));
        let carried: Vec<(ValueId, ValueId)> = carried.chain(rest.carried_loss.zip(loss.map(|l| l.value))).collect();
        let map = instantiate(&mut program, &rest.program, microbatch, &carried);
        grads = rest.grads.iter().map(|(param, grad)| (*param, map[grad.0 as usize])).collect();
        if let Some(previous) = loss {
            program.values[previous.value.0 as usize].kind = Kind::Activation;
        }
        loss = rest.loss().map(|l| Binding { value: map[l.value.0 as usize], ..l });
    }
    program.bindings.extend(loss);
    Accumulated { program, grads }
}

/// Copies `template` into `program` with fresh values for all that belongs to a microbatch; returns the new ids.
fn instantiate(
    program: &mut Program,
    template: &Program,
    microbatch: u32,
    carried: &[(ValueId, ValueId)],
) -> Vec<ValueId> {
    let hyper = template.bound(Role::Hyper).next();
    let mut map: Vec<ValueId> = Vec::with_capacity(template.values.len());
    for (i, value) in template.values.iter().enumerate() {
        let id = ValueId(i as u32);
        let new = match carried.iter().find(|(hole, _)| *hole == id) {
            Some((_, supplied)) => *supplied,
            // State and the scalars of the step are shared; both programs list them under the same ids, since the
            // backward pass only appends.
            None if value.kind.is_state() || Some(id) == hyper => id,
            None => program.add_value(value.name.clone(), &value.shape, value.dtype, value.kind),
        };
        map.push(new);
    }
    for instr in &template.instrs {
        let mut instr = instr.clone();
        instr.site.microbatch = microbatch;
        instr.reads.iter_mut().chain(&mut instr.writes).for_each(|v| *v = map[v.0 as usize]);
        program.instrs.push(instr);
    }
    let own = template.bindings.iter().filter(|b| b.role != Role::LossSum && Some(b.value) != hyper);
    program.bindings.extend(own.map(|b| Binding { role: b.role, microbatch, value: map[b.value.0 as usize] }));
    map
}
