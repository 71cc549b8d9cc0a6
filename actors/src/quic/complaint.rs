//! Logs a line for each rejected peer, and only a count in a flood.

use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const LINES_PER_SECOND: u32 = 20;

/// Counts the lines of the current second.
#[derive(Debug)]
pub(super) struct Complaints(Mutex<(Instant, u32)>);

impl Complaints {
    pub(super) fn new() -> Complaints {
        Complaints(Mutex::new((Instant::now(), 0)))
    }

    /// Logs a rejected peer. Beyond `LINES_PER_SECOND`, counts it instead.
    pub(super) fn refused(&self, peer: SocketAddr, why: &dyn Display) {
        let (silent, line) = self.count(Instant::now());
        if let Some(n_refused) = silent {
            tracing::warn!(n_refused, "rejected further peers that are not listed");
        }
        if line {
            tracing::warn!(%peer, %why, "refused a peer");
        }
    }

    /// The number of unlisted peers of a past second, if any, and whether to list this one.
    fn count(&self, now: Instant) -> (Option<u32>, bool) {
        let mut guard = self.0.lock().expect("no holder of this lock panics");
        let (since, n_lines) = &mut *guard;
        let mut silent = None;
        if now.duration_since(*since) >= Duration::from_secs(1) {
            silent = n_lines.checked_sub(LINES_PER_SECOND).filter(|n| *n > 0);
            (*since, *n_lines) = (now, 0);
        }
        *n_lines = n_lines.saturating_add(1);
        (silent, *n_lines <= LINES_PER_SECOND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_beyond_the_limit_are_counted_instead_of_listed() {
        let complaints = Complaints::new();
        let now = Instant::now();

        let n_listed = (0..1000).filter(|_| complaints.count(now).1).count();
        let after = complaints.count(now + Duration::from_secs(1));

        assert_eq!(n_listed, LINES_PER_SECOND as usize);
        assert_eq!(after, (Some(1000 - LINES_PER_SECOND), true));
        assert_eq!(complaints.count(now + Duration::from_secs(2)), (None, true));
    }
}
