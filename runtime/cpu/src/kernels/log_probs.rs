//! Log-probabilities of labels, and sums of them over rows of a microbatch.

use super::cross_entropy::{BLOCK, column_of};
use super::cross_entropy_part::merge;
use super::math::{exp, max, sum};
use super::parallel::rows_per_task;
use super::simd::simd;
use crate::tasks::{Cut, Tasks};
use phalanx_device::float::Float;

/// The log-probability of each label, in nats, and the logarithm of the sum of the row's exponentials; both 0 where the label is
/// negative.
///
/// # Shapes
/// `logits: [N, V]`, `labels`, `log_probs`, `norms`: `[N]`, `V = n_columns`.
///
/// # Panics
/// If a label is `V` or greater.
pub fn log_probs(logits: &[f32], labels: &[i32], n_columns: usize, log_probs: &mut [f32], norms: &mut [f32]) {
    let rows = rows_per_task(n_columns);
    assert!(logits.len() == labels.len() * n_columns && log_probs.len() == labels.len() && norms.len() == labels.len());
    let written = log_probs.par_chunks_mut(rows).zip(norms.par_chunks_mut(rows));
    written
        .zip(logits.par_chunks(rows * n_columns.max(1)).zip(labels.par_chunks(rows)))
        .for_each(|((log_probs, norms), (logits, labels))| rows_of(logits, labels, n_columns, log_probs, norms));
}

simd! {
    fn rows_of(logits: &[f32], labels: &[i32], v: usize, log_probs: &mut [f32], norms: &mut [f32]) {
        for (i, (row, label)) in logits.chunks_exact(v).zip(labels).enumerate() {
            (log_probs[i], norms[i]) = (0.0, 0.0);
            if *label < 0 {
                continue;
            }
            let largest = max(row);
            // A loop, not `map`: a closure around the sum would not be inlined and so not vectorised.
            let mut total = 0.0;
            for block in row.chunks(BLOCK) {
                total += sum(block, |x| exp(x - largest)) as f64;
            }
            let norm = largest as f64 + total.ln();
            (log_probs[i], norms[i]) = ((row[column_of(*label, v)] as f64 - norm) as f32, norm as f32);
        }
    }
}

/// [`log_probs`] of logits whose columns are sharded over ranks, from the numbers of all shards.
///
/// # Shapes
/// `labels`, `log_probs`, `norms`: `[N]`, `all_stats: [shards, N, 3]`, as
/// [`super::cross_entropy_part::cross_entropy_stats`] writes them.
pub fn log_probs_from_stats(labels: &[i32], all_stats: &[f32], log_probs: &mut [f32], norms: &mut [f32]) {
    let n = labels.len();
    for (i, label) in labels.iter().enumerate() {
        (log_probs[i], norms[i]) = (0.0, 0.0);
        if *label >= 0 {
            let row = merge(all_stats, n, i);
            let norm = row.largest as f64 + row.total.ln();
            (log_probs[i], norms[i]) = ((row.of_label as f64 - norm) as f32, norm as f32);
        }
    }
}

/// Overwrites logits with `(onehot(label) - softmax) d`, or zero where the label is negative.
///
/// # Shapes
/// `logits: [N, V]`, the columns `first..first + V` of the vocabulary; `labels`, `norms`, `d`: `[N]`; `V = n_columns`.
pub fn log_probs_backward<T: Float>(
    logits: &mut [T],
    labels: &[i32],
    n_columns: usize,
    first: usize,
    norms: &[f32],
    d: &[f32],
) {
    let rows = rows_per_task(n_columns);
    assert!(logits.len() == labels.len() * n_columns && norms.len() == labels.len() && d.len() == labels.len());
    logits.par_chunks_mut(rows * n_columns.max(1)).zip(labels.par_chunks(rows)).enumerate().for_each(
        |(task, (logits, labels))| {
            for (i, (row, label)) in logits.chunks_exact_mut(n_columns).zip(labels).enumerate() {
                let at = task * rows + i;
                gradient_row(row, *label, first, norms[at], d[at]);
            }
        },
    );
}

simd! {
    fn gradient_row<T: Float>(row: &mut [T], label: i32, first: usize, norm: f32, d: f32) {
        if label < 0 {
            row.fill(T::from_f32(0.0));
            return;
        }
        let column = (label as usize).checked_sub(first).filter(|column| *column < row.len());
        let of_label = column.map(|column| d * (1.0 - exp(row[column].to_f32() - norm)));
        for x in row.iter_mut() {
            *x = T::from_f32(-d * exp(x.to_f32() - norm));
        }
        if let (Some(column), Some(of_label)) = (column, of_label) {
            row[column] = T::from_f32(of_label);
        }
    }
}

/// For each row of the microbatch, the sum over tokens with `label >= 0`, and their number; both weighted if there are weights.
///
/// # Shapes
/// `x`, `labels`, `weights`: `[N]`; `sums: [2, R]`, `N` a multiple of `R`.
pub fn row_sums(x: &[f32], labels: &[i32], weights: Option<&[f32]>, sums: &mut [f64]) {
    let n_rows = sums.len() / 2;
    let len = x.len() / n_rows;
    let (sums, counts) = sums.split_at_mut(n_rows);
    for (row, (sum, count)) in sums.iter_mut().zip(counts).enumerate() {
        let counted = (row * len..(row + 1) * len).filter(|i| labels[*i] >= 0);
        (*sum, *count) = (0.0, 0.0);
        for i in counted {
            let weight = weight_of(weights, i);
            *sum += weight * x[i] as f64;
            *count += weight;
        }
    }
}

/// The derivative of its row's sum for each token with `label >= 0`, times its weight if there are weights; otherwise zero.
///
/// # Shapes
/// `d: [2, R]`, `labels`, `weights`, `dx`: `[N]`, `N` a multiple of `R`.
pub fn row_sums_backward(d: &[f64], labels: &[i32], weights: Option<&[f32]>, dx: &mut [f32]) {
    let n_rows = d.len() / 2;
    let len = dx.len() / n_rows;
    for (i, (dx, label)) in dx.iter_mut().zip(labels).enumerate() {
        *dx = if *label >= 0 { (d[i / len] * weight_of(weights, i)) as f32 } else { 0.0 };
    }
}

fn weight_of(weights: Option<&[f32]>, i: usize) -> f64 {
    weights.map_or(1.0, |weights| weights[i] as f64)
}

#[cfg(test)]
mod tests {
    use super::super::cross_entropy_part::cross_entropy_stats;
    use super::super::testing::{bits, close, finite_differences, random, same_on_every_number_of_threads, wide};
    use super::*;
    use proptest::prelude::*;

    fn reference(row: &[f64], label: usize) -> f64 {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row[label] - largest - row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
    }

    fn labels(n: usize, v: usize, seed: u64) -> Vec<i32> {
        random(n, seed).iter().map(|x| if *x < -0.5 { -100 } else { (x.abs() * v as f32) as i32 }).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn log_probs_and_gradients_match_the_definition_whole_and_in_shards(
            n in 1usize..40, v in 1usize..90, cut in any::<usize>(), seed in any::<u64>(),
        ) {
            let logits: Vec<f32> = random(n * v, seed).iter().map(|x| 10.0 * x).collect();
            let (labels, d) = (labels(n, v, seed ^ 1), random(n, seed ^ 2));
            let (mut found, mut norms, mut gradient) = (vec![f32::NAN; n], vec![f32::NAN; n], logits.clone());

            log_probs(&logits, &labels, v, &mut found, &mut norms);
            log_probs_backward(&mut gradient, &labels, v, 0, &norms, &d);

            for (i, (row, label)) in wide(&logits).chunks(v).zip(&labels).enumerate() {
                let Ok(label) = usize::try_from(*label) else {
                    prop_assert!(found[i] == 0.0 && gradient[i * v..][..v].iter().all(|x| *x == 0.0));
                    continue;
                };
                let expected = reference(row, label);
                prop_assert!((found[i] as f64 - expected).abs() <= 1e-6 * (1.0 + expected.abs()));
                let expected = finite_differences(row, |x| d[i] as f64 * reference(x, label));
                close(&gradient[i * v..][..v], &expected, 3e-6);
            }
            let cut = cut % (v + 1);
            let mut stats = Vec::new();
            for shard in [0..cut, cut..v] {
                let columns: Vec<f32> = logits.chunks(v).flat_map(|row| row[shard.clone()].to_vec()).collect();
                let mut own = vec![f32::NAN; 3 * n];
                cross_entropy_stats(&columns, &labels, shard.len(), shard.start, &mut own);
                stats.extend(own);
            }
            let (mut again, mut norms) = (vec![f32::NAN; n], vec![f32::NAN; n]);
            log_probs_from_stats(&labels, &stats, &mut again, &mut norms);
            close(&again, &wide(&found), 2e-6);
            if cut > 0 && cut < v {
                let mut local: Vec<f32> = logits.chunks(v).flat_map(|row| row[cut..].to_vec()).collect();
                log_probs_backward(&mut local, &labels, v - cut, cut, &norms, &d);
                let expected: Vec<f32> = gradient.chunks(v).flat_map(|row| row[cut..].to_vec()).collect();
                close(&local, &wide(&expected), 3e-6);
            }
        }
    }

    #[test]
    fn sums_of_rows_are_those_of_tokens_with_a_label() {
        let mut sums = [f64::NAN; 4];

        row_sums(&[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], &[-100, 0, 7, -100, -100, -100], None, &mut sums);

        assert_eq!(sums, [6.0, 0.0, 2.0, 0.0]);
        let mut dx = [f32::NAN; 6];
        row_sums_backward(&[0.5, 3.0, 9.0, 9.0], &[-100, 0, 7, 1, -100, -1], None, &mut dx);
        assert_eq!(dx, [0.0, 0.5, 0.5, 3.0, 0.0, 0.0]);
    }

    #[test]
    fn tokens_count_as_much_as_their_weights_say() {
        let (labels, weights) = ([-100, 0, 7, 1, -100, 3], Some(&[9.0, 0.5, 2.0, 0.25, 9.0, 0.0][..]));
        let (mut sums, mut dx) = ([f64::NAN; 4], [f32::NAN; 6]);

        row_sums(&[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], &labels, weights, &mut sums);
        row_sums_backward(&[0.5, 3.0, 9.0, 9.0], &labels, weights, &mut dx);

        assert_eq!(sums, [9.0, 2.0, 2.5, 0.25]);
        assert_eq!(dx, [0.0, 0.25, 1.0, 0.75, 0.0, 0.0]);
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let (logits, labels, d) = (random(200 * 100, 5), labels(200, 100, 6), random(200, 7));

        same_on_every_number_of_threads(|| {
            let (mut found, mut norms, mut gradient) = (vec![0.0; 200], vec![0.0; 200], logits.clone());
            log_probs(&logits, &labels, 100, &mut found, &mut norms);
            log_probs_backward(&mut gradient, &labels, 100, 0, &norms, &d);
            (bits(&found), bits(&norms), bits(&gradient))
        });
    }
}
