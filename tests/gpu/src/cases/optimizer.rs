//! Updates of parameters, and the sums that they need.

use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::optimizer::{Adafactor, AdamW, AdamW8bit, Extent, Lion, OptimizerSpec, STATE_WORDS, Sgd};
use phalanx_strategies::program::blocks::Blocks;
use phalanx_strategies::program::tiles::Tiles;
use phalanx_strategies::program::{DType, Hyper, Init, Op, Param, ParamPart, Update, ValueId, op};
use std::ops::Range;

/// Elements of the parameter and of a run of it; several blocks, not a multiple of a vector.
const N_PARAM: usize = 5000;
const N: usize = 4099;

/// All rules; runs that begin anywhere in the parameter; coefficients that are not finite.
pub(super) fn cases() -> Vec<Case> {
    let rules = [
        OptimizerSpec::AdamW(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }),
        OptimizerSpec::Sgd(Sgd { momentum: 0.9, weight_decay: 0.01 }),
        OptimizerSpec::Lion(Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 }),
    ];
    let mut cases = Vec::new();
    for rule in rules {
        cases.extend([0, 4, 7].map(|first| by_element(rule, first, 0.37)));
        cases.extend([f64::NAN, f64::INFINITY].map(|coefficient| by_element(rule, 4, coefficient)));
        let of_split = [(0, 0.37), (7, 0.37), (8, 0.37), (8, f64::NAN)];
        cases.extend(of_split.map(|(first, coefficient)| by_element(rule, first, coefficient).splitting(0)));
    }
    cases.extend([0.37, f64::NAN].map(in_blocks));
    cases.push(in_blocks(0.37).splitting(0));
    for whole in wholes() {
        cases.extend([adafactor(&whole, 0, 0.37), adafactor(&whole, 1, 0.37)]);
        cases.extend([0.37, f64::NAN].map(|coefficient| adafactor(&whole, 2, coefficient)));
    }
    cases
}

fn hyper(rule: &OptimizerSpec) -> Operand {
    let mut hyper = vec![f64::NAN; Hyper::LEN];
    hyper[Hyper::LEARNING_RATE] = 3e-3;
    hyper[Hyper::RULE..][..2].copy_from_slice(&rule.scalars(7));
    Operand::of(&[Hyper::LEN], DType::F64, hyper)
}

/// Elements of very different magnitudes, some of them zero.
fn gradient(n: usize) -> Operand {
    let mut g = Operand::random(&[n], DType::F32, 11);
    g.elements.iter_mut().enumerate().for_each(|(i, x)| *x *= [0.0, 1.0, 1e-3, 1e3, 1e-25][i % 5]);
    g
}

/// Element by element: the same bits.
fn by_element(rule: OptimizerSpec, first: usize, coefficient: f64) -> Case {
    let n_state = rule.n_state_of_elements();
    let (tiles, blocks) = (Tiles::default(), Blocks::default());
    let update = Update { rule, rate: Hyper::LEARNING_RATE, first, n_dims: 1, n_rounds: 0, tiles, blocks };
    let mut reads = vec![Operand::random(&[N_PARAM], DType::F32, 1)];
    reads.extend((0..n_state).map(|i| {
        let mut state = Operand::random(&[N], DType::F32, 2 + i as u64).map(|x| 1e-2 * x);
        // The average of squares is not negative; both are zero at first.
        state.elements.iter_mut().for_each(|x| *x = if i == 1 { x.abs() } else { *x });
        state.elements[..50].fill(0.0);
        state
    }));
    reads.extend([gradient(N), hyper(&rule), Operand::of(&[], DType::F64, vec![coefficient])]);
    let name = format!("{} from {first}, coefficient {coefficient}", rule.name());
    let case = Case::new(name, Op::Update(update), reads, Tolerance::EXACT);
    (0..=n_state).fold(case, Case::updating)
}

/// Several tensors, some of them in blocks, from an odd element of the parameter on: the same bits.
fn in_blocks(coefficient: f64) -> Case {
    let rule = OptimizerSpec::AdamW8bit(AdamW8bit(AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }));
    let (first, all) = (256, param(&[&[35 * 256], &[3 * 256], &[17 * 256], &[4096 + 203]]));
    let blocks = Param { updated: first..all.updated.end, ..all }.blocks().expect("the run begins with a block");
    let (n, n_words) = (blocks.n_elements(), blocks.n_words());
    // Words at random, but positive numbers near 0.01 where they are numbers.
    let state = |seed: u64| {
        let mut words = Operand::random(&[n_words], DType::F32, seed).map(|x| (x * 1e9).clamp(-2e9, 2e9).trunc());
        let mut left = &mut words.elements[..];
        for run in &blocks.runs {
            let own = left.split_off_mut(..run.n_words()).expect("as many as counted");
            let numbers = own.iter_mut().step_by(if run.is_coded { STATE_WORDS } else { 1 });
            numbers.for_each(|x| *x = f64::from(((1e-2 + 1e-12 * *x) as f32).to_bits()));
        }
        Operand { dtype: DType::I32, ..words }
    };
    let mut reads = vec![Operand::random(&[first + n], DType::F32, 1), state(2), state(3)];
    reads.extend([gradient(n), hyper(&rule), Operand::of(&[], DType::F64, vec![coefficient])]);
    let tiles = Tiles::default();
    let update = Update { rule, rate: Hyper::LEARNING_RATE, first, n_dims: 1, n_rounds: 0, tiles, blocks };
    let case = Case::new(format!("adamw_8bit, coefficient {coefficient}"), Op::Update(update), reads, Tolerance::EXACT);
    (0..=2).fold(case, Case::updating)
}

/// A parameter and the elements of it that a rank has.
struct Whole {
    name: &'static str,
    param: Param,
    run: Range<usize>,
}

/// Matrices, a vector, a stack of matrices, columns of a matrix; two tensors of which a rank has parts, one of them
/// on several ranks. Some have more rows or
/// columns than one block, some begin at no multiple of a vector.
fn wholes() -> Vec<Whole> {
    let of = |name, shapes: &[&[usize]], run: Range<usize>| Whole { name, param: param(shapes), run };
    let mut cut = param(&[&[70, 48]]);
    cut.cut(1, &[8..21, 40..43]);
    // Another rank counts the elements of the second tensor.
    let mut shared = param(&[&[40, 20], &[20, 20]]);
    shared.parts[1].owned = false;
    shared.cut(0, &[0..20, 40..60]);
    vec![
        of("matrix", &[&[70, 48]], 0..70 * 48),
        of("wide matrix", &[&[3, 1042]], 0..3 * 1042),
        of("high matrix", &[&[16_600, 2]], 0..16_600 * 2),
        of("vector", &[&[1500]], 3..1303),
        of("stack", &[&[3, 20, 12]], 100..650),
        of("matrices", &[&[30, 20], &[25, 20]], 131..1007),
        Whole { name: "columns", param: cut, run: 5..1001 },
        Whole { name: "copy", param: shared, run: 0..800 },
    ]
}

fn param(shapes: &[&[usize]]) -> Param {
    let parts = shapes.iter().enumerate().map(|(i, shape)| ParamPart::whole(format!("w{i}"), shape)).collect();
    let mut stacked = shapes[0].to_vec();
    stacked[0] = shapes.iter().map(|shape| shape[0]).sum();
    Param::whole(ValueId(0), &stacked, parts, Init::Zeros)
}

/// The sums of round 0 or 1, or the update after both.
fn adafactor(whole: &Whole, n_rounds: usize, coefficient: f64) -> Case {
    let Whole { name, param, run } = whole;
    let rule = OptimizerSpec::Adafactor(Adafactor { eps1: 1e-4, weight_decay: 0.1, ..Adafactor::default() });
    let (n_dims, tiles) = (param.shape.len(), Tiles::of(param, run));
    let n_param = param.shape.iter().product();
    // Sums of squares that fit the number of elements, so that averages have the magnitude of squares.
    let of = |extent: Extent, seed: u64, size: f64| {
        Operand::random(&[tiles.n_values(extent)], DType::F32, seed).map(|x| size * (0.1 + x.abs()))
    };
    let mut reads = vec![Operand::random(&[n_param], DType::F32, 1)];
    reads.extend(rule.state(n_dims).iter().enumerate().map(|(i, state)| of(state.extent, 20 + i as u64, 1.0)));
    reads.push(Operand::random(&[run.len()], DType::F32, 11));
    let rounds = rule.sums(n_dims)[..n_rounds].iter().flat_map(|round| round.iter());
    reads.extend(rounds.enumerate().map(|(i, extent)| {
        let size = if *extent == Extent::Tensor { 2.0 * n_param as f64 } else { 30.0 };
        of(*extent, 30 + i as u64, size)
    }));
    reads.extend([hyper(&rule), Operand::of(&[], DType::F64, vec![coefficient])]);
    let next = rule.sums(n_dims).get(n_rounds);
    let n_state = rule.state(n_dims).len();
    let writes: Vec<usize> = next.iter().flat_map(|round| round.iter()).map(|e| tiles.n_values(*e)).collect();
    let blocks = Blocks::default();
    let update = Update { rule, rate: Hyper::LEARNING_RATE, first: run.start, n_dims, n_rounds, tiles, blocks };
    let op = if next.is_some() { Op::UpdateSums(op::UpdateSums(update)) } else { Op::Update(update) };
    // f64 sums in another order, rounded to f32.
    let tolerance = Tolerance { absolute: 1e-12, relative: 1e-6 };
    let case = Case::new(format!("adafactor of a {name}, round {n_rounds}, {coefficient}"), op, reads, tolerance);
    if next.is_none() {
        return (0..=n_state).fold(case, Case::updating);
    }
    writes.into_iter().fold(case, |case, n| case.writing(&[n], DType::F32))
}
