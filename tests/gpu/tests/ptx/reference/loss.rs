//! Softmax cross-entropy over whole rows of logits, and over rows whose columns several ranks share.

use super::Matrix;
use phalanx_strategies::program::{Hyper, VocabShard};

/// Of the logits of a row: the largest, the sum of exponentials relative to it, and that of the label.
pub(super) struct Row {
    pub(super) largest: f64,
    pub(super) total: f64,
    pub(super) of_label: f64,
}

impl Row {
    /// The logits of the classes from `first` on.
    pub(super) fn of(logits: &[f64], first: usize, label: f64) -> Row {
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let reference = if largest == f64::NEG_INFINITY { 0.0 } else { largest };
        let total = logits.iter().map(|x| (x - reference).exp()).sum();
        let column = (label as usize).checked_sub(first);
        let of_label = column.and_then(|column| logits.get(column)).copied().unwrap_or(f64::NEG_INFINITY);
        Row { largest, total, of_label }
    }

    /// The classes of all shards.
    pub(super) fn merged<'a>(parts: impl Iterator<Item = &'a [f64]> + Clone) -> Row {
        let greatest = |i: usize| parts.clone().map(|part| part[i]).fold(f64::NEG_INFINITY, f64::max);
        let largest = greatest(0);
        let total = parts.clone().map(|part| part[1] * (part[0] - largest).exp()).sum();
        Row { largest, total, of_label: greatest(2) }
    }

    fn loss(&self) -> f64 {
        self.largest + self.total.ln() - self.of_label
    }
}

pub fn statistics(x: &[Matrix], first: usize) -> Vec<f64> {
    let of_row = |(logits, label): (&[f64], &f64)| {
        let Row { largest, total, of_label } = Row::of(if *label < 0.0 { &[] } else { logits }, first, *label);
        [largest, total, of_label]
    };
    x[0].rows().zip(&x[1].at).flat_map(of_row).collect()
}

pub fn cross_entropy(x: &[Matrix], residual: bool, gradient: bool, vocab: Option<VocabShard>) -> Vec<Vec<f64>> {
    let (logits, labels, scale) = (&x[0], &x[1].at, x[2].at[Hyper::LOSS_GRAD_SCALE]);
    let first = vocab.map_or(0, |vocab| vocab.first);
    let mut loss = if residual { x[x.len() - 1].at[0] } else { 0.0 };
    let mut dlogits = vec![0.0; logits.at.len()];
    for (i, (dlogits, label)) in dlogits.chunks_exact_mut(logits.cols).zip(labels).enumerate() {
        if *label < 0.0 {
            continue;
        }
        let row = match vocab {
            None => Row::of(logits.row(i), 0, *label),
            Some(_) => Row::merged(x[3].rows().skip(i).step_by(labels.len())),
        };
        loss += row.loss();
        for (j, (d, x)) in dlogits.iter_mut().zip(logits.row(i)).enumerate() {
            let target = if (first + j) as f64 == *label { 1.0 } else { 0.0 };
            *d = ((x - row.largest).exp() / row.total - target) * scale;
        }
    }
    if gradient { vec![vec![loss], dlogits] } else { vec![vec![loss]] }
}
