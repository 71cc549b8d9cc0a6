//! SwiGLU and GELU, and their adjoints.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{ActivationFn, DType, Op, op};

const N: usize = 19;

/// Both functions with several element types, and rows that begin anywhere.
pub(super) fn cases() -> Vec<Case> {
    let types = [
        (DType::F32, DType::F32),
        (DType::Bf16, DType::Bf16),
        (DType::F16, DType::F16),
        (DType::F32, DType::Bf16),
        (DType::F16, DType::F32),
    ];
    let mut cases = Vec::new();
    for (x, y) in types {
        for f in [ActivationFn::SwiGlu, ActivationFn::GeluTanh] {
            for columns in [72, 37] {
                cases.push(forward(f, columns, x, y));
                cases.extend([false, true].map(|again| backward(f, columns, x, y, again)));
            }
        }
    }
    cases
}

/// Far into both tails of the sigmoid.
fn gates(shape: &[usize], dtype: DType) -> Operand {
    let mut gates = Operand::random(shape, dtype, 1).map(|x| 6.0 * x);
    gates.elements[..6].copy_from_slice(&[0.0, -0.0, 100.0, -100.0, 20.0, -20.0]);
    gates
}

fn wide(f: ActivationFn, columns: usize) -> [usize; 2] {
    [N, if f == ActivationFn::SwiGlu { 2 * columns } else { columns }]
}

/// CUDA documents an error of 2 + 1.173 |x| units in the last place for the fast exponential of x: 26 units, or 3.1e-6, at 20.
/// Beyond that, the sigmoid is below the absolute part.
const TOLERANCE: Tolerance = Tolerance { absolute: 2e-6, relative: 4e-6 };

fn forward(f: ActivationFn, columns: usize, x: DType, y: DType) -> Case {
    let reads = vec![gates(&wide(f, columns), x)];
    let name = format!("{f:?} of {columns} columns, {x} to {y}");
    Case::new(name, Op::Activation(op::Activation(f)), reads, TOLERANCE).writing(&[N, columns], y)
}

fn backward(f: ActivationFn, columns: usize, x: DType, y: DType, again: bool) -> Case {
    let reads = vec![gates(&wide(f, columns), x), Operand::random(&[N, columns], y, 2)];
    let name = format!("{f:?} backward of {columns} columns, {x} from {y}{}", if again { ", again" } else { "" });
    let op = Op::ActivationBackward(op::ActivationBackward { function: f, again });
    let case = Case::new(name, op, reads, TOLERANCE).writing(&wide(f, columns), x);
    if again { case.writing(&[N, columns], y) } else { case }
}
