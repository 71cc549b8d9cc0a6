//! Sums of many buffers along one fixed binary tree, so that their bits do not tell how the buffers were spread.
//!
//! The tree over `n` leaves splits at the largest power of two below `n`: a run of leaves that starts at a multiple of a
//! power of two and is as long as that is always a subtree. Whoever holds such a run may sum it alone, and the sum of
//! the sums along the same tree is the sum over all leaves, to the bit.

use super::parallel::CHUNK;
use super::simd::simd;
use rayon::prelude::*;

/// Elements that go through the whole tree together: its partial sums stay in the caches of a core.
const TILE: usize = 512;

/// Leaves that are added in registers: a power of two, so that they are a subtree.
const GROUP: usize = 8;

/// Partial sums that wait for their right-hand sides: at most one of each power of two.
const LEVELS: usize = 16;

/// `out = Σ leaves`, in the order of the tree; zeros if there is no leaf.
///
/// # Shapes
/// All equal.
///
/// # Panics
/// If there are `2^16` leaves or more.
pub fn tree_sum(leaves: &[&[f32]], out: &mut [f32]) {
    assert!(leaves.iter().all(|leaf| leaf.len() == out.len()));
    let Some((first, rest)) = leaves.split_first() else {
        return out.fill(0.0);
    };
    out.par_chunks_mut(CHUNK).enumerate().for_each(|(i, out)| {
        out.copy_from_slice(&first[i * CHUNK..i * CHUNK + out.len()]);
        sum_chunk(out, rest, i * CHUNK);
    });
}

/// [`tree_sum`] of `first` and then `rest`, into `first`.
///
/// # Shapes
/// All equal.
///
/// # Panics
/// If there are `2^16` leaves or more.
pub fn tree_sum_assign(first: &mut [f32], rest: &[&[f32]]) {
    assert!(rest.iter().all(|leaf| leaf.len() == first.len()));
    first.par_chunks_mut(CHUNK).enumerate().for_each(|(i, first)| sum_chunk(first, rest, i * CHUNK));
}

simd! {
    /// Adds to `first` the elements of `rest` from `start` on.
    fn sum_chunk(first: &mut [f32], rest: &[&[f32]], start: usize) {
        let mut waiting = [[0.0f32; TILE]; LEVELS];
        let (mut head, n) = ([0.0f32; TILE], rest.len() + 1);
        for (tile, first) in first.chunks_mut(TILE).enumerate() {
            let (from, len) = (start + tile * TILE, first.len());
            head[..len].copy_from_slice(first);
            let (mut n_waiting, mut done) = (0, 0);
            while done < n {
                let subtree = GROUP.min(1 << (n - done).ilog2());
                let mut leaves = [&head[..len]; GROUP];
                for (i, leaf) in leaves.iter_mut().enumerate().take(subtree) {
                    if done + i > 0 {
                        *leaf = &rest[done + i - 1][from..from + len];
                    }
                }
                sum_subtree(&mut waiting[n_waiting][..len], leaves, subtree);
                done += subtree;
                // A whole group completes as many subtrees as its count has trailing zeros, as in binary counting;
                // what is smaller waits for the end.
                let n_complete = if subtree == GROUP { (done / GROUP).trailing_zeros() } else { 0 };
                for _ in 0..n_complete {
                    add_last(&mut waiting, n_waiting);
                    n_waiting -= 1;
                }
                n_waiting += 1;
            }
            for last in (1..n_waiting).rev() {
                add_last(&mut waiting, last);
            }
            first.copy_from_slice(&waiting[0][..len]);
        }
    }
}

/// The sum of the first `n` leaves, in one pass.
#[inline(always)]
fn sum_subtree(to: &mut [f32], leaves: [&[f32]; GROUP], n: usize) {
    let len = to.len();
    let [a, b, c, d, e, f, g, h] = leaves;
    let (a, b, c, d) = (&a[..len], &b[..len], &c[..len], &d[..len]);
    let (e, f, g, h) = (&e[..len], &f[..len], &g[..len], &h[..len]);
    match n {
        1 => to.copy_from_slice(a),
        2 => {
            for i in 0..len {
                to[i] = a[i] + b[i];
            }
        }
        4 => {
            for i in 0..len {
                to[i] = (a[i] + b[i]) + (c[i] + d[i]);
            }
        }
        _ => {
            for i in 0..len {
                to[i] = ((a[i] + b[i]) + (c[i] + d[i])) + ((e[i] + f[i]) + (g[i] + h[i]));
            }
        }
    }
}

/// Adds the sum at `last` to the one before it.
#[inline(always)]
fn add_last(waiting: &mut [[f32; TILE]; LEVELS], last: usize) {
    let (left, right) = waiting.split_at_mut(last);
    for (left, right) in left[last - 1].iter_mut().zip(&right[0]) {
        *left += right;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, close, random, same_on_every_number_of_threads, wide};
    use super::*;
    use proptest::prelude::*;

    /// The definition, one element at a time.
    fn reference(leaves: &[f32]) -> f32 {
        match leaves {
            [] => 0.0,
            [leaf] => *leaf,
            _ => {
                let (left, right) = leaves.split_at(leaves.len().next_power_of_two() / 2);
                reference(left) + reference(right)
            }
        }
    }

    fn leaves(n: usize, len: usize, seed: u64) -> Vec<Vec<f32>> {
        (0..n).map(|i| random(len, seed ^ i as u64)).collect()
    }

    fn sum_of(leaves: &[&[f32]], len: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; len];
        tree_sum(leaves, &mut out);
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn both_forms_follow_the_tree_to_the_bit(n in 0usize..70, len in 0usize..2500, seed in any::<u64>()) {
            let leaves = leaves(n, len, seed);
            let slices: Vec<&[f32]> = leaves.iter().map(Vec::as_slice).collect();

            let sum = sum_of(&slices, len);

            let of_element = |e: usize| reference(&leaves.iter().map(|leaf| leaf[e]).collect::<Vec<_>>());
            prop_assert_eq!(bits(&sum), bits(&(0..len).map(of_element).collect::<Vec<_>>()));
            if let Some((first, rest)) = slices.split_first() {
                let mut first = first.to_vec();
                tree_sum_assign(&mut first, rest);
                prop_assert_eq!(bits(&first), bits(&sum));
            }
        }
    }

    #[test]
    fn sums_of_aligned_runs_make_up_the_whole() {
        let leaves = leaves(13, 300, 1);
        let slices: Vec<&[f32]> = leaves.iter().map(Vec::as_slice).collect();

        let whole = sum_of(&slices, 300);

        for run in [1, 2, 4, 8, 16] {
            let of_runs: Vec<Vec<f32>> = slices.chunks(run).map(|run| sum_of(run, 300)).collect();
            let of_runs: Vec<&[f32]> = of_runs.iter().map(Vec::as_slice).collect();
            assert_eq!(bits(&sum_of(&of_runs, 300)), bits(&whole), "runs of {run}");
        }
    }

    #[test]
    fn many_long_buffers_are_summed_on_any_number_of_threads() {
        let len = 2 * CHUNK + 77;
        let leaves = leaves(20, len, 2);
        let slices: Vec<&[f32]> = leaves.iter().map(Vec::as_slice).collect();

        let expected: Vec<f64> =
            (0..len).map(|e| wide(&leaves.iter().map(|x| x[e]).collect::<Vec<_>>()).iter().sum()).collect();

        close(&sum_of(&slices, len), &expected, 1e-6);
        same_on_every_number_of_threads(|| bits(&sum_of(&slices, len)));
    }
}
