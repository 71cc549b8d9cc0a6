//! Division of work into tasks, by the shape alone, never by the number of threads.
#![allow(unsafe_code)] // Tasks of attention write disjoint columns of one matrix, which safe slices cannot express.

use super::simd::simd;
use crate::tasks::run_apart;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements of one task of an element-wise kernel: 64 KiB of f32, some microseconds of work.
pub const CHUNK: usize = 1 << 14;

/// Most parts of the rows of a reduction.
pub const PARTS: usize = 32;

/// Rows of one task where rows are independent; at least 1.
pub fn rows_per_task(n_columns: usize) -> usize {
    (CHUNK / n_columns.max(1)).max(1)
}

/// Least elements of a part of a reduction; fewer take less time than a hand-over to another thread.
const SMALLEST_PART: usize = 1 << 12;

/// Rows of one part of a reduction over `n` rows of `n_columns`: at most [`PARTS`] parts; at least 1.
pub fn rows_per_part(n: usize, n_columns: usize) -> usize {
    n.div_ceil(PARTS).max(SMALLEST_PART.div_ceil(n_columns.max(1)))
}

/// Sums the first `n_parts` rows of `parts [PARTS, C]` into `out [C]`, in order.
pub fn sum_parts(parts: &[f32], n_parts: usize, out: &mut [f32], accumulate: bool) {
    if !accumulate {
        out.fill(0.0);
    }
    for part in parts.chunks_exact(out.len().max(1)).take(n_parts) {
        add_row(out, part);
    }
}

simd! {
    fn add_row(out: &mut [f32], row: &[f32]) {
        for (out, x) in out.iter_mut().zip(row) {
            *out += x;
        }
    }
}

/// Runs `task(i, slot)` for each `i` in `0..n_tasks`. A slot of `scratch` serves one task at a time; the number of
/// slots of `slot_len` in `scratch` bounds the concurrent tasks.
///
/// # Panics
/// If `scratch` is shorter than one slot.
pub fn for_each_task(n_tasks: usize, scratch: &mut [f32], slot_len: usize, task: impl Fn(usize, &mut [f32]) + Sync) {
    assert!(scratch.len() >= slot_len, "scratch of {} is shorter than one slot of {slot_len}", scratch.len());
    let next = AtomicUsize::new(0);
    let slot_len = slot_len.max(1);
    let n_slots = scratch.len() / slot_len;
    let slots = Shared::new(scratch);
    run_apart(n_slots, &|slot| {
        // SAFETY: slots are disjoint, and each runs once.
        let slot = unsafe { slots.part(slot * slot_len, slot_len) };
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= n_tasks {
                return;
            }
            task(i, slot);
        }
    });
}

/// A matrix whose disjoint parts are written by concurrent tasks.
#[derive(Clone, Copy)]
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`; the caller of `part` promises that no other slice overlaps.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Borrows the matrix for as long as tasks may write to it.
    pub fn new(whole: &'a mut [T]) -> Shared<'a, T> {
        Shared { start: whole.as_mut_ptr(), len: whole.len(), owner: PhantomData }
    }

    /// A part to write to.
    ///
    /// # Panics
    /// If it is out of bounds.
    ///
    /// # Safety
    /// While the slice lives, no other slice overlaps it.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, first: usize, len: usize) -> &mut [T] {
        assert!(first <= self.len && len <= self.len - first, "{first}..+{len} of {}", self.len);
        // SAFETY: in bounds; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        let runs: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
        let mut scratch = vec![0.0; 3 * 7 + 5];

        for_each_task(100, &mut scratch, 7, |i, slot| {
            assert_eq!(slot.len(), 7);
            runs[i].fetch_add(1, Ordering::Relaxed);
        });

        assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn rows_are_divided_into_at_most_the_maximum_number_of_parts() {
        for n in 1..200usize {
            assert!(n.div_ceil(rows_per_part(n, 10_000)) <= PARTS);
        }
    }
}
