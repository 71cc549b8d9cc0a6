//! Softmax cross-entropy over logits whose columns are sharded over ranks: each rank holds the columns
//! `first..first + V` of the vocabulary. Source: Shoeybi et al. 2019, Megatron-LM, §3 (arXiv:1909.08053).
//!
//! We differ: one collective gathers three numbers of each row, where Megatron reduces a maximum, then two sums. Each
//! rank then merges them in the order of the shards, with the same bits at every rank.
//!
//! The numbers of a row, in this order: the largest local logit `m` (minus infinity if there is none),
//! `Σ e^(logit - m)`, and the logit of the label, minus infinity if the label is not a local column. A label outside
//! all shards thus gives an infinite loss, where the kernel for whole rows panics.

use super::cross_entropy::BLOCK;
use super::math::{exp, max, sum};
use super::parallel::{PARTS, rows_per_part, rows_per_task};
use super::simd::simd;
use crate::tasks::{Cut, Tasks};

/// Numbers of a shard for each row.
pub const N_STATS: usize = 3;

/// This shard's numbers for each row; rows with a negative label are ignored and get the numbers of an empty shard.
///
/// # Shapes
/// `logits: [N, V]`, `labels: [N]` (of the whole vocabulary), `V = n_columns`, `stats: [N, 3]`.
pub fn cross_entropy_stats(logits: &[f32], labels: &[i32], n_columns: usize, first: usize, stats: &mut [f32]) {
    let rows = rows_per_task(n_columns);
    assert!(logits.len() == labels.len() * n_columns && stats.len() == labels.len() * N_STATS);
    stats.par_chunks_mut(rows * N_STATS).zip(labels.par_chunks(rows)).enumerate().for_each(
        |(task, (stats, labels))| {
            let logits = &logits[task * rows * n_columns..][..labels.len() * n_columns];
            stats_rows(logits, labels, n_columns, first, stats);
        },
    );
}

/// Sum over rows with `label >= 0` of `ln Σ e^logits - logits[label]`, in nats: the same bits on every shard.
///
/// # Shapes
/// `labels: [N]`, `all_stats: [shards, N, 3]`.
pub fn cross_entropy_from_stats(labels: &[i32], all_stats: &[f32]) -> f64 {
    assert!(all_stats.len().is_multiple_of((labels.len() * N_STATS).max(1)));
    let n = labels.len();
    let rows = rows_per_part(n, N_STATS);
    let mut parts = [0.0; PARTS];
    parts.par_iter_mut().zip(labels.par_chunks(rows)).enumerate().for_each(|(i, (part, labels))| {
        for (row, _) in labels.iter().enumerate().filter(|(_, label)| **label >= 0) {
            let of_row = merge(all_stats, n, i * rows + row);
            *part += of_row.largest as f64 + of_row.total.ln() - of_row.of_label as f64;
        }
    });
    parts.iter().sum()
}

/// [`cross_entropy_from_stats`] that overwrites the local logits with their gradient: `(softmax - onehot(label)) scale`,
/// or zero where the label is negative.
///
/// # Shapes
/// `logits: [N, V]`, `labels: [N]`, `V = n_columns`, `all_stats: [shards, N, 3]`.
pub fn cross_entropy_from_stats_with_gradient(
    logits: &mut [f32],
    labels: &[i32],
    n_columns: usize,
    first: usize,
    all_stats: &[f32],
    scale: f32,
) -> f64 {
    let (n, rows) = (labels.len(), rows_per_task(n_columns));
    assert!(logits.len() == n * n_columns);
    let loss = cross_entropy_from_stats(labels, all_stats);
    let tasks = logits.par_chunks_mut(rows * n_columns.max(1)).zip(labels.par_chunks(rows)).enumerate();
    tasks.for_each(|(task, (logits, labels))| {
        for (i, (row, label)) in logits.chunks_exact_mut(n_columns).zip(labels).enumerate() {
            if *label < 0 {
                row.fill(0.0);
                continue;
            }
            let of_row = merge(all_stats, n, task * rows + i);
            softmax_row(row, of_row.largest, (scale as f64 / of_row.total) as f32);
            if let Some(column) = column_of(*label, first, n_columns) {
                row[column] -= scale;
            }
        }
    });
    loss
}

/// A row of the whole vocabulary.
pub(super) struct Row {
    pub(super) largest: f32,
    pub(super) total: f64,
    pub(super) of_label: f32,
}

/// Merges the shards' numbers of a row, in shard order.
pub(super) fn merge(all_stats: &[f32], n: usize, row: usize) -> Row {
    let shards = || all_stats.chunks_exact(n * N_STATS).map(|stats| &stats[row * N_STATS..][..N_STATS]);
    let greatest = |i: usize| shards().fold(f32::NEG_INFINITY, |a, stats| if stats[i] > a { stats[i] } else { a });
    let largest = greatest(0);
    // A NaN logit makes its shard's sum NaN, so comparisons may skip it.
    let total = shards().map(|stats| stats[1] as f64 * exp(stats[0] - largest) as f64).sum();
    Row { largest, total, of_label: greatest(2) }
}

fn column_of(label: i32, first: usize, n_columns: usize) -> Option<usize> {
    usize::try_from(label).ok()?.checked_sub(first).filter(|column| *column < n_columns)
}

simd! {
    fn stats_rows(logits: &[f32], labels: &[i32], v: usize, first: usize, stats: &mut [f32]) {
        for (i, (stats, label)) in stats.as_chunks_mut::<N_STATS>().0.iter_mut().zip(labels).enumerate() {
            *stats = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
            if *label < 0 {
                continue;
            }
            let row = &logits[i * v..(i + 1) * v];
            let largest = max(row);
            // If every local logit is minus infinity, any finite reference makes the sum 0.
            let reference = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
            let mut total = 0.0;
            for block in row.chunks(BLOCK) {
                total += sum(block, |x| exp(x - reference)) as f64;
            }
            *stats = [largest, total as f32, column_of(*label, first, v).map_or(f32::NEG_INFINITY, |column| row[column])];
        }
    }
}

simd! {
    fn softmax_row(row: &mut [f32], largest: f32, factor: f32) {
        for x in row {
            *x = exp(*x - largest) * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cross_entropy::{cross_entropy, cross_entropy_with_gradient};
    use super::super::testing::{bits, close, random, same_on_every_number_of_threads, wide};
    use super::*;
    use proptest::prelude::*;
    use std::ops::Range;

    /// The columns of each shard, divided at `cuts`.
    fn shards(v: usize, cuts: &[usize]) -> Vec<Range<usize>> {
        let mut edges: Vec<usize> = cuts.iter().map(|cut| cut % (v + 1)).chain([0, v]).collect();
        edges.sort_unstable();
        edges.windows(2).map(|edge| edge[0]..edge[1]).collect()
    }

    fn columns(logits: &[f32], v: usize, shard: &Range<usize>) -> Vec<f32> {
        logits.chunks(v).flat_map(|row| row[shard.clone()].to_vec()).collect()
    }

    fn all_stats(logits: &[f32], labels: &[i32], v: usize, shards: &[Range<usize>]) -> Vec<f32> {
        let of_shard = |shard: &Range<usize>| {
            let mut stats = vec![f32::NAN; labels.len() * N_STATS];
            cross_entropy_stats(&columns(logits, v, shard), labels, shard.len(), shard.start, &mut stats);
            stats
        };
        shards.iter().flat_map(of_shard).collect()
    }

    fn labels(n: usize, v: usize, seed: u64) -> Vec<i32> {
        random(n, seed).iter().map(|x| if *x < -0.5 { -100 } else { (x.abs() * v as f32) as i32 }).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn shards_of_any_width_agree_with_whole_rows(
            n in 1usize..70, v in 1usize..90, cuts in proptest::collection::vec(any::<usize>(), 0..5), seed in any::<u64>(),
        ) {
            let logits: Vec<f32> = random(n * v, seed).iter().map(|x| 10.0 * x).collect();
            let labels = labels(n, v, seed ^ 1);
            let mut expected = logits.clone();
            let expected_loss = cross_entropy_with_gradient(&mut expected, &labels, v, 0.25);
            let shards = shards(v, &cuts);

            let all_stats = all_stats(&logits, &labels, v, &shards);

            let loss = cross_entropy_from_stats(&labels, &all_stats);
            prop_assert!((loss - expected_loss).abs() <= 1e-6 * (1.0 + expected_loss), "{} {}", loss, expected_loss);
            for shard in &shards {
                let mut local = columns(&logits, v, shard);
                let (width, first) = (shard.len(), shard.start);
                let again =
                    cross_entropy_from_stats_with_gradient(&mut local, &labels, width, first, &all_stats, 0.25);
                prop_assert_eq!(again.to_bits(), loss.to_bits());
                // A shard's sum is rounded to f32 once more than the sum of a whole row.
                close(&local, &wide(&columns(&expected, v, shard)), 2e-7);
            }
        }
    }

    #[test]
    fn ignored_rows_have_no_loss_and_no_gradient() {
        let mut logits = vec![f32::NAN; 30];
        logits[10..20].fill(1.0);
        let labels = [-100, 3, -1];
        let mut stats = vec![f32::NAN; 9];
        cross_entropy_stats(&logits, &labels, 10, 0, &mut stats);

        let loss = cross_entropy_from_stats_with_gradient(&mut logits, &labels, 10, 0, &stats, 1.0);

        assert!((loss - 10f64.ln()).abs() < 1e-6);
        assert!(logits[..10].iter().chain(&logits[20..]).all(|x| *x == 0.0));
        assert!((logits[13] + 0.9).abs() < 1e-6);
    }

    #[test]
    fn shard_of_minus_infinities_does_not_change_the_loss() {
        let (labels, v) = ([1, 2], 6);
        let logits: Vec<f32> = (0..12).map(|i| if i % 6 >= 3 { f32::NEG_INFINITY } else { i as f32 * 0.1 }).collect();

        let stats = all_stats(&logits, &labels, v, &[0..3, 3..6]);

        let expected = cross_entropy(&logits, &labels, v);
        assert!((cross_entropy_from_stats(&labels, &stats) - expected).abs() < 1e-6);
    }

    #[test]
    fn nan_logit_on_one_shard_makes_the_loss_nan() {
        for at in [0, 20, 49] {
            let mut logits = random(50, 4);
            logits[at] = f32::NAN;

            let stats = all_stats(&logits, &[1], 50, &[0..17, 17..50]);

            assert!(cross_entropy_from_stats(&[1], &stats).is_nan());
        }
    }

    #[test]
    fn label_outside_all_shards_makes_the_loss_infinite() {
        let stats = all_stats(&random(50, 5), &[50], 50, &[0..17, 17..50]);

        assert_eq!(cross_entropy_from_stats(&[50], &stats), f64::INFINITY);
    }

    #[test]
    fn wide_vocabulary_is_summed_accurately() {
        let logits: Vec<f32> = random(2 * 150_000, 3).iter().map(|x| 4.0 * x).collect();
        let labels = [7, 149_999];

        let stats = all_stats(&logits, &labels, 150_000, &[0..50_000, 50_000..149_000, 149_000..150_000]);

        let expected = cross_entropy(&logits, &labels, 150_000);
        assert!((cross_entropy_from_stats(&labels, &stats) - expected).abs() < 1e-6);
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let (logits, labels) = (random(200 * 100, 5), labels(200, 150, 6));

        same_on_every_number_of_threads(|| {
            let (mut stats, mut dlogits) = (vec![0.0; 600], logits.clone());
            cross_entropy_stats(&logits, &labels, 100, 50, &mut stats);
            let loss = cross_entropy_from_stats_with_gradient(&mut dlogits, &labels, 100, 50, &stats, 0.1);
            (bits(&stats), loss.to_bits(), bits(&dlogits))
        });
    }
}
