//! What a rank sleeps on, with all of its threads that wait: one word that whoever changes something for it rings.
//!
//! A waiter first looks a number of times, because most waits are short; then it says that it sleeps, looks once more,
//! and sleeps. Whoever changes what it waits for first publishes the change and then looks whether it sleeps. Of these
//! two pairs of write and read one must see the other (both are apart by a sequentially consistent fence), so that no
//! change is slept through, and ringing costs a system call only if somebody sleeps.
#![allow(unsafe_code)] // The futex system call takes a raw address.

use std::sync::atomic::{AtomicU32, Ordering, fence};

/// How long a sleeper sleeps before it looks again. Nothing depends on it but peers that died between a change and a ring.
const LOOK_AGAIN_NS: i64 = 50_000_000;

/// A bell, alone on its cache line.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct Bell {
    rung: AtomicU32,
    /// Threads of the owner that are about to sleep or sleep.
    n_sleepers: AtomicU32,
}

/// The right to sleep once, unless the bell has been rung since.
#[must_use]
pub(super) struct Dozing<'a> {
    bell: &'a Bell,
    seen: u32,
}

impl Bell {
    /// Wakes the owner if it sleeps. What it is to see must have been written before.
    pub(super) fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.n_sleepers.load(Ordering::Relaxed) != 0 {
            self.ring_loudly();
        }
    }

    /// Wakes the owner, whatever it says.
    pub(super) fn ring_loudly(&self) {
        self.rung.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the address is that of a live atomic; FUTEX_WAKE reads nothing else.
        unsafe {
            libc::syscall(libc::SYS_futex, self.rung.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }

    /// Announces that the owner will sleep. It must look for changes once more before it does.
    pub(super) fn doze(&self) -> Dozing<'_> {
        let seen = self.rung.load(Ordering::SeqCst);
        self.n_sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Dozing { bell: self, seen }
    }
}

impl Dozing<'_> {
    /// Sleeps until the bell is rung; not at all if it has been since [`Bell::doze`]. May return early.
    pub(super) fn sleep(self) {
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: LOOK_AGAIN_NS };
        // SAFETY: the address is that of a live atomic and the timeout outlives the call. FUTEX_WAIT without the private
        // flag works across processes. Its outcome does not matter: the caller looks again.
        unsafe {
            let word = self.bell.rung.as_ptr();
            libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, self.seen, &raw const timeout);
        }
    }
}

impl Drop for Dozing<'_> {
    fn drop(&mut self) {
        self.bell.n_sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    use super::*;

    /// The median of several times: one may be long because the machine is busy, most are long only if the bell is not heard.
    fn median(mut time: impl FnMut() -> Duration) -> Duration {
        let mut times: Vec<Duration> = (0..9).map(|_| time()).collect();
        times.sort();
        times[times.len() / 2]
    }

    #[test]
    fn a_change_between_the_last_look_and_sleep_is_not_slept_through() {
        let asleep = median(|| {
            let bell = Bell::default();
            let dozing = bell.doze();
            bell.ring();

            let start = Instant::now();
            dozing.sleep();
            start.elapsed()
        });

        assert!(asleep < Duration::from_millis(40), "{asleep:?}");
    }

    #[test]
    fn one_thread_that_wakes_does_not_leave_another_asleep() {
        let asleep = median(|| {
            let bell = Bell::default();
            let first = bell.doze();
            drop(bell.doze());
            bell.ring();

            let start = Instant::now();
            first.sleep();
            start.elapsed()
        });

        assert!(asleep < Duration::from_millis(40), "{asleep:?}");
    }

    #[test]
    fn every_change_wakes_its_sleeper() {
        let (bell, flag) = (Bell::default(), AtomicBool::new(false));
        let n_rounds = 2000;

        let slept = std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..n_rounds {
                    while flag.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    flag.store(true, Ordering::Release);
                    bell.ring();
                }
            });
            let start = Instant::now();
            for _ in 0..n_rounds {
                while !flag.load(Ordering::Acquire) {
                    let dozing = bell.doze();
                    if !flag.load(Ordering::Acquire) {
                        dozing.sleep();
                    }
                }
                flag.store(false, Ordering::Release);
            }
            start.elapsed()
        });

        // A lost wake-up costs 50 ms; that of each round would cost 100 s.
        assert!(slept < Duration::from_secs(20), "{slept:?}");
    }
}
