//! Events of a job: one JSON object per line in `events.jsonl`.

use actix::Message;
use phalanx_strategies::elastic::checkpoint::Checkpoint;
use phalanx_strategies::elastic::identity::{Generation, NodeId, Step, Term, Worker};
use phalanx_strategies::elastic::incident::{Cause, Culprit, Phase, Timeline, Why};
use phalanx_strategies::elastic::message::{Ending, WorldPlan};
use phalanx_strategies::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// An event and its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Milliseconds since 1970, by the clock of the coordinator's machine.
    pub unix_ms: u64,
    /// Term of the coordinator.
    pub term: Term,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

/// The kinds of events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum What {
    /// A coordinator has started its term.
    Leads,
    /// A coordinator has stopped while the job continues.
    StepsDown,
    /// A new world has been formed.
    World(WorldEvent),
    /// An incident is over: training has resumed.
    Incident(IncidentLine),
    /// A checkpoint is complete.
    Checkpoint(Checkpoint),
    /// A checkpoint could not be saved; training goes on.
    NotSaved {
        /// Its generation and step.
        checkpoint: Checkpoint,
        /// The error, as a sentence.
        reason: String,
    },
    /// The job is over.
    Ended {
        /// How the job ended.
        ending: Ending,
    },
    /// A node may not take part.
    NodeRefused {
        /// The node.
        node: NodeId,
        /// The reason, as a sentence.
        reason: String,
    },
    /// A node takes part although its devices differ from those of the others.
    NodeDiffers {
        /// The node.
        node: NodeId,
        /// The difference, as a sentence.
        text: String,
    },
    /// The store of lease and record has not answered for the time of a lease.
    StoreSilent {
        /// The error, as a sentence.
        error: String,
    },
    /// The store answers again.
    StoreAnswers {
        /// Milliseconds since the first request without an answer.
        silent_ms: u64,
    },
    /// All reachable nodes have confirmed the end of the job.
    NodesNotified,
}

/// A new world, as an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorldEvent {
    /// Generation of the world.
    pub generation: Generation,
    /// Mesh of the world.
    pub mesh: Mesh,
    /// The step from which it continues.
    pub step: Step,
    /// The worker of each rank, in rank order.
    pub ranks: Vec<Worker>,
    /// Members without a rank that catch up while the ranks train.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub catching_up: Vec<Worker>,
    /// Members without a rank that send state.
    pub guests: Vec<Worker>,
}

/// A finished incident.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IncidentLine {
    /// The world that trains again.
    pub generation: Generation,
    /// The root cause, as a sentence.
    pub cause: String,
    /// Details.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The worker at its origin, if any.
    pub worker: Option<Worker>,
    /// The node at its origin, if any.
    pub node: Option<NodeId>,
    /// Kind of the root cause.
    pub why: Why,
    /// Further causes before training resumed.
    pub also: Vec<String>,
    /// Duration of each phase.
    pub phases_ms: PhasesMs,
    /// From the last heartbeat to resumed training.
    pub total_ms: f64,
    /// The first step that the new world commits.
    pub first_step: Step,
    /// Committed steps that the new world repeats, because their state is lost.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub n_repeated: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde passes references
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// How long each phase of an incident took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhasesMs {
    /// From the last heartbeat to detection.
    pub detect: f64,
    /// Until the end of the generation was durable.
    pub agree: f64,
    /// Until all members had left it.
    pub abort: f64,
    /// Until the next world was decided and durable.
    pub regroup: f64,
    /// Until every member had its state.
    pub heal: f64,
    /// Until members trained.
    pub resume: f64,
}

impl Message for Event {
    type Result = ();
}

impl Event {
    /// An event at the current time.
    pub fn now(term: Term, what: What) -> Event {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Event { unix_ms: since.as_millis() as u64, term, what }
    }

    /// The event as a line of `events.jsonl`, without the newline.
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).expect("an event has string keys only")
    }
}

impl From<&Timeline> for IncidentLine {
    fn from(timeline: &Timeline) -> IncidentLine {
        let Cause { culprit, why } = timeline.cause;
        let (worker, node) = match culprit {
            Culprit::Worker(worker) => (Some(worker), Some(worker.member.node)),
            Culprit::Node(node) => (None, Some(node)),
            Culprit::Job => (None, None),
        };
        let of = |phase: Phase| ms(timeline.phases[phase as usize]);
        IncidentLine {
            generation: timeline.generation,
            cause: timeline.cause.to_string(),
            detail: timeline.detail.clone(),
            worker,
            node,
            why,
            also: timeline.also.iter().map(Cause::to_string).collect(),
            phases_ms: PhasesMs {
                detect: of(Phase::Detect),
                agree: of(Phase::Agree),
                abort: of(Phase::Abort),
                regroup: of(Phase::Regroup),
                heal: of(Phase::Heal),
                resume: of(Phase::Resume),
            },
            total_ms: ms(timeline.total()),
            first_step: timeline.step.next(),
            n_repeated: timeline.n_repeated,
        }
    }
}

impl From<&WorldPlan> for WorldEvent {
    fn from(world_plan: &WorldPlan) -> WorldEvent {
        WorldEvent {
            generation: world_plan.generation,
            mesh: world_plan.mesh,
            step: world_plan.base.step,
            ranks: world_plan.assignments.clone(),
            catching_up: world_plan.catching_up.iter().map(|catch_up| catch_up.worker).collect(),
            guests: world_plan.guests.clone(),
        }
    }
}

fn ms(duration: Duration) -> f64 {
    // Microsecond precision keeps the lines short.
    duration.as_micros() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::elastic::identity::{Incarnation, MemberId};

    fn timeline() -> Timeline {
        let worker = Worker { member: MemberId { node: NodeId(1), slot: 0 }, incarnation: Incarnation(7) };
        Timeline {
            generation: Generation(4),
            step: Step(41),
            cause: Cause { culprit: Culprit::Worker(worker), why: Why::Died },
            detail: None,
            also: vec![Cause { culprit: Culprit::Node(NodeId(2)), why: Why::Silent }],
            phases: [1, 2, 4, 8, 16, 32].map(Duration::from_millis),
            n_repeated: 7,
        }
    }

    #[test]
    fn incident_is_one_line_that_names_the_first_cause_and_every_phase() {
        let event = Event { unix_ms: 5, term: Term(2), what: What::Incident(IncidentLine::from(&timeline())) };

        let line = event.to_line();

        assert!(!line.contains('\n'));
        let json: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(json["event"], "incident");
        assert_eq!(json["cause"], "node 1 slot 0 (incarnation 7) died");
        assert_eq!(json["also"][0], "node 2 fell silent");
        assert_eq!((json["phases_ms"]["heal"].as_f64(), json["total_ms"].as_f64()), (Some(16.0), Some(63.0)));
        assert_eq!((json["first_step"].as_u64(), json["node"].as_u64()), (Some(42), Some(1)));
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
    }

    #[test]
    fn each_kind_of_event_survives_its_line() {
        let kinds = [
            What::Leads,
            What::StepsDown,
            What::Checkpoint(Checkpoint::default()),
            What::NotSaved { checkpoint: Checkpoint::default(), reason: "no space left".into() },
            What::Ended { ending: Ending::Failed("loss is NaN".into()) },
            What::Ended { ending: Ending::Finished },
            What::NodeRefused { node: NodeId(3), reason: "no GPU".into() },
            What::NodeDiffers { node: NodeId(3), text: "another model".into() },
            What::StoreSilent { error: "s3://bucket/run could not be read".into() },
            What::StoreAnswers { silent_ms: 75_000 },
            What::NodesNotified,
        ];
        for what in kinds {
            let event = Event { unix_ms: 1, term: Term(1), what };

            assert_eq!(serde_json::from_str::<Event>(&event.to_line()).unwrap(), event);
        }
    }
}
