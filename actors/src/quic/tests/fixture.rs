//! A coordinator, machines, a network that tests can cut, and a log that tests can read.

use crate::quic::dial::{self, Sockets};
use crate::quic::enrol::{NODE, enrol};
use crate::quic::link::{Link, LinkConfig};
use crate::quic::listener::Listener;
use crate::quic::listener_config::ListenerConfig;
use crate::quic::{QuicError, transport};
use crate::transport::{Downlink, Inbound};
use crate::trust::credential::Credential;
use crate::trust::join::{Address, JoinString};
use crate::trust::name::Role;
use crate::trust::tls;
use phalanx_strategies::elastic::identity::{Generation, Incarnation, JobId, NodeId, Term};
use phalanx_strategies::elastic::message::{DesiredState, DesiredStateId, Report, Stage};
use phalanx_strategies::elastic::timing::Timing;
use quinn::Connection;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TryRecvError;
use tracing_subscriber::fmt::MakeWriter;

pub(crate) const JOB: JobId = JobId(7);
pub(crate) const HOUR: Duration = Duration::from_secs(3600);
/// How long a test waits for an event. Events take milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until a condition gives a value.
pub(crate) fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "expected {what} within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a client future.
pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await.expect("completes within PATIENCE") })
}

/// A coordinator.
pub(crate) struct Coordinator {
    pub(crate) listener: Listener,
    pub(crate) events: Receiver<Inbound>,
    pub(crate) dir: Arc<TempDir>,
    config: ListenerConfig,
}

impl Coordinator {
    pub(crate) fn new() -> Coordinator {
        Coordinator::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut ListenerConfig)) -> Coordinator {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let mut config = ListenerConfig::new(dir.path(), JOB);
        config.listen = (own_address(), 0).into();
        change(&mut config);
        Coordinator::start(config, dir)
    }

    fn start(config: ListenerConfig, dir: Arc<TempDir>) -> Coordinator {
        let (listener, events) = until("a free address", || match Listener::start(config.clone()) {
            Err(QuicError::Bind { kind: ErrorKind::AddrInUse, .. }) => None,
            started => Some(started.unwrap()),
        });
        Coordinator { listener, events, dir, config }
    }

    /// Restarts the coordinator from its directory, at the same address.
    pub(crate) fn restart(self) -> Coordinator {
        let listen = self.listener.address();
        self.listener.close();
        Coordinator::start(ListenerConfig { listen, ..self.config }, self.dir)
    }

    /// Another coordinator of the same job, at another address.
    pub(crate) fn beside(&self) -> Coordinator {
        let listen = (own_address(), 0).into();
        Coordinator::start(ListenerConfig { listen, ..self.config.clone() }, Arc::clone(&self.dir))
    }

    /// Closes the listener and tries to start another one from the directory.
    pub(crate) fn start_again(&self) -> Result<(), QuicError> {
        self.listener.close();
        Listener::start(self.config.clone()).map(drop)
    }

    pub(crate) fn addresses(&self) -> Vec<Address> {
        vec![self.listener.address().into()]
    }

    pub(crate) fn invite(&self) -> JoinString {
        self.listener.invite(self.addresses(), HOUR, 100).unwrap()
    }

    /// Waits for the first event that `pick` accepts; drops the events before it.
    pub(crate) fn event<T>(&mut self, what: &str, mut pick: impl FnMut(Inbound) -> Option<T>) -> T {
        until(what, || match self.events.try_recv() {
            Ok(event) => pick(event),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => panic!("the listener has ended"),
        })
    }

    pub(crate) fn report(&mut self) -> Report {
        self.event("a report", |event| match event {
            Inbound::Report(report) => Some(report),
            Inbound::Heartbeats(mut reports) => reports.pop(),
            _ => None,
        })
    }

    pub(crate) fn connected(&mut self) -> (NodeId, Incarnation) {
        self.event("a connection", |event| match event {
            Inbound::Connected { node, boot, .. } => Some((node, boot)),
            _ => None,
        })
    }

    /// Messages that arrived and have not been consumed.
    pub(crate) fn drain(&mut self) -> Vec<Inbound> {
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }
}

/// A separate loopback address for each coordinator, so that a node of another test never finds this coordinator at the
/// port of its own.
fn own_address() -> Ipv4Addr {
    static N: AtomicU16 = AtomicU16::new(1);
    let [a, b] = N.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    Ipv4Addr::new(127, 1, a, b)
}

/// File in a machine's folder with the addresses that a coordinator has published.
pub(crate) const PUBLISHED: &str = "published";

/// A machine that may become a node.
pub(crate) struct Machine {
    pub(crate) dir: TempDir,
}

impl Machine {
    pub(crate) fn new() -> Machine {
        Machine { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn enrol(&self, join: &JoinString) -> Result<Credential, QuicError> {
        wait(enrol(join, self.dir.path(), &Timing::default()))
    }

    pub(crate) fn kept(&self) -> Credential {
        Credential::load(self.dir.path(), NODE).unwrap().unwrap()
    }

    pub(crate) fn link(&self, addresses: Vec<Address>, credential: Credential) -> (Link, Receiver<DesiredState>) {
        self.link_within(Timing::default(), addresses, credential)
    }

    pub(crate) fn link_within(
        &self,
        timing: Timing,
        addresses: Vec<Address>,
        credential: Credential,
    ) -> (Link, Receiver<DesiredState>) {
        let (dir, published) = (self.dir.path().to_path_buf(), Some(self.dir.path().join(PUBLISHED).into()));
        let config = LinkConfig { addresses, published, dir, timing, n_desired_states_max: 4 };
        Link::start(config, credential).unwrap()
    }
}

pub(crate) fn node_and_boot(credential: &Credential) -> (NodeId, Incarnation) {
    match credential.certified().name.role {
        Role::Node { node, boot } => (node, boot),
        other => panic!("expected a node, found {other:?}"),
    }
}

/// A report of a node, identified by its number.
pub(crate) fn report(credential: &Credential, number: u64) -> Report {
    let (node, boot) = node_and_boot(credential);
    Report {
        job: JOB,
        node,
        boot,
        number,
        desired_state: DesiredStateId::default(),
        draining: false,
        n_failed_starts: 0,
        inputs: vec![],
        devices: vec![],
        members: Vec::new(),
    }
}

/// A desired state, identified by its generation.
pub(crate) fn desired_state(generation: u64) -> DesiredState {
    let id = DesiredStateId { term: Term(1), generation: Generation(generation), stage: Stage::Stop, revision: 0 };
    let (evict, requests) = Default::default();
    DesiredState { job: JOB, id, world_plan: None, evict, requests, release: None, refused: None }
}

pub(crate) fn next_desired_state(desired_states: &mut Receiver<DesiredState>) -> DesiredState {
    until("a desired state", || desired_states.try_recv().ok())
}

/// A member's connection, on which a test sends arbitrary bytes.
pub(crate) async fn connect(addresses: &[Address], credential: &Credential) -> Result<Connection, QuicError> {
    dial(addresses, tls::member(credential, tls::MEMBER).unwrap()).await
}

/// A connection with this TLS configuration.
pub(crate) async fn dial(addresses: &[Address], tls: rustls::ClientConfig) -> Result<Connection, QuicError> {
    let config = dial::client(tls, transport::member(&Timing::default()));
    dial::dial(&Sockets::default(), addresses, &config, PATIENCE).await
}

/// Forwards datagrams between clients and a server, unless cut.
pub(crate) struct Cable {
    pub(crate) address: SocketAddr,
    cut: Arc<AtomicBool>,
    end: Arc<AtomicBool>,
}

impl Cable {
    pub(crate) fn to(server: SocketAddr) -> Cable {
        let front = UdpSocket::bind("127.0.0.1:0").unwrap();
        front.set_nonblocking(true).unwrap();
        let address = front.local_addr().unwrap();
        let (cut, end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let state = (cut.clone(), end.clone());
        std::thread::spawn(move || forward(&front, server, &state.0, &state.1));
        Cable { address, cut, end }
    }

    pub(crate) fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::SeqCst);
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.end.store(true, Ordering::SeqCst);
    }
}

fn forward(front: &UdpSocket, server: SocketAddr, cut: &AtomicBool, end: &AtomicBool) {
    let mut backs: BTreeMap<SocketAddr, UdpSocket> = BTreeMap::new();
    let mut bytes = [0; 65_536];
    while !end.load(Ordering::SeqCst) {
        while let Ok((n, client)) = front.recv_from(&mut bytes) {
            let back = backs.entry(client).or_insert_with(|| {
                let back = UdpSocket::bind("127.0.0.1:0").unwrap();
                back.set_nonblocking(true).unwrap();
                back
            });
            if !cut.load(Ordering::SeqCst) {
                let _ = back.send_to(&bytes[..n], server);
            }
        }
        for (client, back) in &backs {
            while let Ok((n, _)) = back.recv_from(&mut bytes) {
                if !cut.load(Ordering::SeqCst) {
                    let _ = front.send_to(&bytes[..n], client);
                }
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A captured log.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Captures the log of this thread and of the threads that it starts.
    pub(crate) fn start() -> (Log, tracing::subscriber::DefaultGuard) {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    /// The lines about refused peers.
    pub(crate) fn refusals(&self) -> Vec<String> {
        let bytes = self.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap().lines().filter(|line| line.contains("refused")).map(str::to_owned).collect()
    }

    /// Waits for the line about a refused peer, and checks that it is the only one.
    pub(crate) fn refusal(&self) -> String {
        let mut lines = until("a refusal in the log", || Some(self.refusals()).filter(|lines| !lines.is_empty()));
        assert_eq!(lines.len(), 1, "{lines:#?}");
        lines.remove(0)
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Log;

    fn make_writer(&self) -> Log {
        self.clone()
    }
}
