//! The progress counter of a device, written by its thread and readable by any thread.
//!
//! Its overhead is one relaxed addition per instruction and one store per collective, which is not measurable.

use phalanx_strategies::elastic::progress::{At, Progress, Wait};
use phalanx_strategies::mesh::Axes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Shared by a device and the threads that observe or stop it. Empty, and without overhead, if the device is not observed.
#[derive(Clone, Debug, Default)]
pub struct ProgressCounter {
    counters: Option<Arc<Counters>>,
    /// The generation of the device's work, unless the work is valid in every world.
    world: Option<u64>,
}

#[derive(Debug, Default)]
struct Counters {
    ticks: AtomicU64,
    at: AtomicU64,
    /// Worlds before this generation have ended.
    left: AtomicU64,
}

/// A guard that marks the device as waiting or storing until it is dropped.
#[derive(Debug)]
#[must_use = "dropping the guard ends the activity"]
pub struct ActivityGuard<'a> {
    progress_counter: &'a ProgressCounter,
    before: u64,
}

impl ProgressCounter {
    /// A counter for an observed device.
    pub fn new() -> ProgressCounter {
        ProgressCounter { counters: Some(Arc::default()), world: None }
    }

    /// The same counter, for work that belongs to this world only.
    #[must_use]
    pub fn of_world(&self, generation: u64) -> ProgressCounter {
        ProgressCounter { world: Some(generation), ..self.clone() }
    }

    /// The same counter, for work that belongs to no particular world.
    #[must_use]
    pub fn of_any_world(&self) -> ProgressCounter {
        ProgressCounter { world: None, ..self.clone() }
    }

    /// Marks all worlds before this generation as ended.
    pub fn leave(&self, generation: u64) {
        if let Some(counters) = &self.counters {
            counters.left.fetch_max(generation, Ordering::Relaxed);
        }
    }

    /// Whether the device works for a world that has ended.
    pub fn is_left(&self) -> bool {
        let left = |(counters, world): (&Arc<Counters>, u64)| counters.left.load(Ordering::Relaxed) > world;
        self.counters.as_ref().zip(self.world).is_some_and(left)
    }

    /// Counts one unit of progress.
    pub fn tick(&self) {
        if let Some(counters) = &self.counters {
            counters.ticks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Marks what the device is doing until the guard is dropped.
    pub fn during(&self, at: At) -> ActivityGuard<'_> {
        let before = self.counters.as_ref().map_or(0, |counters| counters.at.swap(encode(at), Ordering::Relaxed));
        self.tick();
        ActivityGuard { progress_counter: self, before }
    }

    /// The device's current progress.
    pub fn read(&self) -> Progress {
        let read = |counters: &Arc<Counters>| {
            let at = decode(counters.at.load(Ordering::Relaxed));
            Progress { ticks: counters.ticks.load(Ordering::Relaxed), at }
        };
        self.counters.as_ref().map_or(Progress::default(), read)
    }
}

impl Drop for ActivityGuard<'_> {
    fn drop(&mut self) {
        if let Some(counters) = &self.progress_counter.counters {
            counters.at.store(self.before, Ordering::Relaxed);
        }
        self.progress_counter.tick();
    }
}

/// Encodes into one word, so that a read is never torn.
fn encode(at: At) -> u64 {
    match at {
        At::Idle => 0,
        At::Computes => 1,
        At::Stores => 2,
        At::Waits(Wait { axes, number }) => 3 | (u64::from(u8::from(axes)) << 8) | (u64::from(number) << 32),
    }
}

fn decode(word: u64) -> At {
    match word as u8 {
        0 => At::Idle,
        1 => At::Computes,
        2 => At::Stores,
        _ => At::Waits(Wait { axes: Axes::from((word >> 8) as u8), number: (word >> 32) as u32 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::mesh::Axis;

    #[test]
    fn leaving_a_world_ends_work_of_earlier_worlds_only() {
        let progress_counter = ProgressCounter::new();
        let (third, fourth, any) =
            (progress_counter.of_world(3), progress_counter.of_world(4), progress_counter.of_world(3).of_any_world());

        progress_counter.leave(4);
        progress_counter.leave(2);

        assert_eq!([&third, &fourth, &any].map(ProgressCounter::is_left), [true, false, false]);
        assert!(!ProgressCounter::default().of_world(1).is_left(), "an unobserved device never leaves a world");
    }

    #[test]
    fn activity_is_readable_until_its_guard_is_dropped_and_each_change_counts() {
        let progress_counter = ProgressCounter::new();
        let wait = At::Waits(Wait { axes: Axes::of(&[Axis::DpShard, Axis::Tp]), number: u32::MAX });

        let computes = progress_counter.during(At::Computes);
        let waits = progress_counter.during(wait);
        let while_waiting = progress_counter.read();
        drop(waits);

        assert_eq!(while_waiting, Progress { ticks: 2, at: wait });
        assert_eq!(progress_counter.read(), Progress { ticks: 3, at: At::Computes });
        drop(computes);
        assert_eq!(progress_counter.read(), Progress { ticks: 4, at: At::Idle });
    }
}
