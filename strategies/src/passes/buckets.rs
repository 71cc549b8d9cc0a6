//! Groups gradients into buckets, each exchanged by one collective.

use crate::program::{DType, Program};

/// Cuts items into runs whose parameters' gradients fill `bytes`.
pub(super) fn buckets<T: Copy>(
    program: &Program,
    items: &[T],
    param: impl Fn(T) -> usize,
    bytes: usize,
) -> Vec<Vec<T>> {
    buckets_within(program, items, param, |_| 0, bytes)
}

/// As [`buckets`], with one key in each run, so that gradients of one microbatch do not wait for the next.
pub(super) fn buckets_within<T: Copy>(
    program: &Program,
    items: &[T],
    param: impl Fn(T) -> usize,
    key: impl Fn(T) -> u32,
    bytes: usize,
) -> Vec<Vec<T>> {
    let mut buckets: Vec<Vec<T>> = Vec::new();
    let mut filled = usize::MAX;
    for item in items {
        let size = program.params[param(*item)].shape.iter().product::<usize>() * DType::F32.size_bytes();
        let ends = buckets.last().is_none_or(|b| b.len() >= TENSORS_MAX || key(b[0]) != key(*item));
        if filled >= bytes || ends {
            buckets.push(Vec::new());
            filled = 0;
        }
        filled += size;
        buckets.last_mut().expect("one was just opened").push(*item);
    }
    buckets
}

/// Maximum number of tensors in one collective.
pub(super) const TENSORS_MAX: usize = 256;
