//! What travels between nodes and the coordinator, and what the coordinator writes down.

use super::commit::{Promise, Version};
use super::identity::{Generation, Incarnation, JobId, NodeId, Step, Term, Worker};
use super::incident::Cause;
use super::progress::Progress;
use super::recovery::Transfer;
use super::shadow::Shard;
use super::snapshot::{Checkpoint, Part};
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::SocketAddr;
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
    /// How many processes in a row have ended before their first word, in the place where there were most.
    pub n_stillborn: u32,
    /// Its workers.
    pub members: Vec<MemberReport>,
}

/// What a worker is at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberReport {
    /// Who.
    pub worker: Worker,
    /// The process, as the kernel of its machine calls it.
    pub pid: Option<u32>,
    /// Where its peers reach its tensors, if they can.
    pub address: Option<SocketAddr>,
    /// Whether it has ceased to give its supervisor signs of life.
    pub hangs: bool,
    /// The latest generation that it has been told of; it takes part in no earlier one any more.
    pub generation: Generation,
    /// What it does in that generation.
    pub phase: MemberPhase,
    /// The last step whose gradients it has handed to the others; who is behind here keeps the others waiting.
    pub entered: Step,
    /// Whether its device gets on.
    pub progress: Progress,
    /// That its world cannot go on, though it was not told to leave it.
    pub broken: Option<Broken>,
    /// How far it is.
    pub promise: Promise,
    /// State that it has in memory, all of the step of its promise.
    pub holds: Vec<Shard>,
    /// The latest part of a checkpoint that it has made durable.
    pub saved: Option<Part>,
    /// Why it cannot go on and no successor could; at most [`FAILURE_LEN_MAX`] bytes.
    pub failure: Option<String>,
}

/// Why a world cannot go on, in the eyes of one member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Broken {
    /// Whom it cannot reach, if that is known.
    pub lost: Option<Worker>,
    /// What it found; at most [`FAILURE_LEN_MAX`] bytes.
    pub reason: String,
}

/// Bound of a sentence in which a member says why it, or its world, cannot go on.
pub const FAILURE_LEN_MAX: usize = 512;

/// What a worker does in a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemberPhase {
    /// Nothing: it has stopped, or has no seat.
    Stopped,
    /// It has no seat and sends its state to those who have.
    Guest,
    /// It has left its world between two steps, as was wished, and keeps its state for the next one.
    Paused,
    /// It has a seat and fetches its state.
    Healing,
    /// It has its state.
    Ready,
    /// It has no seat and catches up while the others train; once it holds anything, it has caught up.
    Learning,
    /// It trains.
    Running,
    /// It has finished the last step and makes durable what is not.
    Saving,
    /// It has finished the last step, and all that it had to save is durable.
    Done,
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
    /// Of the operator's wishes; see [`Wishes::revision`].
    pub revision: u64,
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
    /// The job is over: let go of everything.
    End,
}

/// What the operator, or the coordinator, wants of the members. Wishes are never withdrawn, so the larger of two is the later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Wishes {
    /// Whether the job shall end after a step, as if that were the last.
    pub stop: bool,
    /// How many checkpoints were asked for since the job began.
    pub save: u64,
    /// The world of this generation, if it still trains, is to come to rest between two steps: another follows by choice.
    pub pause: Generation,
}

impl Wishes {
    /// Counts the changes of wishes.
    pub fn revision(self) -> u64 {
        self.save + u64::from(self.stop) + self.pause.0
    }

    /// All that either of the two asks for.
    #[must_use]
    pub fn and(self, other: Wishes) -> Wishes {
        let (stop, save) = (self.stop || other.stop, self.save.max(other.save));
        Wishes { stop, save, pause: self.pause.max(other.pause) }
    }
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
    /// What the operator wants.
    pub wishes: Wishes,
    /// The supervisor that may go, if it is that of a drained node of which nothing is needed any more. A later start of
    /// the node is another supervisor.
    pub release: Option<Incarnation>,
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
    /// Who has no seat yet and catches up while the others train.
    pub learners: Vec<Learner>,
    /// Who has no seat and sends state to those who have, until the world runs.
    pub guests: Vec<Worker>,
    /// Where tensors of the members are reached, in the order of [`Formation::members`].
    pub addresses: Vec<Option<SocketAddr>>,
    /// The state from which it goes on.
    pub base: Version,
    /// In which generation the votes for that state's last step were cast.
    pub voted_in: Generation,
    /// What each rank shall hold: its own shard first, then the shadows of others.
    pub holds: Vec<Vec<Shard>>,
    /// What each rank fetches.
    pub transfers: Vec<Vec<Transfer>>,
    /// How many of the checkpoints that were asked for are complete; the world owes the others.
    pub n_saves: u64,
    /// Whether it does not train, but makes the state that it begins from durable and ends: too few members will stay.
    pub rests: bool,
}

impl Formation {
    /// The seat of a worker, if it has one.
    pub fn rank_of(&self, worker: Worker) -> Option<usize> {
        self.seats.iter().position(|seat| *seat == worker)
    }

    /// All who take part: the seats, then the learners, then the guests.
    pub fn members(&self) -> impl Iterator<Item = Worker> {
        let learners = self.learners.iter().map(|learner| learner.worker);
        self.seats.iter().copied().chain(learners).chain(self.guests.iter().copied())
    }

    /// The number of a worker among all who take part: its rank, or behind all ranks.
    pub fn member_of(&self, worker: Worker) -> Option<u32> {
        self.members().position(|other| other == worker).map(|at| at as u32)
    }

    /// What a worker catches up for, if it does.
    pub fn learner(&self, worker: Worker) -> Option<&Learner> {
        self.learners.iter().find(|learner| learner.worker == worker)
    }

    /// The mesh, the rank and the shards of the seat that a worker has, or for which it catches up.
    pub fn seat_of(&self, worker: Worker) -> Option<(Mesh, usize, &[Shard])> {
        let own = self.rank_of(worker).map(|rank| (self.mesh, rank, &self.holds[rank][..]));
        own.or_else(|| self.learner(worker).map(|learner| (learner.mesh, learner.rank, &learner.holds[..])))
    }
}

/// A member without a seat that catches up while the others train: see [`super::learner`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Learner {
    /// Who.
    pub worker: Worker,
    /// The mesh in which it is to have a seat. It cuts the state as that of the world does.
    pub mesh: Mesh,
    /// Its seat there.
    pub rank: usize,
    /// What it shall hold there: its own shard first, then the shadows of others.
    pub holds: Vec<Shard>,
    /// Which of the seats send that: all of it, or nothing if it has all of it.
    pub transfers: Vec<Transfer>,
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
    /// Whether nobody has been told to train in that world: then it has committed nothing.
    pub idle: bool,
    /// The latest complete checkpoint; the initial weights count as one.
    pub checkpoint: Checkpoint,
    /// Why the latest generation was begun, if it has not resumed.
    pub cause: Option<Cause>,
    /// What the operator wants of the members.
    pub wishes: Wishes,
    /// How many of the checkpoints that were asked for are complete.
    pub n_saves: u64,
    /// Nodes that the operator has drained.
    pub drained: BTreeSet<NodeId>,
    /// The mesh that the operator has asked for; that of the policy if absent.
    pub wanted: Option<Mesh>,
    /// Worlds in a row that ended by something that broke and had committed no new step.
    pub n_crashes: u32,
    /// How the job ended, if it has.
    pub ending: Option<Ending>,
}

impl Record {
    /// The record of the same job if it is to go on after its end: from its checkpoint, and as if nothing had been asked
    /// of it.
    #[must_use]
    pub fn reopened(self) -> Record {
        let Record { term, generation, checkpoint, .. } = self;
        Record { term, generation, checkpoint, ..Record::default() }
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All members were done.
    Finished,
    /// It could not go on, and why.
    Failed(String),
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
