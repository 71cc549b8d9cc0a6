//! A counter in shared memory that one rank advances and others wait for.
//!
//! The lowest bit says that the group is aborted; the count is above it and wraps. Abort therefore changes the very word
//! that a sleeper compares, so a wake-up cannot be lost between its last look and its sleep.
#![allow(unsafe_code)] // The futex system call takes a raw address.

use std::sync::atomic::{AtomicU32, Ordering};

/// Set in a counter when the group is aborted.
const ABORT: u32 = 1;

/// How long a sleeper sleeps before it looks again. Nothing depends on it but a group whose aborter died half-way.
const LOOK_AGAIN_NS: i64 = 50_000_000;

/// A counter, alone on its cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Counter {
    value: AtomicU32,
    /// Ranks that sleep, so that advancing costs no system call when none does. A killed sleeper leaves it too high,
    /// which costs a system call and nothing else.
    sleepers: AtomicU32,
}

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// The count was reached.
    Reached,
    /// The group was aborted.
    Aborted,
}

impl Counter {
    /// Adds one to the count and wakes whoever sleeps.
    pub fn advance(&self) {
        self.value.fetch_add(2, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            self.wake();
        }
    }

    /// Marks the group as aborted and wakes whoever sleeps.
    pub fn abort(&self) {
        self.value.fetch_or(ABORT, Ordering::SeqCst);
        self.wake();
    }

    /// Waits until the count is `target` or later (within half the range of the count): `n_spins` looks, then sleep.
    pub fn wait(&self, target: u32, n_spins: u32, is_aborted: impl Fn() -> bool) -> Waited {
        let mut n_looks = 0;
        loop {
            let seen = self.value.load(Ordering::SeqCst);
            if seen & ABORT != 0 {
                return Waited::Aborted;
            }
            if (seen.wrapping_sub(target << 1) as i32) >= 0 {
                return Waited::Reached;
            }
            if n_looks < n_spins {
                n_looks += 1;
                std::hint::spin_loop();
                continue;
            }
            if is_aborted() {
                return Waited::Aborted;
            }
            self.sleep(seen);
        }
    }

    /// Sleeps unless the word has changed since it was `seen`.
    fn sleep(&self, seen: u32) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: LOOK_AGAIN_NS };
        // SAFETY: the address is that of a live atomic and the timeout outlives the call. FUTEX_WAIT without the private
        // flag works across processes. Its outcome does not matter: the caller looks at the word again.
        unsafe {
            libc::syscall(libc::SYS_futex, self.value.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Wakes every sleeper.
    fn wake(&self) {
        // SAFETY: the address is that of a live atomic; FUTEX_WAKE reads nothing else.
        unsafe {
            libc::syscall(libc::SYS_futex, self.value.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_wraps_is_still_later() {
        let counter = Counter { value: AtomicU32::new(u32::MAX - 1), sleepers: AtomicU32::new(0) };

        counter.advance();

        assert_eq!(counter.wait(0x7fff_ffff, 0, || true), Waited::Reached);
        assert_eq!(counter.wait(0, 0, || true), Waited::Reached);
        assert_eq!(counter.wait(1, 0, || true), Waited::Aborted);
    }

    #[test]
    fn abort_ends_a_wait_that_sleeps() {
        let counter = Counter::default();

        let waited = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| counter.wait(1, 0, || false));
            while counter.sleepers.load(Ordering::SeqCst) == 0 {
                std::hint::spin_loop();
            }
            counter.abort();
            waiter.join().unwrap()
        });

        assert_eq!(waited, Waited::Aborted);
    }
}
