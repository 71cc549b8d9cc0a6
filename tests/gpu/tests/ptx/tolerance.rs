//! How far results may differ from their definitions in f64.

use crate::elements::rounded;
use phalanx_gpu::case::{Case, Tolerance};
use phalanx_strategies::optimizer::OptimizerSpec;
use phalanx_strategies::program::{DType, Op, Update, op};

/// Unit roundoff of f32.
const F32: f64 = 1.0 / (1 << 24) as f64;

/// The tolerance of a case against f64, without the rounding of the result. Cases that compare two machines of f32 state one
/// already. The others require equal bits of two machines with the same formula; here is what that formula in f32 may differ
/// from the one in f64, for operands of order 1.
pub fn of(case: &Case) -> Tolerance {
    let n_summed = |operand: usize| case.reads[operand].shape[0] as f64;
    match &case.op {
        // The scalars of the rule, the state and the parameter are rounded a few times each.
        Op::Update(Update { rule: OptimizerSpec::Adafactor(_), .. }) | Op::UpdateSums(_) => Tolerance::of(64.0 * F32),
        Op::Update(_) => Tolerance::of(16.0 * F32),
        _ if !case.tolerance.is_exact() => case.tolerance,
        // As many roundings as terms, each of a partial sum of a few times order 1.
        Op::EmbeddingBackward(_) => Tolerance::of(4.0 * F32 * n_summed(0)),
        // Up to 64 terms of up to 10^6, by several standard deviations.
        Op::TreeSum(op::TreeSum { n_leaves, .. }) => {
            Tolerance { absolute: *n_leaves as f64 * 8e6 * F32, relative: 0.0 }
        }
        // Two products and a sum.
        Op::Rotary(_) | Op::QkSquaresBackward(_) => Tolerance { absolute: 32.0 * F32, relative: 0.0 },
        // A quotient, a sum, a root, a reciprocal and two products.
        Op::QkNorm(_) => Tolerance { absolute: 0.0, relative: 8.0 * F32 },
        // A quotient and a product.
        Op::Magnitude(_) => Tolerance { absolute: 0.0, relative: 2.0 * F32 },
        // In f64.
        Op::ClipCoefficient(_) | Op::Sum(_) => Tolerance { absolute: 0.0, relative: 1e-13 },
        // Rounded once, or not at all.
        _ => Tolerance::EXACT,
    }
}

/// Half the distance of neighbouring numbers of a type, relative to the number.
fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => F32,
        DType::Bf16 => 1.0 / 256.0,
        DType::F16 => 1.0 / 2048.0,
        DType::F64 | DType::I32 | DType::E4m3 => 0.0,
    }
}

/// For each result that differs too much: its first such element, and their number.
pub fn differences(case: &Case, expected: &[Vec<f64>], found: &[Vec<f64>], tolerance: Tolerance) -> Vec<String> {
    assert_eq!(expected.len(), found.len(), "{}: results", case.name);
    let mut differences = Vec::new();
    for (i, ((expected, found), (shape, dtype))) in expected.iter().zip(found).zip(&case.writes).enumerate() {
        assert_eq!(expected.len(), found.len(), "{}: elements of result {i}", case.name);
        let allowed = |y: f64| {
            tolerance.absolute + (tolerance.relative + unit_roundoff(*dtype) * (1.0 + tolerance.relative)) * y.abs()
        };
        let agrees =
            |y: f64, x: f64| x == rounded(*dtype, y) || (x.is_nan() && y.is_nan()) || (x - y).abs() <= allowed(y);
        let wrong: Vec<usize> = (0..found.len()).filter(|j| !agrees(expected[*j], found[*j])).collect();
        if let Some(j) = wrong.first() {
            let (x, y, n, of) = (found[*j], expected[*j], wrong.len(), found.len());
            differences.push(format!(
                "result {i} {shape:?} {dtype}, {n} of {of} elements, first {j}: {x}, and {y} in f64; at most {:.3e} apart",
                allowed(y)
            ));
        }
    }
    differences
}
