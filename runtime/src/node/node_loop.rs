//! The loop of the thread that owns the rank processes of a node.

use crate::error::JobError;
use crate::events::{Event, Report};
use crate::node::failures::FailureReports;
use crate::node::leave::Leave;
use crate::node::metrics_merge::EventSink;
use crate::node::processes::{Node as Processes, NodeEvent};
use phalanx_actors::control::ControlThread;
use phalanx_actors::node::{Node, Process};
use phalanx_actors::transport::Uplink;
use phalanx_strategies::elastic::supervisor::Abandonment;
use std::collections::VecDeque;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// Interval of polling for a request to leave, unless a rank sends something earlier, as it does several times a second.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The outcome of a node's part in a job.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// The report of the leader, if the leader was on this node.
    pub(crate) report: Option<Report>,
    /// The failure of a rank of this node, if any.
    pub(crate) failure: Option<JobError>,
}

/// The loop of the thread that owns the rank processes.
pub(super) struct NodeLoop {
    processes: Processes,
    supervisor: Node,
    uplink: Arc<dyn Uplink>,
    commands: Receiver<Process>,
    wakened: UnixStream,
    /// Events that did not fit into the supervisor's mailbox.
    unsent: VecDeque<NodeEvent>,
    drained: bool,
    /// Whether the supervisor knows that the job is over for this node.
    knows_end: bool,
    /// Since when no coordinator is connected.
    lost_since: Option<Instant>,
    /// How long a draining node waits for a coordinator: another one may take over, or this one may lead again once its store
    /// answers.
    patience: Duration,
    sink: EventSink,
    failures: FailureReports,
    report: Option<Report>,
}

impl NodeLoop {
    /// A loop that takes commands of the supervisor, and gives up on coordinators that are lost for `patience`.
    pub(super) fn new(
        processes: Processes,
        supervisor: Node,
        uplink: Arc<dyn Uplink>,
        (commands, wakened): (Receiver<Process>, UnixStream),
        patience: Duration,
        is_alone: bool,
    ) -> NodeLoop {
        NodeLoop {
            processes,
            supervisor,
            uplink,
            commands,
            wakened,
            unsent: VecDeque::new(),
            drained: false,
            knows_end: false,
            lost_since: None,
            patience,
            sink: EventSink::new(is_alone),
            failures: FailureReports::default(),
            report: None,
        }
    }

    /// Runs until the node's part is over; returns what the ranks have told.
    ///
    /// # Errors
    /// When the node cannot take part any more.
    pub(super) fn run(
        mut self,
        thread: &ControlThread,
        leaves: &dyn Fn() -> Leave,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Outcome, JobError> {
        let outcome = self.follow(thread, leaves, on_event);
        self.sink.rest(on_event);
        // The last messages are sent before the link closes.
        self.uplink.close();
        outcome.map(|()| Outcome { report: self.report.take(), failure: self.failures.take() })
    }

    fn follow(
        &mut self,
        thread: &ControlThread,
        leaves: &dyn Fn() -> Leave,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<(), JobError> {
        loop {
            if let Some(Err(panicked)) = thread.has_ended() {
                return Err(JobError::JobFailed(panicked.to_string()));
            }
            // The coordinator counts the ranks of this node as dead.
            if let Some(why) = self.uplink.refusal() {
                return Err(JobError::NodeRefused(why));
            }
            match leaves() {
                Leave::Drain if !self.drained => self.drained = self.supervisor.drain(),
                Leave::Now => return Ok(()),
                Leave::Stay | Leave::Drain => {}
            }
            if self.uplink.is_over() || self.drained && self.has_lost_coordinators() {
                self.end();
            }
            while let Ok(command) = self.commands.try_recv() {
                match command {
                    Process::Spawn(worker, device) => self.processes.spawn(worker, device),
                    Process::Kill(worker) => self.processes.kill(worker)?,
                    Process::Examine(worker) => self.processes.examine(worker)?,
                    Process::Tell(worker, desired_state) => self.processes.tell(worker, &desired_state)?,
                    Process::Shutdown(why) => return why.map_or(Ok(()), |why| Err(abandonment(why))),
                }
            }
            while let Some(event) = self.unsent.pop_front() {
                if !self.send_event(&event) {
                    self.unsent.push_front(event);
                    break;
                }
            }
            if let Some(event) = self.processes.next_event(Some(POLL_INTERVAL))? {
                self.handle(event, on_event)?;
            }
        }
    }

    /// Lets the supervisor end with its ranks.
    fn end(&mut self) {
        self.knows_end = self.knows_end || self.supervisor.over();
    }

    /// Whether every coordinator is out of reach for so long that none will release this node.
    fn has_lost_coordinators(&mut self) -> bool {
        if self.uplink.is_connected() {
            self.lost_since = None;
            return false;
        }
        self.lost_since.get_or_insert_with(Instant::now).elapsed() >= self.patience
    }

    fn handle(&mut self, event: NodeEvent, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<(), JobError> {
        match event {
            NodeEvent::Woken => {
                let mut bytes = [0; 64];
                while (&self.wakened).read(&mut bytes).is_ok_and(|n| n > 0) {}
            }
            NodeEvent::Happened { generation, rank, event } => self.sink.add(generation, rank, event, on_event),
            NodeEvent::Done(report) => self.report = Some(report),
            NodeEvent::Failed(worker, failure_report) => {
                if !self.sink.is_alone {
                    on_event(&Event::Note(format!("{worker}: {}", failure_report.text)));
                }
                // Every other process would fail on the same input, even if this process has not started.
                if failure_report.is_input {
                    self.send_or_queue(NodeEvent::Failed(worker, failure_report.clone()));
                }
                self.failures.failed(worker, failure_report);
            }
            NodeEvent::Line(worker, text) => {
                on_event(&Event::Note(format!("{worker}: {text}")));
                self.failures.line(text);
            }
            NodeEvent::StatusReport(status_report) => drop(self.supervisor.status_report(status_report)),
            event => {
                match &event {
                    NodeEvent::Started(_) => self.failures.started(),
                    NodeEvent::Exited(worker, ending, false) => {
                        on_event(&Event::Note(format!("{worker} {ending} before its first status report")));
                        self.failures.failed_start(*worker, *ending);
                    }
                    _ => {}
                }
                self.send_or_queue(event);
            }
        }
        Ok(())
    }

    /// Passes an event to the supervisor, now or once its mailbox has room.
    fn send_or_queue(&mut self, event: NodeEvent) {
        if !self.unsent.is_empty() || !self.send_event(&event) {
            self.unsent.push_back(event);
        }
    }

    /// Passes an event to the supervisor; returns whether its mailbox had room.
    fn send_event(&self, event: &NodeEvent) -> bool {
        match event {
            NodeEvent::Started(status_report) => self.supervisor.started(status_report.clone()),
            NodeEvent::Exited(worker, ..) => self.supervisor.exited(*worker),
            NodeEvent::Examined(worker, waited) => self.supervisor.examined(*worker, *waited),
            NodeEvent::Failed(worker, failure_report) => {
                self.supervisor.cannot_start(*worker, failure_report.text.clone())
            }
            _ => true,
        }
    }
}

/// The error of a node that cannot take part.
fn abandonment(why: Abandonment) -> JobError {
    match why {
        Abandonment::Refused(reason) => JobError::NodeRefused(reason),
        Abandonment::NoDevices(faults) => JobError::DevicesLost(faults.join("; ")),
    }
}
