//! Log-probabilities of labels, their sums over rows, and formulas over groups of rows.

use super::cross_entropy::{TOLERANCE, labels, logits, narrow, random_stats};
use crate::case::{Case, Operand, Tolerance};
use phalanx_strategies::program::formula::{Expr, Input, Tape};
use phalanx_strategies::program::{DType, Hyper, Op, VocabShard, op};
use std::sync::Arc;

/// Sums in another order, and functions of another library.
const OTHER_ORDER: Tolerance = Tolerance { absolute: 1e-14, relative: 1e-12 };

/// Every operation, whole and in shards.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, v) in [(33, 37), (20, 256), (7, 3), (4, 5001), (3, 45_003)] {
        let of_shape = [log_probs(n, v), log_probs_of_shard(n, v), gradient(n, v, 0), gradient(n, v, v)];
        for dtype in [DType::Bf16, DType::F16] {
            cases.extend(of_shape.clone().map(|case| narrow(case, dtype)));
        }
        cases.extend(of_shape);
    }
    for (n, rows) in [(12, 4), (2000, 2), (5, 5), (700, 1)] {
        cases.extend(
            [false, true]
                .into_iter()
                .flat_map(|weighted| [row_sums(n, rows, weighted), row_sums_backward(n, rows, weighted)]),
        );
    }
    for (groups, residual, counts) in [(3, false, true), (3, true, true), (3, true, false), (70, true, true)] {
        cases.extend([
            formulas(groups, (false, residual), counts, &[]),
            formulas(groups, (true, residual), counts, &[0, 1]),
        ]);
    }
    cases.push(formulas(5, (false, false), true, &[1]));
    cases
}

fn log_probs(n: usize, v: usize) -> Case {
    let op = Op::LogProbs(op::LogProbs { vocab: None });
    let case = Case::new(format!("log-probabilities of {n} x {v}"), op, vec![logits(n, v), labels(n, v)], TOLERANCE);
    case.writing(&[n], DType::F32).writing(&[n], DType::F32)
}

/// The second of three shards.
fn log_probs_of_shard(n: usize, v: usize) -> Case {
    let op = Op::LogProbs(op::LogProbs { vocab: Some(VocabShard { first: v, n_shards: 3 }) });
    let reads = vec![logits(n, v), labels(n, 3 * v), random_stats(n, v)];
    let case = Case::new(format!("log-probabilities of a shard of {n} x {v}"), op, reads, TOLERANCE);
    case.writing(&[n], DType::F32).writing(&[n], DType::F32)
}

/// Norms are those of logits four times as large as the shard, so that no probability is above one.
fn gradient(n: usize, v: usize, first: usize) -> Case {
    let op = Op::LogProbsBackward(op::LogProbsBackward { first });
    let norms = Operand::random(&[n], DType::F32, 3).map(|x| 16.0 + x);
    let reads = vec![logits(n, v), labels(n, first + v), norms, Operand::random(&[n], DType::F32, 4)];
    let name = format!("gradient of log-probabilities of {n} x {v} from {first}");
    Case::new(name, op, reads, TOLERANCE).writing(&[n, v], DType::F32)
}

/// Weights of tokens, some of them 0; none if it is not `weighted`.
fn weights(n: usize, weighted: bool) -> Option<Operand> {
    weighted.then(|| Operand::random(&[n], DType::F32, 6).map(|x| x.max(0.0)))
}

fn row_sums(n: usize, rows: usize, weighted: bool) -> Case {
    let reads = [Operand::random(&[n], DType::F32, 1), labels(n, 9)].into_iter().chain(weights(n, weighted)).collect();
    Case::new(format!("sums of {rows} rows of {n}, weighted {weighted}"), Op::RowSums(op::RowSums), reads, OTHER_ORDER)
        .writing(&[2, rows], DType::F64)
}

fn row_sums_backward(n: usize, rows: usize, weighted: bool) -> Case {
    let reads = [Operand::random(&[2, rows], DType::F64, 1), labels(n, 9)];
    let reads = reads.into_iter().chain(weights(n, weighted)).collect();
    let name = format!("gradient of sums of {rows} rows of {n}, weighted {weighted}");
    Case::new(name, Op::RowSumsBackward(op::RowSumsBackward), reads, Tolerance::EXACT).writing(&[n], DType::F32)
}

/// Formulas with every step over pairs of rows; one pair in three has no counted token.
fn formulas(groups: usize, (given, residual): (bool, bool), counts: bool, gradients: &[u32]) -> Case {
    let [a, b] = [0, 1].map(|row| Expr::sum(0, row) / (1.0 + Expr::count(0, row)));
    let c = Expr::sum(1, 0) - Expr::sum(1, 1);
    let loss = -(a.clone() * 0.5 - b.clone()).log_sigmoid() + (a.clone() + c.clone()).relu() + b.clone().sigmoid();
    let loss = loss + (1.0 + c.clone().exp()).ln();
    let loss = if given { loss * Expr::given(1) + Expr::given(0) } else { loss };
    let all = [loss, a.clone() * c.clone(), c.clone().positive(), a - b, -c.log_sigmoid()];
    let mut tape = Tape::of(&all);
    let inputs = gradients.iter().flat_map(|operand| [0, 1].map(|row| Input { operand: *operand, count: false, row }));
    tape.differentiate(&[Hyper::LOSS_GRAD_SCALE as u32, Hyper::TEXT_GRAD_SCALE as u32], inputs);
    let op = op::Formulas {
        tape: Arc::new(tape),
        n_sums: all.len(),
        scales: vec![Hyper::LOSS_GRAD_SCALE as u32, Hyper::TEXT_GRAD_SCALE as u32],
        group: 2,
        counts,
        given,
        residual,
        gradients: gradients.to_vec(),
    };
    let rows = 2 * groups;
    let operand = |seed: u64| {
        let mut operand = Operand::random(&[2, rows], DType::F64, seed);
        let counts = operand.elements[rows..].iter_mut().enumerate();
        counts.for_each(|(row, count)| *count = if row / 2 % 3 == 1 { 0.0 } else { (row % 7 + 1) as f64 });
        operand
    };
    let mut hyper = Operand::of(&[Hyper::LEN], DType::F64, vec![f64::NAN; Hyper::LEN]);
    hyper.elements[Hyper::LOSS_GRAD_SCALE] = 0.125;
    hyper.elements[Hyper::TEXT_GRAD_SCALE] = 3.0;
    let mut reads = vec![operand(1), operand(2), hyper];
    if given {
        reads.push(Operand::of(&[2], DType::F64, vec![0.25, -1.5]));
    }
    if residual {
        reads.push(Operand::random(&[all.len()], DType::F64, 5));
    }
    let name = format!(
        "formulas of {groups} groups, given {given}, residual {residual}, counts {counts}, gradients {gradients:?}"
    );
    let case = Case::new(name, Op::Formulas(op), reads, OTHER_ORDER).writing(&[all.len()], DType::F64);
    gradients.iter().fold(case, |case, _| case.writing(&[2, rows], DType::F64))
}
