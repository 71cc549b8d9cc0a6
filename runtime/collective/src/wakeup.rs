//! The futex on which all waiting threads of a rank sleep; a peer wakes the rank after a change for it.
//!
//! A waiter first polls, because most waits are short; then it announces that it sleeps, polls once more, and sleeps. A
//! peer first publishes its change and then checks for sleepers. On both sides a sequentially consistent fence
//! separates the two accesses, so one side always sees the other: no change is missed, and waking makes a system call
//! only if a thread sleeps.
#![allow(unsafe_code)] // The futex system call takes a raw address.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// Longest sleep before the next poll; matters only for peers that die between a change and the wake-up.
const RECHECK_NS: i64 = 50_000_000;

/// A futex word with its count of sleepers, alone on its cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct Wakeup {
    n_wakes: AtomicU32,
    /// Threads of the owner that sleep or are about to sleep.
    n_sleepers: AtomicU32,
}

/// Permission to sleep once, unless a wake-up has happened since.
#[must_use]
pub(super) struct SleepPermit<'a> {
    wakeup: &'a Wakeup,
    seen: u32,
}

impl Wakeup {
    /// Wakes the owner if it sleeps. The change must be written before.
    pub(super) fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.n_sleepers.load(Ordering::Relaxed) != 0 {
            self.wake_always();
        }
    }

    /// Wakes the owner unconditionally.
    pub(super) fn wake_always(&self) {
        self.n_wakes.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the address belongs to a live atomic; FUTEX_WAKE reads no other memory.
        unsafe {
            libc::syscall(libc::SYS_futex, self.n_wakes.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }

    /// Announces that the owner will sleep. The owner must poll once more before it sleeps.
    pub(super) fn prepare_to_sleep(&self) -> SleepPermit<'_> {
        let seen = self.n_wakes.load(Ordering::SeqCst);
        self.n_sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        SleepPermit { wakeup: self, seen }
    }
}

impl SleepPermit<'_> {
    /// Sleeps until the next wake-up; returns at once if one has happened since [`Wakeup::prepare_to_sleep`]. May
    /// return early. Returns whether something else than the end of the longest sleep ended it; the caller polls in any case.
    pub(super) fn sleep(self) -> bool {
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: RECHECK_NS };
        // SAFETY: the address belongs to a live atomic and the timeout outlives the call. FUTEX_WAIT without the
        // private flag works across processes.
        let code = unsafe {
            let word = self.wakeup.n_wakes.as_ptr();
            libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, self.seen, &raw const timeout)
        };
        code == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ETIMEDOUT)
    }
}

impl Drop for SleepPermit<'_> {
    fn drop(&mut self) {
        self.wakeup.n_sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn change_between_the_last_poll_and_sleep_is_not_missed() {
        let wakeup = Wakeup::default();
        let permit = wakeup.prepare_to_sleep();

        wakeup.wake();

        assert!(permit.sleep(), "nothing but time has ended the sleep");
    }

    #[test]
    fn wake_up_reaches_a_sleeper_after_another_thread_has_cancelled_its_sleep() {
        let wakeup = Wakeup::default();
        let first = wakeup.prepare_to_sleep();
        drop(wakeup.prepare_to_sleep());

        wakeup.wake();

        assert!(first.sleep(), "nothing but time has ended the sleep");
    }

    #[test]
    fn sleep_that_nobody_ends_ends_by_itself() {
        assert!(!Wakeup::default().prepare_to_sleep().sleep());
    }

    #[test]
    fn every_change_wakes_its_sleeper() {
        let (wakeup, flag) = (Wakeup::default(), AtomicBool::new(false));
        let n_rounds = 2000;

        let slept = std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..n_rounds {
                    while flag.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    flag.store(true, Ordering::Release);
                    wakeup.wake();
                }
            });
            let start = Instant::now();
            for _ in 0..n_rounds {
                while !flag.load(Ordering::Acquire) {
                    let permit = wakeup.prepare_to_sleep();
                    if !flag.load(Ordering::Acquire) {
                        let _ = permit.sleep();
                    }
                }
                flag.store(false, Ordering::Release);
            }
            start.elapsed()
        });

        // A lost wake-up costs 50 ms; one per round would cost 100 s.
        assert!(slept < Duration::from_secs(20), "{slept:?}");
    }
}
