//! The threads that run the kernels of a program, awake from one kernel to the next.
//!
//! A step calls hundreds of kernels, most of them for less than a millisecond. An idle thread of rayon sleeps after a few microseconds, and
//! the next kernel needs a system call to wake it. While a program runs, the threads of the pool therefore poll for the next kernel,
//! and sleep only after [`AWAKE`], as threads of OpenMP do.
//!
//! Invariants:
//! - `TEAM-1` A task list is used only by its leader, which publishes and closes it, and by helpers that entered while it was open. The
//!   leader leaves [`Team::run`] only after all of them have left.
//! - `TEAM-2` Every task of a list runs once.
#![allow(unsafe_code)] // Helpers call a task list of another thread, whose borrows they cannot name.

use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a helper waits for the next kernel before it sleeps: longer than the serial work between two kernels.
const AWAKE: Duration = Duration::from_micros(50);
/// Looks at the state between two looks at the clock.
const LOOKS: usize = 64;

/// Of [`Team::state`]: the list is open, so that helpers may enter.
const OPEN: u64 = 1 << 31;
/// The run has ended, so that helpers return.
const ENDED: u64 = 1 << 30;
/// A task has panicked on a helper.
const PANICKED: u64 = 1 << 29;
/// The helpers that are inside.
const INSIDE: u64 = PANICKED - 1;
/// The number of the list is in the upper half.
const LIST: u64 = 1 << 32;

/// A leader and its helpers.
#[derive(Debug)]
pub(crate) struct Team {
    /// The number of the task list, whether it is open, and how many helpers are inside.
    state: AtomicU64,
    /// Written by the leader while no helper is inside.
    task: UnsafeCell<Task>,
    /// The tasks that are left of each thread's share.
    shares: Box<[Share]>,
    n_sleeping: AtomicUsize,
    sleeping: Mutex<()>,
    wake: Condvar,
}

/// `'static` stands for the duration of [`Team::run`] (`TEAM-1`).
type Task = Option<&'static (dyn Fn(usize) + Sync)>;

// SAFETY: `task` is written by the leader alone, while no helper is inside (`TEAM-1`); everything else is `Sync`.
unsafe impl Sync for Team {}

/// The first task and the one after the last, in the halves of a word; on a pair of cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Share(AtomicU64);

impl Share {
    fn set(&self, tasks: Range<u64>) {
        self.0.store((tasks.start << 32) | tasks.end, Ordering::Relaxed);
    }

    /// Takes the first task, or the last one.
    fn take(&self, is_first: bool) -> Option<usize> {
        let mut taken = 0;
        let take = |tasks: u64| {
            let (start, end) = (tasks >> 32, tasks & u64::from(u32::MAX));
            taken = if is_first { start } else { end.wrapping_sub(1) };
            (start < end).then(|| if is_first { tasks + LIST } else { tasks - 1 })
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok().map(|_| taken as usize)
    }
}

/// What a thread does for a team.
#[derive(Clone, Copy)]
enum Role {
    None,
    /// It leads this one, and runs no list at the moment.
    Leader(*const Team),
    /// It runs a list, or helps.
    Busy,
}

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::None) };
}

/// A role of this thread until this is dropped.
struct In(Role);

impl In {
    fn role(role: Role) -> In {
        In(ROLE.replace(role))
    }
}

impl Drop for In {
    fn drop(&mut self) {
        ROLE.set(self.0);
    }
}

/// Runs `task(i)` once for each `i` in `0..n_tasks` on the team that this thread leads; if it is running a task, on this thread alone.
/// Returns false, having done nothing, if it has no team.
///
/// # Panics
/// If there are 2^32 tasks or more, or one of them panics.
pub(crate) fn run(n_tasks: usize, task: &(dyn Fn(usize) + Sync)) -> bool {
    match ROLE.get() {
        Role::None => return false,
        Role::Leader(team) if n_tasks > 1 => {
            let n_tasks = u32::try_from(n_tasks).expect("fewer than 2^32 tasks");
            let _busy = In::role(Role::Busy);
            // SAFETY: `lead` keeps the team for as long as this thread leads it.
            unsafe { &*team }.run(u64::from(n_tasks), task);
        }
        Role::Leader(_) | Role::Busy => (0..n_tasks).for_each(task),
    }
    true
}

impl Team {
    /// Makes a team for a pool of `n_threads`; the pool's threads join it in [`Team::lead`].
    pub(crate) fn new(n_threads: usize) -> Team {
        Team {
            state: AtomicU64::new(ENDED),
            task: UnsafeCell::new(None),
            shares: (0..n_threads).map(|_| Share(AtomicU64::new(0))).collect(),
            n_sleeping: AtomicUsize::new(0),
            sleeping: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Runs `work` on this thread, a member of a rayon pool, whose other threads help with the kernels that it calls. Meanwhile they do
    /// nothing else for the pool, so `work` may not wait for one in particular, as `rayon::broadcast` does. Does not allocate.
    pub(crate) fn lead<R>(&self, work: impl FnOnce() -> R) -> R {
        let is_free = matches!(ROLE.get(), Role::None) && rayon::current_thread_index().is_some();
        if self.shares.len() < 2 || !is_free {
            return work();
        }
        self.state.fetch_and(!ENDED, Ordering::Relaxed);
        // SAFETY: a thread of the pool runs the first of two closures itself.
        let work = unsafe {
            OnThisThread::new(|| {
                let _end = End(self);
                let _leader = In::role(Role::Leader(self));
                work()
            })
        };
        rayon::join(move || work.call(), || self.help_from(1)).0.0
    }

    /// Helps as the thread of share `i`, and has the next thread of the pool that is idle help as that of the next one.
    fn help_from(&self, i: usize) {
        if i + 1 < self.shares.len() {
            rayon::join(|| self.help(i), || self.help_from(i + 1));
        } else {
            self.help(i);
        }
    }

    /// Runs tasks of every list that is opened, until the run ends.
    fn help(&self, i: usize) {
        // A thread of a team that waits for other work of rayon's may come here meanwhile. It must not wait for its own lists.
        if !matches!(ROLE.get(), Role::None) {
            return;
        }
        let _busy = In::role(Role::Busy);
        let mut seen = 0;
        while let Some(state) = self.next_list(seen) {
            // Fails if another helper has entered or left, or the list was closed.
            if self.state.compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
                continue;
            }
            seen = state / LIST;
            let _inside = Inside(self);
            // SAFETY: `TEAM-1`: entered while the list was open.
            let task = unsafe { *self.task.get() }.expect("an open list has a task");
            self.work(i, task);
        }
    }

    /// Waits for an open list with another number than `seen`. None if the run has ended.
    fn next_list(&self, seen: u64) -> Option<u64> {
        let looks = |state: u64| match (state & ENDED != 0, state & OPEN != 0 && state / LIST != seen) {
            (true, _) => Some(None),
            (false, true) => Some(Some(state)),
            (false, false) => None,
        };
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if let Some(found) = looks(self.state.load(Ordering::Acquire)) {
                    return found;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > AWAKE {
                break;
            }
        }
        let mut guard = self.sleeping.lock().unwrap_or_else(PoisonError::into_inner);
        // Counted before the last look, as the leader changes the state before it looks at the count.
        self.n_sleeping.fetch_add(1, Ordering::SeqCst);
        let found = loop {
            if let Some(found) = looks(self.state.load(Ordering::SeqCst)) {
                break found;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.n_sleeping.fetch_sub(1, Ordering::Relaxed);
        found
    }

    /// Wakes the helpers that sleep, after a change of the state.
    fn wake_sleeping(&self) {
        if self.n_sleeping.load(Ordering::SeqCst) > 0 {
            drop(self.sleeping.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_all();
        }
    }

    fn run(&self, n_tasks: u64, task: &(dyn Fn(usize) + Sync)) {
        let n_threads = self.shares.len() as u64;
        for (share, t) in self.shares.iter().zip(0..) {
            share.set(n_tasks * t / n_threads..n_tasks * (t + 1) / n_threads);
        }
        // SAFETY: the lifetime ends when `Closed` is dropped (`TEAM-1`); no helper is inside.
        unsafe {
            *self.task.get() =
                Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(task))
        };
        let list = self.state.load(Ordering::Relaxed) / LIST + 1;
        self.state.store((list * LIST) | OPEN, Ordering::SeqCst);
        let closed = Closed(self);
        self.wake_sleeping();
        self.work(0, task);
        drop(closed);
        assert!(self.state.load(Ordering::Relaxed) & PANICKED == 0, "a task panicked on another thread");
    }

    /// Runs tasks until none is left: those of the thread's own share in order, then the last ones of others.
    fn work(&self, i: usize, task: &(dyn Fn(usize) + Sync)) {
        while let Some(task_idx) = self.shares[i].take(true) {
            task(task_idx);
        }
        let n = self.shares.len();
        for other in (1..n).map(|d| &self.shares[(i + d) % n]) {
            while let Some(task_idx) = other.take(false) {
                task(task_idx);
            }
        }
    }
}

/// Ends the run of a team when it is dropped.
struct End<'a>(&'a Team);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_or(ENDED, Ordering::SeqCst);
        self.0.wake_sleeping();
    }
}

/// Closes the list of a team when it is dropped, and waits for the helpers inside.
struct Closed<'a>(&'a Team);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let state = &self.0.state;
        state.fetch_and(!OPEN, Ordering::Relaxed);
        let start = Instant::now();
        while state.load(Ordering::Acquire) & INSIDE != 0 {
            // A helper whose processor another thread has needs this one's, perhaps.
            if start.elapsed() < AWAKE { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

/// A helper inside a list, until it is dropped.
struct Inside<'a>(&'a Team);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.state.fetch_or(PANICKED, Ordering::Relaxed);
        }
        self.0.state.fetch_sub(1, Ordering::Release);
    }
}

/// A closure, or its result, that stays on one thread although its type could go to another.
struct OnThisThread<T>(T);

// SAFETY: by the promise of `OnThisThread::new`.
unsafe impl<T> Send for OnThisThread<T> {}

impl<T> OnThisThread<T> {
    /// # Safety
    /// The value stays on the calling thread.
    unsafe fn new(value: T) -> OnThisThread<T> {
        OnThisThread(value)
    }

    fn call<R>(self) -> OnThisThread<R>
    where
        T: FnOnce() -> R,
    {
        OnThisThread((self.0)())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks;
    use crate::thread::{on_device_thread, with_team};
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;
    use std::sync::atomic::AtomicU32;

    fn add_to(count: &AtomicU32) {
        count.fetch_add(1, Ordering::Relaxed);
    }

    // TEAM-2
    #[test]
    fn every_task_of_many_lists_runs_once_on_any_number_of_threads() {
        for n_threads in 1..=4 {
            on_device_thread(n_threads, || {
                let runs: Vec<AtomicU32> = (0..37).map(|_| AtomicU32::new(0)).collect();
                for _ in 0..3 {
                    with_team(|| {
                        for list in 0..2000 {
                            let n = list % 38;
                            tasks::run(n, &|i| add_to(&runs[i]));
                            // As soon as a list has been run, all of it has.
                            let done: u32 = runs.iter().map(|n| n.swap(0, Ordering::Relaxed)).sum();
                            assert_eq!(done as usize, n, "{n_threads} threads");
                        }
                    });
                }
            })
            .unwrap();
        }
    }

    #[test]
    fn all_threads_of_the_pool_help_even_after_a_pause_in_which_they_sleep() {
        let all_here = Barrier::new(3);
        on_device_thread(3, || {
            with_team(|| {
                for _ in 0..5 {
                    tasks::run(3, &|_| {
                        all_here.wait();
                    });
                    std::thread::sleep(20 * AWAKE);
                }
            });
        })
        .unwrap();
    }

    // TEAM-1
    #[test]
    fn list_has_been_run_only_when_its_last_helper_has_left() {
        let both_here = Barrier::new(2);
        on_device_thread(2, || {
            with_team(|| {
                let (leader, n_left) = (std::thread::current().id(), AtomicU32::new(0));
                tasks::run(2, &|_| {
                    both_here.wait();
                    if std::thread::current().id() != leader {
                        std::thread::sleep(400 * AWAKE);
                        add_to(&n_left);
                    }
                });
                assert_eq!(n_left.load(Ordering::Relaxed), 1);
            });
        })
        .unwrap();
    }

    // TEAM-1
    #[test]
    fn panic_of_a_task_reaches_the_leader_from_any_thread_and_the_team_goes_on() {
        on_device_thread(2, || {
            let both_here = Barrier::new(2);
            for panicking in [0, 1] {
                let n_went_on = AtomicU32::new(0);
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    with_team(|| {
                        tasks::run(2, &|i| {
                            both_here.wait();
                            assert!(i != panicking, "planned");
                        });
                        add_to(&n_went_on);
                    })
                }));
                assert_eq!(n_went_on.into_inner(), 0, "the leader went on after task {panicking} had panicked");
                assert!(outcome.is_err(), "task {panicking} panicked");

                let n_runs = AtomicU32::new(0);
                with_team(|| tasks::run(100, &|_| add_to(&n_runs)));
                assert_eq!(n_runs.into_inner(), 100);
            }
        })
        .unwrap();
    }

    #[test]
    fn run_may_use_the_pool_in_other_ways_too() {
        use rayon::prelude::*;
        for n_threads in 1..=4 {
            on_device_thread(n_threads, || {
                for _ in 0..50 {
                    with_team(|| {
                        // While another thread runs the second closure, this one looks for other work, and may find that of a helper.
                        let (start, has_begun) = (Instant::now(), AtomicU32::new(0));
                        let wait = || while has_begun.load(Ordering::Relaxed) == 0 && start.elapsed() < 10 * AWAKE {};
                        rayon::join(wait, || {
                            add_to(&has_begun);
                            std::thread::sleep(10 * AWAKE);
                        });
                        tasks::run(9, &|_| {
                            assert_eq!((0..20usize).into_par_iter().with_max_len(1).sum::<usize>(), 190)
                        });
                    });
                }
            })
            .unwrap();
        }
    }

    #[test]
    fn task_may_run_tasks_of_its_own() {
        let n_runs = AtomicU32::new(0);
        on_device_thread(2, || {
            with_team(|| tasks::run(8, &|_| tasks::run(8, &|_| add_to(&n_runs))));
        })
        .unwrap();

        assert_eq!(n_runs.into_inner(), 64);
    }
}
