//! The job's status as a value, for the CLI and for JSON.

use super::super::devices::DeviceHealth;
use super::super::identity::{Generation, Incarnation, MemberId, NodeId, Step, Term, Worker};
use super::super::incident::Timeline;
use super::super::message::{Ending, MemberPhase, MemberReport, Requests, Unsaved};
use super::super::progress::At;
use super::{Activity, Coordinator, Phase};
use crate::elastic::checkpoint::Checkpoint;
use crate::mesh::{Axis, Mesh};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

/// The coordinator's view of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Term of the coordinator.
    pub term: Term,
    /// The latest world.
    pub generation: Generation,
    /// What the coordinator is doing.
    pub activity: Activity,
    /// Why no world is formed yet, or why the world is not the wanted one.
    pub blocked: Option<String>,
    /// Shape of the latest world that was formed.
    pub mesh: Option<Mesh>,
    /// Shape of the wanted world.
    pub wanted: Mesh,
    /// The latest step that is known to be committed; its state may be that of members that are gone.
    pub step: Step,
    /// Operator requests.
    pub requests: Requests,
    /// Number of requested checkpoints that are complete.
    pub n_saves: u64,
    /// Number of requested checkpoints that are answered by a failure.
    pub n_unsaved: u64,
    /// The latest checkpoint that could not be saved, unless a later one was.
    pub unsaved: Option<Unsaved>,
    /// All nodes that have ever reported.
    pub nodes: Vec<NodeStatus>,
    /// The latest closed incidents, oldest first.
    pub timelines: Vec<Timeline>,
    /// The latest complete checkpoint; step 0 is the initial weights.
    pub checkpoint: Checkpoint,
    /// Milliseconds since it became complete, or since this coordinator's term began if that was later: no newer state is
    /// durable since then.
    pub checkpoint_age_ms: u64,
    /// How the job ended, if it has.
    pub ending: Option<Ending>,
    /// Faults that do not stop training, such as files that cannot be written.
    pub faults: Vec<String>,
}

/// Status of one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Id of the node.
    pub node: NodeId,
    /// Whether its last report is older than the detection time.
    pub silent: bool,
    /// Whether it is draining.
    pub draining: bool,
    /// Whether it gets no rank for now, because another node cannot reach it.
    pub left_out: bool,
    /// Milliseconds since its last report.
    pub heard_ago_ms: u64,
    /// Its devices, also those that no rank uses.
    pub devices: Vec<DeviceHealth>,
    /// Its workers.
    pub ranks: Vec<RankStatus>,
}

/// Status of one rank process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Its slot.
    pub member: MemberId,
    /// Number of the process in that slot.
    pub incarnation: Incarnation,
    /// Its rank in the latest world.
    pub rank: Option<usize>,
    /// Mesh coordinate of that rank, by axis.
    pub coordinate: Option<BTreeMap<String, usize>>,
    /// Process id on its machine.
    pub pid: Option<u32>,
    /// Address at which peers reach its tensors.
    pub address: Option<SocketAddr>,
    /// Its device among those of its node, if the node has any.
    pub device: Option<u32>,
    /// The latest generation announced to it.
    pub generation: Generation,
    /// Phase of the member.
    pub phase: MemberPhase,
    /// The last step whose gradients it has contributed.
    pub entered: Step,
    /// The step of its state, if it has any.
    pub applied: Option<Step>,
    /// What its device is doing.
    pub at: At,
    /// Whether its heartbeats have stopped.
    pub hangs: bool,
    /// Whether it is a straggler: all others wait for it most of the time.
    pub slow: bool,
    /// Number of shards in memory that it trains.
    pub n_own: usize,
    /// Number of shards in memory that it keeps for other ranks.
    pub n_shadows: usize,
}

impl Coordinator {
    /// The status at this time.
    pub fn status(&self, now: Instant) -> Status {
        let record = &self.record;
        let world_plan = record.world_plan.as_deref();
        let mesh = world_plan.map(|world_plan| world_plan.mesh);
        let ranks: BTreeMap<Worker, usize> = world_plan
            .iter()
            .flat_map(|f| f.assignments.iter().enumerate())
            .map(|(rank, worker)| (*worker, rank))
            .collect();
        let nodes: Vec<NodeStatus> =
            self.membership.nodes().map(|node| self.node_status(now, node, mesh, &ranks)).collect();
        let unsaved = self.unsaved.as_ref().map(Unsaved::to_string);
        let faults = unsaved
            .into_iter()
            .chain(self.membership.nodes().flat_map(|node| self.membership.members(node)).filter_map(fault))
            .collect();
        Status {
            term: record.term,
            generation: record.generation,
            activity: self.activity(),
            blocked: self.blocked().map(|blocked| blocked.to_string()),
            mesh,
            wanted: self.policy.wanted,
            step: self.reached,
            requests: record.requests,
            n_saves: record.n_saves,
            n_unsaved: self.n_unsaved,
            unsaved: self.unsaved.clone(),
            nodes,
            timelines: self.timelines.iter().cloned().collect(),
            checkpoint: record.checkpoint,
            checkpoint_age_ms: now.saturating_duration_since(self.checkpoint_since).as_millis() as u64,
            ending: record.ending.clone(),
            faults,
        }
    }

    fn node_status(
        &self,
        now: Instant,
        node: NodeId,
        mesh: Option<Mesh>,
        ranks: &BTreeMap<Worker, usize>,
    ) -> NodeStatus {
        let slow = if let Phase::Running { watch, .. } = &self.phase { watch.slow } else { None };
        let worker = |member: &MemberReport| {
            let status = worker_status(member, mesh, ranks.get(&member.worker).copied());
            RankStatus { slow: slow == Some(member.worker), ..status }
        };
        let heard = self.membership.heard(node).unwrap_or(now);
        NodeStatus {
            node,
            silent: self.membership.is_silent(node),
            draining: self.drains(node),
            left_out: self.left_out.contains(&node),
            heard_ago_ms: now.saturating_duration_since(heard).as_millis() as u64,
            devices: self.membership.devices(node).to_vec(),
            ranks: self.membership.members(node).map(worker).collect(),
        }
    }
}

/// A member's fault, with its name.
fn fault(member: &MemberReport) -> Option<String> {
    member.fault.as_ref().map(|fault| format!("{}: {fault}", member.worker))
}

fn worker_status(member: &MemberReport, mesh: Option<Mesh>, rank: Option<usize>) -> RankStatus {
    let coordinate = mesh.zip(rank).map(|(mesh, rank)| {
        let at = mesh.coord(rank);
        Axis::ALL.into_iter().map(|axis| (axis.name().to_owned(), at.on(axis))).collect()
    });
    let own = mesh.zip(rank).map(|(mesh, rank)| super::super::shadow::Shard::of(&mesh, rank));
    let n_own = member.holds.iter().filter(|shard| Some(**shard) == own).count();
    RankStatus {
        member: member.worker.member,
        incarnation: member.worker.incarnation,
        rank,
        coordinate,
        pid: member.pid,
        address: member.address,
        device: member.device,
        generation: member.generation,
        phase: member.phase,
        entered: member.entered,
        applied: member.commit_state.applied.map(|version| version.step),
        at: member.progress.at,
        hangs: member.hangs,
        slow: false,
        n_own,
        n_shadows: member.holds.len() - n_own,
    }
}
