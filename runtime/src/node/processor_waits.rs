//! How long a rank has waited for a processor, as the kernel counts it.
//!
//! Only the thread that sends the heartbeats counts. Its state alone would not do: a thread that is runnable may run all the time,
//! and one that sleeps may have waited until a moment ago. The kernel counts, for each thread, the time that it has run and the time
//! that it was runnable without running; but it counts a wait only once the wait is over. So a runnable thread is taken to have
//! waited whenever it did not run, and any other one as long as the kernel has counted. A stopped thread has not waited: it
//! would not have run with a processor either.
//!
//! A group of processes that has used up its quota is covered: its threads stay runnable.

use phalanx_actors::rank::THREAD;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The waits of a process.
#[derive(Debug)]
pub(super) struct ProcessorWaits {
    /// Folder of the thread that sends the heartbeats; `None` if the system does not show it.
    thread: Option<PathBuf>,
    /// When the thread was last looked at, and what the kernel had counted.
    last: (Instant, Counts),
}

/// What the kernel has counted for a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    ran: Duration,
    /// Waits that are over.
    waited: Duration,
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runnable,
    Stopped,
    Other,
}

impl ProcessorWaits {
    /// The waits of this process, from now on.
    pub(super) fn of(pid: u32) -> ProcessorWaits {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let is_named =
            |folder: &PathBuf| fs::read_to_string(folder.join("comm")).is_ok_and(|name| name.trim() == THREAD);
        let thread = threads.map(|thread| thread.path()).find(is_named);
        let counts = thread.as_deref().and_then(counts).unwrap_or_default();
        ProcessorWaits { thread, last: (Instant::now(), counts) }
    }

    /// How long the process has waited since this was last called.
    pub(super) fn since_last(&mut self) -> Duration {
        let Some(thread) = &self.thread else { return Duration::ZERO };
        // It may have ended.
        let (Some(state), Some(counts)) = (state(thread), counts(thread)) else { return Duration::ZERO };
        let now = Instant::now();
        let (before, last) = std::mem::replace(&mut self.last, (now, counts));
        waited(now - before, last, counts, state)
    }
}

fn waited(passed: Duration, before: Counts, now: Counts, state: State) -> Duration {
    match state {
        State::Runnable => passed.saturating_sub(now.ran.saturating_sub(before.ran)),
        State::Other => now.waited.saturating_sub(before.waited).min(passed),
        State::Stopped => Duration::ZERO,
    }
}

fn state(thread: &Path) -> Option<State> {
    let text = fs::read_to_string(thread.join("stat")).ok()?;
    // The name in parentheses may contain anything.
    let letter = text.rsplit_once(')')?.1.trim_start().chars().next()?;
    Some(match letter {
        'R' => State::Runnable,
        'T' | 't' => State::Stopped,
        _ => State::Other,
    })
}

fn counts(thread: &Path) -> Option<Counts> {
    let text = fs::read_to_string(thread.join("schedstat")).ok()?;
    let mut fields = text.split_whitespace().map_while(|field| field.parse().ok()).map(Duration::from_nanos);
    Some(Counts { ran: fields.next()?, waited: fields.next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runnable_thread_waits_while_it_does_not_run_and_a_sleeping_one_as_long_as_the_kernel_counts() {
        let ms = Duration::from_millis;
        let counts = |ran, waited| Counts { ran: ms(ran), waited: ms(waited) };
        let before = counts(70, 30);
        for (state, now, expected) in [
            (State::Runnable, before, 500),
            (State::Runnable, counts(170, 30), 400),
            (State::Runnable, counts(570, 30), 0),
            (State::Runnable, counts(580, 30), 0),
            (State::Other, before, 0),
            (State::Other, counts(71, 430), 400),
            (State::Other, counts(71, 930), 500),
            (State::Stopped, before, 0),
            (State::Stopped, counts(71, 430), 0),
        ] {
            assert_eq!(waited(ms(500), before, now, state), ms(expected), "{state:?} {now:?}");
        }
    }

    #[test]
    fn system_shows_the_states_and_counts_of_threads() {
        let thread = PathBuf::from("/proc/thread-self");
        let other = std::thread::Builder::new().name("a) T (b".into()).spawn(std::thread::park).unwrap();
        let parked = loop {
            let threads = fs::read_dir("/proc/self/task").unwrap().flatten().map(|thread| thread.path());
            let name = |thread: &PathBuf| fs::read_to_string(thread.join("comm")).unwrap_or_default();
            let mut parked = threads.filter(|thread| name(thread).trim() == "a) T (b");
            match parked.next() {
                Some(parked) if state(&parked) == Some(State::Other) => break parked,
                _ => std::thread::yield_now(),
            }
        };

        assert_eq!(state(&thread), Some(State::Runnable));
        let before = counts(&thread).unwrap();
        let until = Instant::now() + Duration::from_millis(50);
        while Instant::now() < until {}
        let after = counts(&thread).unwrap();
        assert!(after.ran > before.ran, "{before:?} {after:?}");
        assert!(counts(&parked).is_some());
        other.thread().unpark();
        other.join().unwrap();
    }
}
