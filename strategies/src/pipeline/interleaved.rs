//! 1F1B over several chunks of layers for each stage.
//!
//! Source: Narayanan et al. 2021, §2.2.2 (arXiv:2104.04473). Microbatches travel in groups: a stage takes a whole group
//! through its first chunk, then through its second, and so on; backwards mirror that. The paper uses groups of exactly
//! `p` microbatches and requires a multiple of `p`. Here the `m` microbatches form `max(1, m / p)` groups of nearly
//! equal size, the longer first, all of at least `p` unless there are fewer microbatches than stages: a shorter group
//! at the end would wait for its own round trip at every chunk, and can deadlock with blocking receives. The bubble is
//! the paper's for every `m >= p`; a stage holds at most `v - 1` times the excess of the longest group over `p` more.

use super::{Slot, Work, slot};

pub(super) fn order(n_stages: usize, stage: usize, n_microbatches: usize, n_chunks: usize) -> Vec<Slot> {
    let forwards = travel(n_stages, n_microbatches, n_chunks);
    let backward = |s: &Slot| slot(Work::Backward, n_chunks - 1 - s.chunk as usize, s.microbatch as usize);
    let n_warmup = n_warmup(n_stages, stage, n_microbatches, n_chunks);
    let mut order = forwards[..n_warmup].to_vec();
    for (k, s) in forwards.iter().enumerate() {
        order.extend(forwards.get(n_warmup + k));
        order.push(backward(s));
    }
    order
}

/// Number of forwards before the first backward, minus the one right before it: two for each later stage, so that the
/// first microbatch can go to the last stage and back, and a group for every chunk but the last.
pub(super) fn n_warmup(n_stages: usize, stage: usize, n_microbatches: usize, n_chunks: usize) -> usize {
    let longest = group_sizes(n_stages, n_microbatches).next().unwrap_or(0);
    (2 * (n_stages - 1 - stage) + (n_chunks - 1) * longest).min(n_chunks * n_microbatches)
}

/// Forwards of a stage: group after group, within a group chunk after chunk.
fn travel(n_stages: usize, n_microbatches: usize, n_chunks: usize) -> Vec<Slot> {
    let mut forwards = Vec::with_capacity(n_chunks * n_microbatches);
    let mut first = 0;
    for size in group_sizes(n_stages, n_microbatches) {
        for chunk in 0..n_chunks {
            forwards.extend((first..first + size).map(|i| slot(Work::Forward, chunk, i)));
        }
        first += size;
    }
    forwards
}

fn group_sizes(n_stages: usize, n_microbatches: usize) -> impl Iterator<Item = usize> {
    let n_groups = (n_microbatches / n_stages).max(1);
    let (size, n_longer) = (n_microbatches / n_groups, n_microbatches % n_groups);
    (0..n_groups).map(move |group| size + usize::from(group < n_longer))
}
