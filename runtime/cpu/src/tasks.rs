//! Slices cut into tasks, which run on the threads of the current rayon pool; while a program runs, as a [`team`].
//!
//! The methods are those of rayon's indexed parallel iterators. rayon instantiates its scheduler for each closure; for the
//! kernels that made three fifths of this crate's machine code and half of its build time. Here the scheduler is compiled
//! once, and a task, which takes microseconds, costs one call through a pointer.
#![allow(unsafe_code)] // Tasks write disjoint chunks of one slice, which safe slices cannot express.

use crate::team;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use std::marker::PhantomData;

/// The operands of `len()` tasks.
pub trait Tasks: Sync + Sized {
    /// What one task reads and writes.
    type Operands: Send;

    /// The number of tasks.
    fn len(&self) -> usize;

    /// The operands of task `i`.
    ///
    /// # Safety
    /// `i < self.len()`, and the operands of the same `i` do not exist elsewhere.
    unsafe fn operands(&self, i: usize) -> Self::Operands;

    /// Tasks with the operands of both; as many as the shorter one has.
    fn zip<B: Tasks>(self, other: B) -> Zip<Self, B> {
        Zip(self, other)
    }

    /// Tasks that also get their index.
    fn enumerate(self) -> Enumerate<Self> {
        Enumerate(self)
    }

    /// Runs every task once; adjacent tasks may run on the same thread, one after the other.
    fn for_each(self, task: impl Fn(Self::Operands) + Sync) {
        // SAFETY: `run` passes each index below `len()` once.
        run(self.len(), &|i| task(unsafe { self.operands(i) }));
    }
}

/// Runs `task(i)` once for each `i` in `0..n_tasks`; adjacent indices may run on the same thread, one after the other.
pub fn run(n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    if !team::run(n_tasks, task) {
        (0..n_tasks).into_par_iter().for_each(task);
    }
}

/// Runs `task(i)` once for each `i` in `0..n_tasks`, each on a thread of its own if enough threads are idle.
pub fn run_apart(n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    if !team::run(n_tasks, task) {
        (0..n_tasks).into_par_iter().with_max_len(1).for_each(task);
    }
}

/// Cuts a slice into tasks.
pub trait Cut<T> {
    /// Chunks of `len` elements; the last one may be shorter.
    ///
    /// # Panics
    /// If `len` is 0.
    fn par_chunks(&self, len: usize) -> Chunks<'_, T>;

    /// Writable chunks of `len` elements; the last one may be shorter.
    ///
    /// # Panics
    /// If `len` is 0.
    fn par_chunks_mut(&mut self, len: usize) -> ChunksMut<'_, T>;

    /// Single writable elements.
    fn par_iter_mut(&mut self) -> ElementsMut<'_, T>;
}

impl<T> Cut<T> for [T] {
    fn par_chunks(&self, len: usize) -> Chunks<'_, T> {
        assert!(len > 0, "chunks of 0 elements");
        Chunks { slice: self, len }
    }

    fn par_chunks_mut(&mut self, len: usize) -> ChunksMut<'_, T> {
        assert!(len > 0, "chunks of 0 elements");
        ChunksMut { start: self.as_mut_ptr(), n: self.len(), len, owner: PhantomData }
    }

    fn par_iter_mut(&mut self) -> ElementsMut<'_, T> {
        ElementsMut(self.par_chunks_mut(1))
    }
}

/// Chunks of a slice.
pub struct Chunks<'a, T> {
    slice: &'a [T],
    len: usize,
}

impl<'a, T: Sync> Tasks for Chunks<'a, T> {
    type Operands = &'a [T];

    fn len(&self) -> usize {
        self.slice.len().div_ceil(self.len)
    }

    unsafe fn operands(&self, i: usize) -> &'a [T] {
        let first = i * self.len;
        &self.slice[first..self.slice.len().min(first + self.len)]
    }
}

/// Writable chunks of a slice.
pub struct ChunksMut<'a, T> {
    start: *mut T,
    n: usize,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`; `operands` hands out disjoint parts of it, each once by its contract.
unsafe impl<T: Send> Sync for ChunksMut<'_, T> {}

impl<'a, T: Send> Tasks for ChunksMut<'a, T> {
    type Operands = &'a mut [T];

    fn len(&self) -> usize {
        self.n.div_ceil(self.len)
    }

    unsafe fn operands(&self, i: usize) -> &'a mut [T] {
        let first = i * self.len;
        assert!(first < self.n, "task {i} of {}", self.len());
        // SAFETY: in bounds by the assertion and the minimum; chunks of different `i` are disjoint, and the caller has no
        // other one of this `i`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), self.len.min(self.n - first)) }
    }
}

/// Writable elements of a slice.
pub struct ElementsMut<'a, T>(ChunksMut<'a, T>);

impl<'a, T: Send> Tasks for ElementsMut<'a, T> {
    type Operands = &'a mut T;

    fn len(&self) -> usize {
        self.0.len()
    }

    unsafe fn operands(&self, i: usize) -> &'a mut T {
        // SAFETY: by the caller; a chunk has one element.
        unsafe { &mut self.0.operands(i)[0] }
    }
}

/// See [`Tasks::zip`].
pub struct Zip<A, B>(A, B);

impl<A: Tasks, B: Tasks> Tasks for Zip<A, B> {
    type Operands = (A::Operands, B::Operands);

    fn len(&self) -> usize {
        self.0.len().min(self.1.len())
    }

    unsafe fn operands(&self, i: usize) -> Self::Operands {
        // SAFETY: by the caller, for both.
        unsafe { (self.0.operands(i), self.1.operands(i)) }
    }
}

/// See [`Tasks::enumerate`].
pub struct Enumerate<A>(A);

impl<A: Tasks> Tasks for Enumerate<A> {
    type Operands = (usize, A::Operands);

    fn len(&self) -> usize {
        self.0.len()
    }

    unsafe fn operands(&self, i: usize) -> Self::Operands {
        // SAFETY: by the caller.
        (i, unsafe { self.0.operands(i) })
    }
}

#[cfg(test)]
mod tests {
    use super::{Cut, Tasks, run_apart};
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn chunks_cover_a_slice_once_and_the_last_one_is_shorter() {
        for n in [0usize, 1, 4, 5, 8, 1001] {
            let from: Vec<usize> = (0..n).collect();
            let mut to = vec![0; n];
            let mut sums = vec![0; n.div_ceil(4)];

            let tasks = to.par_chunks_mut(4).zip(from.par_chunks(4)).zip(sums.par_iter_mut()).enumerate();
            tasks.for_each(|(i, ((to, from), sum))| {
                assert_eq!(from[0], i * 4);
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from + 1);
                *sum += from.iter().sum::<usize>();
            });

            assert_eq!(to, (1..=n).collect::<Vec<_>>());
            assert_eq!(sums.iter().sum::<usize>(), from.iter().sum::<usize>());
        }
    }

    #[test]
    fn zipped_tasks_are_as_many_as_the_shorter_side_has() {
        let n_runs = AtomicUsize::new(0);

        [1, 2, 3].par_chunks(1).zip([1, 2, 3, 4].par_chunks(2)).for_each(|_| {
            n_runs.fetch_add(1, Ordering::Relaxed);
        });

        assert_eq!(n_runs.into_inner(), 2);
    }

    #[test]
    fn tasks_apart_run_at_the_same_time() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        let all_here = std::sync::Barrier::new(4);

        pool.install(|| {
            run_apart(4, &|_| {
                all_here.wait();
            })
        });
    }
}
