//! All timeouts of the control plane, derived from one: the time to detect a silent machine.
//!
//! Invariant:
//! - `TIMING-1` [`Timing::derive`] returns a value that passes [`Timing::check`]: a few lost heartbeats cause no false
//!   alarm, and no deadline expires before the event that it waits for can be detected.
//! - `TIMING-2` Clocks whose rates are within [`CLOCK_RATIO_MAX`] cause no false alarm. On the watching clock, the time from one
//!   heartbeat or renewal to the next, and until it is looked for, stays below the detection time and the lease.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How much faster than another machine's clock a clock may run. Clocks that run freely differ by less than 0.1 %, those of
/// busy virtual machines by some percent.
pub const CLOCK_RATIO_MAX: f64 = 1.5;

/// The timeouts. Fields may be set individually; [`Timing::check`] then verifies their relations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// A node that sends no report for this long is lost.
    pub detection_time: Duration,
    /// Interval of a node's reports.
    pub heartbeat: Duration,
    /// Interval of a rank's heartbeats to its supervisor, whose overhead is negligible.
    pub life: Duration,
    /// A rank that sends its supervisor no heartbeat for this long hangs.
    pub suspicion: Duration,
    /// Time for members to stop once they are told to.
    pub stop_grace: Duration,
    /// Interval of the coordinator's lease renewals.
    pub lease_renewal: Duration,
    /// A standby takes over when the lease was not renewed for this long.
    pub lease: Duration,
    /// Time that a new coordinator waits for reports from its predecessor's world.
    pub takeover_grace: Duration,
    /// A device is stuck after a pause of this length, or of [`PAUSES`](super::progress::PAUSES) times the longest earlier
    /// pause of any member, if that is longer.
    pub stuck: Duration,
    /// Longest pause of a device before its first committed step in a world.
    pub first_step: Duration,
    /// A world is formed again if no unready member fetches a piece of its state for this long.
    pub heal: Duration,
    /// Time to wait for state that only a silent node holds, before it is read from disk.
    pub disk_patience: Duration,
    /// Crashes in a row, or failed starts, end the job only if they have lasted this long.
    pub crash_patience: Duration,
}

/// Two timeouts that do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be at least {required:?} ({why}), found {found:?}")]
pub struct TimingError {
    /// Name of the field.
    pub what: &'static str,
    /// Its smallest valid value.
    pub required: Duration,
    /// Its value.
    pub found: Duration,
    /// Reason for the smallest valid value.
    pub why: &'static str,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing::derive(Duration::from_secs(1))
    }
}

impl Timing {
    /// The timeouts that belong to a detection time (default 1 s).
    pub fn derive(detection_time: Duration) -> Timing {
        Timing {
            detection_time,
            heartbeat: detection_time * 3 / 10,
            life: detection_time * 3 / 20,
            suspicion: detection_time / 2,
            stop_grace: detection_time,
            lease_renewal: detection_time / 4,
            lease: detection_time,
            takeover_grace: detection_time,
            stuck: detection_time * 5,
            first_step: detection_time * 600,
            heal: detection_time * 60,
            disk_patience: detection_time * 5,
            crash_patience: detection_time * 30,
        }
    }

    /// Checks that the timeouts fit each other (`TIMING-1`).
    ///
    /// # Errors
    /// The first timeout that is too short, and why.
    pub fn check(&self) -> Result<(), TimingError> {
        let millisecond = Duration::from_millis(1);
        let rules = [
            ("heartbeat", self.heartbeat, millisecond, "timers are no finer than a millisecond"),
            ("life", self.life, millisecond, "timers are no finer than a millisecond"),
            (
                "detection_time",
                self.detection_time,
                self.heartbeat * 3,
                "three heartbeats in a row must be lost before a node counts as lost",
            ),
            (
                "suspicion",
                self.suspicion,
                self.life * 3,
                "three heartbeats must be missing before a rank counts as hung",
            ),
            (
                "stop_grace",
                self.stop_grace,
                self.suspicion + self.heartbeat,
                "a hung rank must be detected before the others are blamed",
            ),
            ("lease", self.lease, self.lease_renewal * 3, "three renewals must fail before a standby takes over"),
            (
                "takeover_grace",
                self.takeover_grace,
                self.heartbeat * 3,
                "every node must be able to report to a new coordinator before it counts as lost",
            ),
            ("stuck", self.stuck, self.detection_time + self.stop_grace, "lost nodes must be detected first"),
            ("first_step", self.first_step, self.stuck, "preparing a step takes longer than any step after it"),
            ("heal", self.heal, self.detection_time * 2, "a lost source must be detected first"),
            ("disk_patience", self.disk_patience, self.detection_time, "a silent node must have a chance to return"),
            ("crash_patience", self.crash_patience, self.suspicion, "the first pause after a crash must fit in"),
        ];
        match rules.into_iter().find(|(_, found, required, _)| found < required) {
            Some((what, found, required, why)) => Err(TimingError { what, required, found, why }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // TIMING-1
    #[test]
    fn derived_timeouts_fit_each_other() {
        for ms in [10, 50, 333, 1_000, 30_000] {
            assert_eq!(Timing::derive(Duration::from_millis(ms)).check(), Ok(()), "detection time of {ms} ms");
        }
    }

    // TIMING-2
    #[test]
    fn heartbeats_and_renewals_of_slow_clocks_arrive_in_time_on_fast_ones() {
        let timing = Timing::default();
        let on_a_fast_clock = |interval: Duration| interval.mul_f64(CLOCK_RATIO_MAX);

        assert!(on_a_fast_clock(timing.heartbeat) * 2 < timing.detection_time);
        assert!(on_a_fast_clock(timing.lease_renewal) + timing.lease_renewal < timing.lease);
        let shortest = Timing { lease: timing.lease_renewal * 3, detection_time: timing.heartbeat * 3, ..timing };
        assert!(on_a_fast_clock(shortest.heartbeat) < shortest.detection_time);
        assert!(on_a_fast_clock(shortest.lease_renewal) + shortest.lease_renewal < shortest.lease);
    }

    #[test]
    fn detection_time_below_the_resolution_of_timers_is_rejected() {
        let err = Timing::derive(Duration::from_millis(5)).check().unwrap_err();

        assert_eq!(err.what, "life");
    }

    #[test]
    fn error_names_the_timeout_that_is_too_short() {
        let good = Timing::default();
        let short = Duration::from_millis(1);
        let bad = [
            ("detection_time", Timing { detection_time: short, ..good }),
            ("suspicion", Timing { suspicion: short, ..good }),
            ("stop_grace", Timing { stop_grace: short, ..good }),
            ("lease", Timing { lease: short, ..good }),
            ("takeover_grace", Timing { takeover_grace: short, ..good }),
            ("stuck", Timing { stuck: short, ..good }),
            ("first_step", Timing { first_step: short, ..good }),
            ("heal", Timing { heal: short, ..good }),
            ("disk_patience", Timing { disk_patience: short, ..good }),
            ("crash_patience", Timing { crash_patience: short, ..good }),
        ];

        for (name, timing) in bad {
            let err = timing.check().unwrap_err();
            assert_eq!(err.what, name);
            assert!(err.to_string().starts_with(&format!("{name} must be at least ")), "{err}");
        }
    }
}
