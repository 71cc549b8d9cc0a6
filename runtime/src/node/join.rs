//! A node of a job: its supervisor, and the loop that starts and watches rank processes.

use crate::config::JobConfig;
use crate::config::precision::PrecisionSection;
use crate::control::STOP_PATIENCE;
use crate::control_place::{ADDRESS, ControlPlace};
use crate::devices::choice_of;
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::events::{Event, Report};
use crate::frontend::UserModel;
use crate::launch::executable::Executable;
use crate::node::bootstrap::JobBootstrap;
use crate::node::devices;
use crate::node::failures::FailureReports;
use crate::node::folder::NodeFolder;
use crate::node::metrics_merge::EventSink;
use crate::node::processes::{Node as Processes, NodeEvent};
use crate::node::shared_folder;
use crate::rank::rank_messages::Begin;
use crate::train::inputs::RunInputs;
use crate::train::plan::{self, ModelPlan};
use crate::train::preparation::prepare_data;
use phalanx_actors::control::{ControlThread, block_on};
use phalanx_actors::node::{Node, Process};
use phalanx_actors::quic::QuicError;
use phalanx_actors::quic::enrol::enrol;
use phalanx_actors::quic::link::{Link, LinkConfig};
use phalanx_actors::supervisor::Settings;
use phalanx_actors::transport::Uplink;
use phalanx_actors::trust::credential::Credential;
use phalanx_actors::trust::join::{JoinString, parse_addresses};
use phalanx_actors::trust::name::{Name, Role};
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId, Worker};
use phalanx_strategies::elastic::message::{DesiredState, Ending};
use phalanx_strategies::elastic::supervisor::Abandonment;
use phalanx_strategies::elastic::timing::Timing;
use std::cell::Cell;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Settings of a node.
pub(crate) struct JoinAs {
    pub(crate) join: JoinString,
    /// The credential from [`enter`].
    pub(crate) credential: Credential,
    /// Folder of the node's key and certificate, locked until the node ends.
    pub(crate) folder: NodeFolder,
    /// Number of rank processes.
    pub(crate) n_slots: u32,
    /// Address at which ranks of other nodes reach the ranks of this one; detected if absent.
    pub(crate) advertise: Option<IpAddr>,
    /// The rank program.
    pub(crate) program: Executable,
}

/// Queue size for desired states.
const DESIRED_STATES_MAX: usize = 64;
/// Interval of polling for a request to leave, unless a rank sends something earlier, as it does several times a second.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Whether a node stays in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// Stay.
    Stay,
    /// Leave once other nodes have its state.
    Drain,
    /// Leave at once: the coordinator is gone.
    Now,
}

/// How long a node waits after a signal before it drains. What ends a whole job, such as a preemption or the end of a session,
/// signals all its processes at about the same time; then the coordinator ends the job with a checkpoint, and no node needs to move
/// its state.
const TOGETHER: Duration = Duration::from_secs(2);

impl Leave {
    /// What a node does that may have been asked to leave. `since` is when that was first seen.
    pub(crate) fn after_signal(is_asked: bool, since: &Cell<Option<Instant>>) -> Leave {
        if !is_asked {
            return Leave::Stay;
        }
        let begin = since.get().unwrap_or_else(Instant::now);
        since.set(Some(begin));
        if begin.elapsed() < TOGETHER { Leave::Stay } else { Leave::Drain }
    }
}

/// Enrols as a node of a job, with its key and certificate in `folder`.
///
/// # Errors
/// When no coordinator answers, or the coordinator refuses. [`ControlPlaneError::JobOver`] when nobody answers because the job has
/// ended, as far as this machine can read its record.
pub(crate) fn enter(join: &JoinString, folder: &NodeFolder) -> Result<Credential, JobError> {
    let enrolled = block_on(enrol(&with_published(join), folder.path(), &Timing::default()))
        .map_err(ControlPlaneError::cannot("start an event loop"))?;
    let ended = match &enrolled {
        Err(QuicError::Unreachable { .. }) => ending_of(join),
        _ => None,
    };
    match ended {
        Some(JobEnd { place, ending, .. }) => Err(ControlPlaneError::JobOver { place, ending }.into()),
        None => Ok(enrolled.map_err(ControlPlaneError::from)?),
    }
}

/// The end of a job.
pub(crate) struct JobEnd {
    /// The place of its record.
    place: String,
    pub(crate) ending: Ending,
    /// Somebody has stopped it.
    pub(crate) is_stopped: bool,
}

/// The end of the job of a join string, if it has ended and this machine can read its record.
pub(crate) fn ending_of(join: &JoinString) -> Option<JobEnd> {
    let place = join.published.clone()?;
    let store = ControlPlace::at(Path::new(&place), &Timing::default()).ok()?;
    let record = store.store_as_it_is().read_record().ok()?;
    Some(JobEnd { place, ending: record.ending?, is_stopped: record.requests.stop })
}

/// The join string with the addresses that the active coordinator has published, if this machine can read them: a join string
/// may be older than the coordinator.
fn with_published(join: &JoinString) -> JoinString {
    let read = |root: &String| ControlPlace::at(Path::new(root), &Timing::default()).ok()?.read(ADDRESS).ok()?;
    let text = join.published.as_ref().and_then(read);
    let published = text.and_then(|text| parse_addresses(text.trim()).ok()).unwrap_or_default();
    let mut addresses = join.addresses.clone();
    addresses.extend(published.into_iter().filter(|address| !join.addresses.contains(address)));
    JoinString { addresses, ..join.clone() }
}

/// The outcome of a node's part in a job.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// The report of the leader, if the leader was on this node.
    pub(crate) report: Option<Report>,
    /// The failure of a rank of this node, if any.
    pub(crate) failure: Option<JobError>,
}

/// A node of a job, and the transport to its coordinator.
pub(crate) struct Part {
    pub(crate) job: JobId,
    pub(crate) node: NodeId,
    pub(crate) boot: Incarnation,
    pub(crate) bootstrap: JobBootstrap,
    /// Number of rank processes.
    pub(crate) n_slots: u32,
    /// Threads of each rank.
    pub(crate) n_threads: usize,
    /// What its ranks train on and with.
    pub(crate) inputs: RunInputs,
    /// Address at which ranks of other nodes reach the ranks of this one; `None` if there are no other nodes.
    pub(crate) listen: Option<IpAddr>,
    /// The rank program.
    pub(crate) program: Executable,
    pub(crate) uplink: Arc<dyn Uplink>,
    pub(crate) desired_states: mpsc::Receiver<DesiredState>,
}

/// Takes part in a job that another machine coordinates, until the job ends or this node is released.
pub(crate) fn join(
    how: JoinAs,
    leaves: &dyn Fn() -> Leave,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Outcome, JobError> {
    let credential = how.credential;
    let Name { job, role: Role::Node { node, boot } } = credential.certified().name else {
        return Err(ControlPlaneError::NotANode.into());
    };
    let bootstrap: JobBootstrap = serde_json::from_slice(credential.bootstrap()).map_err(ControlPlaneError::Decode)?;
    let config = JobConfig::from_yaml_str(&bootstrap.yaml, &[])?;
    shared_folder::check(&config.output, job, bootstrap.claim)?;
    let timing = config.elastic.timing();
    let tokenizer = plan::tokenizer(&config)?;
    let model = plan::model_plan(&config, &tokenizer)?;
    // Whether the memory suffices depends on the ranks that this node gets.
    model.device.fits(0, how.n_slots, 0).unwrap_or(Ok(())).map_err(JobError::NoRoomOnGpu)?;
    for note in model.device_notes(how.n_slots)? {
        on_event(&Event::Note(note));
    }
    let data = match prepare_data(&config, &model, &tokenizer, &|| leaves() != Leave::Stay, on_event) {
        // It has no ranks yet.
        Err(stopped) if stopped.is_stop() => return Ok(Outcome::default()),
        prepared => prepared?,
    };
    let inputs = RunInputs::of(&config, &model, &tokenizer, &data)?;
    drop(data);
    on_event(&Event::Note(format!("{node} of {job} ({boot}) with {} ranks", how.n_slots)));
    let listen = how.advertise.or_else(|| towards(&how.join)).ok_or(ControlPlaneError::NoAddress)?;
    let settings = LinkConfig {
        addresses: how.join.addresses.clone(),
        published: Some(ControlPlace::of(&config.output.output_dir, &timing)?.published(job)),
        dir: how.folder.path().to_owned(),
        timing,
        n_desired_states_max: DESIRED_STATES_MAX,
    };
    let (link, desired_states) = Link::start(settings, credential).map_err(ControlPlaneError::from)?;
    let part = Part {
        job,
        node,
        boot,
        bootstrap,
        n_slots: how.n_slots,
        n_threads: config
            .precision
            .threads
            .unwrap_or_else(|| (model.device.available_threads() / how.n_slots as usize).max(1)),
        inputs,
        listen: Some(listen),
        program: how.program,
        uplink: Arc::new(link),
        desired_states,
    };
    let thread =
        ControlThread::start("phalanx-control").map_err(ControlPlaneError::cannot("start the control thread"))?;
    let outcome = part.take(&config, model, &thread, leaves, on_event);
    thread.stop();
    outcome
}

impl Part {
    /// Takes part until the job ends or this node is released. The supervisor runs on `thread`; the ranks are children of the
    /// calling thread.
    pub(crate) fn take(
        self,
        config: &JobConfig,
        model: ModelPlan,
        thread: &ControlThread,
        leaves: &dyn Fn() -> Leave,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Outcome, JobError> {
        let Part { job, node, boot, bootstrap, n_slots, inputs, .. } = self;
        let timing = config.elastic.timing();
        let is_alone = self.listen.is_none();
        // Nobody can add ranks to a job on one machine.
        let n_ranks_min = || Ok::<_, JobError>(config.elastic.policy(config.parallel.mesh()?, 1, 0).smallest(None));
        let n_slots_min = if is_alone { n_ranks_min()? as u32 } else { 1 };
        let devices = devices::for_slots(model.device.health(), n_slots);
        let watch = model.device.watch();
        let begin = Begin {
            job,
            worker: Worker::default(),
            assignment: (config.parallel.mesh()?, 0),
            arena_bytes: 0,
            is_successor: false,
            n_threads: self.n_threads,
            yaml: yaml_of_ranks(config, &model),
            listen: self.listen,
            secret: bootstrap.secret,
            peak_flops: model.device.peak_flops(model.spec.precision.is_bf16()),
            start_from: bootstrap.start_from,
            claim: bootstrap.claim,
            timing,
            user_model: model.model.user().map(UserModel::digest),
            inputs,
        };
        let inputs = if is_alone { Vec::new() } else { begin.inputs.of_node() };
        let evaluates = config.data.evaluates();
        let ids = devices.health().iter().map(|device| device.id.clone()).collect();
        let mut processes = Processes::new(node, self.program, model, evaluates, begin, n_slots, ids)?;
        let (commands, taken) = channel();
        let [waker, wakened, polled] = waker().map_err(ControlPlaneError::cannot("make a pair of sockets"))?;
        processes.wake_on(OwnedFd::from(polled));
        let settings = Settings { job, node, boot, n_slots, n_slots_min, devices, inputs, timing };
        let starting =
            Node::start(thread, settings, Arc::clone(&self.uplink), self.desired_states, waking(commands, waker));
        let supervisor = block_on(starting)
            .map_err(ControlPlaneError::cannot("start an event loop"))?
            .map_err(ControlPlaneError::from)?;
        if let Some(watch) = watch {
            devices::watch(watch, supervisor.clone())?;
        }
        let mut node_loop = NodeLoop {
            processes,
            supervisor,
            uplink: Arc::clone(&self.uplink),
            commands: taken,
            wakened,
            unsent: VecDeque::new(),
            drained: false,
            knows_end: false,
            lost_since: None,
            patience: (timing.lease + timing.takeover_grace + timing.disk_patience).max(STOP_PATIENCE),
            sink: EventSink::new(is_alone),
            failures: FailureReports::default(),
            report: None,
        };
        let outcome = node_loop.follow(thread, leaves, on_event);
        node_loop.sink.rest(on_event);
        // The last messages are sent before the link closes.
        self.uplink.close();
        outcome.map(|()| Outcome { report: node_loop.report.take(), failure: node_loop.failures.take() })
    }
}

/// The configuration for ranks, which use the kind of device that the node has chosen.
fn yaml_of_ranks(config: &JobConfig, model: &ModelPlan) -> String {
    let precision = PrecisionSection { device: choice_of(&*model.device), ..config.precision.clone() };
    JobConfig { precision, ..config.clone() }.to_yaml()
}

/// Sends commands to the loop of the node, and wakes it.
fn waking(commands: Sender<Process>, waker: UnixStream) -> impl Fn(Process) + Send + 'static {
    move |command| {
        let _ = commands.send(command);
        // If the socket is full, the reader is already being woken.
        let _ = (&waker).write(&[1]);
    }
}

/// A socket that wakes the node loop, the end that the loop drains, and a copy of that end for polling.
fn waker() -> std::io::Result<[UnixStream; 3]> {
    let (waker, wakened) = UnixStream::pair()?;
    waker.set_nonblocking(true)?;
    wakened.set_nonblocking(true)?;
    let polled = wakened.try_clone()?;
    Ok([waker, wakened, polled])
}

/// The error of a node that cannot take part.
fn abandonment(why: Abandonment) -> JobError {
    match why {
        Abandonment::Refused(reason) => JobError::NodeRefused(reason),
        Abandonment::NoDevices(faults) => JobError::DevicesLost(faults.join("; ")),
    }
}

/// The address of this machine on its route to the coordinator.
pub(crate) fn towards(join: &JoinString) -> Option<IpAddr> {
    join.addresses.iter().find_map(|address| {
        let target = (address.host.as_str(), address.port).to_socket_addrs().ok()?.next()?;
        let any: SocketAddr = if target.is_ipv4() { "0.0.0.0:0".parse().ok()? } else { "[::]:0".parse().ok()? };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(target).ok()?;
        Some(socket.local_addr().ok()?.ip())
    })
}

/// The loop of the thread that owns the rank processes.
struct NodeLoop {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signalled_node_drains_only_if_the_job_does_not_end_soon() {
        let asked = Cell::new(None);

        let before = Leave::after_signal(false, &asked);
        let at_first = Leave::after_signal(true, &asked);
        asked.set(Instant::now().checked_sub(TOGETHER));
        let later = Leave::after_signal(true, &asked);

        assert_eq!((before, at_first, later), (Leave::Stay, Leave::Stay, Leave::Drain));
    }
}
