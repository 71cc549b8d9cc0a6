//! The watermark of a device: what its thread counts and shows, and any other thread may read at any time.
//!
//! One relaxed addition per instruction, one store per collective: the step does not notice.

use phalanx_strategies::elastic::progress::{At, Progress, Wait};
use phalanx_strategies::mesh::Axes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Shared by a device and whoever asks how it gets on. That of a device that nobody asks is empty, and costs nothing.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Option<Arc<Words>>);

#[derive(Debug, Default)]
struct Words {
    ticks: AtomicU64,
    at: AtomicU64,
}

/// That a device waits or reads files; over when dropped.
#[derive(Debug)]
#[must_use = "what is not kept is over at once"]
pub struct Doing<'a> {
    pulse: &'a Pulse,
    before: u64,
}

impl Pulse {
    /// Of a device that somebody asks.
    pub fn new() -> Pulse {
        Pulse(Some(Arc::default()))
    }

    /// The device gets on.
    pub fn tick(&self) {
        if let Some(words) = &self.0 {
            words.ticks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// It is at this until the guard is dropped.
    pub fn during(&self, at: At) -> Doing<'_> {
        let before = self.0.as_ref().map_or(0, |words| words.at.swap(encode(at), Ordering::Relaxed));
        self.tick();
        Doing { pulse: self, before }
    }

    /// Where it is.
    pub fn read(&self) -> Progress {
        let read = |words: &Arc<Words>| {
            let at = decode(words.at.load(Ordering::Relaxed));
            Progress { ticks: words.ticks.load(Ordering::Relaxed), at }
        };
        self.0.as_ref().map_or(Progress::default(), read)
    }
}

impl Drop for Doing<'_> {
    fn drop(&mut self) {
        if let Some(words) = &self.pulse.0 {
            words.at.store(self.before, Ordering::Relaxed);
        }
        self.pulse.tick();
    }
}

/// One word, so that it is never read half written.
fn encode(at: At) -> u64 {
    match at {
        At::Rests => 0,
        At::Computes => 1,
        At::Stores => 2,
        At::Waits(Wait { axes, number }) => 3 | (u64::from(u8::from(axes)) << 8) | (u64::from(number) << 32),
    }
}

fn decode(word: u64) -> At {
    match word as u8 {
        0 => At::Rests,
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
    fn what_a_device_is_at_is_shown_until_it_is_over_and_each_change_counts() {
        let pulse = Pulse::new();
        let wait = At::Waits(Wait { axes: Axes::of(&[Axis::DpShard, Axis::Tp]), number: u32::MAX });

        let computes = pulse.during(At::Computes);
        let waits = pulse.during(wait);
        let while_waiting = pulse.read();
        drop(waits);

        assert_eq!(while_waiting, Progress { ticks: 2, at: wait });
        assert_eq!(pulse.read(), Progress { ticks: 3, at: At::Computes });
        drop(computes);
        assert_eq!(pulse.read(), Progress { ticks: 4, at: At::Rests });
    }
}
