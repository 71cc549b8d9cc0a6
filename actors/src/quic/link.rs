//! The node's side: keeps a connection to the active coordinator, reconnecting forever, on its own thread.

use super::dial::{self, Sockets};
use super::enrol::{self, NODE, Renew};
use super::frame::{self, Code, End};
use super::{QuicError, transport};
use crate::transport::{NotSent, Uplink};
use crate::trust::credential::Credential;
use crate::trust::join::Address;
use crate::trust::tls;
use crate::wire::{self, WireError};
use bytes::Bytes;
use phalanx_strategies::elastic::message::{DesiredState, Report};
use phalanx_strategies::elastic::timing::Timing;
use quinn::Connection;
use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::{mpsc, watch};

/// The first wait after a failure.
const BACKOFF_MIN: Duration = Duration::from_millis(10);

/// What a link needs to know.
#[derive(Clone, Debug)]
pub struct LinkConfig {
    /// Where coordinators may be.
    pub addresses: Vec<Address>,
    /// Where the credential is kept; renewed ones are written there.
    pub dir: PathBuf,
    /// How fast all has to be.
    pub timing: Timing,
    /// How many desired states may wait to be taken up; further ones wait at the coordinator, where newer replace older
    /// ones.
    pub n_desired_states_max: usize,
}

/// How a link is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// It looks for a coordinator.
    Searching,
    /// It has one.
    Connected(SocketAddr),
    /// It will try again; why it failed.
    Waiting(String),
    /// The coordinator rejects this node: its certificate has expired, or a later incarnation of the node has joined.
    /// The link keeps trying, but its owner should end it or join again.
    Refused(String),
    /// It was closed.
    Closed,
}

/// Handle of the node's side. When the last clone is dropped the side is closed.
#[derive(Clone)]
pub struct Link {
    outbox: Outbox,
    state: watch::Receiver<LinkState>,
    /// The side ends when this says so, or is gone.
    close: Arc<watch::Sender<bool>>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

/// Reports that are to be sent: the newest of each sort (`QUIC-5`).
#[derive(Clone)]
struct Outbox {
    heartbeat: watch::Sender<EncodedReport>,
    news: watch::Sender<EncodedReport>,
}

/// An encoded report and its number, by which newer is told from older.
#[derive(Clone, Default)]
struct EncodedReport {
    number: u64,
    frame: Bytes,
}

impl Link {
    /// Starts to look for a coordinator, on a thread of its own.
    ///
    /// # Errors
    /// When there is no thread for it, or the timeouts do not fit each other.
    pub fn start(
        config: LinkConfig,
        credential: Credential,
    ) -> Result<(Link, mpsc::Receiver<DesiredState>), QuicError> {
        let (mut link, desired_states, side) = Link::new(config, credential)?;
        let log = tracing::dispatcher::get_default(Clone::clone);
        // The runtime is made here, so that there is an error to return; it is used on the thread only.
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

    /// Starts to look for a coordinator, on the event loop of the caller: for programs with thousands of nodes. What
    /// else that loop does delays heartbeats.
    ///
    /// # Errors
    /// When the timeouts do not fit each other.
    ///
    /// # Panics
    /// When the caller is not on an event loop.
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
        let side = Side { config, credential, outbox: outbox.clone(), desired_states: tx, state, sockets };
        let link = Link { outbox, state: states, close: Arc::new(close), thread: Arc::default() };
        Ok((link, desired_states, side.run(closed)))
    }

    /// How it is, now and from now on.
    pub fn state(&self) -> watch::Receiver<LinkState> {
        self.state.clone()
    }
}

impl Uplink for Link {
    /// Fails only when the report is too long to be sent at all.
    fn heartbeat(&self, report: &Report) -> Result<(), NotSent> {
        self.outbox.heartbeat.send_replace(EncodedReport::of(report)?);
        Ok(())
    }

    /// Fails only when the report is too long to be sent at all.
    fn news(&self, report: &Report) -> Result<(), NotSent> {
        self.outbox.news.send_replace(EncodedReport::of(report)?);
        Ok(())
    }

    /// If the side has a thread, waits until the end is sent.
    fn close(&self) {
        self.close.send_replace(true);
        let thread = self.thread.lock().expect("nobody panics while joining").take();
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

/// What the thread has. It ends when it is told to, or when the handles are gone and with them the one who would tell.
struct Side {
    config: LinkConfig,
    credential: Credential,
    outbox: Outbox,
    desired_states: mpsc::Sender<DesiredState>,
    state: watch::Sender<LinkState>,
    sockets: Sockets,
}

/// How a connection went on.
enum Next {
    /// With a newer certificate, at once.
    Renewed(Credential),
    /// Not at all.
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
        loop {
            let since = Instant::now();
            let err = match self.connect().await {
                Ok(connection) => match self.talk(&connection).await {
                    Next::Renewed(credential) => {
                        self.credential = credential;
                        frame::close(&connection, Code::Done, "it comes again with its renewed certificate");
                        continue;
                    }
                    Next::Ended(end) => {
                        if let End::Violation(violation) = &end {
                            frame::close(&connection, Code::Violation, &violation.to_string());
                        }
                        enrol::refusal(end)
                    }
                },
                Err(err) => err,
            };
            if since.elapsed() > detection_time {
                backoff = BACKOFF_MIN;
            }
            if let QuicError::Refused(why) = err {
                self.enter(LinkState::Refused(why));
                // It will be refused again; it does not fill the other side's log.
                tokio::time::sleep(detection_time).await;
                continue;
            }
            self.enter(LinkState::Waiting(err.to_string()));
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
                    LinkState::Refused(why) => tracing::error!(%why, "the coordinator refuses this node"),
                    LinkState::Searching | LinkState::Closed => {}
                }
                *have = state;
            }
            changed
        });
    }

    async fn connect(&self) -> Result<Connection, QuicError> {
        let tls = tls::member(&self.credential, tls::MEMBER)?;
        let config = dial::client(tls, transport::member(&self.config.timing));
        let patience = self.config.timing.detection_time * 4;
        let connection = dial::dial(&self.sockets, &self.config.addresses, &config, patience).await?;
        self.enter(LinkState::Connected(connection.remote_address()));
        Ok(connection)
    }

    async fn talk(&self, connection: &Connection) -> Next {
        let mut heartbeats = self.outbox.heartbeat.subscribe();
        let mut news = self.outbox.news.subscribe();
        // A coordinator that knows nothing is told everything by the latest reports.
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
            // The others may be waiting for something else than the connection.
            err = connection.closed() => Err(err.into()),
        };
        let Err(end) = end;
        Next::Ended(end)
    }

    /// One at a time, so that they are taken up in their order.
    async fn take_desired_states(&self, connection: &Connection) -> Result<Infallible, End> {
        loop {
            let mut stream = connection.accept_uni().await?;
            let desired_state: DesiredState = frame::receive(&mut stream).await?;
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
                // It fails only if the connection is lost, which others notice, too.
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

    /// Waits until two thirds of the certificate's life are over; then asks for a newer one and keeps it.
    async fn renew(&self, connection: &Connection) -> Result<Credential, End> {
        let certified = self.credential.certified();
        let life = certified.not_after.duration_since(certified.not_before).unwrap_or_default();
        let due = certified.not_before + life / 3 * 2;
        tokio::time::sleep(due.duration_since(SystemTime::now()).unwrap_or_default()).await;
        loop {
            let grant = enrol::ask(connection, &Renew).await?;
            match self.credential.renewed(grant) {
                Ok(credential) => {
                    let kept = credential.clone();
                    let dir = self.config.dir.clone();
                    let writing = tokio::task::spawn_blocking(move || kept.save(&dir, NODE)).await;
                    if let Ok(Err(why)) = writing {
                        tracing::error!(%why, "cannot keep the renewed certificate; a restart will need a token");
                    }
                    tracing::info!("renewed the certificate");
                    return Ok(credential);
                }
                Err(why) => {
                    tracing::error!(%why, "the coordinator renews a certificate that is not ours");
                    tokio::time::sleep(life / 30).await;
                }
            }
        }
    }
}

async fn send_news(connection: &Connection, news: &mut watch::Receiver<EncodedReport>) -> Result<Infallible, End> {
    loop {
        changed(news).await;
        // First a stream, then the report: while there is no stream a newer report takes its place.
        let stream = connection.open_uni().await?;
        let encoded = news.borrow_and_update().clone();
        frame::send(stream, encoded.frame).await?;
    }
}

/// The side has a sender itself, so it never ends.
async fn changed(reports: &mut watch::Receiver<EncodedReport>) {
    reports.changed().await.expect("the outbox lives as long as its side");
}
