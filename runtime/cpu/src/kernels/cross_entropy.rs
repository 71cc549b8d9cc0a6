//! Softmax cross-entropy, fused with its gradient.

use super::math::{exp, max, sum};
use super::parallel::{PARTS, rows_per_part};
use super::simd::simd;
use crate::tasks::{Cut, Tasks};

/// Columns summed in f32 before the sum continues in f64: keeps the error of a row of any width below 1e-6.
pub(super) const BLOCK: usize = 4096;

/// Sum over rows with `label >= 0` of `ln Σ e^logits - logits[label]`, in nats; other rows are ignored.
///
/// # Shapes
/// `logits: [N, V]`, `labels: [N]`, `V = n_columns`.
///
/// # Panics
/// If a label is `V` or greater.
pub fn cross_entropy(logits: &[f32], labels: &[i32], n_columns: usize) -> f64 {
    let rows = rows_per_part(labels.len(), n_columns);
    assert_eq!(logits.len(), labels.len() * n_columns);
    let mut parts = [0.0; PARTS];
    parts
        .par_iter_mut()
        .zip(logits.par_chunks(rows * n_columns.max(1)).zip(labels.par_chunks(rows)))
        .for_each(|(part, (logits, labels))| *part = loss_rows(logits, labels, n_columns));
    parts.iter().sum()
}

/// [`cross_entropy`] that overwrites each row of logits with its gradient: `(softmax - onehot(label)) scale`, or zero
/// where the label is negative.
///
/// # Shapes
/// `logits: [N, V]`, `labels: [N]`, `V = n_columns`.
///
/// # Panics
/// If a label is `V` or greater.
pub fn cross_entropy_with_gradient(logits: &mut [f32], labels: &[i32], n_columns: usize, scale: f32) -> f64 {
    let rows = rows_per_part(labels.len(), n_columns);
    assert_eq!(logits.len(), labels.len() * n_columns);
    let mut parts = [0.0; PARTS];
    parts
        .par_iter_mut()
        .zip(logits.par_chunks_mut(rows * n_columns.max(1)).zip(labels.par_chunks(rows)))
        .for_each(|(part, (logits, labels))| *part = gradient_rows(logits, labels, n_columns, scale));
    parts.iter().sum()
}

pub(super) fn column_of(label: i32, n_columns: usize) -> usize {
    let column = label as usize;
    assert!(column < n_columns, "label {label} is outside {n_columns} classes");
    column
}

simd! {
    fn loss_rows(logits: &[f32], labels: &[i32], v: usize) -> f64 {
        let mut loss = 0.0;
        for (row, label) in logits.chunks_exact(v).zip(labels).filter(|(_, label)| **label >= 0) {
            let largest = max(row);
            // A loop, not `map`: a closure around the sum would not be inlined and so not vectorised.
            let mut total = 0.0;
            for block in row.chunks(BLOCK) {
                total += sum(block, |x| exp(x - largest)) as f64;
            }
            loss += largest as f64 + total.ln() - row[column_of(*label, v)] as f64;
        }
        loss
    }
}

simd! {
    fn gradient_rows(logits: &mut [f32], labels: &[i32], v: usize, scale: f32) -> f64 {
        let mut loss = 0.0;
        for (row, label) in logits.chunks_exact_mut(v).zip(labels) {
            if *label < 0 {
                row.fill(0.0);
                continue;
            }
            let column = column_of(*label, v);
            let (largest, of_label) = (max(row), row[column] as f64);
            let mut total = 0.0;
            for block in row.chunks_mut(BLOCK) {
                for x in block.iter_mut() {
                    *x = exp(*x - largest);
                }
                total += sum(block, |x| x) as f64;
            }
            loss += largest as f64 + total.ln() - of_label;
            let factor = (scale as f64 / total) as f32;
            for x in row.iter_mut() {
                *x *= factor;
            }
            row[column] -= scale;
        }
        loss
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, close, finite_differences, random, same_on_every_number_of_threads, wide};
    use super::*;
    use proptest::prelude::*;

    fn reference(logits: &[f64], labels: &[i32], v: usize) -> f64 {
        let row = |(row, label): (&[f64], &i32)| match usize::try_from(*label) {
            Ok(label) => {
                let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln() + largest - row[label]
            }
            Err(_) => 0.0,
        };
        logits.chunks(v).zip(labels).map(row).sum()
    }

    fn labels(n: usize, v: usize, seed: u64) -> Vec<i32> {
        random(n, seed).iter().map(|x| if *x < -0.5 { -100 } else { (x.abs() * v as f32) as i32 }).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn loss_and_gradient_match_the_definition(n in 1usize..70, v in 1usize..90, seed in any::<u64>()) {
            let logits: Vec<f32> = random(n * v, seed).iter().map(|x| 10.0 * x).collect();
            let labels = labels(n, v, seed ^ 1);
            let mut dlogits = logits.clone();

            let alone = cross_entropy(&logits, &labels, v);
            let loss = cross_entropy_with_gradient(&mut dlogits, &labels, v, 0.25);

            let expected = reference(&wide(&logits), &labels, v);
            prop_assert!((loss - expected).abs() <= 1e-6 * (1.0 + expected), "{} {}", loss, expected);
            prop_assert_eq!(loss, alone);
            // Differences are computed row by row: those of the whole sum would lose small gradients.
            for (i, (row, label)) in wide(&logits).chunks(v).zip(&labels).enumerate().take(4) {
                let found = &dlogits[i * v..(i + 1) * v];
                close(found, &finite_differences(row, |x| 0.25 * reference(x, &[*label], v)), 1e-6);
            }
        }
    }

    #[test]
    fn ignored_rows_have_no_loss_and_no_gradient() {
        let mut logits = vec![f32::NAN; 30];
        logits[10..20].fill(1.0);

        let loss = cross_entropy_with_gradient(&mut logits, &[-100, 3, -1], 10, 1.0);

        assert!((loss - 10f64.ln()).abs() < 1e-6);
        assert!(logits[..10].iter().chain(&logits[20..]).all(|x| *x == 0.0));
        assert!((logits[13] + 0.9).abs() < 1e-6);
    }

    #[test]
    fn wide_vocabulary_is_summed_accurately() {
        let logits: Vec<f32> = random(2 * 150_000, 3).iter().map(|x| 4.0 * x).collect();

        let loss = cross_entropy(&logits, &[7, 149_999], 150_000);

        let expected = reference(&wide(&logits), &[7, 149_999], 150_000);
        assert!((loss - expected).abs() < 1e-6, "{loss} {expected}");
    }

    #[test]
    fn nan_logit_makes_the_loss_nan() {
        let mut logits = random(50, 4);
        logits[20] = f32::NAN;

        assert!(cross_entropy(&logits, &[1], 50).is_nan());
        assert!(cross_entropy_with_gradient(&mut logits, &[1], 50, 1.0).is_nan());
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let logits = random(200 * 100, 5);

        same_on_every_number_of_threads(|| {
            let mut dlogits = logits.clone();
            let loss = cross_entropy_with_gradient(&mut dlogits, &labels(200, 100, 6), 100, 0.1);
            (loss.to_bits(), bits(&dlogits))
        });
    }
}
