//! The coordinator's side: one UDP port, on a thread of its own.

use super::batch::{self, Batch};
use super::complaint::Complaints;
use super::frame::{self, Code};
use super::listener_config::ListenerConfig;
use super::shared::{NOT_LEADING, Shared};
use super::{QuicError, accept, transport};
use crate::transport::{Downlink, Inbound, NotSent};
use crate::trust::authority::Authority;
use crate::trust::join::{Address, JoinString};
use crate::trust::register::Register;
use crate::trust::token::TokenId;
use crate::trust::validity::Validity;
use crate::trust::{Fingerprint, TrustError};
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use phalanx_strategies::elastic::message::DesiredState;
use quinn::{Endpoint, TokioRuntime};
use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc;

/// Handle of the coordinator's side. Dropping the last clone closes the side.
#[derive(Clone)]
pub struct Listener {
    shared: Arc<Shared>,
    address: SocketAddr,
    closer: Arc<Closer>,
}

struct Closer {
    /// Held until close, so that the port is free afterwards.
    endpoint: Mutex<Option<Endpoint>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Listener {
    /// Opens or creates the authority and the register, writes the operator's credential, and listens. Blocks on files:
    /// not for an event loop.
    ///
    /// # Errors
    /// When the directory or the address cannot be used, or the timeouts are inconsistent.
    pub fn start(config: ListenerConfig) -> Result<(Listener, mpsc::Receiver<Inbound>), QuicError> {
        config.timing.check()?;
        let authority = Authority::open(&config.place, config.job)?;
        let register = Mutex::new(Register::open(&config.place)?);
        let (inbound, events) = mpsc::channel(config.n_events_max);
        let shared = Arc::new(Shared {
            config,
            authority,
            register,
            nodes: Mutex::default(),
            complaints: Complaints::new(),
            inbound,
            batch: Batch::default(),
            leads: AtomicBool::new(true),
            encoded: Mutex::default(),
        });
        let (tx, rx) = std::sync::mpsc::channel();
        let log = tracing::dispatcher::get_default(Clone::clone);
        let thread = std::thread::Builder::new().name("phalanx-listener".to_owned()).spawn({
            let shared = shared.clone();
            move || tracing::dispatcher::with_default(&log, || run(&shared, &tx))
        });
        let thread = thread.map_err(|err| QuicError::Thread(err.kind()))?;
        let endpoint: Endpoint = rx.recv().expect("the thread sends a result before it ends")?;
        let address = endpoint.local_addr().expect("the socket is bound");
        tracing::info!(%address, job = %shared.config.job, authority = %shared.authority.fingerprint(), "listening");
        let closer = Closer { endpoint: Mutex::new(Some(endpoint)), thread: Mutex::new(Some(thread)) };
        Ok((Listener { shared, address, closer: Arc::new(closer) }, events))
    }

    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Fingerprint of the authority's key, as in join strings.
    pub fn fingerprint(&self) -> Fingerprint {
        self.shared.authority.fingerprint()
    }

    /// Creates a join string with a new token, valid for a number of machines and a duration. Writes a file: not for an
    /// event loop.
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
        Ok(JoinString { authority: self.fingerprint(), token, addresses, published: None })
    }

    /// Revokes a token; nodes that have joined with it stay. Writes a file: not for an event loop.
    ///
    /// # Errors
    /// When the register cannot be written; the token then stays valid.
    pub fn revoke(&self, token: TokenId) -> Result<(), TrustError> {
        self.shared.register().revoke(token)
    }
}

impl Downlink for Listener {
    /// Sends a desired state to a node. It replaces an older one that is not sent yet.
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

    fn set_leads(&self, leads: bool) {
        let nodes = self.shared.nodes();
        self.shared.leads.store(leads, Ordering::Release);
        if !leads {
            nodes.values().for_each(|connected| frame::close(&connected.connection, Code::Done, NOT_LEADING));
        }
    }

    /// Also waits until the port is free.
    fn close(&self) {
        self.closer.close_endpoint();
        self.closer.join();
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Closer {
    fn close_endpoint(&self) {
        let endpoint = self.endpoint.lock().expect("no holder of this lock panics").take();
        if let Some(endpoint) = endpoint {
            endpoint.close((Code::Done as u32).into(), b"the coordinator is closing");
        }
    }

    fn join(&self) {
        let thread = self.thread.lock().expect("no holder of this lock panics").take();
        if let Some(Err(panic)) = thread.map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        self.close_endpoint();
    }
}

/// Body of the listener's thread.
fn run(shared: &Arc<Shared>, started: &std::sync::mpsc::Sender<Result<Endpoint, QuicError>>) {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let parking = shared.clone();
    builder.enable_all().on_thread_park(move || parking.batch.rest_if_full(&parking.config.timing));
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
            never = batch::hand_over(&shared.batch, &shared.config.timing, &shared.inbound) => match never {},
        }
    });
    // Does not wait for requests on blocking threads.
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

/// Longest time between two looks at the clock.
const CLOCK_PERIOD: Duration = Duration::from_secs(60);

/// Renews the coordinator's and the operator's certificates before they expire. Looks at the clock again and again, because it
/// may be set, and goes on while the machine is suspended.
async fn renew(shared: &Arc<Shared>, endpoint: &Endpoint) -> Infallible {
    let mut issued = Validity::starting(SystemTime::now(), shared.config.lifetime);
    loop {
        tokio::time::sleep(CLOCK_PERIOD.min(shared.config.lifetime / 12)).await;
        let now = SystemTime::now();
        if !issued.is_due(now) {
            continue;
        }
        issued = Validity::starting(now, shared.config.lifetime);
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
