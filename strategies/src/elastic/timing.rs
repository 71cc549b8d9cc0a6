//! All timeouts of the control plane, derived from one: how fast a silent machine shall be noticed.
//!
//! Invariant:
//! - `TIMING-1` What [`Timing::derive`] returns passes [`Timing::check`]: no false alarm from a few lost heartbeats,
//!   and no deadline that ends before what it waits for can be noticed.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The timeouts. Fields may be set individually; [`Timing::check`] then verifies their relations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// A node that said nothing for so long is lost.
    pub detection_time: Duration,
    /// Interval of a node's reports.
    pub heartbeat: Duration,
    /// A rank gives its own supervisor a heartbeat so often; that costs next to nothing.
    pub life: Duration,
    /// A rank that gave its own supervisor no heartbeat for so long hangs.
    pub suspicion: Duration,
    /// Members that were told to stop have so long to do it.
    pub stop_grace: Duration,
    /// The coordinator renews its lease so often.
    pub lease_renewal: Duration,
    /// A standby takes over when the lease was not renewed for so long.
    pub lease: Duration,
    /// A new coordinator waits so long for the reports of a world that it did not form.
    pub takeover_grace: Duration,
    /// A device that does not get on for so long, nor for some times the longest pause before, is stuck.
    pub stuck: Duration,
    /// The same until its first step in a world is committed.
    pub first_step: Duration,
    /// A member that fetches no piece of its state for so long does not heal: its world is formed anew.
    pub heal: Duration,
    /// State that only a silent node has is waited for so long before it is read from disk; nodes that could not reach each
    /// other are tried again after so long.
    pub disk_patience: Duration,
}

/// Two timeouts that do not fit each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be at least {required:?} ({why}), found {found:?}")]
pub struct TimingError {
    /// Name of the field.
    pub what: &'static str,
    /// Its least value.
    pub required: Duration,
    /// Its value.
    pub found: Duration,
    /// Where the least value comes from.
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
            life: detection_time / 10,
            suspicion: detection_time / 2,
            stop_grace: detection_time,
            lease_renewal: detection_time / 5,
            lease: detection_time,
            takeover_grace: detection_time,
            stuck: detection_time * 5,
            first_step: detection_time * 600,
            heal: detection_time * 60,
            disk_patience: detection_time * 5,
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
                "three heartbeats in a row must be lost before a node is called lost",
            ),
            ("suspicion", self.suspicion, self.life * 3, "three heartbeats must fail before a rank hangs"),
            (
                "stop_grace",
                self.stop_grace,
                self.suspicion + self.heartbeat,
                "a rank that hangs must be noticed before the others are blamed",
            ),
            ("lease", self.lease, self.lease_renewal * 3, "three renewals must fail before a standby takes over"),
            (
                "takeover_grace",
                self.takeover_grace,
                self.heartbeat * 3,
                "a new coordinator must hear each node before it calls one lost",
            ),
            ("stuck", self.stuck, self.detection_time + self.stop_grace, "lost nodes must be noticed first"),
            ("first_step", self.first_step, self.stuck, "preparing a step takes longer than any step after it"),
            ("heal", self.heal, self.detection_time * 2, "a lost source must be noticed first"),
            ("disk_patience", self.disk_patience, self.detection_time, "a silent node must have a chance to return"),
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

    #[test]
    fn a_detection_time_below_the_resolution_of_timers_is_refused() {
        let err = Timing::derive(Duration::from_millis(5)).check().unwrap_err();

        assert_eq!(err.what, "life");
    }

    #[test]
    fn too_short_timeout_is_named_in_one_sentence() {
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
        ];

        for (name, timing) in bad {
            let err = timing.check().unwrap_err();
            assert_eq!(err.what, name);
            assert!(err.to_string().starts_with(&format!("{name} must be at least ")), "{err}");
        }
    }
}
