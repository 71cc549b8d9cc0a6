//! Mixed precision: what is stored and multiplied in half width, and what stays f32.
//!
//! Parameters, their gradients, optimizer state, the residual stream, statistics, logits and the loss stay f32; every
//! other activation (and with it its gradient) is stored in half width. Products accumulate in f32. For devices that read half copies,
//! [`super::half_copies`] stores the logits of training steps in half width too.
//! Source: Micikevicius et al. 2018 (arXiv:1710.03740); Kalamkar et al. 2019 for bf16 (arXiv:1905.12322).
//! We differ in that no half-width copy of the weights is kept: the machine rounds them as it multiplies.

use crate::program::op::width::Width;
use crate::program::{Compute, DType, Kind, Op, Program};
use serde::{Deserialize, Serialize};

/// Precision of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
    /// bf16 activations and products, f32 master weights.
    Bf16,
    /// As bf16, with the products of linear layers in FP8; see [`super::fp8`].
    Fp8,
    /// fp16 activations, f32 master weights; needs loss scaling.
    F16,
}

impl Precision {
    /// Whether activations are in bf16.
    pub const fn is_bf16(self) -> bool {
        matches!(self, Precision::Bf16 | Precision::Fp8)
    }

    /// The precision of linear layers.
    pub const fn compute(self) -> Compute {
        match self {
            Precision::F32 | Precision::F16 => Compute::F32,
            Precision::Bf16 => Compute::Bf16,
            Precision::Fp8 => Compute::Fp8,
        }
    }
}

/// Sets the element types of a forward program's activations and the precision of its products.
pub fn precision(program: &mut Program, precision: Precision) {
    let compute = precision.compute().without_fp8();
    let narrow = match precision {
        Precision::F32 => return,
        Precision::Bf16 | Precision::Fp8 => DType::Bf16,
        Precision::F16 => DType::F16,
    };
    let wide = read_as_f32(program);
    for i in 0..program.instrs.len() {
        let instr = &mut program.instrs[i];
        if let Op::MatMul(m) = &mut instr.op
            && m.compute != Compute::Fp8
        {
            m.compute = compute;
        }
        let added_to = match instr.op.operation().width() {
            Width::Unchanged => continue,
            Width::OfOperands => {
                follow_operands(program, i);
                continue;
            }
            Width::OfLastOperand => instr.reads.last().copied(),
            Width::Half => None,
        };
        let y = instr.writes[0];
        let dtype = match added_to {
            Some(operand) => program.value(operand).dtype,
            None if wide[y.0 as usize] || program.value(y).kind == Kind::Output => DType::F32,
            None => narrow,
        };
        program.values[y.0 as usize].dtype = dtype;
    }
}

/// Values that are only moved, summed or split keep their element type.
fn follow_operands(program: &mut Program, i: usize) {
    let instr = &program.instrs[i];
    let first = instr.reads.first().map(|v| program.value(*v).dtype);
    let of_operand = |w: usize| instr.reads.get(w).map(|v| program.value(*v).dtype).or(first);
    let dtypes: Vec<_> = (0..instr.writes.len()).map(of_operand).collect();
    for (v, dtype) in instr.writes.clone().into_iter().zip(dtypes) {
        program.values[v.0 as usize].dtype = dtype.unwrap_or(program.value(v).dtype);
    }
}

/// Values that an operation reads as f32: logits, and terms of the residual stream.
fn read_as_f32(program: &Program) -> Vec<bool> {
    let mut wide = vec![false; program.values.len()];
    for instr in program.instrs.iter().rev() {
        let is_wide = instr.writes.iter().any(|v| wide[v.0 as usize]);
        let operands = instr.op.operation().wide_operands(is_wide, instr.reads.len());
        instr.reads[operands].iter().for_each(|v| wide[v.0 as usize] = true);
    }
    wide
}
