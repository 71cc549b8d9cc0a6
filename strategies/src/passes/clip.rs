//! Gradient clipping by the global L2 norm. Source: Pascanu et al. 2013 (arXiv:1211.5063), with PyTorch's
//! `max_norm / (norm + 1e-6)`. The norm is computed even without clipping: users monitor it, and a non-finite norm stops
//! the update.
//!
//! The norm covers the whole gradient under every sharding: one of the ranks that hold an element counts it, and one sum
//! over the world completes the norm and the loss.

use crate::mesh::{Axes, Axis, Group};
use crate::program::{
    Binding, Collective, CollectiveKind, DType, Kind, Op, Param, Phase, Program, Role, Site, ValueId, op,
};
use std::ops::Range;

const SITE: Site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };

/// Appends the norm over `grads` and the clipping coefficient; returns the coefficient. Also completes the loss, which has the shape
/// `loss`.
pub fn clip(program: &mut Program, grads: &[(usize, ValueId)], loss: &[usize], max_norm: Option<f64>) -> ValueId {
    let hyper = super::optimizer::hyper(program);
    let mut sums = Vec::with_capacity(grads.len() + 1);
    for (index, grad) in grads {
        for elements in counted(program, &program.params[*index]) {
            // An output, so that the host can report a non-finite gradient by the name of its parameter.
            let sum = program.add_value("sum_squares", &[], DType::F64, Kind::Output);
            program.push(Op::SumSquares(op::SumSquares { elements }), vec![*grad], vec![sum], SITE);
            let binding = Binding::new(Role::GradSumSquares, sum);
            program.bindings.push(Binding { microbatch: *index as u32, ..binding });
            sums.push(sum);
        }
    }
    let mut sums = complete(program, loss, sums);
    sums.push(hyper);
    coefficient(program, sums, max_norm)
}

/// Appends the norm and the coefficient from sums of squares over the world and the scalars of the step. A rank that updates nothing has
/// them too: it may keep a copy of another one's state.
pub(super) fn coefficient(program: &mut Program, sums: Vec<ValueId>, max_norm: Option<f64>) -> ValueId {
    let norm = program.add_value("grad_norm", &[], DType::F64, Kind::Output);
    let coefficient = program.add_value("clip_coefficient", &[], DType::F64, Kind::Output);
    program.push(Op::ClipCoefficient(op::ClipCoefficient { max_norm }), sums, vec![norm, coefficient], SITE);
    program.bindings.push(Binding::new(Role::GradNorm, norm));
    program.bindings.push(Binding::new(Role::ClipCoefficient, coefficient));
    coefficient
}

/// Appends the sum of the loss over the world to a program without gradients.
pub fn complete_loss(program: &mut Program, loss: &[usize]) {
    complete(program, loss, Vec::new());
}

/// Runs of the elements of a gradient that this rank counts.
fn counted(program: &Program, param: &Param) -> Vec<Option<(usize, usize)>> {
    if !param.owned || program.mesh_rank.on(Axis::DpReplicate) > 0 {
        return Vec::new();
    }
    if param.parts.iter().all(|p| p.owned) {
        return vec![None];
    }
    let mut start = 0;
    let mut runs: Vec<Range<usize>> = Vec::new();
    for part in &param.parts {
        let here = start..start + part.n_elements();
        start = here.end;
        let here = here.start.max(param.updated.start)..here.end.min(param.updated.end);
        if part.owned && !here.is_empty() {
            runs.push(here);
        }
    }
    runs.into_iter().map(|r| Some((r.start - param.updated.start, r.len()))).collect()
}

/// Sums the loss and the sums of squares over the world; a single rank has nothing to add.
fn complete(program: &mut Program, loss_shape: &[usize], sums: Vec<ValueId>) -> Vec<ValueId> {
    let mesh_rank = program.mesh_rank;
    let axes: Vec<Axis> = Axis::ALL.into_iter().filter(|a| mesh_rank.mesh.axis(*a) > 1).collect();
    if axes.is_empty() {
        return sums;
    }
    let group = Group { axes: Axes::of(&axes), run: None };
    let loss = program.bindings.iter().position(|b| b.role == Role::LossSum);
    let loss = loss.map(|i| program.bindings.remove(i).value);
    // All tensor-parallel ranks of a row have its loss, which counts once.
    let loss: Vec<ValueId> = loss.into_iter().filter(|_| mesh_rank.on(Axis::Tp) == 0).collect();
    let partial = [(loss, loss_shape), (sums, &[][..])].map(|(terms, shape)| {
        let sum = program.add_value("partial_sum", shape, DType::F64, Kind::Activation);
        program.push(Op::Sum(op::Sum), terms, vec![sum], SITE);
        sum
    });
    let totals = [("loss_sum", loss_shape, Kind::Output), ("sum_squares", &[], Kind::Activation)]
        .map(|(name, shape, kind)| program.add_value(name, shape, DType::F64, kind));
    let c = Collective::new(CollectiveKind::AllReduce, group);
    program.push(Op::Start(op::Start(c)), partial.to_vec(), totals.to_vec(), SITE);
    program.push(Op::Await(op::Await(c)), totals.to_vec(), vec![], SITE);
    program.bindings.push(Binding::new(Role::OwnLoss, partial[0]));
    program.bindings.push(Binding::new(Role::LossSum, totals[0]));
    vec![totals[1]]
}
