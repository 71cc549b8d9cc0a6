//! FP8 products: linear layers of the blocks multiply e4m3 numbers, forward and for the gradients of their inputs.
//!
//! Rows of activations and of gradients have scales of their own, powers of two that are computed in the step; weights have a common
//! one. Gradients of weights, adapters, the head and everything else stay in bf16. A tensor-parallel rank scales the columns that it has
//! of a row, so no rank waits for another.
//!
//! Source: torchao's recipe `rowwise_with_gw_hp` (pytorch/ao, `torchao/float8/config.py`): e4m3 in both directions, scales that are
//! powers of two, gradients of weights in high precision. We differ in that all weights have one scale, see
//! [`crate::program::packing::E4M3_STEP`]: rounding them then needs no maximum, and is the same for every part of a weight.

use crate::program::{Compute, Instr, MatMul, Op, ParamPart, Program};
use std::collections::BTreeSet;

/// Lets products of blocks with a weight compute in FP8 if its rows and columns are whole vectors. The choice depends on whole tensors, so
/// that every mesh stores frozen weights alike.
pub fn fp8(program: &mut Program) {
    let has_vectors =
        |part: &ParamPart| part.shape.len() == 2 && part.shape.iter().all(|n| n.is_multiple_of(Compute::FP8_VECTOR));
    let is_linear = |instr: &Instr| {
        let weight = instr.reads.get(1).and_then(|v| program.param_of(*v));
        instr.site.block.is_some() && weight.is_some_and(|weight| weight.parts.iter().all(has_vectors))
    };
    let linear: Vec<bool> = program.instrs.iter().map(is_linear).collect();
    let mut weights = BTreeSet::new();
    for (instr, _) in program.instrs.iter_mut().zip(linear).filter(|(_, is_linear)| *is_linear) {
        if let Op::MatMul(m @ MatMul { trans_a: false, .. }) = &mut instr.op {
            m.compute = Compute::Fp8;
            weights.insert(instr.reads[1]);
        }
    }
    program.params.iter_mut().filter(|param| weights.contains(&param.value)).for_each(|param| param.in_fp8 = true);
}

/// Lets products compute in bf16 again of whose weight this rank has no whole vectors. Others may have them: results differ by rounding.
pub fn fp8_of_whole_vectors(program: &mut Program) {
    let is_cut = |instr: &Instr| {
        let Some(weight) = instr.reads.get(1).and_then(|v| program.param_of(*v)) else { return false };
        let (value, packing) = (program.value(weight.value), weight.packing);
        let n_columns = packing.map_or(value.n_columns(), |packing| packing.weights(value.n_columns()));
        ![value.n_rows(), n_columns].iter().all(|n| n.is_multiple_of(Compute::FP8_VECTOR))
    };
    let cut: Vec<bool> = program.instrs.iter().map(is_cut).collect();
    for (instr, _) in program.instrs.iter_mut().zip(cut).filter(|(_, is_cut)| *is_cut) {
        if let Op::MatMul(m) = &mut instr.op {
            m.compute = m.compute.without_fp8();
        }
    }
}
