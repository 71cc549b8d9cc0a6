//! Softmax cross-entropy.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::{DType, Hyper, Op, VocabShard, op};

/// Factor of the gradient.
const SCALE: f64 = 0.125;
/// f32 exponentials: their relative error on a GPU is about the number of nats below the largest logit, in roundings.
pub(super) const TOLERANCE: Tolerance = Tolerance { absolute: 2e-7, relative: 5e-6 };

/// Whole rows and parts of rows, with and without gradient and carried loss.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Rows that begin anywhere; the last have more elements than the threads of a block keep.
    for (n, v) in [(33, 37), (20, 256), (7, 3), (4, 5001), (3, 45_003)] {
        for (residual, gradient) in [(false, true), (true, true), (true, false), (false, false)] {
            cases.push(whole(n, v, residual, gradient));
            cases.push(shard(n, v, residual, gradient));
        }
        cases.push(stats(n, v));
        for dtype in [DType::Bf16, DType::F16] {
            cases.extend(
                [whole(n, v, false, true), shard(n, v, true, true), stats(n, v)].map(|case| narrow(case, dtype)),
            );
        }
    }
    cases.extend([extremes(false), extremes(true), infinite_stats()]);
    cases
}

pub(super) fn logits(n: usize, v: usize) -> Operand {
    Operand::random(&[n, v], DType::F32, 1).map(|x| 4.0 * x)
}

/// Some labels are ignored, among them the last; `n_classes` of all shards.
pub(super) fn labels(n: usize, n_classes: usize) -> Operand {
    let label = |i: usize| if i % 4 == 2 { -100.0 } else { (i * 7919 % n_classes) as f64 };
    Operand::of(&[n], DType::I32, (0..n).map(label).collect())
}

fn hyper() -> Operand {
    let mut hyper = Operand::of(&[Hyper::LEN], DType::F64, vec![f64::NAN; Hyper::LEN]);
    hyper.elements[Hyper::LOSS_GRAD_SCALE] = SCALE;
    hyper
}

fn case(name: String, op: Op, mut reads: Vec<Operand>, residual: bool, gradient: bool) -> Case {
    let logits = reads[0].shape.clone();
    if residual {
        reads.push(Operand::of(&[], DType::F64, vec![17.5]));
    }
    let case = Case::new(name, op, reads, TOLERANCE).writing(&[], DType::F64);
    if gradient { case.writing(&logits, DType::F32) } else { case }
}

fn whole(n: usize, v: usize, residual: bool, gradient: bool) -> Case {
    let name = format!("cross-entropy of {n} x {v}, residual {residual}, gradient {gradient}");
    let op = Op::CrossEntropy(op::CrossEntropy { residual, gradient, vocab: None });
    case(name, op, vec![logits(n, v), labels(n, v), hyper()], residual, gradient)
}

/// The second of three shards.
fn shard(n: usize, v: usize, residual: bool, gradient: bool) -> Case {
    let vocab = VocabShard { first: v, n_shards: 3 };
    let name = format!("cross-entropy of a shard of {n} x {v}, residual {residual}, gradient {gradient}");
    let op = Op::CrossEntropy(op::CrossEntropy { residual, gradient, vocab: Some(vocab) });
    case(name, op, vec![logits(n, v), labels(n, 3 * v), hyper(), random_stats(n, v)], residual, gradient)
}

/// Of three shards of `n` rows: largest logit, sum of exponentials, label's logit.
pub(super) fn random_stats(n: usize, v: usize) -> Operand {
    let mut stats = Operand::random(&[3, n, 3], DType::F32, 5);
    for (i, stat) in stats.elements.iter_mut().enumerate() {
        *stat = match i % 3 {
            0 => 12.0 + *stat,
            1 => 1.0 + v as f64 * stat.abs() / 50.0,
            _ if i / 3 % 3 == 1 => *stat,
            _ => f64::NEG_INFINITY,
        };
    }
    stats
}

fn stats(n: usize, v: usize) -> Case {
    let op = Op::CrossEntropyStats(op::CrossEntropyStats(VocabShard { first: v, n_shards: 3 }));
    let reads = vec![logits(n, v), labels(n, 3 * v)];
    Case::new(format!("statistics of {n} x {v}"), op, reads, TOLERANCE).writing(&[1, n, 3], DType::F32)
}

/// The case with logits of this type, and their gradient.
pub(super) fn narrow(mut case: Case, dtype: DType) -> Case {
    let logits = &mut case.reads[0];
    let elements = std::mem::take(&mut logits.elements);
    *logits = Operand::of(&logits.shape, dtype, elements).rounded();
    let is_gradient = |shape: &[usize]| *shape == case.reads[0].shape;
    case.writes.iter_mut().filter(|(shape, _)| is_gradient(shape)).for_each(|(_, of)| *of = dtype);
    Case { name: format!("{}, in {dtype}", case.name), ..case }
}

/// Logits of minus infinity among others, large logits, and a row that is not a number.
fn extremes(gradient: bool) -> Case {
    let mut case = whole(6, 100, false, gradient);
    let Operand { elements, .. } = &mut case.reads[0];
    (0..100).filter(|i| i % 3 > 0).for_each(|i| elements[i] = f64::NEG_INFINITY);
    (100..200).for_each(|i| elements[i] += 1e4);
    (300..400).for_each(|i| elements[i] -= 1e4);
    elements[2 * 100 + 7] = f64::NAN; // an ignored row
    case.reads[1].elements[0] = 9.0;
    Case { name: format!("cross-entropy of extremes, gradient {gradient}"), ..case }
}

/// A part whose logits are all minus infinity.
fn infinite_stats() -> Case {
    let mut case = stats(3, 50);
    case.reads[0].elements[..50].fill(f64::NEG_INFINITY);
    Case { name: "statistics of minus infinities".into(), ..case }
}
