//! Exponential backoff: excludes a failing node for exponentially longer periods.

use std::time::{Duration, Instant};

/// Failures of one kind, and until when they have a consequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    /// Failures in a row.
    pub(super) n_times: u32,
    latest: Instant,
    pub(super) until: Instant,
}

impl Backoff {
    /// No failure yet.
    pub(super) fn new(now: Instant) -> Backoff {
        Backoff { n_times: 0, latest: now, until: now }
    }

    /// Forgets all failures after a calm time without one.
    pub(super) fn calm_down(&mut self, now: Instant, calm: Duration) {
        if now.saturating_duration_since(self.latest.max(self.until)) >= calm {
            *self = Backoff::new(now);
        }
    }

    /// Counts a failure.
    pub(super) fn count(&mut self, now: Instant) {
        (self.n_times, self.latest) = (self.n_times + 1, now);
    }

    /// Backs off for the shortest time, doubled so many times.
    pub(super) fn hold(&mut self, now: Instant, shortest: Duration, n_doublings: u32) {
        self.until = now + shortest * 2u32.pow(n_doublings);
    }

    /// Whether the time has not passed.
    pub(super) fn holds(&self, now: Instant) -> bool {
        now < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_holds_for_the_doubled_time_and_is_forgotten_after_a_calm_one() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut backoff = Backoff::new(start);
        assert!(!backoff.holds(start));

        backoff.count(start);
        backoff.hold(start, second, 2);

        assert!(backoff.holds(start + 3 * second) && !backoff.holds(start + 4 * second));
        backoff.calm_down(start + 13 * second, 10 * second);
        assert_eq!(backoff.n_times, 1);
        backoff.calm_down(start + 14 * second, 10 * second);
        assert_eq!(backoff.n_times, 0);
    }
}
