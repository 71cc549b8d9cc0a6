//! Progress of a rank's device, which distinguishes a slow rank from a stuck one, and a stuck rank from the ranks that
//! wait for it.
//!
//! Invariants:
//! - `PROGRESS-1` A device that waits for peers or for storage is never blamed.
//! - `PROGRESS-2` The duration of a step does not matter: a device that executes instructions makes progress.

use super::identity::Step;
use crate::mesh::Axes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Progress of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Increases with every instruction, collective and piece of state; only changes of the value are meaningful.
    pub ticks: u64,
    /// What the device is doing.
    pub at: At,
}

/// What a device is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum At {
    /// It has nothing to do.
    #[default]
    Idle,
    /// It computes.
    Computes,
    /// Waits in a collective that not all peers have entered.
    Waits(Wait),
    /// It reads or writes files.
    Stores,
}

/// A collective that a device waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Wait {
    /// Axes of its group; none for collectives of all ranks, such as the vote, and for pairs.
    pub axes: Axes,
    /// Its number on these axes in this step, from 0.
    pub number: u32,
}

/// How long each member of a world has made no progress.
#[derive(Clone, Debug, Default)]
pub struct Pauses<W: Ord> {
    beats: BTreeMap<W, Beat>,
    /// The longest pause from which a member recovered.
    longest: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Beat {
    ticks: u64,
    since: Instant,
    /// The applied step at the first observation.
    first: Option<Step>,
    /// Whether it has made progress since; the first pause is preparation.
    ticked: bool,
    /// Whether it has committed a step since.
    proven: bool,
}

/// How long a device may pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Before its first committed step in this world, while the duration of its instructions is unknown.
    pub first_step: Duration,
    /// Afterwards; or [`PAUSES`] times the longest pause seen, if that is longer.
    pub stuck: Duration,
}

/// A device counts as stuck after a pause `PAUSES` times as long as the longest earlier pause of any member.
pub const PAUSES: u32 = 4;

impl<W: Ord + Copy> Pauses<W> {
    /// A tracker without observations.
    pub fn new() -> Pauses<W> {
        Pauses { beats: BTreeMap::new(), longest: Duration::ZERO }
    }

    /// Records a member's progress and applied step; returns since when it has paused, if the pause is too long.
    pub fn observe(
        &mut self,
        now: Instant,
        who: W,
        progress: Progress,
        applied: Option<Step>,
        patience: &Patience,
    ) -> Option<Instant> {
        let new = Beat { ticks: progress.ticks, since: now, first: applied, ticked: false, proven: false };
        let beat = self.beats.entry(who).or_insert(new);
        beat.proven |= applied > beat.first;
        if beat.ticks != progress.ticks {
            if std::mem::replace(&mut beat.ticked, true) {
                self.longest = self.longest.max(now.saturating_duration_since(beat.since));
            }
            (beat.ticks, beat.since) = (progress.ticks, now);
        }
        let limit = if beat.proven { patience.stuck.max(self.longest * PAUSES) } else { patience.first_step };
        (now >= beat.since + limit).then_some(beat.since)
    }

    /// Restarts all pauses after the coordinator itself was suspended.
    pub fn forgive(&mut self, now: Instant) {
        self.beats.values_mut().for_each(|beat| beat.since = now);
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Idle => f.write_str("is idle"),
            At::Computes => f.write_str("computes"),
            At::Waits(wait) => write!(f, "waits for {wait}"),
            At::Stores => f.write_str("reads or writes files"),
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.axes == Axes::NONE {
            return f.write_str("all ranks");
        }
        write!(f, "collective #{} on {}", self.number, self.axes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience { first_step: Duration::from_secs(60), stuck: Duration::from_secs(5) };

    fn ticks(ticks: u64) -> Progress {
        Progress { ticks, at: At::Computes }
    }

    // PROGRESS-2
    #[test]
    fn step_of_any_length_is_no_pause_while_instructions_complete() {
        let start = Instant::now();
        let mut pauses = Pauses::new();

        let found: Vec<_> = (0..1_000)
            .filter_map(|s| pauses.observe(start + Duration::from_secs(s), 0, ticks(s), Some(Step(7)), &PATIENCE))
            .collect();

        assert_eq!(found, []);
    }

    #[test]
    fn pause_limit_follows_the_longest_earlier_pause() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut pauses = Pauses::new();
        let mut observe = |s, n, step| pauses.observe(at(s), 0, ticks(n), Some(Step(step)), &PATIENCE);

        assert_eq!(observe(0, 0, 7), None);
        assert_eq!(observe(59, 0, 7), None, "a first step includes preparation");
        assert_eq!(observe(60, 0, 7), Some(at(0)));
        assert_eq!(observe(61, 1, 7), None, "the device was only slow");
        assert_eq!(observe(71, 2, 8), None);
        assert_eq!(observe(71 + 4 * 10 - 1, 2, 8), None, "an earlier instruction took ten seconds");
        assert_eq!(observe(71 + 4 * 10, 2, 8), Some(at(71)));
    }

    #[test]
    fn proven_member_may_pause_for_the_configured_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pauses = Pauses::new();
        for (ms, n) in [(0, 0), (500, 1), (1_000, 2)] {
            assert_eq!(pauses.observe(at(ms), 0, ticks(n), Some(Step(n)), &PATIENCE), None);
        }

        assert_eq!(pauses.observe(at(5_999), 0, ticks(2), Some(Step(2)), &PATIENCE), None);
        assert_eq!(pauses.observe(at(6_000), 0, ticks(2), Some(Step(2)), &PATIENCE), Some(at(1_000)));
    }
}
