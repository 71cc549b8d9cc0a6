//! What travels between nodes and the coordinator, and what the coordinator writes down.

use super::commit::{Promise, Version};
use super::identity::{Generation, Incarnation, JobId, NodeId, Step, Term, Worker};
use super::incident::Cause;
use super::recovery::Transfer;
use super::shadow::Shard;
use super::snapshot::{Checkpoint, Part};
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// All that a node knows, from its supervisor to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The job.
    pub job: JobId,
    /// Who reports.
    pub node: NodeId,
    /// Which start of its supervisor.
    pub boot: Incarnation,
    /// Number of the report since that start.
    pub number: u64,
    /// The latest order that it has taken up.
    pub order: OrderId,
    /// Whether the machine is about to be taken away.
    pub draining: bool,
    /// Its workers.
    pub members: Vec<MemberReport>,
}

/// What a worker is at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberReport {
    /// Who.
    pub worker: Worker,
    /// Whether it gives its supervisor signs of life.
    pub hangs: bool,
    /// The latest generation that it has been told of; it takes part in no earlier one any more.
    pub generation: Generation,
    /// What it does in that generation.
    pub phase: MemberPhase,
    /// The last step whose gradients it has handed to the others; who is behind here keeps the others waiting.
    pub entered: Step,
    /// How far it is.
    pub promise: Promise,
    /// State that it has in memory, all of the step of its promise.
    pub holds: Vec<Shard>,
    /// The latest part of a checkpoint that it has made durable.
    pub saved: Option<Part>,
}

/// What a worker does in a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemberPhase {
    /// Nothing: it has stopped, or has no seat.
    Stopped,
    /// It has a seat and fetches its state.
    Healing,
    /// It has its state.
    Ready,
    /// It trains.
    Running,
}

/// Position of an order in the sequence of all orders. A coordinator never gives two orders of one id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OrderId {
    /// Of the coordinator.
    pub term: Term,
    /// Of the world.
    pub generation: Generation,
    /// Of the world's life.
    pub stage: Stage,
}

/// The life of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stage {
    /// Leave every earlier generation and say how far you are.
    #[default]
    Stop,
    /// Take your seats and fetch your state.
    Form,
    /// Train.
    Run,
}

/// What the coordinator wants of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The job.
    pub job: JobId,
    /// Which order.
    pub id: OrderId,
    /// The world; absent while it is to stop.
    #[serde(with = "shared")]
    pub formation: Option<Arc<Formation>>,
    /// Workers of this node to be killed.
    pub evict: Vec<Worker>,
}

/// A world and how it comes to its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Formation {
    /// Its number.
    pub generation: Generation,
    /// Its shape.
    pub mesh: Mesh,
    /// Who sits where; a rank is a position.
    pub seats: Vec<Worker>,
    /// The state from which it goes on.
    pub base: Version,
    /// In which generation the votes for that state's last step were cast.
    pub voted_in: Generation,
    /// What each rank shall hold: its own shard first, then the shadows of others.
    pub holds: Vec<Vec<Shard>>,
    /// What each rank fetches.
    pub transfers: Vec<Vec<Transfer>>,
}

impl Formation {
    /// The seat of a worker, if it has one.
    pub fn rank_of(&self, worker: Worker) -> Option<usize> {
        self.seats.iter().position(|seat| *seat == worker)
    }
}

/// What a coordinator must know of its predecessors; durable before anybody acts on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Whose record it is.
    pub term: Term,
    /// The latest generation that anybody may have been told of.
    pub generation: Generation,
    /// The latest world that anybody may have been told of.
    #[serde(with = "shared")]
    pub formation: Option<Arc<Formation>>,
    /// The latest complete checkpoint; the initial weights count as one.
    pub checkpoint: Checkpoint,
    /// Why the latest generation was begun, if it has not resumed.
    pub cause: Option<Cause>,
}

/// Serialises what is behind a shared pointer as if it were not.
mod shared {
    use super::Formation;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub fn serialize<S: Serializer>(value: &Option<Arc<Formation>>, to: S) -> Result<S::Ok, S::Error> {
        value.as_deref().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Arc<Formation>>, D::Error> {
        Ok(Option::<Formation>::deserialize(from)?.map(Arc::new))
    }
}
