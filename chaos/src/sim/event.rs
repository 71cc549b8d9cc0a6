//! Events of the simulation and their queue.

use crate::plan::Fault;
use phalanx_strategies::elastic::checkpoint::{Checkpoint, Part};
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::coordinator::newest_checkpoint::Listing;
use phalanx_strategies::elastic::copies::Difference;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, Step, Term, Worker};
use phalanx_strategies::elastic::message::{DesiredState, MemberReport, Record, Report, Requests};
use phalanx_strategies::elastic::recovery::Transfer;
use phalanx_strategies::elastic::succession::Lease;
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Instant;

/// An event. Nodes and candidates are given by index.
#[derive(Clone, Debug)]
pub enum Event {
    /// A machine starts.
    NodeStarts { node: usize },
    /// A supervisor's timer fires.
    NodeTimer { node: usize, boot: Incarnation },
    /// A desired state arrives at a node.
    DesiredStateArrives { node: usize, desired_state: DesiredState },
    /// A process has started.
    WorkerStarts { worker: Worker },
    /// A process has exited; the kernel notifies its supervisor.
    WorkerExited { worker: Worker },
    /// A rank's status report arrives at its supervisor.
    StatusReportArrives { status_report: Box<MemberReport> },
    /// A machine is taken away.
    NodeDies { node: usize, back_after_ms: u64 },
    /// A coordinator process starts.
    CandidateStarts { candidate: usize },
    /// A lasting fault is over.
    FaultEnds { fault: Fault },
    /// A message comes that is not for its receiver.
    Stranger,
    /// A collective may have become complete.
    Collective { generation: Generation, step: Step },
    /// An event for a rank process. It waits while the process is stopped.
    ToRank { worker: Worker, what: RankEvent },
    /// An event for a coordinator process. It waits while the process is stopped.
    ToCandidate { candidate: usize, life: u64, what: CandidateEvent },
}

/// An event for a rank process.
#[derive(Clone, Debug)]
pub enum RankEvent {
    /// A desired state, passed on by its supervisor.
    DesiredState(DesiredState),
    /// The rank has computed its part of a step.
    Computed { generation: Generation, step: Step },
    /// All gradients of a step are reduced.
    Reduced { generation: Generation, step: Step, digest: u64 },
    /// All members have voted for a step.
    Committed { generation: Generation, step: Step, requests: Requests },
    /// All ranks have compared their copies of the state of a step; the difference, if there is one.
    Compared { generation: Generation, step: Step, found: Option<Arc<Difference>> },
    /// For a catching-up member: the reduced gradients of a step, and pieces of the state `base` before it.
    CatchUpPart { generation: Generation, step: Step, digest: u64, base: Version, pieces: Vec<(u64, u64)> },
    /// For a catching-up member: all members have voted for a step whose gradients it has.
    Outcome { generation: Generation, step: Step },
    /// The work at the end of the job is done.
    Finished { generation: Generation },
    /// The rank's device has joined a world.
    JoinedWorld { generation: Generation },
    /// The rank tries a transfer of state.
    Fetch { generation: Generation, base: Version, transfer: Transfer },
    /// The rank's connections broke.
    Broken { generation: Generation, lost: Option<Worker> },
    /// A part of a checkpoint is written.
    Saved { part: Part, atoms: Vec<(u64, u64)> },
}

/// An event for a coordinator process.
#[derive(Clone, Debug)]
pub enum CandidateEvent {
    /// The coordinator's timer fires.
    Timer,
    /// A report of a node arrives.
    Report(Report),
    /// The store answers a read.
    Lease(Lease),
    /// A conditional write reaches the store.
    WriteLease(LeaseWrite),
    /// The store answers a conditional write, requested at this time.
    LeaseWritten { asked: Instant, result: Result<Lease, Lease> },
    /// The leader of this term reads the record, again.
    ReadRecord(Term),
    /// The leader of this term lists the checkpoints.
    ListCheckpoints { term: Term, listing: Listing },
    /// The newest checkpoint that counts for a listing of the leader of this term.
    Listed { term: Term, listing: Listing, newest: Option<Checkpoint> },
    /// A record reaches the store.
    WriteRecord(Box<RecordWrite>),
    /// The store answers the write of a record of this term; the version of the record that it has now.
    RecordWritten { term: Term, accepted: bool, version: u64 },
}

/// A conditional write of the lease, requested at this time.
#[derive(Clone, Copy, Debug)]
pub struct LeaseWrite {
    pub old: Lease,
    pub new: Lease,
    pub asked: Instant,
    pub attempt: Attempt,
}

/// A write of a record over this version.
#[derive(Clone, Debug)]
pub struct RecordWrite {
    pub record: Record,
    pub over: u64,
    pub attempt: Attempt,
}

/// How a write comes to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// The writer waits for the answer. If it dies meanwhile, the write may still take effect.
    Awaited,
    /// The writer repeats a write that has failed, if it still leads.
    Repeated,
    /// The writer has given it up, but it takes effect.
    GivenUp,
}

impl Event {
    /// The node whose machine handles this event.
    pub fn on_node(&self) -> Option<usize> {
        match self {
            Event::NodeTimer { node, .. } | Event::DesiredStateArrives { node, .. } => Some(*node),
            Event::WorkerStarts { worker } | Event::WorkerExited { worker } => Some(worker.member.node.0 as usize),
            Event::StatusReportArrives { status_report } => Some(status_report.worker.member.node.0 as usize),
            _ => None,
        }
    }
}

/// Events in the order of their time, then of their creation.
#[derive(Debug, Default)]
pub struct Queue {
    heap: BinaryHeap<Entry>,
    n: u64,
}

#[derive(Debug)]
struct Entry {
    at: u64,
    number: u64,
    event: Event,
}

impl Queue {
    /// Adds an event.
    pub fn push(&mut self, at: u64, event: Event) {
        self.n += 1;
        self.heap.push(Entry { at, number: self.n, event });
    }

    /// The next event and its time.
    pub fn pop(&mut self) -> Option<(u64, Event)> {
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Entry) -> Ordering {
        // Reversed: the heap pops the greatest entry first.
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Entry) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}
