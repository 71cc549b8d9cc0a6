//! A node of a job: its supervisor, and the rank processes that it starts and watches.

use crate::config::JobConfig;
use crate::config::datasets::ValSetSize;
use crate::error::{JobError, unusable};
use crate::events::{Event, Report};
use crate::node::processes::Node as Processes;
use crate::node::processes::NodeEvent;
use crate::node::welcome::Welcome;
use crate::rank::words::Begin;
use crate::train::plan;
use crate::train::preparation::prepare_data;
use phalanx_actors::control::{ControlThread, block_on};
use phalanx_actors::node::{Letter, Node, Process};
use phalanx_actors::quic::enrol::enrol;
use phalanx_actors::quic::link::{Link, LinkConfig};
use phalanx_actors::supervisor::Settings;
use phalanx_actors::trust::credential::Credential;
use phalanx_actors::trust::join::JoinString;
use phalanx_actors::trust::name::{Name, Role};
use phalanx_cpu::available_threads;
use phalanx_cpu::matmul::peak_flops;
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::timing::Timing;
use phalanx_strategies::passes::precision::Precision;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// How a machine takes part.
pub(crate) struct JoinAs {
    pub(crate) join: JoinString,
    /// What [`enter`] gave for it.
    pub(crate) credential: Credential,
    /// Where its key and certificate are kept.
    pub(crate) dir: PathBuf,
    /// Rank processes.
    pub(crate) n_slots: u32,
    /// Where ranks of other nodes reach those of this one; found out if absent.
    pub(crate) advertise: Option<IpAddr>,
    /// This program.
    pub(crate) program: PathBuf,
}

/// Orders that may wait to be taken up.
const ORDERS_MAX: usize = 64;
/// How often it is looked whether the machine is about to be taken away.
const LOOK: Duration = Duration::from_millis(50);

/// What a node is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// To take part.
    Stay,
    /// To go once others have its state.
    Drain,
    /// To go at once: nobody is left to say when.
    Now,
}

/// Becomes a node of a job, with its key and certificate in `dir`.
///
/// # Errors
/// When no coordinator answers, or it refuses.
pub(crate) fn enter(join: &JoinString, dir: &Path) -> Result<Credential, JobError> {
    block_on(enrol(join, dir, &Timing::default())).map_err(unusable)?.map_err(unusable)
}

/// Takes part until the job is over, or this node is released. Returns what the leader reported, if it was here.
pub(crate) fn join(
    how: JoinAs,
    leaves: &dyn Fn() -> Leave,
    on_event: &mut (dyn FnMut(&Event) + Send),
) -> Result<Option<Report>, JobError> {
    let credential = how.credential;
    let Name { job, role: Role::Node { node, boot } } = credential.certified().name else {
        return Err(unusable("the coordinator's certificate is not one of a node"));
    };
    let welcome: Welcome = serde_json::from_slice(credential.welcome())
        .map_err(|error| unusable(format!("the coordinator says what this version does not understand: {error}")))?;
    let config = JobConfig::from_yaml_str(&welcome.yaml, &[])?;
    let timing = config.elastic.timing();
    let tokenizer = plan::tokenizer(&config)?;
    let model = plan::model_plan(&config, &tokenizer)?;
    prepare_data(&config, &model, &tokenizer, on_event)?;
    on_event(&Event::Note(format!("{node} of {job} ({boot}) with {} ranks", how.n_slots)));
    let listen = how.advertise.or_else(|| towards(&how.join)).ok_or_else(|| {
        unusable("no address at which ranks of other nodes could reach those of this one; name one with --advertise")
    })?;
    let n_slots = how.n_slots;
    let begin = Begin {
        job,
        worker: Worker::default(),
        seat: (config.parallel.mesh()?, 0),
        seat_bytes: 0,
        n_threads: config.precision.threads.unwrap_or_else(|| (available_threads() / n_slots as usize).max(1)),
        yaml: welcome.yaml,
        listen: Some(listen),
        secret: welcome.secret,
        peak_flops: peak_flops(model.spec.precision == Precision::Bf16),
        start_from: welcome.start_from,
        timing,
    };
    let evaluates = config.data.val_set_size != ValSetSize::Nothing;
    let mut processes = Processes::new(node, how.program, model, evaluates, begin, n_slots)?;

    let settings = LinkConfig { addresses: how.join.addresses.clone(), dir: how.dir, timing, n_orders_max: ORDERS_MAX };
    let (link, orders) = Link::start(settings, credential).map_err(unusable)?;
    let thread = ControlThread::start("phalanx-control").map_err(unusable)?;
    let (commands, taken) = channel();
    let (waker, wakened) = UnixStream::pair().map_err(unusable)?;
    for end in [&waker, &wakened] {
        end.set_nonblocking(true).map_err(unusable)?;
    }
    processes.wake_on(OwnedFd::from(wakened.try_clone().map_err(unusable)?));
    let supervisor = {
        let link = link.clone();
        let letters = move |letter| {
            let sent = match &letter {
                Letter::Heartbeat(report) => link.heartbeat(report),
                Letter::News(report) => link.news(report),
            };
            if let Err(error) = sent {
                tracing::error!(%error, "a report cannot be sent");
            }
        };
        let wake = move |command| {
            let _ = commands.send(command);
            // A full socket wakes as well as a fuller one.
            let _ = (&waker).write(&[1]);
        };
        let settings = Settings { job, node, boot, n_slots, timing };
        block_on(Node::start(&thread, settings, letters, wake)).map_err(unusable)?.map_err(unusable)?
    };
    let obeying = {
        let supervisor = supervisor.clone();
        let obey = move || block_on(supervisor.obey(orders));
        std::thread::Builder::new().name("phalanx-orders".into()).spawn(obey).map_err(unusable)?
    };
    let mut hall =
        Hall { processes, supervisor, commands: taken, wakened, unsaid: VecDeque::new(), drained: false, report: None };
    let outcome = hall.follow(&thread, leaves, on_event);
    let report = hall.report.take();
    // What was said last is on its way before this node says good-bye.
    link.close();
    thread.stop();
    let _ = obeying.join();
    outcome.map(|()| report)
}

/// The address of this machine from which the coordinator is reached.
fn towards(join: &JoinString) -> Option<IpAddr> {
    join.addresses.iter().find_map(|address| {
        let target = (address.host.as_str(), address.port).to_socket_addrs().ok()?.next()?;
        let any: SocketAddr = if target.is_ipv4() { "0.0.0.0:0".parse().ok()? } else { "[::]:0".parse().ok()? };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect(target).ok()?;
        Some(socket.local_addr().ok()?.ip())
    })
}

/// What the thread that has the processes does.
struct Hall {
    processes: Processes,
    supervisor: Node,
    commands: Receiver<Process>,
    wakened: UnixStream,
    /// What the supervisor had no room for.
    unsaid: VecDeque<NodeEvent>,
    drained: bool,
    report: Option<Report>,
}

impl Hall {
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
            match leaves() {
                Leave::Drain if !self.drained => self.drained = self.supervisor.drain(),
                Leave::Now => return Ok(()),
                Leave::Stay | Leave::Drain => {}
            }
            while let Ok(command) = self.commands.try_recv() {
                match command {
                    Process::Spawn(worker) => {
                        if let Err(error) = self.processes.spawn(worker) {
                            tracing::error!(%worker, %error, "a rank cannot be started");
                            return Err(error);
                        }
                    }
                    Process::Kill(worker) => self.processes.kill(worker)?,
                    Process::Tell(worker, order) => self.processes.tell(worker, &order)?,
                    Process::Shutdown => return Ok(()),
                }
            }
            while let Some(event) = self.unsaid.pop_front() {
                if !self.say(&event) {
                    self.unsaid.push_front(event);
                    break;
                }
            }
            if let Some(event) = self.processes.next_event(Some(LOOK))? {
                self.hear(event, on_event)?;
            }
        }
    }

    fn hear(&mut self, event: NodeEvent, on_event: &mut (dyn FnMut(&Event) + Send)) -> Result<(), JobError> {
        match event {
            NodeEvent::Woken => {
                let mut bytes = [0; 64];
                while (&self.wakened).read(&mut bytes).is_ok_and(|n| n > 0) {}
            }
            NodeEvent::Happened { rank: 0, event, .. } => on_event(&event),
            NodeEvent::Happened { .. } => {}
            NodeEvent::Done(report) => self.report = Some(report),
            NodeEvent::Failed(worker, excuse) => on_event(&Event::Note(format!("{worker}: {}", excuse.text))),
            NodeEvent::Line(worker, text) => on_event(&Event::Note(format!("{worker}: {text}"))),
            NodeEvent::Word(word) => drop(self.supervisor.word(word)),
            event => {
                if let NodeEvent::Exited(worker, ending, false) = &event {
                    tracing::warn!(%worker, %ending, "a rank ended before it had begun");
                }
                if !self.unsaid.is_empty() || !self.say(&event) {
                    self.unsaid.push_back(event);
                }
            }
        }
        Ok(())
    }

    /// Tells the supervisor; whether it had room.
    fn say(&self, event: &NodeEvent) -> bool {
        match event {
            NodeEvent::Started(word) => self.supervisor.started(word.clone()),
            NodeEvent::Exited(worker, ..) => self.supervisor.exited(*worker),
            _ => true,
        }
    }
}
