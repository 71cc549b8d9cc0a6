//! The parameter update: one fused instruction for each trainable parameter.

use super::tensor_sums::{Exchange, Pending, SITE, tensor_sums};
use crate::optimizer::{Extent, OptimizerSpec};
use crate::program::blocks::{Blocks, CutState};
use crate::program::tiles::Tiles;
use crate::program::{Binding, DType, Hyper, Kind, Op, Program, Role, Update, ValueId};

/// Appends the update of every parameter in `grads`, after the sums over whole tensors that the rule needs.
///
/// # Errors
/// When a block of the rule's state would be on two ranks.
pub fn optimizer(
    program: &mut Program,
    grads: &[(usize, ValueId)],
    coefficient: ValueId,
    spec: &OptimizerSpec,
    exchange: &Exchange,
) -> Result<(), CutState> {
    let scalars = [hyper(program), coefficient];
    let updates = grads.iter().map(|(param, grad)| pending(program, *param, *grad, spec));
    let mut updates = updates.collect::<Result<Vec<Pending>, CutState>>()?;
    tensor_sums(program, &mut updates, scalars, exchange);
    for Pending { update, state, grad, sums, .. } in updates {
        let reads = state.iter().copied().chain([grad]).chain(sums).chain(scalars).collect();
        program.push(Op::Update(update), reads, state, SITE);
    }
    Ok(())
}

/// Creates the state of a parameter.
fn pending(program: &mut Program, index: usize, grad: ValueId, spec: &OptimizerSpec) -> Result<Pending, CutState> {
    let param = program.params[index].clone();
    let name = program.value(param.value).name.clone();
    let n_dims = param.shape.len();
    // Sharded state is a run of elements; whole state keeps the shape of its parameter.
    let (held, updated) = (param.held.clone(), param.updated.clone());
    let whole = updated.len() == param.shape.iter().product::<usize>();
    let of_elements = if whole { param.shape.clone() } else { vec![updated.len()] };
    let tiles = if by_element(spec, n_dims) { Tiles::default() } else { Tiles::of(&param, &updated) };
    let blocks = if spec.has_blocks() { param.blocks()? } else { Blocks::default() };
    let mut state = vec![param.value];
    for tensor in spec.state(n_dims) {
        let (shape, dtype) = match tensor.extent {
            Extent::Elements => (of_elements.clone(), DType::F32),
            Extent::Blocks => (vec![blocks.n_words()], DType::I32),
            extent => (vec![tiles.n_values(extent)], DType::F32),
        };
        state.push(program.add_value(format!("{}.{name}", tensor.name), &shape, dtype, Kind::OptimizerState));
    }
    let rule = if param.decay { *spec } else { spec.without_decay() };
    let n_rounds = rule.sums(n_dims).len();
    let (rate, first) = (param.rate, updated.start - held.start);
    let update = Update { rule, rate, first, n_dims, n_rounds, tiles, blocks };
    Ok(Pending { param: index, update, state, grad, sums: Vec::new() })
}

/// Whether a rule works element by element, without rows, columns or whole tensors.
fn by_element(spec: &OptimizerSpec, n_dims: usize) -> bool {
    let is_of_elements = |extent| matches!(extent, Extent::Elements | Extent::Blocks);
    spec.sums(n_dims).is_empty() && spec.state(n_dims).iter().all(|tensor| is_of_elements(tensor.extent))
}

/// The input of the step's scalars, created if the program has none.
pub(super) fn hyper(program: &mut Program) -> ValueId {
    if let Some(value) = program.bound(Role::Hyper).next() {
        return value;
    }
    let value = program.add_value("hyper", &[Hyper::LEN], DType::F64, Kind::Input);
    program.bindings.push(Binding::new(Role::Hyper, value));
    value
}
