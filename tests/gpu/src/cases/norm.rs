//! RMS norm and layer norm.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{DType, NormKind, Op, op};

const EPS: f32 = 1e-5;

/// Rows whose statistics are extreme: their squares vanish, overflow, or are not numbers.
const EXTREMES: [f64; 6] = [0.0, 1e-30, 1e25, f64::INFINITY, f64::NAN, -3e4];

/// Sums of at most 16,385 squares in f32, in two orders: a few roundings of 6e-8 each, growing with their square root.
const FORWARD: Tolerance = Tolerance::of(3e-6);

/// For a sum of `n` terms of order 1 in f32, in two orders: `n` roundings of partial sums up to `sqrt(n)`, of both signs, add
/// up to about `6e-8 n`.
pub(super) fn of_sum(n: usize) -> Tolerance {
    Tolerance { absolute: 2e-6 + 4e-8 * n as f64, relative: 2e-6 }
}

/// Both directions of both norms.
pub(super) fn cases() -> Vec<Case> {
    let (f32, bf16, f16) = (DType::F32, DType::Bf16, DType::F16);
    let (rms, layer) = (NormKind::Rms, NormKind::Layer);
    let mut cases = Vec::new();
    // More rows than blocks, several of them for some blocks.
    let many = 2500;
    for (kind, x, y, cols) in [
        (rms, f32, bf16, 40),
        (rms, bf16, bf16, 40),
        (rms, f16, f32, 36),
        (layer, f32, f32, 100),
        (layer, f16, f16, 33),
    ] {
        cases.push(forward(kind, x, y, [many, cols]));
        cases.extend(backward(kind, x, y, [many, cols], true, true));
    }
    cases.extend(backward(rms, f32, bf16, [many, 40], true, false));
    cases.extend(backward(rms, f32, bf16, [many, 40], false, false));
    cases.extend(backward(layer, f32, f32, [many, 100], false, true));
    // Blocks of several warps that have several rows.
    cases.extend(backward(rms, f32, bf16, [1200, 600], true, true));
    // One vector; exactly the threads of a block; the longest row with 8 elements for each thread, and a longer one.
    for cols in [4, 512, 4096, 4100] {
        cases.push(forward(rms, f32, bf16, [5, cols]));
        cases.extend(backward(rms, f32, bf16, [5, cols], true, true));
    }
    for (kind, y, shape, again) in [
        (rms, bf16, [many, 40], false),
        (rms, bf16, [many, 40], true),
        (layer, f16, [9, 36], true),
        // Too long for registers.
        (rms, bf16, [5, 8196], true),
    ] {
        cases.push(adjoint(kind, [f32, y], shape, [true, true], [again, true]));
    }
    // Too long for the registers of the backward pass.
    cases.extend(backward(rms, f32, bf16, [5, 8196], true, true));
    cases.extend(backward(layer, f32, f32, [300, 4100], true, true));
    // Too long for those of the forward pass.
    cases.extend([rms, layer].map(|kind| forward(kind, f32, f32, [3, 16_385])));
    cases.extend([rms, layer].map(extremes));
    cases
}

/// Every number of rows, with columns that fill vectors and with odd ones.
pub(super) fn rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for (rows, kind) in
        super::ROWS.into_iter().flat_map(|rows| [NormKind::Rms, NormKind::Layer].map(|kind| (rows, kind)))
    {
        for (dtype, cols) in super::TYPES.into_iter().flat_map(|dtype| [136, 75].map(|cols| (dtype, cols))) {
            cases.push(forward(kind, dtype, dtype, [rows, cols]));
            cases.extend(backward(kind, dtype, dtype, [rows, cols], true, true));
        }
    }
    cases
}

fn params(kind: NormKind, cols: usize) -> Vec<Operand> {
    let n_params = if kind == NormKind::Rms { 1 } else { 2 };
    (0..n_params).map(|i| Operand::random(&[cols], DType::F32, 10 + i)).collect()
}

fn forward(kind: NormKind, x: DType, y: DType, shape: [usize; 2]) -> Case {
    let name = format!("norm {kind:?} {x} to {y} {shape:?}");
    case_of(name, kind, Operand::random(&shape, x, 1).map(|x| 0.5 + 2.0 * x), y)
}

fn case_of(name: String, kind: NormKind, x: Operand, y: DType) -> Case {
    let [rows, cols] = x.shape[..] else { panic!("a matrix") };
    let reads = [vec![x], params(kind, cols)].concat();
    let case = Case::new(name, Op::Norm(op::Norm { kind, eps: EPS }), reads, FORWARD);
    let case = case.writing(&[rows, cols], y).writing(&[rows], DType::F32);
    if kind == NormKind::Rms { case } else { case.writing(&[rows], DType::F32) }
}

fn extremes(kind: NormKind) -> Case {
    let cols = 100;
    let mut x = Operand::random(&[EXTREMES.len(), cols], DType::F32, 1);
    for (row, extreme) in x.elements.chunks_mut(cols).zip(EXTREMES) {
        // Constant rows, except that values which are not finite stand alone.
        let changed = if extreme.is_finite() { cols } else { 1 };
        row[..changed].fill(extreme);
    }
    let y = if kind == NormKind::Rms { DType::Bf16 } else { DType::F32 };
    case_of(format!("norm {kind:?} of extremes"), kind, x, y)
}

fn backward(
    kind: NormKind,
    x: DType,
    y: DType,
    shape: [usize; 2],
    residual_x: bool,
    residual_params: bool,
) -> [Case; 2] {
    [false, true].map(|again| adjoint(kind, [x, y], shape, [residual_x, residual_params], [again, false]))
}

/// The adjoint; with `again`, it also writes the result of the norm, and with `narrow` its own in half width.
fn adjoint(
    kind: NormKind,
    [x, y]: [DType; 2],
    shape: [usize; 2],
    residuals: [bool; 2],
    [again, narrow]: [bool; 2],
) -> Case {
    let ([rows, cols], [residual_x, residual_params]) = (shape, residuals);
    let is_layer = kind == NormKind::Layer;
    let mut reads = vec![Operand::random(&shape, x, 1), Operand::random(&[cols], DType::F32, 2)];
    reads.push(Operand::random(&[rows], DType::F32, 3).map(|r| 0.3 + 0.1 * r.abs()));
    reads.extend(is_layer.then(|| Operand::random(&[rows], DType::F32, 4)));
    reads.push(Operand::random(&shape, y, 5));
    reads.extend(residual_x.then(|| Operand::random(&shape, x, 6)));
    let n_params = 1 + usize::from(is_layer);
    reads.extend((0..n_params).filter(|_| residual_params).map(|i| Operand::random(&[cols], DType::F32, 7 + i as u64)));
    reads.extend((again && is_layer).then(|| Operand::random(&[cols], DType::F32, 9)));
    let op = Op::NormBackward(op::NormBackward { kind, residual_x, residual_params, again, narrow });
    let name = format!("norm backward {kind:?} {x} from {y} {shape:?} {residual_x} {residual_params}");
    let name = format!("{name}{}{}", if again { ", again" } else { "" }, if narrow { ", narrow" } else { "" });
    let case = Case::new(name, op, reads, of_sum(rows)).writing(&shape, x);
    let case = (0..n_params).fold(case, |case, _| case.writing(&[cols], DType::F32));
    (0..usize::from(again) + usize::from(narrow)).fold(case, |case, _| case.writing(&shape, y))
}
