//! Log-probabilities of labels, their sums over rows, and formulas over groups of rows.

use super::Matrix;
use super::loss::Row;
use phalanx_gpu::case::Case;
use phalanx_strategies::program::formula::{Input, Known};
use phalanx_strategies::program::{Op, VocabShard, op};

pub fn has(op: &Op) -> bool {
    matches!(op, Op::LogProbs(_) | Op::LogProbsBackward(_) | Op::RowSums(_) | Op::RowSumsBackward(_) | Op::Formulas(_))
}

pub fn reference(case: &Case, x: &[Matrix]) -> Vec<Vec<f64>> {
    match &case.op {
        Op::LogProbs(op::LogProbs { vocab }) => log_probs(x, *vocab),
        Op::LogProbsBackward(op::LogProbsBackward { first }) => vec![log_probs_backward(x, *first)],
        Op::RowSums(_) => vec![row_sums(x, case.writes[0].0[1])],
        Op::RowSumsBackward(_) => vec![row_sums_backward(x)],
        Op::Formulas(f) => formulas(f, x),
        other => unreachable!("{} compares no sequences", other.name()),
    }
}

fn log_probs(x: &[Matrix], vocab: Option<VocabShard>) -> Vec<Vec<f64>> {
    let (logits, labels) = (&x[0], &x[1].at);
    let (mut found, mut norms) = (Vec::new(), Vec::new());
    for (i, label) in labels.iter().enumerate() {
        let row = match vocab {
            None => Row::of(logits.row(i), 0, *label),
            Some(_) => Row::merged(x[2].rows().skip(i).step_by(labels.len())),
        };
        let norm = row.largest + row.total.ln();
        let is_ignored = *label < 0.0;
        found.push(if is_ignored { 0.0 } else { row.of_label - norm });
        norms.push(if is_ignored { 0.0 } else { norm });
    }
    vec![found, norms]
}

fn log_probs_backward(x: &[Matrix], first: usize) -> Vec<f64> {
    let (logits, labels, norms, d) = (&x[0], &x[1].at, &x[2].at, &x[3].at);
    let of_row = |(i, row): (usize, &[f64])| {
        let element = |(j, x): (usize, &f64)| {
            let target = if (first + j) as f64 == labels[i] { 1.0 } else { 0.0 };
            if labels[i] < 0.0 { 0.0 } else { (target - (x - norms[i]).exp()) * d[i] }
        };
        row.iter().enumerate().map(element).collect::<Vec<f64>>()
    };
    logits.rows().enumerate().flat_map(of_row).collect()
}

fn row_sums(x: &[Matrix], n_rows: usize) -> Vec<f64> {
    let len = x[0].at.len() / n_rows;
    let total = |row: usize, of_token: &dyn Fn(usize) -> f64| -> f64 {
        (row * len..(row + 1) * len).map(|i| counts(x, i) * of_token(i)).sum()
    };
    let sums = (0..n_rows).map(|row| total(row, &|i| x[0].at[i]));
    sums.chain((0..n_rows).map(|row| total(row, &|_| 1.0))).collect()
}

fn row_sums_backward(x: &[Matrix]) -> Vec<f64> {
    let (d, n) = (x[0].row(0), x[1].at.len());
    (0..n).map(|i| counts(x, i) * d[i * d.len() / n]).collect()
}

/// How much a token counts, by the labels and weights behind the first operand.
fn counts(x: &[Matrix], i: usize) -> f64 {
    if x[1].at[i] < 0.0 { 0.0 } else { x.get(2).map_or(1.0, |weights| weights.at[i]) }
}

fn formulas(f: &op::Formulas, x: &[Matrix]) -> Vec<Vec<f64>> {
    let n_operands = f.n_operands(x.len());
    let n_rows = x[0].cols;
    let mut sums = if f.residual { x[x.len() - 1].at.clone() } else { vec![0.0; f.n_sums] };
    let mut gradients = vec![vec![0.0; 2 * n_rows]; f.gradients.len()];
    let given = if f.given { &x[n_operands + 1].at[..] } else { &[] };
    let known = Known { hyper: &x[n_operands].at, given };
    let mut done = Vec::new();
    for first in (0..n_rows).step_by(f.group) {
        if x[0].row(1)[first..first + f.group].iter().all(|n| *n == 0.0) {
            continue;
        }
        let input = |i: Input| x[i.operand as usize].row(usize::from(i.count))[first + i.row as usize];
        f.tape.run(known, input, &mut done);
        let result = |i: usize| done[f.tape.results[i] as usize];
        (0..f.n_sums).filter(|_| f.counts).for_each(|i| sums[i] += result(i));
        for (g, gradient) in gradients.iter_mut().enumerate() {
            (0..f.group).for_each(|i| gradient[first + i] = result(f.n_sums + g * f.group + i));
        }
    }
    std::iter::once(sums).chain(gradients).collect()
}
