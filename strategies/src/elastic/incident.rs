//! Incidents: the root cause, and the duration of each recovery phase.
//!
//! Invariants:
//! - `INCIDENT-1` An incident has one first cause, from the earliest report; causes that follow until the incident is
//!   over are listed beside it.
//! - `INCIDENT-2` The phases' durations add up to the time from the last sign of health to the resumption.

use super::identity::{Generation, NodeId, Step, Worker};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::{Duration, Instant};

/// The root cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cause {
    /// Its origin.
    pub culprit: Culprit,
    /// What happened.
    pub why: Why,
}

/// The origin of an incident.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Culprit {
    /// A rank process.
    Worker(Worker),
    /// A machine.
    Node(NodeId),
    /// No single worker or node.
    Job,
}

/// What began an incident.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Why {
    /// The job starts.
    Started,
    /// The process has exited, as reported by its supervisor.
    Died,
    /// No report of the machine arrived for the detection time.
    Silent,
    /// The process is alive but sends no heartbeat.
    Hangs,
    /// Its device has failed, as reported by the device's driver; its supervisor ends the process.
    DeviceFailed,
    /// Its device is stuck or slow while others wait for it.
    Straggles,
    /// No member makes progress.
    Stuck,
    /// Other members lost their connection to it, while its supervisor still reports.
    Unreachable,
    /// Its machine is draining.
    Drains,
    /// Enough members for a larger mesh are present.
    Grows,
    /// The operator requested another mesh.
    Resized,
    /// The coordinator died and its world did not survive.
    Succession,
    /// The job is about to fail, and saves what is committed first.
    Fails,
    /// Copies of the state differ: a bit has flipped in one of them.
    Corrupted,
    /// A loss or gradient is not finite, although the copies of the state agree.
    NotFinite,
}

impl Why {
    /// Whether this is a failure, as opposed to a planned change.
    pub const fn is_crash(self) -> bool {
        matches!(
            self,
            Why::Died
                | Why::Silent
                | Why::Hangs
                | Why::DeviceFailed
                | Why::Straggles
                | Why::Stuck
                | Why::Unreachable
                | Why::Corrupted
                | Why::NotFinite
        )
    }
}

/// Phases of an incident, in order. A second failure returns the incident to an earlier phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// From the last heartbeat to detection.
    Detect,
    /// Until the end of the generation is durable.
    Agree,
    /// Until all members have left it.
    Abort,
    /// Until the next world is decided and durable.
    Regroup,
    /// Until every member has its state.
    Heal,
    /// Until members train.
    Resume,
}

impl Phase {
    /// All, in order.
    pub const ALL: [Phase; 6] = [Phase::Detect, Phase::Agree, Phase::Abort, Phase::Regroup, Phase::Heal, Phase::Resume];
}

/// A closed incident.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// The world that trains again.
    pub generation: Generation,
    /// The base step of that world; the next step is the first that it commits.
    pub step: Step,
    /// The first cause (`INCIDENT-1`).
    pub cause: Cause,
    /// Details of the first cause that has any; they begin with "then" if that is a later one.
    #[serde(default)]
    pub detail: Option<String>,
    /// Causes that followed, up to [`ALSO_MAX`].
    pub also: Vec<Cause>,
    /// Time in each of [`Phase::ALL`].
    pub phases: [Duration; 6],
    /// Steps that are known to have been committed and are repeated, because their state is lost.
    #[serde(default)]
    pub n_repeated: u64,
}

impl Timeline {
    /// From the last sign of health to the resumption (`INCIDENT-2`).
    pub fn total(&self) -> Duration {
        self.phases.iter().sum()
    }
}

/// Largest number of causes listed beside the first one.
pub const ALSO_MAX: usize = 64;

/// An open incident.
#[derive(Clone, Debug)]
pub struct Incident {
    cause: Cause,
    detail: Option<String>,
    also: Vec<Cause>,
    phase: Phase,
    since: Instant,
    phases: [Duration; 6],
    n_repeated: u64,
}

impl Incident {
    /// Opens an incident; `healthy` is when the culprit was last known to be healthy.
    pub fn new(now: Instant, healthy: Instant, cause: Cause) -> Incident {
        let mut incident = Incident {
            cause,
            detail: None,
            also: vec![],
            phase: Phase::Detect,
            since: healthy,
            phases: Default::default(),
            n_repeated: 0,
        };
        incident.enter(now, Phase::Agree);
        incident
    }

    /// The first cause.
    pub fn cause(&self) -> Cause {
        self.cause
    }

    /// Adds details of the first cause.
    #[must_use]
    pub fn because(self, detail: Option<String>) -> Incident {
        Incident { detail, ..self }
    }

    /// Adds details of a cause that followed, unless an earlier one has some.
    pub fn explain(&mut self, detail: Option<String>) {
        self.detail = self.detail.take().or_else(|| detail.map(|detail| format!("then {detail}")));
    }

    /// Adds a cause that followed the first one (`INCIDENT-1`).
    pub fn also(&mut self, cause: Cause) {
        if cause != self.cause && self.also.len() < ALSO_MAX && !self.also.contains(&cause) {
            self.also.push(cause);
        }
    }

    /// A world begins from a checkpoint, and repeats this many steps.
    pub fn repeats(&mut self, n_steps: u64) {
        self.n_repeated += n_steps;
    }

    /// Enters a phase.
    pub fn enter(&mut self, now: Instant, phase: Phase) {
        self.phases[self.phase as usize] += now.saturating_duration_since(self.since);
        (self.phase, self.since) = (phase, now);
    }

    /// Closes the incident: a world trains again, from this step.
    pub fn close(mut self, now: Instant, generation: Generation, step: Step) -> Timeline {
        self.enter(now, Phase::Resume);
        let Incident { cause, detail, also, phases, n_repeated, .. } = self;
        Timeline { generation, step, cause, detail, also, phases, n_repeated }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.culprit {
            Culprit::Worker(worker) => write!(f, "{worker} ")?,
            Culprit::Node(node) => write!(f, "{node} ")?,
            Culprit::Job => f.write_str("the job ")?,
        }
        f.write_str(match self.why {
            Why::Started => "started",
            Why::Died => "died",
            Why::Silent => "fell silent",
            Why::Hangs => "hangs",
            Why::DeviceFailed => "has a failing device",
            Why::Straggles => "straggles",
            Why::Stuck => "is stuck",
            Why::Unreachable if self.culprit == Culprit::Job => "lost a connection",
            Why::Unreachable => "cannot be reached by others",
            Why::Drains => "is drained",
            Why::Grows => "grows",
            Why::Resized => "is resized",
            Why::Succession => "has a new coordinator",
            Why::Fails => "saves what is committed and fails",
            Why::NotFinite if self.culprit == Culprit::Job => "has a loss or gradient that is not finite",
            Why::NotFinite => "has a loss that is not finite",
            Why::Corrupted if self.culprit == Culprit::Job => "has copies of state that differ",
            Why::Corrupted => "has corrupted state",
        })
    }
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.generation, self.cause)?;
        if let Some(detail) = &self.detail {
            write!(f, ": {detail}")?;
        }
        if !self.also.is_empty() {
            write!(f, " (and {} more)", self.also.len())?;
        }
        if self.n_repeated > 0 {
            write!(f, "; repeating {} steps from {}", self.n_repeated, self.step)?;
        }
        for (phase, duration) in Phase::ALL.iter().zip(self.phases) {
            let name = format!("{phase:?}").to_lowercase();
            write!(f, " · {name} {:.1} ms", duration.as_secs_f64() * 1e3)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // INCIDENT-1, INCIDENT-2
    #[test]
    fn first_cause_is_kept_and_phases_add_up() {
        let start = Instant::now();
        let ms = |n| start + Duration::from_millis(n);
        let died = Cause { culprit: Culprit::Node(NodeId(1)), why: Why::Died };
        let later = Cause { culprit: Culprit::Node(NodeId(2)), why: Why::Silent };

        let mut incident = Incident::new(ms(10), ms(4), died);
        incident.enter(ms(12), Phase::Abort);
        for detail in [None, Some("out of memory"), Some("aborted")] {
            incident.also(later);
            incident.explain(detail.map(str::to_owned));
        }
        incident.enter(ms(20), Phase::Heal);
        incident.enter(ms(25), Phase::Abort);
        incident.enter(ms(26), Phase::Resume);
        let timeline = incident.close(ms(30), Generation(5), Step(7));

        assert_eq!(timeline.cause, died);
        assert_eq!(timeline.also, [later]);
        assert_eq!(timeline.detail.as_deref(), Some("then out of memory"));
        assert_eq!(timeline.total(), Duration::from_millis(26));
        assert_eq!(timeline.phases[Phase::Abort as usize], Duration::from_millis(9));
        assert!(
            timeline.to_string().contains("node 1 died: then out of memory (and 1 more) · detect 6.0 ms"),
            "{timeline}"
        );
    }
}
