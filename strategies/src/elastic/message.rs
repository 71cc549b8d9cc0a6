//! Messages between nodes and the coordinator, and the coordinator's durable record.

use super::checkpoint::{Checkpoint, Part};
use super::commit::{CommitState, Version};
use super::copies::Difference;
use super::devices::DeviceHealth;
use super::identity::{Generation, Incarnation, JobId, NodeId, Step, Term, Worker};
use super::incident::Cause;
use super::inputs::Input;
use super::progress::Progress;
use super::recovery::Transfer;
use super::shadow::Shard;
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// A node's complete report, sent by its supervisor to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The job.
    pub job: JobId,
    /// The reporting node.
    pub node: NodeId,
    /// Incarnation of its supervisor.
    pub boot: Incarnation,
    /// Sequence number of the report since that start.
    pub number: u64,
    /// The latest desired state that it has accepted.
    pub desired_state: DesiredStateId,
    /// Whether the machine is about to be preempted.
    pub draining: bool,
    /// The largest number of consecutive failed starts in any slot: processes that ended before their first status
    /// report.
    pub n_failed_starts: u32,
    /// Its devices, at most [`DEVICES_MAX`](super::devices::DEVICES_MAX); none if its ranks use its processors.
    pub devices: Vec<DeviceHealth>,
    /// What it trains on and with, at most [`INPUTS_MAX`](super::inputs::INPUTS_MAX); none if no other node can join the job.
    pub inputs: Vec<Input>,
    /// Its workers.
    pub members: Vec<MemberReport>,
}

/// Status of one worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberReport {
    /// The worker.
    pub worker: Worker,
    /// Process id on its machine.
    pub pid: Option<u32>,
    /// Address at which peers reach its tensors, if any.
    pub address: Option<SocketAddr>,
    /// Its device among those of its node, if the node has any.
    pub device: Option<u32>,
    /// Whether its heartbeats to its supervisor have stopped.
    pub hangs: bool,
    /// The latest generation announced to it; it takes no part in earlier ones.
    pub generation: Generation,
    /// Its phase in that generation.
    pub phase: MemberPhase,
    /// The last step whose gradients it has contributed; a member that is behind delays the others.
    pub entered: Step,
    /// Progress of its device.
    pub progress: Progress,
    /// Set if its world cannot continue although the coordinator has not ended it.
    pub broken: Option<Broken>,
    /// The latest dispute about its state that a repeated step has settled.
    pub settled: Option<Settled>,
    /// Its committed and voted steps.
    pub commit_state: CommitState,
    /// Shards in its memory, all at the applied version.
    pub holds: Vec<Shard>,
    /// The latest checkpoint part that it has made durable.
    pub saved: Option<Part>,
    /// The latest checkpoint that its world could not save.
    pub unsaved: Option<Unsaved>,
    /// A permanent failure, which a restart would not cure; at most [`FAILURE_LEN_MAX`] bytes.
    pub failure: Option<String>,
    /// A fault that does not stop it, such as a full disk for its measurements; at most [`FAILURE_LEN_MAX`] bytes.
    pub fault: Option<String>,
}

/// A checkpoint that could not be saved; training goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unsaved {
    /// Its generation and step.
    pub of: Checkpoint,
    /// The error; at most [`FAILURE_LEN_MAX`] bytes.
    pub reason: String,
}

impl fmt::Display for Unsaved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the checkpoint of {} was not saved: {}", self.of.step, self.reason)
    }
}

/// One member's reason why its world cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Broken {
    /// The unreachable peer, if known.
    pub lost: Option<Worker>,
    /// The copies of state that differ, if that is the reason.
    pub corrupt: Option<Box<Difference>>,
    /// The step whose loss or gradient is not finite, if that is the reason.
    pub not_finite: Option<NotFinite>,
    /// The error; at most [`FAILURE_LEN_MAX`] bytes.
    pub reason: String,
}

/// A step whose loss or gradient is not finite, although all copies of the state agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotFinite {
    /// The step.
    pub step: Step,
    /// The rank whose own part of the loss is not finite, if the parts of all others are.
    pub suspect: Option<u32>,
}

/// The outcome of a dispute: its step is repeated, and all copies agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settled {
    /// The step.
    pub step: Step,
    /// Ranks of this world whose process deviated when the step was made first, at most
    /// [`CLAIMS_MAX`](super::copies::CLAIMS_MAX); none if unknown.
    pub suspects: Vec<u32>,
}

/// A step after which copies of state differed without a majority; its repetition will show which copy deviated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dispute {
    /// The step.
    pub step: Step,
    /// A tensor whose copies differed.
    pub tensor: String,
    /// Number of times that copies differed at this step.
    pub n_times: u32,
}

/// Text of a peer with its control characters escaped: it goes to terminals and logs.
pub fn printable(text: &str) -> String {
    let escaped = |c: char| if c.is_control() { c.escape_default().collect() } else { String::from(c) };
    text.chars().map(escaped).collect()
}

/// Maximum length of a failure reason, in bytes.
pub const FAILURE_LEN_MAX: usize = 512;

/// What a worker does in a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum MemberPhase {
    /// Stopped, or without a rank.
    Stopped,
    /// Without a rank; sends its state to members with a rank.
    Guest,
    /// Paused between two steps as requested; keeps its state for the next world.
    Paused,
    /// Has a rank and fetches its state.
    Healing,
    /// Has its state.
    Ready,
    /// Without a rank; catches up while the others train. It has caught up once it reports any state.
    CatchingUp,
    /// Trains.
    Running,
    /// Has finished the last step and is saving.
    Saving,
    /// Has finished the last step, and everything it had to save is durable.
    Done,
}

/// Position of a desired state in the sequence of all desired states. A coordinator never sends two different desired
/// states with one id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DesiredStateId {
    /// Term of the coordinator.
    pub term: Term,
    /// Generation of the world.
    pub generation: Generation,
    /// Stage of the world's life cycle.
    pub stage: Stage,
    /// Revision of the operator's requests; see [`Requests::revision`].
    pub revision: u64,
}

/// Life cycle of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stage {
    /// Leave every earlier generation and report the applied and voted steps.
    #[default]
    Stop,
    /// Join the world and fetch the state.
    Form,
    /// Train.
    Run,
    /// The job is over: release everything.
    End,
}

/// Requests of the operator or the coordinator to the members. Requests are never withdrawn, so the larger of two is
/// the later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Requests {
    /// Whether to stop the job after the current step.
    pub stop: bool,
    /// Number of checkpoints requested since the job began.
    pub save: u64,
    /// Generation of the world to pause between two steps, for a planned change.
    pub pause: Generation,
}

impl Requests {
    /// Number of changes made so far.
    pub fn revision(self) -> u64 {
        self.save + u64::from(self.stop) + self.pause.0
    }

    /// The union of both.
    #[must_use]
    pub fn and(self, other: Requests) -> Requests {
        let (stop, save) = (self.stop || other.stop, self.save.max(other.save));
        Requests { stop, save, pause: self.pause.max(other.pause) }
    }
}

/// The desired state of a node, as sent by the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DesiredState {
    /// The job.
    pub job: JobId,
    /// Its position in the sequence.
    pub id: DesiredStateId,
    /// Plan of the world; absent while the previous world is stopping.
    #[serde(with = "shared")]
    pub world_plan: Option<Arc<WorldPlan>>,
    /// Workers of this node to kill.
    pub evict: Vec<Worker>,
    /// Operator requests.
    pub requests: Requests,
    /// Incarnation of the supervisor that may exit, if this is a drained node that is no longer needed. A later start
    /// of the node is another incarnation.
    pub release: Option<Incarnation>,
    /// Set if the node may not take part.
    pub refused: Option<Refusal>,
}

/// Why a node may not take part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// Incarnation of the refused supervisor; a later start of the node may be accepted.
    pub boot: Incarnation,
    /// The reason, as a sentence.
    pub reason: String,
}

/// What the ranks of a job compute on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compute {
    /// Processors.
    Processors,
    /// Devices; the product name is that of the job's first one.
    Devices(String),
}

/// The plan of a world: members, ranks, and where their state comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorldPlan {
    /// Number of the world.
    pub generation: Generation,
    /// Shape of the world.
    pub mesh: Mesh,
    /// The worker of each rank, by position.
    pub assignments: Vec<Worker>,
    /// Members without a rank that catch up while the others train.
    pub catching_up: Vec<CatchUp>,
    /// Members without a rank that send state until the world runs.
    pub guests: Vec<Worker>,
    /// Data-plane addresses of the members, in the order of [`WorldPlan::members`].
    pub addresses: Vec<Option<SocketAddr>>,
    /// The base state.
    pub base: Version,
    /// Generation in which the votes for the base step were cast.
    pub voted_in: Generation,
    /// Shards that each rank holds: its own first, then shadows.
    pub holds: Vec<Vec<Shard>>,
    /// Transfers to each rank.
    pub transfers: Vec<Vec<Transfer>>,
    /// Number of requested checkpoints that are complete; this world writes the others.
    pub n_saves: u64,
    /// Whether the world only saves its base state and ends, because too few members will stay or a stop was requested.
    pub rests: bool,
    /// Steps whose copies of state are compared because they differed before.
    pub disputed: Vec<Step>,
}

impl WorldPlan {
    /// The rank of a worker, if it has one.
    pub fn rank_of(&self, worker: Worker) -> Option<usize> {
        self.assignments.iter().position(|assignment| *assignment == worker)
    }

    /// All members: ranks, then catching-up members, then guests.
    pub fn members(&self) -> impl Iterator<Item = Worker> {
        let catching_up = self.catching_up.iter().map(|catch_up| catch_up.worker);
        self.assignments.iter().copied().chain(catching_up).chain(self.guests.iter().copied())
    }

    /// The index of a worker among all members: its rank, or an index after all ranks.
    pub fn member_of(&self, worker: Worker) -> Option<u32> {
        self.members().position(|other| other == worker).map(|at| at as u32)
    }

    /// The catch-up entry of a worker, if it catches up.
    pub fn catch_up(&self, worker: Worker) -> Option<&CatchUp> {
        self.catching_up.iter().find(|catch_up| catch_up.worker == worker)
    }

    /// Mesh, rank and shards that a worker has or catches up for.
    pub fn assignment_of(&self, worker: Worker) -> Option<(Mesh, usize, &[Shard])> {
        let own = self.rank_of(worker).map(|rank| (self.mesh, rank, &self.holds[rank][..]));
        own.or_else(|| self.catch_up(worker).map(|catch_up| (catch_up.mesh, catch_up.rank, &catch_up.holds[..])))
    }
}

/// A member without a rank that catches up while the others train: see [`super::catch_up`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CatchUp {
    /// The worker.
    pub worker: Worker,
    /// The mesh of its future rank. It cuts the state as the current mesh does.
    pub mesh: Mesh,
    /// Its future rank in that mesh.
    pub rank: usize,
    /// Shards of that rank: its own first, then shadows.
    pub holds: Vec<Shard>,
    /// Transfers of the whole state, or none if it already has all of it.
    pub transfers: Vec<Transfer>,
}

/// The coordinator's durable record, written before any member that may outlive the coordinator acts on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Term that wrote the record.
    pub term: Term,
    /// The latest generation that may have been announced.
    pub generation: Generation,
    /// The latest world plan that may have been announced.
    #[serde(with = "shared")]
    pub world_plan: Option<Arc<WorldPlan>>,
    /// Whether that world has no durable decision to train, and so has committed nothing.
    pub idle: bool,
    /// The latest complete checkpoint that is known; the initial weights count as one.
    pub checkpoint: Checkpoint,
    /// The latest generation before this run: checkpoints up to it are those of earlier runs.
    #[serde(default)]
    pub began: Generation,
    /// Why the latest generation began, if it has not resumed training.
    pub cause: Option<Cause>,
    /// Operator requests.
    pub requests: Requests,
    /// Number of requested checkpoints that are complete.
    pub n_saves: u64,
    /// Nodes that the operator has drained.
    pub drained: BTreeSet<NodeId>,
    /// Nodes that the operator has declared gone, each with the latest incarnation that may not return (`QUORUM-4`).
    #[serde(default)]
    pub gone: BTreeMap<NodeId, Incarnation>,
    /// Whether a report has shown that the last world is a later one than the record knows of (`COORDINATOR-20`).
    #[serde(default)]
    pub unrecorded: bool,
    /// The mesh that the operator requested; the policy's mesh if absent.
    pub wanted: Option<Mesh>,
    /// What the ranks compute on, once a node has reported.
    #[serde(default)]
    pub compute: Option<Compute>,
    /// What the nodes train on and with, once a node has reported.
    #[serde(default)]
    pub inputs: Option<Vec<Input>>,
    /// Consecutive worlds that failed without committing a step.
    pub n_crashes: u32,
    /// State in memory of a lineage up to this one is not used: copies of it differed (`COORDINATOR-17`).
    #[serde(default)]
    pub corrupt: Generation,
    /// Disputes that are not settled.
    #[serde(default)]
    pub disputes: Vec<Dispute>,
    /// Why the job is about to fail, while it saves what is committed.
    #[serde(default)]
    pub failing: Option<String>,
    /// How the job ended, if it has.
    pub ending: Option<Ending>,
}

impl Record {
    /// The record from which an ended job continues: its checkpoint, without requests.
    #[must_use]
    pub fn reopened(self) -> Record {
        let Record { term, generation, checkpoint, .. } = self;
        Record { term, generation, checkpoint, began: generation, ..Record::default() }
    }
}

/// How a job ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All members were done.
    Finished,
    /// The job failed, for this reason.
    Failed(String),
}

/// Serializes the value behind an `Arc`.
mod shared {
    use super::WorldPlan;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub fn serialize<S: Serializer>(value: &Option<Arc<WorldPlan>>, to: S) -> Result<S::Ok, S::Error> {
        value.as_deref().serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Arc<WorldPlan>>, D::Error> {
        Ok(Option::<WorldPlan>::deserialize(from)?.map(Arc::new))
    }
}
