//! Signs that the device of a rank gets on, and what it is at: how a rank that is slow is told from one that hangs, and one
//! that hangs from those that wait for it.
//!
//! Invariants:
//! - `G-1` Who waits for others is never to blame, nor who waits for storage.
//! - `G-2` How long a step takes does not matter: a device that goes on with its instructions gets on.

use super::identity::Step;
use crate::mesh::Axes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// The watermark of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Grows with every instruction, every collective and every piece of state; its value means nothing else.
    pub ticks: u64,
    /// What it is at.
    pub at: At,
}

/// What a device is at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum At {
    /// It has nothing to do.
    #[default]
    Rests,
    /// It computes.
    Computes,
    /// It has entered a collective that not all others have.
    Waits(Wait),
    /// It reads or writes files.
    Stores,
}

/// A collective that is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Wait {
    /// Over which axes; none for those of all ranks, such as the vote, and of pairs.
    pub axes: Axes,
    /// Its number on these axes in this step, from 0.
    pub number: u32,
}

/// How long members of a world have not got on, as seen from outside.
#[derive(Clone, Debug, Default)]
pub struct Pulses<W: Ord> {
    beats: BTreeMap<W, Beat>,
    /// The longest pause after which any member went on.
    longest: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Beat {
    ticks: u64,
    since: Instant,
    /// The step that it had applied at first.
    first: Option<Step>,
    /// Whether it has gone on since: the first pause is that of preparation.
    ticked: bool,
    /// Whether it has committed a step since.
    proven: bool,
}

/// How long a device may pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Until it has committed a step in this world: nothing is known yet of how long its instructions take.
    pub first_step: Duration,
    /// Afterwards, or [`PAUSES`] times the longest pause that was seen, whichever is longer.
    pub stuck: Duration,
}

/// A pause so many times as long as any before is no pause any more.
pub const PAUSES: u32 = 4;

impl<W: Ord + Copy> Pulses<W> {
    /// Nobody has been seen yet.
    pub fn new() -> Pulses<W> {
        Pulses { beats: BTreeMap::new(), longest: Duration::ZERO }
    }

    /// A look at a member that has this watermark and has applied this step; returns since when it has paused for too
    /// long, if it has.
    pub fn look(
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

    /// Nobody could be seen for a while: all get as long as they had again.
    pub fn forgive(&mut self, now: Instant) {
        self.beats.values_mut().for_each(|beat| beat.since = now);
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Rests => f.write_str("rests"),
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

    // G-2
    #[test]
    fn a_step_of_any_length_is_no_pause_while_instructions_go_on() {
        let start = Instant::now();
        let mut pulses = Pulses::new();

        let found: Vec<_> = (0..1_000)
            .filter_map(|s| pulses.look(start + Duration::from_secs(s), 0, ticks(s), Some(Step(7)), &PATIENCE))
            .collect();

        assert_eq!(found, []);
    }

    #[test]
    fn a_pause_is_measured_by_those_before_it() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut pulses = Pulses::new();
        let mut look = |s, n, step| pulses.look(at(s), 0, ticks(n), Some(Step(step)), &PATIENCE);

        assert_eq!(look(0, 0, 7), None);
        assert_eq!(look(59, 0, 7), None, "its first step may take as long as it takes to prepare");
        assert_eq!(look(60, 0, 7), Some(at(0)));
        assert_eq!(look(61, 1, 7), None, "it had only been slow");
        assert_eq!(look(71, 2, 8), None);
        assert_eq!(look(71 + 4 * 10 - 1, 2, 8), None, "an instruction took ten seconds before");
        assert_eq!(look(71 + 4 * 10, 2, 8), Some(at(71)));
    }

    #[test]
    fn one_that_has_proven_itself_may_pause_for_the_configured_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pulses = Pulses::new();
        for (ms, n) in [(0, 0), (500, 1), (1_000, 2)] {
            assert_eq!(pulses.look(at(ms), 0, ticks(n), Some(Step(n)), &PATIENCE), None);
        }

        assert_eq!(pulses.look(at(5_999), 0, ticks(2), Some(Step(2)), &PATIENCE), None);
        assert_eq!(pulses.look(at(6_000), 0, ticks(2), Some(Step(2)), &PATIENCE), Some(at(1_000)));
    }
}
