//! Sums of scalars, of squares and along trees.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::passes::reproducible::plan_of_sum;
use phalanx_strategies::program::{DType, Hyper, Op, op};

/// f64 sums in another order.
const OTHER_ORDER: Tolerance = Tolerance { absolute: 1e-300, relative: 1e-12 };

/// Every sum, with few and with many terms.
pub(super) fn cases() -> Vec<Case> {
    let mut cases =
        vec![sum(&[], Tolerance::EXACT), sum(&[1, 1, 1], Tolerance::EXACT), sum(&[1; 300], Tolerance::EXACT)];
    cases.extend([sum(&[40_001], OTHER_ORDER), sum(&[1, 700, 0, 1, 20_000], OTHER_ORDER)]);
    cases.extend([sum_of_runs(&[3, 3], 3), sum_of_runs(&[], 4), sum_of_runs(&[1400], 7), assemble_vectors(9, 7)]);
    cases.extend([assemble(3, false), assemble(250, false), assemble(250, true)]);
    cases.extend([clip(3, None), clip(3, Some(1.0)), clip(3, Some(1e6)), clip(300, Some(0.5)), clip_infinite()]);
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let runs = [None, Some((0, 5)), Some((3, 20_001)), Some((8, 0))];
        cases.extend(runs.map(|elements| squares(dtype, elements)));
    }
    cases.extend(
        [(1000, 256), (1024, 256), (1000, 7), (3, 256), (3000, 1000)].map(|(n, block)| squares_blocks(n, block)),
    );
    for (n_leaves, n_ranks) in [(1, 1), (2, 2), (8, 3), (13, 5), (64, 7), (3, 5)] {
        cases.extend([404, 403].map(|n| tree_sum(n, n_leaves, n_ranks)));
    }
    cases
}

/// Positive terms, so that the relative error of the sum has a bound.
fn terms(lens: &[usize]) -> Vec<Operand> {
    let shape = |len: usize| if len == 1 { vec![] } else { vec![len] };
    let term = |(i, len): (usize, &usize)| Operand::random(&shape(*len), DType::F64, i as u64 + 1).map(f64::abs);
    lens.iter().enumerate().map(term).collect()
}

fn sum(lens: &[usize], tolerance: Tolerance) -> Case {
    let name = format!("sum of {} operands, {} terms", lens.len(), lens.iter().sum::<usize>());
    Case::new(name, Op::Sum(op::Sum), terms(lens), tolerance).writing(&[], DType::F64)
}

fn sum_of_runs(lens: &[usize], run: usize) -> Case {
    let name = format!("sum of {} operands in runs of {run}", lens.len());
    Case::new(name, Op::Sum(op::Sum), terms(lens), OTHER_ORDER).writing(&[run], DType::F64)
}

fn assemble_vectors(n: usize, len: usize) -> Case {
    let op = Op::Assemble(op::Assemble { places: (0..n).map(|i| (2 * i + 3) % (2 * n)).collect() });
    let case = Case::new(format!("assemble {n} vectors"), op, terms(&vec![len; n]), Tolerance::EXACT);
    case.writing(&[2 * n * len], DType::F64)
}

/// `n` scalars; with `repeats`, some have the same place.
fn assemble(n: usize, repeats: bool) -> Case {
    let len = 2 * n + 2;
    let place = |i: usize| if repeats { i % 5 } else { (2 * i + 3) % len };
    let (name, op) = (
        format!("assemble {n}, repeats {repeats}"),
        Op::Assemble(op::Assemble { places: (0..n).map(place).collect() }),
    );
    Case::new(name, op, terms(&vec![1; n]), Tolerance::EXACT).writing(&[len], DType::F64)
}

fn hyper() -> Operand {
    let mut hyper = Operand::of(&[Hyper::LEN], DType::F64, vec![f64::NAN; Hyper::LEN]);
    hyper.elements[Hyper::LOSS_SCALE] = 8.0;
    hyper
}

fn clip(n: usize, max_norm: Option<f64>) -> Case {
    let reads: Vec<Operand> = terms(&vec![1; n]).into_iter().chain([hyper()]).collect();
    let name = format!("clip {n} terms to {max_norm:?}");
    let case = Case::new(name, Op::ClipCoefficient(op::ClipCoefficient { max_norm }), reads, Tolerance::EXACT);
    case.writing(&[], DType::F64).writing(&[], DType::F64)
}

fn clip_infinite() -> Case {
    let mut case = clip(4, Some(1.0));
    case.reads[2].elements[0] = f64::INFINITY;
    Case { name: "clip an infinite norm".into(), ..case }
}

fn squares(dtype: DType, elements: Option<(usize, usize)>) -> Case {
    // Finite in f64 only.
    let large = if dtype == DType::F32 { 1e30 } else { 1.0 };
    let g = Operand::random(&[5, 6001], dtype, 1).map(|x| large * x);
    let name = format!("squares of {dtype}, elements {elements:?}");
    Case::new(name, Op::SumSquares(op::SumSquares { elements }), vec![g], OTHER_ORDER).writing(&[], DType::F64)
}

fn squares_blocks(n: usize, block: usize) -> Case {
    let reads = vec![Operand::random(&[n], DType::F32, 1)];
    let name = format!("squares of {n} elements in blocks of {block}");
    Case::new(name, Op::SumSquaresBlocks(op::SumSquaresBlocks { block }), reads, OTHER_ORDER)
        .writing(&[n.div_ceil(block)], DType::F64)
}

fn tree_sum(n: usize, n_leaves: usize, n_ranks: usize) -> Case {
    let n_nodes = 1 + plan_of_sum(n_leaves, n_ranks).0.iter().map(|(_, k)| *k).max().unwrap_or(0);
    // Magnitudes for which the sum depends on its order.
    let node = |k: usize| {
        let mut node = Operand::random(&[n_ranks * n], DType::F32, k as u64 + 1);
        node.elements.iter_mut().enumerate().for_each(|(i, x)| *x *= 10f64.powi((i % 13) as i32 - 6));
        node
    };
    let name = format!("tree sum of {n_leaves} leaves on {n_ranks} ranks, {n} elements");
    let case = Case::new(
        name,
        Op::TreeSum(op::TreeSum { n_leaves, n_ranks }),
        (0..n_nodes).map(node).collect(),
        Tolerance::EXACT,
    );
    case.writing(&[n], DType::F32)
}
