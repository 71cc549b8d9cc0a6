//! The node's side: keeps a connection to the active coordinator and reconnects without limit, on its own thread.

use super::dial::{self, Sockets};
use super::enrol::{self, NODE, Renew};
use super::frame::{self, Code, End};
use super::{QuicError, transport};
use crate::transport::{NotSent, Uplink};
use crate::trust::credential::Credential;
use crate::trust::join::{Address, parse_addresses};
use crate::trust::tls;
use crate::wire::{self, WireError};
use bytes::Bytes;
use phalanx_strategies::elastic::identity::Term;
use phalanx_strategies::elastic::message::{DesiredState, Report};
use phalanx_strategies::elastic::timing::Timing;
use quinn::Connection;
use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{mpsc, watch};

/// The first pause after a failure.
const BACKOFF_MIN: Duration = Duration::from_millis(10);

/// Settings of a link.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// Addresses of all possible coordinators.
    pub addresses: Vec<Address>,
    /// Where the active coordinator publishes its addresses, if this machine can read that: a coordinator may return at another
    /// address.
    pub published: Option<Published>,
    /// Directory of the credential; renewed credentials are written there.
    pub dir: PathBuf,
    /// All timeouts.
    pub timing: Timing,
    /// How many received desired states may wait. Further ones wait at the coordinator, where newer replace older.
    pub n_desired_states_max: usize,
}

/// What a node can read of its job where the coordinators publish it. Both functions may block.
#[derive(Clone)]
pub struct Published {
    addresses: Arc<dyn Fn() -> Option<String> + Send + Sync>,
    is_over: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl Published {
    /// `addresses` reads those of the active coordinator, as a text; `None` if they cannot be read now. `is_over` reads whether the
    /// job is recorded as ended: a coordinator ends without the nodes that it cannot reach.
    pub fn new(
        addresses: impl Fn() -> Option<String> + Send + Sync + 'static,
        is_over: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Published {
        Published { addresses: Arc::new(addresses), is_over: Arc::new(is_over) }
    }
}

impl From<PathBuf> for Published {
    fn from(path: PathBuf) -> Published {
        Published::new(move || std::fs::read_to_string(&path).ok(), || false)
    }
}

impl fmt::Debug for Published {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Published")
    }
}

/// State of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The link looks for a coordinator.
    Searching,
    /// The link is connected to this coordinator.
    Connected(SocketAddr),
    /// The link failed for this reason and will try again.
    Waiting(String),
    /// The coordinator rejects this node for now. The link keeps trying.
    Refused(String),
    /// The coordinator rejects this node for good: a later boot of it has joined, or the job is another one. The link has
    /// given up.
    RefusedForGood(String),
    /// The job is over. The link has given up.
    Over,
    /// The link was closed.
    Closed,
}

/// Handle of the node's side. Dropping the last clone closes the side.
#[derive(Clone)]
pub struct Link {
    outbox: Outbox,
    state: watch::Receiver<LinkState>,
    /// The side ends when this is true or dropped.
    close: Arc<watch::Sender<bool>>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

/// Reports to send: the newest of each kind (`QUIC-5`).
#[derive(Clone)]
struct Outbox {
    heartbeat: watch::Sender<EncodedReport>,
    news: watch::Sender<EncodedReport>,
}

/// An encoded report and its number; newer reports have larger numbers.
#[derive(Clone, Default)]
struct EncodedReport {
    number: u64,
    frame: Bytes,
}

impl Link {
    /// Starts to look for a coordinator, on a thread of its own.
    ///
    /// # Errors
    /// When the system cannot provide a thread, or the timeouts are inconsistent.
    pub fn start(
        config: LinkConfig,
        credential: Credential,
    ) -> Result<(Link, mpsc::Receiver<DesiredState>), QuicError> {
        let (mut link, desired_states, side) = Link::new(config, credential)?;
        let log = tracing::dispatcher::get_default(Clone::clone);
        // Built here to return an error; used only on the thread.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|err| QuicError::Thread(err.kind()))?;
        let thread = std::thread::Builder::new().name("phalanx-link".to_owned()).spawn(move || {
            tracing::dispatcher::with_default(&log, || {
                runtime.block_on(side);
                runtime.shutdown_background();
            });
        });
        link.thread = Arc::new(Mutex::new(Some(thread.map_err(|err| QuicError::Thread(err.kind()))?)));
        Ok((link, desired_states))
    }

    /// Starts to look for a coordinator, on the caller's event loop, for programs with thousands of nodes. Other work on
    /// that loop delays heartbeats.
    ///
    /// # Errors
    /// When the timeouts are inconsistent.
    ///
    /// # Panics
    /// When called outside an event loop.
    pub fn spawn(
        config: LinkConfig,
        credential: Credential,
    ) -> Result<(Link, mpsc::Receiver<DesiredState>), QuicError> {
        let (link, desired_states, side) = Link::new(config, credential)?;
        tokio::spawn(side);
        Ok((link, desired_states))
    }

    fn new(
        config: LinkConfig,
        credential: Credential,
    ) -> Result<(Link, mpsc::Receiver<DesiredState>, impl Future<Output = ()> + Send + 'static), QuicError> {
        config.timing.check()?;
        let (tx, desired_states) = mpsc::channel(config.n_desired_states_max);
        let outbox = Outbox { heartbeat: watch::Sender::default(), news: watch::Sender::default() };
        let (state, states) = watch::channel(LinkState::Searching);
        let (close, closed) = watch::channel(false);
        let sockets = Sockets::default();
        let (outbox_of_side, term) = (outbox.clone(), AtomicU64::default());
        let side = Side { config, credential, outbox: outbox_of_side, desired_states: tx, state, term, sockets };
        let link = Link { outbox, state: states, close: Arc::new(close), thread: Arc::default() };
        Ok((link, desired_states, side.run(closed)))
    }

    /// Watches the state of the link.
    pub fn state(&self) -> watch::Receiver<LinkState> {
        self.state.clone()
    }
}

impl Uplink for Link {
    /// Fails only when the report exceeds the limit of a frame.
    fn heartbeat(&self, report: &Report) -> Result<(), NotSent> {
        self.outbox.heartbeat.send_replace(EncodedReport::of(report)?);
        Ok(())
    }

    /// Fails only when the report exceeds the limit of a frame.
    fn news(&self, report: &Report) -> Result<(), NotSent> {
        self.outbox.news.send_replace(EncodedReport::of(report)?);
        Ok(())
    }

    fn refusal(&self) -> Option<String> {
        if let LinkState::RefusedForGood(why) = &*self.state.borrow() { Some(why.clone()) } else { None }
    }

    fn is_connected(&self) -> bool {
        matches!(*self.state.borrow(), LinkState::Connected(_))
    }

    fn is_over(&self) -> bool {
        *self.state.borrow() == LinkState::Over
    }

    /// If the side has a thread, waits until the close is sent.
    fn close(&self) {
        self.close.send_replace(true);
        let thread = self.thread.lock().expect("no holder of this lock panics").take();
        if let Some(Err(panic)) = thread.map(JoinHandle::join) {
            std::panic::resume_unwind(panic);
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("state", &*self.state.borrow()).finish_non_exhaustive()
    }
}

impl EncodedReport {
    fn of(report: &Report) -> Result<EncodedReport, WireError> {
        Ok(EncodedReport { number: report.number, frame: wire::encode(report)?.into() })
    }
}

/// State of the link's thread. The thread ends on `close`, or when the last handle is dropped.
struct Side {
    config: LinkConfig,
    credential: Credential,
    outbox: Outbox,
    desired_states: mpsc::Sender<DesiredState>,
    state: watch::Sender<LinkState>,
    /// The latest term of a coordinator of this node.
    term: AtomicU64,
    sockets: Sockets,
}

/// How a connection ended.
enum Next {
    /// To be replaced at once, with a newer certificate.
    Renewed(Credential),
    /// To be retried.
    Ended(End),
}

impl Side {
    async fn run(mut self, mut closed: watch::Receiver<bool>) {
        tokio::select! {
            _ = closed.wait_for(|closed| *closed) => {}
            never = self.stay_connected() => match never {},
        }
        self.sockets.close(self.config.timing.heartbeat).await;
        self.state.send_replace(LinkState::Closed);
    }

    async fn stay_connected(&mut self) -> Infallible {
        let detection_time = self.config.timing.detection_time;
        let mut backoff = BACKOFF_MIN;
        // When a coordinator last took its leave: at the end of its job, or because another one has taken over.
        let mut farewell: Option<Instant> = None;
        loop {
            let since = Instant::now();
            let err = match self.connect().await {
                Ok(connection) => match self.talk(&connection).await {
                    Next::Renewed(credential) => {
                        self.credential = credential;
                        frame::close(&connection, Code::Done, "reconnecting with a renewed certificate");
                        continue;
                    }
                    Next::Ended(end) => {
                        end.close(&connection);
                        farewell = end.is_done().then(Instant::now);
                        enrol::refusal(end)
                    }
                },
                Err(err) => err,
            };
            if since.elapsed() > detection_time {
                backoff = BACKOFF_MIN;
            }
            let err = match err {
                QuicError::Expired(_) => match self.renew_by_key().await {
                    Ok(()) => continue,
                    Err(err) => err,
                },
                err => err,
            };
            if let QuicError::RefusedForGood(why) = err {
                self.enter(LinkState::RefusedForGood(why));
                return std::future::pending().await;
            }
            if let QuicError::Refused(why) | QuicError::Expired(why) = err {
                self.enter(LinkState::Refused(why));
                // Likely to be rejected again; the pause limits the coordinator's log lines.
                tokio::time::sleep(detection_time).await;
                continue;
            }
            if self.is_over().await {
                self.enter(LinkState::Over);
                return std::future::pending().await;
            }
            if farewell.is_some_and(|at| at.elapsed() < detection_time) {
                // A node whose job has ended closes this link soon.
                tracing::info!(why = %err, "not connected to a coordinator");
                self.state.send_replace(LinkState::Searching);
            } else {
                self.enter(LinkState::Waiting(err.to_string()));
            }
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(detection_time / 4);
        }
    }

    /// Logs a state when it changes.
    fn enter(&self, state: LinkState) {
        self.state.send_if_modified(|have| {
            let changed = *have != state;
            if changed {
                match &state {
                    LinkState::Connected(address) => tracing::info!(%address, "connected to the coordinator"),
                    LinkState::Waiting(why) => tracing::warn!(%why, "not connected to a coordinator"),
                    LinkState::Refused(why) => tracing::error!(%why, "the coordinator rejected this node"),
                    LinkState::RefusedForGood(why) => {
                        tracing::error!(%why, "the coordinator rejected this node for good");
                    }
                    LinkState::Over => tracing::info!("the job is recorded as ended"),
                    LinkState::Searching | LinkState::Closed => {}
                }
                *have = state;
            }
            changed
        });
    }

    /// Renews an expired certificate: this machine was suspended, or no coordinator could be reached for so long (`TRUST-7`).
    async fn renew_by_key(&mut self) -> Result<(), QuicError> {
        let addresses = self.addresses().await;
        self.credential = enrol::renewal(&addresses, &self.credential, &self.config.timing).await?;
        save(&self.credential, &self.config.dir).await;
        tracing::info!("renewed the expired certificate");
        Ok(())
    }

    /// The configured addresses, and those that the active coordinator has published.
    async fn addresses(&self) -> Vec<Address> {
        let mut addresses = self.config.addresses.clone();
        let Some(published) = self.config.published.clone() else { return addresses };
        // A network file system may not answer for minutes.
        let reading = tokio::task::spawn_blocking(move || (published.addresses)());
        if let Ok(Ok(Some(text))) = tokio::time::timeout(self.config.timing.heartbeat, reading).await
            && let Ok(published) = parse_addresses(text.trim())
        {
            addresses.extend(published);
            addresses.sort();
            addresses.dedup();
        }
        addresses
    }

    /// Whether the job is recorded as ended. If that cannot be read in time, it may go on.
    async fn is_over(&self) -> bool {
        let Some(published) = self.config.published.clone() else { return false };
        let reading = tokio::task::spawn_blocking(move || (published.is_over)());
        matches!(tokio::time::timeout(self.config.timing.heartbeat, reading).await, Ok(Ok(true)))
    }

    async fn connect(&self) -> Result<Connection, QuicError> {
        let tls = tls::member(&self.credential, tls::MEMBER)?;
        let config = dial::client(tls, transport::member(&self.config.timing));
        let patience = self.config.timing.detection_time * 4;
        let connection = dial::dial(&self.sockets, &self.addresses().await, &config, patience).await?;
        self.enter(LinkState::Connected(connection.remote_address()));
        Ok(connection)
    }

    async fn talk(&self, connection: &Connection) -> Next {
        let mut heartbeats = self.outbox.heartbeat.subscribe();
        let mut news = self.outbox.news.subscribe();
        // A new coordinator needs the latest reports, also if they were sent to its predecessor.
        for reports in [&mut heartbeats, &mut news] {
            if !reports.borrow().frame.is_empty() {
                reports.mark_changed();
            }
        }
        let end = tokio::select! {
            end = self.take_desired_states(connection) => end,
            end = self.send_heartbeats(connection, &mut heartbeats) => end,
            end = send_news(connection, &mut news) => end,
            renewed = self.renew(connection) => return renewed.map_or_else(Next::Ended, Next::Renewed),
            // The other tasks may not be waiting for the connection.
            err = connection.closed() => Err(err.into()),
        };
        let Err(end) = end;
        Next::Ended(end)
    }

    /// One at a time, to keep their order. A coordinator that leads an earlier term than another one has been deposed: it may not
    /// know that yet, and the other one needs this node.
    async fn take_desired_states(&self, connection: &Connection) -> Result<Infallible, End> {
        loop {
            let mut stream = connection.accept_uni().await?;
            let desired_state: DesiredState = frame::receive(&mut stream).await?;
            let found = desired_state.id.term;
            let have = Term(self.term.fetch_max(found.0, Ordering::AcqRel));
            if found < have {
                return Err(End::Deposed { found, have });
            }
            let _ = self.desired_states.send(desired_state).await;
        }
    }

    async fn send_heartbeats(
        &self,
        connection: &Connection,
        heartbeats: &mut watch::Receiver<EncodedReport>,
    ) -> Result<Infallible, End> {
        loop {
            changed(heartbeats).await;
            let encoded = heartbeats.borrow_and_update().clone();
            if connection.max_datagram_size().is_some_and(|max| encoded.frame.len() <= max) {
                // Fails only if the connection is lost, which the other tasks also detect.
                let _ = connection.send_datagram(encoded.frame);
            } else {
                self.outbox.news.send_if_modified(|have| {
                    let newer = have.number < encoded.number;
                    if newer {
                        *have = encoded;
                    }
                    newer
                });
            }
        }
    }

    /// Renews the certificate after two thirds of its lifetime and saves the new one.
    async fn renew(&self, connection: &Connection) -> Result<Credential, End> {
        let validity = self.credential.certified().validity();
        let life = validity.not_after.duration_since(validity.renewal_due()).unwrap_or_default();
        tokio::time::sleep(validity.renewal_due().duration_since(SystemTime::now()).unwrap_or_default()).await;
        loop {
            let grant = enrol::ask(connection, &Renew).await?;
            match self.credential.renewed(grant) {
                Ok(credential) => {
                    save(&credential, &self.config.dir).await;
                    tracing::info!("renewed the certificate");
                    return Ok(credential);
                }
                Err(why) => {
                    tracing::error!(%why, "the renewed certificate is not valid for this node");
                    tokio::time::sleep(life / 10).await;
                }
            }
        }
    }
}

/// Saves a renewed credential.
async fn save(credential: &Credential, dir: &Path) {
    let (kept, dir) = (credential.clone(), dir.to_owned());
    let writing = tokio::task::spawn_blocking(move || kept.save(&dir, NODE)).await;
    if let Ok(Err(why)) = writing {
        tracing::error!(%why, "cannot save the renewed certificate; a restart will renew the earlier one");
    }
}

async fn send_news(connection: &Connection, news: &mut watch::Receiver<EncodedReport>) -> Result<Infallible, End> {
    loop {
        changed(news).await;
        // Opens the stream first: a newer report replaces this one until a stream is available.
        let stream = connection.open_uni().await?;
        let encoded = news.borrow_and_update().clone();
        frame::send(stream, encoded.frame).await?;
    }
}

/// Never fails, because the side holds a sender itself.
async fn changed(reports: &mut watch::Receiver<EncodedReport>) {
    reports.changed().await.expect("the side holds a sender");
}
