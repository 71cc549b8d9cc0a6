//! Gradient clipping by the global L2 norm. Source: Pascanu et al. 2013 (arXiv:1211.5063), with PyTorch's
//! `max_norm / (norm + 1e-6)`. The norm is computed whether or not it clips: it is what people watch, and a non-finite
//! one stops the update.

use crate::program::{Binding, DType, Kind, Op, Phase, Program, Role, Site, ValueId};

/// Appends the norm over `grads` and the clipping coefficient; returns the coefficient.
pub fn clip(program: &mut Program, grads: &[(usize, ValueId)], max_norm: Option<f64>) -> ValueId {
    let site = Site { phase: Phase::Optimizer, block: None, microbatch: 0 };
    let hyper = super::optimizer::hyper(program);
    let mut reads = Vec::with_capacity(grads.len() + 1);
    for (index, grad) in grads {
        // The host can ask for each: a non-finite gradient is reported by the name of its parameter.
        let sum = program.add_value("sum_squares", &[], DType::F64, Kind::Output);
        program.push(Op::SumSquares { elements: None }, vec![*grad], vec![sum], site);
        let binding = Binding::new(Role::GradSumSquares, sum);
        program.bindings.push(Binding { microbatch: *index as u32, ..binding });
        reads.push(sum);
    }
    reads.push(hyper);
    let norm = program.add_value("grad_norm", &[], DType::F64, Kind::Output);
    let coefficient = program.add_value("clip_coefficient", &[], DType::F64, Kind::Activation);
    program.push(Op::ClipCoefficient { max_norm }, reads, vec![norm, coefficient], site);
    program.bindings.push(Binding::new(Role::GradNorm, norm));
    coefficient
}
