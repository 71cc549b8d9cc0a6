//! How far a sweep over many seeds is: a line that replaces itself on a terminal, else one line a minute, on standard error.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Time between two lines.
const ON_TERMINAL: Duration = Duration::from_secs(1);
const ELSEWHERE: Duration = Duration::from_secs(60);
/// Erases the line that is shown.
const ERASE: &str = "\r\u{1b}[K";

/// The progress of a sweep.
pub struct Progress {
    n_seeds: u64,
    n_done: AtomicU64,
    n_failed: AtomicU64,
    began: Instant,
    is_terminal: bool,
}

/// Ends the lines when dropped.
pub struct Shown(#[expect(dead_code)] Sender<()>);

impl Progress {
    pub fn new(n_seeds: u64) -> Progress {
        let [n_done, n_failed] = [const { AtomicU64::new(0) }; 2];
        Progress { n_seeds, n_done, n_failed, began: Instant::now(), is_terminal: std::io::stderr().is_terminal() }
    }

    /// What ends the lines, and what [`Progress::show`] takes.
    pub fn channel() -> (Shown, Receiver<()>) {
        let (sender, ended) = channel();
        (Shown(sender), ended)
    }

    /// Writes the lines until the other end of `ended` is dropped.
    pub fn show(&self, ended: &Receiver<()>) {
        let interval = if self.is_terminal { ON_TERMINAL } else { ELSEWHERE };
        while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            let line = line(self.count(&self.n_done), self.n_seeds, self.count(&self.n_failed), self.began.elapsed());
            self.write(&if self.is_terminal { format!("{ERASE}{line}") } else { format!("{line}\n") });
        }
        self.erase();
    }

    /// A seed is done; the text tells why it failed.
    pub fn done(&self, failure: Option<String>) {
        self.n_done.fetch_add(1, Ordering::Relaxed);
        if let Some(text) = failure {
            self.n_failed.fetch_add(1, Ordering::Relaxed);
            self.erase();
            self.write(&format!("{text}\n"));
        }
    }

    fn count(&self, of: &AtomicU64) -> u64 {
        of.load(Ordering::Relaxed)
    }

    fn erase(&self) {
        if self.is_terminal {
            self.write(ERASE);
        }
    }

    /// A reader that has gone does not end the sweep.
    fn write(&self, text: &str) {
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
}

fn line(n_done: u64, n_seeds: u64, n_failed: u64, passed: Duration) -> String {
    let left = n_seeds.saturating_sub(n_done);
    let eta = (n_done > 0).then(|| passed.as_secs_f64() * left as f64 / n_done as f64);
    let eta = eta.map_or_else(|| "?".to_owned(), |seconds| clock(seconds.round() as u64));
    let percent = 100.0 * n_done as f64 / n_seeds.max(1) as f64;
    format!(
        "{n_done} of {n_seeds} seeds ({percent:.1} %), {n_failed} failed, {} passed, {eta} left",
        clock(passed.as_secs())
    )
}

/// Hours, minutes and seconds.
fn clock(seconds: u64) -> String {
    format!("{}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_tells_what_is_left_at_the_speed_so_far() {
        let after = |n_done, s| line(n_done, 1_000_000, 2, Duration::from_secs(s));

        assert_eq!(after(250_000, 600), "250000 of 1000000 seeds (25.0 %), 2 failed, 0:10:00 passed, 0:30:00 left");
        assert_eq!(
            after(1_000_000, 5_025),
            "1000000 of 1000000 seeds (100.0 %), 2 failed, 1:23:45 passed, 0:00:00 left"
        );
        assert_eq!(after(0, 3), "0 of 1000000 seeds (0.0 %), 2 failed, 0:00:03 passed, ? left");
    }
}
