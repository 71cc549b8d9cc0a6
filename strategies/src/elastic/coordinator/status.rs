//! What a job is doing, as a value for people and programs.

use super::super::identity::{Generation, Incarnation, MemberId, NodeId, Step, Term, Worker};
use super::super::incident::Timeline;
use super::super::message::{Ending, MemberPhase, MemberReport, Wishes};
use super::super::progress::At;
use super::super::snapshot::Checkpoint;
use super::{Activity, Coordinator, Phase};
use crate::mesh::{Axis, Mesh};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

/// All that a coordinator knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Which coordinator.
    pub term: Term,
    /// The latest world.
    pub generation: Generation,
    /// What is being done.
    pub activity: Activity,
    /// Why no world is formed yet, or not the one that is wanted.
    pub blocked: Option<String>,
    /// Shape of the latest world that was formed.
    pub mesh: Option<Mesh>,
    /// Shape of the world that is wanted.
    pub wanted: Mesh,
    /// The latest step that all members are known to have applied.
    pub step: Step,
    /// What the operator wants of the members.
    pub wishes: Wishes,
    /// All nodes that were ever heard of.
    pub nodes: Vec<NodeStatus>,
    /// The latest incidents that are over, oldest first.
    pub timelines: Vec<Timeline>,
    /// The latest complete checkpoint; step 0 is the initial weights.
    pub checkpoint: Checkpoint,
    /// How the job ended, if it has.
    pub ending: Option<Ending>,
}

/// What is known of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Which.
    pub node: NodeId,
    /// Whether nothing was heard of it for too long.
    pub silent: bool,
    /// Whether it is to be left.
    pub draining: bool,
    /// Whether it gets no seat for now, since another node cannot reach it.
    pub left_out: bool,
    /// How long ago it was last heard of.
    pub heard_ago_ms: u64,
    /// Its workers.
    pub workers: Vec<WorkerStatus>,
}

/// What is known of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// Its place.
    pub member: MemberId,
    /// Which process of that place.
    pub incarnation: Incarnation,
    /// Its seat in the latest world.
    pub rank: Option<usize>,
    /// Where that is, by axis.
    pub coordinate: Option<BTreeMap<String, usize>>,
    /// The process, as the kernel of its machine calls it.
    pub pid: Option<u32>,
    /// Where its tensors are reached.
    pub address: Option<SocketAddr>,
    /// The latest generation that it has been told of.
    pub generation: Generation,
    /// What it does.
    pub phase: MemberPhase,
    /// The last step whose gradients it has handed to the others.
    pub entered: Step,
    /// The step of its state, if it has any.
    pub applied: Option<Step>,
    /// What its device is at.
    pub at: At,
    /// Whether it gives no sign of life.
    pub hangs: bool,
    /// Whether all others wait for it most of the time.
    pub slow: bool,
    /// Shards that it trains and has in memory.
    pub n_own: usize,
    /// Shards that it keeps for others.
    pub n_shadows: usize,
}

impl Coordinator {
    /// All that is known now.
    pub fn status(&self, now: Instant) -> Status {
        let record = &self.record;
        let formation = record.formation.as_deref();
        let mesh = formation.map(|formation| formation.mesh);
        let ranks: BTreeMap<Worker, usize> =
            formation.iter().flat_map(|f| f.seats.iter().enumerate()).map(|(rank, worker)| (*worker, rank)).collect();
        let nodes: Vec<NodeStatus> =
            self.membership.nodes().map(|node| self.node_status(now, node, mesh, &ranks)).collect();
        let seated = nodes.iter().flat_map(|node| &node.workers).filter(|worker| worker.rank.is_some());
        let base = formation.map(|formation| formation.base.step).unwrap_or_default();
        Status {
            term: record.term,
            generation: record.generation,
            activity: self.activity(),
            blocked: self.blocked().map(|blocked| blocked.to_string()),
            mesh,
            wanted: self.policy.wanted,
            step: seated.filter_map(|worker| worker.applied).min().unwrap_or_default().max(base),
            wishes: record.wishes,
            nodes,
            timelines: self.timelines.iter().cloned().collect(),
            checkpoint: record.checkpoint,
            ending: record.ending.clone(),
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
            WorkerStatus { slow: slow == Some(member.worker), ..status }
        };
        let heard = self.membership.heard(node).unwrap_or(now);
        NodeStatus {
            node,
            silent: self.membership.is_silent(node),
            draining: self.drains(node),
            left_out: self.left_out.contains(&node),
            heard_ago_ms: now.saturating_duration_since(heard).as_millis() as u64,
            workers: self.membership.members(node).map(worker).collect(),
        }
    }
}

fn worker_status(member: &MemberReport, mesh: Option<Mesh>, rank: Option<usize>) -> WorkerStatus {
    let coordinate = mesh.zip(rank).map(|(mesh, rank)| {
        let at = mesh.coord(rank);
        Axis::ALL.into_iter().map(|axis| (axis.name().to_owned(), at.on(axis))).collect()
    });
    let own = mesh.zip(rank).map(|(mesh, rank)| super::super::shadow::Shard::of(&mesh, rank));
    let n_own = member.holds.iter().filter(|shard| Some(**shard) == own).count();
    WorkerStatus {
        member: member.worker.member,
        incarnation: member.worker.incarnation,
        rank,
        coordinate,
        pid: member.pid,
        address: member.address,
        generation: member.generation,
        phase: member.phase,
        entered: member.entered,
        applied: member.promise.applied.map(|version| version.step),
        at: member.progress.at,
        hangs: member.hangs,
        slow: false,
        n_own,
        n_shadows: member.holds.len() - n_own,
    }
}
