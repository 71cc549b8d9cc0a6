//! The coordinator's side: one UDP port, on a thread of its own.

use super::batch::{self, Batch};
use super::complaint::Complaints;
use super::frame::{self, Code};
use super::{QuicError, accept, transport};
use crate::transport::{Downlink, Inbound, NotSent};
use crate::trust::authority::{Authority, Validity};
use crate::trust::credential::{Applicant, Grant};
use crate::trust::join::{Address, JoinString};
use crate::trust::name::Role;
use crate::trust::register::Register;
use crate::trust::token::TokenId;
use crate::trust::{Fingerprint, TrustError, tls};
use crate::wire::{self, WireError};
use bytes::Bytes;
use phalanx_strategies::elastic::identity::{Incarnation, JobId, NodeId};
use phalanx_strategies::elastic::message::DesiredState;
use phalanx_strategies::elastic::timing::Timing;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Connection, Endpoint, ServerConfig, TokioRuntime};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};
use tokio::sync::{mpsc, watch};

/// The name of the operator's credential in the coordinator's directory.
pub const OPERATOR: &str = "operator";

/// Connections that have not shown who they are, at most; beyond, they are refused unheard.
const HANDSHAKES_MAX: usize = 1024;
/// What all of them together may send before they are heard.
const HANDSHAKE_BUFFER_BYTES: u64 = 4 << 20;

/// What a listener needs to know.
#[derive(Clone, Debug)]
pub struct ListenerConfig {
    /// Where the authority, the register and the operator's credential are kept; of this coordinator alone, or handed
    /// over to its successor.
    pub dir: PathBuf,
    /// The job.
    pub job: JobId,
    /// Where to listen. Default: a free port of loopback, which no other machine can reach.
    pub listen: SocketAddr,
    /// How fast all has to be.
    pub timing: Timing,
    /// How long certificates live. Default: 24 h.
    pub lifetime: Duration,
    /// Job information that a node receives with its certificate.
    pub bootstrap: Vec<u8>,
    /// How many events may wait to be handled; heartbeats beyond are dropped, all else waits. Default: 4,096.
    pub n_events_max: usize,
}

impl ListenerConfig {
    /// The defaults.
    pub fn new(dir: &Path, job: JobId) -> ListenerConfig {
        ListenerConfig {
            dir: dir.to_path_buf(),
            job,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            timing: Timing::default(),
            lifetime: Validity::LIFETIME,
            bootstrap: Vec::new(),
            n_events_max: 4096,
        }
    }
}

/// Handle of the coordinator's side. When the last clone is dropped the side is closed.
#[derive(Clone)]
pub struct Listener {
    shared: Arc<Shared>,
    address: SocketAddr,
    closer: Arc<Closer>,
}

/// What the tasks of the side have in common.
pub(super) struct Shared {
    pub(super) config: ListenerConfig,
    pub(super) authority: Authority,
    pub(super) register: Mutex<Register>,
    pub(super) nodes: Mutex<BTreeMap<NodeId, Connected>>,
    pub(super) complaints: Complaints,
    pub(super) inbound: mpsc::Sender<Inbound>,
    pub(super) batch: Batch,
    encoded: Mutex<Option<(DesiredState, Bytes)>>,
}

/// A node that is connected.
pub(super) struct Connected {
    pub(super) boot: Incarnation,
    pub(super) connection: Connection,
    /// The newest desired state that has not been sent (`QUIC-5`).
    pub(super) desired_state: watch::Sender<Option<Bytes>>,
}

struct Closer {
    /// Kept until close, so that the port is free afterwards.
    endpoint: Mutex<Option<Endpoint>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Listener {
    /// Opens the authority and the register, or makes them; writes the operator's credential; listens. Reads and writes
    /// files: not for an event loop.
    ///
    /// # Errors
    /// When the directory or the address cannot be used, or the timeouts do not fit each other.
    pub fn start(config: ListenerConfig) -> Result<(Listener, mpsc::Receiver<Inbound>), QuicError> {
        config.timing.check()?;
        let authority = Authority::open(&config.dir, config.job)?;
        let register = Mutex::new(Register::open(&config.dir)?);
        let (inbound, events) = mpsc::channel(config.n_events_max);
        let shared = Arc::new(Shared {
            config,
            authority,
            register,
            nodes: Mutex::default(),
            complaints: Complaints::new(),
            inbound,
            batch: Batch::default(),
            encoded: Mutex::default(),
        });
        let (tx, rx) = std::sync::mpsc::channel();
        let log = tracing::dispatcher::get_default(Clone::clone);
        let thread = std::thread::Builder::new().name("phalanx-listener".to_owned()).spawn({
            let shared = shared.clone();
            move || tracing::dispatcher::with_default(&log, || run(&shared, &tx))
        });
        let thread = thread.map_err(|err| QuicError::Thread(err.kind()))?;
        let endpoint: Endpoint = rx.recv().expect("the thread answers before it ends")?;
        let address = endpoint.local_addr().expect("the socket is bound");
        tracing::info!(%address, job = %shared.config.job, authority = %shared.authority.fingerprint(), "listening");
        let closer = Closer { endpoint: Mutex::new(Some(endpoint)), thread: Mutex::new(Some(thread)) };
        Ok((Listener { shared, address, closer: Arc::new(closer) }, events))
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Of the authority's key, as join strings name it.
    pub fn fingerprint(&self) -> Fingerprint {
        self.shared.authority.fingerprint()
    }

    /// A join string with a new token, valid for a number of machines and a duration. Writes a file: not for an event
    /// loop.
    ///
    /// # Errors
    /// When the register cannot be written.
    pub fn invite(
        &self,
        addresses: Vec<Address>,
        lifetime: Duration,
        n_machines: u32,
    ) -> Result<JoinString, TrustError> {
        let token = self.shared.register().mint(SystemTime::now(), lifetime, n_machines)?;
        Ok(JoinString { authority: self.fingerprint(), token, addresses })
    }

    /// Revokes a token; nodes that have joined stay. Writes a file: not for an event loop.
    ///
    /// # Errors
    /// When the register cannot be written; the token is still good then.
    pub fn revoke(&self, token: TokenId) -> Result<(), TrustError> {
        self.shared.register().revoke(token)
    }
}

impl Downlink for Listener {
    /// Sends a desired state to a node, instead of an older one that could not be sent yet.
    fn send_desired_state(&self, node: NodeId, desired_state: &DesiredState) -> Result<(), NotSent> {
        let frame = self.shared.encode(desired_state)?;
        let nodes = self.shared.nodes();
        let connected = nodes.get(&node).ok_or(NotSent::NotConnected(node))?;
        connected.desired_state.send_replace(Some(frame));
        Ok(())
    }

    fn connected(&self) -> Vec<(NodeId, Incarnation)> {
        self.shared.nodes().iter().map(|(node, connected)| (*node, connected.boot)).collect()
    }

    /// Also waits until the port is free.
    fn close(&self) {
        self.closer.say_goodbye();
        self.closer.join();
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Closer {
    fn say_goodbye(&self) {
        let endpoint = self.endpoint.lock().expect("nobody panics while closing").take();
        if let Some(endpoint) = endpoint {
            endpoint.close((Code::Done as u32).into(), b"the coordinator is closing");
        }
    }

    fn join(&self) {
        let thread = self.thread.lock().expect("nobody panics while joining").take();
        if let Some(Err(panic)) = thread.map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        self.say_goodbye();
    }
}

impl Shared {
    pub(super) fn register(&self) -> MutexGuard<'_, Register> {
        self.register.lock().expect("nobody panics with the register")
    }

    pub(super) fn nodes(&self) -> MutexGuard<'_, BTreeMap<NodeId, Connected>> {
        self.nodes.lock().expect("nobody panics with the nodes")
    }

    /// A certificate, from now on.
    pub(super) fn grant(&self, public_key: &[u8], role: Role) -> Result<Grant, TrustError> {
        let validity = Validity::starting(SystemTime::now(), self.config.lifetime);
        let certificate = self.authority.issue(public_key, role, validity)?;
        let (certificate, authority) = (certificate.to_vec(), self.authority.certificate().to_vec());
        Ok(Grant { certificate, authority, bootstrap: self.config.bootstrap.clone() })
    }

    /// Most nodes get the same desired state, and the world plan in it may be long, so it is encoded once.
    fn encode(&self, desired_state: &DesiredState) -> Result<Bytes, WireError> {
        let mut encoded = self.encoded.lock().expect("nobody panics while encoding");
        if let Some((last, frame)) = &*encoded
            && is_same(last, desired_state)
        {
            return Ok(frame.clone());
        }
        let frame = Bytes::from(wire::encode(desired_state)?);
        *encoded = Some((desired_state.clone(), frame.clone()));
        Ok(frame)
    }

    /// A key and a certificate of the coordinator's own. It is renewed like all others.
    fn server_config(&self) -> Result<ServerConfig, TrustError> {
        let validity = Validity::starting(SystemTime::now(), self.config.lifetime);
        let tls = tls::coordinator(&self.authority, &self.authority.credential(Role::Coordinator, validity)?)?;
        let crypto =
            QuicServerConfig::try_from(tls).expect("the provider has the cipher suite of QUIC's first packets");
        let mut config = ServerConfig::with_crypto(Arc::new(crypto));
        config
            .transport_config(transport::coordinator(&self.config.timing))
            .migration(false)
            .max_incoming(HANDSHAKES_MAX)
            .incoming_buffer_size(HANDSHAKE_BUFFER_BYTES / 64)
            .incoming_buffer_size_total(HANDSHAKE_BUFFER_BYTES);
        Ok(config)
    }

    /// For processes that can read the directory. The key stays, so that file and file fit at any moment.
    fn write_operator(&self) -> Result<(), TrustError> {
        let applicant = Applicant::open(&self.config.dir, OPERATOR)?;
        let grant = self.grant(&applicant.public_key(), Role::Operator)?;
        applicant.granted(grant)?.save(&self.config.dir, OPERATOR)
    }
}

/// World plans behind two pointers are taken for different; to compare them would cost as much as to encode one.
fn is_same(a: &DesiredState, b: &DesiredState) -> bool {
    let world_plan = match (&a.world_plan, &b.world_plan) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    };
    world_plan && (a.job, a.id, a.requests, a.release) == (b.job, b.id, b.requests, b.release) && a.evict == b.evict
}

/// What the thread does.
fn run(shared: &Arc<Shared>, started: &std::sync::mpsc::Sender<Result<Endpoint, QuicError>>) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let resting = shared.clone();
    builder.enable_all().on_thread_park(move || resting.batch.rest_if_full(&resting.config.timing));
    let runtime = match builder.build() {
        Ok(runtime) => runtime,
        Err(err) => {
            let _ = started.send(Err(QuicError::Thread(err.kind())));
            return;
        }
    };
    runtime.block_on(async {
        let endpoint = match open(shared) {
            Ok(endpoint) => endpoint,
            Err(err) => {
                let _ = started.send(Err(err));
                return;
            }
        };
        let _ = started.send(Ok(endpoint.clone()));
        tokio::select! {
            () = accept::serve(shared, &endpoint) => endpoint.wait_idle().await,
            never = renew(shared, &endpoint) => match never {},
            never = batch::hand_over(shared) => match never {},
        }
    });
    // Whoever is still being served by a blocking thread is not waited for.
    runtime.shutdown_background();
}

fn open(shared: &Shared) -> Result<Endpoint, QuicError> {
    shared.write_operator()?;
    let server = shared.server_config()?;
    let config = transport::coordinator_endpoint(shared.authority.secret("stateless reset"));
    let address = shared.config.listen;
    Endpoint::new(config, Some(server), transport::bind(address)?, Arc::new(TokioRuntime))
        .map_err(|err| QuicError::Bind { address, kind: err.kind() })
}

/// Replaces the coordinator's own certificate and the operator's file before they expire.
async fn renew(shared: &Arc<Shared>, endpoint: &Endpoint) -> Infallible {
    loop {
        tokio::time::sleep(shared.config.lifetime / 3 * 2).await;
        match shared.server_config() {
            Ok(config) => endpoint.set_server_config(Some(config)),
            Err(why) => tracing::error!(%why, "cannot renew the coordinator's certificate"),
        }
        let writing = tokio::task::spawn_blocking({
            let shared = shared.clone();
            move || shared.write_operator()
        });
        if let Ok(Err(why)) = writing.await {
            tracing::error!(%why, "cannot renew the operator's certificate");
        }
    }
}

/// Tells a peer why it is not served, and the log that it was not.
pub(super) fn refuse(shared: &Shared, connection: &Connection, code: Code, log: &dyn fmt::Display, why: &str) {
    shared.complaints.refused(connection.remote_address(), log);
    frame::close(connection, code, why);
}
