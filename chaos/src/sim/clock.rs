//! The clocks of machines: each has a rate of its own, may stop, and has a time of day that may be set.
//!
//! The machines of `phalanx_strategies` are given instants of their own machine's clock only. The time of day must not matter to
//! them.

use super::Sim;
use crate::environment::Machine;
use crate::mutation::Mutation;
use std::time::{Duration, Instant};

/// One clock; all times in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Virtual time, and the time of this clock, at its last change.
    changed: u64,
    then: u64,
    percent: u64,
    stopped: bool,
    /// What was added to the time of day.
    time_of_day: i64,
}

/// Time of each clock when the simulation starts: more than it may be set back.
const FIRST: u64 = 2 * 3_600 * 1_000_000;

impl Clock {
    /// A clock that is right.
    pub fn new() -> Clock {
        Clock { changed: 0, then: FIRST, percent: 100, stopped: false, time_of_day: 0 }
    }

    /// Its time at a virtual time.
    fn at(&self, now: u64) -> u64 {
        let since = if self.stopped { 0 } else { now - self.changed };
        self.then + since * self.percent / 100
    }

    /// The first virtual time at which it shows this time, unless it is stopped.
    fn when(&self, time: u64) -> Option<u64> {
        let remaining = time.saturating_sub(self.then) * 100;
        (!self.stopped).then(|| self.changed + remaining.div_ceil(self.percent))
    }

    fn change(&mut self, now: u64, percent: u64, stopped: bool) {
        *self = Clock { changed: now, then: self.at(now), percent, stopped, ..*self };
    }
}

/// All clocks.
#[derive(Debug)]
pub struct Clocks {
    pub nodes: Vec<Clock>,
    pub candidates: Vec<Clock>,
}

impl Sim {
    fn clock(&mut self, machine: Machine) -> &mut Clock {
        match machine {
            Machine::Node(node) => &mut self.clocks.nodes[node.0 as usize],
            Machine::Candidate(i) => &mut self.clocks.candidates[i],
        }
    }

    /// The time of a node's clock.
    pub(super) fn node_now(&self, i: usize) -> Instant {
        self.instant_of(&self.clocks.nodes[i])
    }

    /// The time of a coordinator's clock.
    pub(super) fn candidate_now(&self, i: usize) -> Instant {
        self.instant_of(&self.clocks.candidates[i])
    }

    fn instant_of(&self, clock: &Clock) -> Instant {
        self.start + Duration::from_micros(clock.at(self.now).saturating_add_signed(self.shown(clock)))
    }

    /// The virtual time at which a clock shows this instant.
    pub(super) fn when(&self, clock: &Clock, due: Instant) -> Option<u64> {
        let due = due.saturating_duration_since(self.start).as_micros() as u64;
        clock.when(due.saturating_add_signed(-self.shown(clock)))
    }

    fn shown(&self, clock: &Clock) -> i64 {
        if self.is(Mutation::TrustTimeOfDay) { clock.time_of_day } else { 0 }
    }

    /// Lets a clock run at another rate.
    pub(super) fn set_rate(&mut self, machine: Machine, percent: u64) {
        let now = self.now;
        let clock = self.clock(machine);
        clock.change(now, percent.max(1), clock.stopped);
        self.arm_machine(machine);
    }

    /// Stops a clock, or lets it go on.
    pub(super) fn set_stopped(&mut self, machine: Machine, stopped: bool) {
        let now = self.now;
        let clock = self.clock(machine);
        if clock.stopped != stopped {
            clock.change(now, clock.percent, stopped);
            self.arm_machine(machine);
        }
    }

    /// Changes the time of day.
    pub(super) fn set_time_of_day(&mut self, machine: Machine, by_s: i64) {
        // Twice an hour back would be before the first instant.
        self.clock(machine).time_of_day = by_s.clamp(-3_600, 3_600) * 1_000_000;
    }

    /// Timers are armed at virtual times, which another rate changes.
    fn arm_machine(&mut self, machine: Machine) {
        match machine {
            Machine::Node(node) => self.arm_node(node.0 as usize),
            Machine::Candidate(i) => self.arm(i),
        }
    }
}
