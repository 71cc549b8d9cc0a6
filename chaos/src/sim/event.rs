//! What happens next.

use crate::plan::Fault;
use phalanx_strategies::elastic::commit::Version;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, Step, Worker};
use phalanx_strategies::elastic::message::{DesiredState, MemberReport, Record, Report, Requests};
use phalanx_strategies::elastic::recovery::Transfer;
use phalanx_strategies::elastic::snapshot::Part;
use phalanx_strategies::elastic::succession::Lease;
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Something that happens at some time. Nodes and candidates are given by their index.
#[derive(Clone, Debug)]
pub enum Event {
    /// A machine starts.
    NodeStarts { node: usize },
    /// The timer of a supervisor.
    NodeTimer { node: usize, boot: Incarnation },
    /// A message of a coordinator.
    DesiredStateArrives { node: usize, desired_state: DesiredState },
    /// A process has started.
    WorkerStarts { worker: Worker },
    /// The kernel tells the supervisor of the end of a process.
    WorkerExited { worker: Worker },
    /// A rank tells its supervisor something.
    StatusReportArrives { status_report: MemberReport },
    /// A machine is taken away.
    NodeDies { node: usize, back_after_ms: u64 },
    /// A coordinator process starts.
    CandidateStarts { candidate: usize },
    /// A lasting fault is over.
    FaultEnds { fault: Fault },
    /// A collective may have become complete.
    Collective { generation: Generation, step: Step },
    /// Something for a rank process, which gets it when it runs.
    ToRank { worker: Worker, what: RankEvent },
    /// Something for a coordinator process, which gets it when it runs.
    ToCandidate { candidate: usize, life: u64, what: CandidateEvent },
}

/// Something for a rank process.
#[derive(Clone, Debug)]
pub enum RankEvent {
    /// A desired state, passed on by its supervisor.
    DesiredState(DesiredState),
    /// Its own part of a step is computed.
    Computed { generation: Generation, step: Step },
    /// All gradients of a step are reduced.
    Reduced { generation: Generation, step: Step, digest: u64 },
    /// All have voted for a step.
    Committed { generation: Generation, step: Step, requests: Requests },
    /// A catching-up member is sent the reduced gradients of a step, and pieces of the state `base` before it.
    CatchUpPart { generation: Generation, step: Step, digest: u64, base: Version, pieces: Vec<(u64, u64)> },
    /// All have voted for a step that a catching-up member has the gradients of.
    Outcome { generation: Generation, step: Step },
    /// All that belongs to the end is done.
    Finished { generation: Generation },
    /// Its device has joined a world.
    JoinedWorld { generation: Generation },
    /// A piece of state may have come.
    Fetch { generation: Generation, base: Version, transfer: Transfer },
    /// Its connections to others broke.
    Broken { generation: Generation, lost: Option<Worker> },
    /// A part of a checkpoint is written.
    Saved { part: Part, atoms: Vec<(u64, u64)> },
}

/// Something for a coordinator process.
#[derive(Clone, Debug)]
pub enum CandidateEvent {
    /// Its timer.
    Timer,
    /// A message of a node.
    Report(Report),
    /// The store answers a read.
    Lease(Lease),
    /// A conditional write reaches the store, asked for at this time.
    WriteLease { old: Lease, new: Lease, asked: u64 },
    /// The store answers a conditional write.
    LeaseWritten { asked: u64, result: Result<Lease, Lease> },
    /// A record reaches the store.
    WriteRecord(Record),
    /// The store answers it.
    RecordWritten(bool),
}

/// Events in the order of their time, then of their making.
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
        // The heap gives the greatest first.
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
