//! The watermark of a device: what its thread counts and shows, and any other thread may read at any time.
//!
//! One relaxed addition per instruction, one store per collective: the step does not notice.

use phalanx_strategies::elastic::progress::{At, Progress, Wait};
use phalanx_strategies::mesh::Axes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Shared by a device and whoever asks how it gets on, or tells it to stop. That of a device that nobody asks is empty, and
/// costs nothing.
#[derive(Clone, Debug, Default)]
pub struct Pulse {
    words: Option<Arc<Words>>,
    /// The world for which the device works, unless its work is good for any.
    world: Option<u64>,
}

#[derive(Debug, Default)]
struct Words {
    ticks: AtomicU64,
    at: AtomicU64,
    /// Earlier worlds than this one are over.
    left: AtomicU64,
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
        Pulse { words: Some(Arc::default()), world: None }
    }

    /// The same while the device works for this world only.
    #[must_use]
    pub fn of_world(&self, generation: u64) -> Pulse {
        Pulse { world: Some(generation), ..self.clone() }
    }

    /// The same for work that is good for any world.
    #[must_use]
    pub fn of_any_world(&self) -> Pulse {
        Pulse { world: None, ..self.clone() }
    }

    /// Earlier worlds than this one are over: nobody needs what is computed there.
    pub fn leave(&self, generation: u64) {
        if let Some(words) = &self.words {
            words.left.fetch_max(generation, Ordering::Relaxed);
        }
    }

    /// Whether nobody needs what the device works at.
    pub fn is_left(&self) -> bool {
        let left = |(words, world): (&Arc<Words>, u64)| words.left.load(Ordering::Relaxed) > world;
        self.words.as_ref().zip(self.world).is_some_and(left)
    }

    /// The device gets on.
    pub fn tick(&self) {
        if let Some(words) = &self.words {
            words.ticks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// It is at this until the guard is dropped.
    pub fn during(&self, at: At) -> Doing<'_> {
        let before = self.words.as_ref().map_or(0, |words| words.at.swap(encode(at), Ordering::Relaxed));
        self.tick();
        Doing { pulse: self, before }
    }

    /// Where it is.
    pub fn read(&self) -> Progress {
        let read = |words: &Arc<Words>| {
            let at = decode(words.at.load(Ordering::Relaxed));
            Progress { ticks: words.ticks.load(Ordering::Relaxed), at }
        };
        self.words.as_ref().map_or(Progress::default(), read)
    }
}

impl Drop for Doing<'_> {
    fn drop(&mut self) {
        if let Some(words) = &self.pulse.words {
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
    fn work_for_a_world_that_is_over_is_not_needed_and_other_work_is() {
        let pulse = Pulse::new();
        let (third, fourth, any) = (pulse.of_world(3), pulse.of_world(4), pulse.of_world(3).of_any_world());

        pulse.leave(4);
        pulse.leave(2);

        assert_eq!([&third, &fourth, &any].map(Pulse::is_left), [true, false, false]);
        assert!(!Pulse::default().of_world(1).is_left(), "nobody tells it");
    }

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
