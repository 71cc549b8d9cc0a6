//! Elementwise operations.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{DType, Dropout, Op, op};

/// Whole groups of elements, and a rest.
const SHAPE: [usize; 2] = [37, 61];
const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Conversions between all types of activations; sums and multiples of several; runs of elements. All are rounded once.
pub(super) fn cases() -> Vec<Case> {
    let pairs = TYPES.into_iter().flat_map(|x| TYPES.into_iter().map(move |y| (x, y)));
    let mut cases: Vec<Case> = pairs.map(|(x, y)| cast(x, y)).collect();
    let sums = [
        (DType::F32, DType::F32, DType::F32),
        (DType::F32, DType::Bf16, DType::F32),
        (DType::Bf16, DType::F32, DType::F16),
        (DType::Bf16, DType::Bf16, DType::Bf16),
    ];
    cases.extend(sums.into_iter().map(|(a, b, y)| add(a, b, y)));
    cases.push(add_to_second());
    cases.extend(TYPES.map(scale));
    cases.extend(TYPES.map(dropout));
    cases.extend([0, 1, 100].map(slice));
    cases.extend([0, 1, 100].map(paste));
    cases
}

fn cast(x: DType, y: DType) -> Case {
    let operand = Operand::random(&SHAPE, x, 1);
    Case::new(format!("cast {x} to {y}"), Op::Cast(op::Cast), vec![operand], Tolerance::EXACT).writing(&SHAPE, y)
}

fn add(a: DType, b: DType, y: DType) -> Case {
    let reads = vec![Operand::random(&SHAPE, a, 1), Operand::random(&SHAPE, b, 2)];
    Case::new(format!("add {a} and {b} to {y}"), Op::Add(op::Add), reads, Tolerance::EXACT).writing(&SHAPE, y)
}

/// The sum takes the place of the second operand, which is a parameter: as gradients are summed.
fn add_to_second() -> Case {
    let reads = vec![Operand::random(&SHAPE, DType::F32, 1), Operand::random(&SHAPE, DType::F32, 2)];
    Case::new("add to the second operand", Op::Add(op::Add), reads, Tolerance::EXACT).updating(1)
}

fn scale(x: DType) -> Case {
    let op = Op::Scale(op::Scale { factor: -0.37 });
    Case::new(format!("scale {x}"), op, vec![Operand::random(&SHAPE, x, 1)], Tolerance::EXACT).writing(&SHAPE, x)
}

/// On a rank whose columns do not begin with the first.
fn dropout(x: DType) -> Case {
    let op = Op::Dropout(Dropout { rate: 0.3, stream: 5, first_column: 61 });
    let keys = (0..SHAPE[0]).map(|t| f64::from((t as i32 - 9).wrapping_mul(0x1234_5677))).collect();
    let reads = vec![Operand::random(&SHAPE, x, 1), Operand::of(&SHAPE[..1], DType::I32, keys)];
    Case::new(format!("dropout {x}"), op, reads, Tolerance::EXACT).writing(&SHAPE, x)
}

fn slice(start: usize) -> Case {
    let reads = vec![Operand::random(&SHAPE, DType::F32, 1)];
    Case::new(format!("slice from {start}"), Op::Slice(op::Slice { start }), reads, Tolerance::EXACT)
        .writing(&[77], DType::F32)
}

fn paste(start: usize) -> Case {
    let reads = vec![Operand::random(&SHAPE, DType::F32, 1), Operand::random(&[77], DType::F32, 2)];
    Case::new(format!("paste at {start}"), Op::Paste(op::Paste { start }), reads, Tolerance::EXACT)
        .writing(&SHAPE, DType::F32)
}
