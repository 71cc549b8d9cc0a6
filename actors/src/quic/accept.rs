//! Accepts connections, identifies their peers and admits new nodes (`QUIC-1`).

use super::enrol::{self, Join};
use super::frame::{self, Code, End};
use super::shared;
use super::shared::{NOT_LEADING, Shared};
use super::{node, operator};
use crate::trust::name::{Certified, Role};
use crate::trust::register::{NodeIdentity, Refused};
use crate::trust::{TrustError, tls};
use crate::wire;
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use quinn::crypto::rustls::HandshakeData;
use quinn::{Connection, ConnectionError, Endpoint, Incoming};
use rustls::pki_types::CertificateDer;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};
use tokio::task::AbortHandle;

/// Most handshakes and joins in progress. Joins queue anyway, for a durable write each. Small in tests, to reach the limit.
pub(super) const UNKNOWN_MAX: usize = if cfg!(test) { 16 } else { 1024 };
/// Above this number of handshakes, a peer must prove its source address first.
const UNKNOWN_UNCHECKED_MAX: usize = if cfg!(test) { 4 } else { 256 };
/// How long a handshake or a join may take. Under load a handshake waits for earlier ones.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves all connections until the endpoint is closed.
pub(super) async fn serve(shared: &Arc<Shared>, endpoint: &Endpoint) {
    let mut unidentified = Unidentified::default();
    while let Some(incoming) = endpoint.accept().await {
        let n_unidentified = unidentified.count();
        if n_unidentified >= UNKNOWN_UNCHECKED_MAX && !incoming.remote_address_validated() && incoming.may_retry() {
            // Fails only if the peer is validated already.
            let _ = incoming.retry();
            continue;
        }
        if n_unidentified == UNKNOWN_MAX {
            unidentified.end_oldest(shared);
        }
        let (peer, alive) = (incoming.remote_address(), Arc::new(()));
        let weak = Arc::downgrade(&alive);
        let task = tokio::spawn(greet(shared.clone(), incoming, alive)).abort_handle();
        unidentified.peers.push_back(Unknown { peer, alive: weak, task });
    }
}

/// Connections whose peer is not identified yet or joins, from the oldest on. If there are too many, the oldest ends: strangers that
/// keep their connections open cannot keep nodes out, which identify themselves within some round trips.
#[derive(Default)]
struct Unidentified {
    peers: VecDeque<Unknown>,
}

struct Unknown {
    peer: SocketAddr,
    /// Dropped once the peer is identified or the connection has ended.
    alive: Weak<()>,
    task: AbortHandle,
}

impl Unidentified {
    fn count(&mut self) -> usize {
        self.peers.retain(|unknown| unknown.alive.strong_count() > 0);
        self.peers.len()
    }

    fn end_oldest(&mut self, shared: &Shared) {
        if let Some(Unknown { peer, task, .. }) = self.peers.pop_front() {
            shared.complaints.refused(peer, &"too many handshakes in progress");
            task.abort();
        }
    }
}

/// Completes the handshake, identifies the peer and serves it.
async fn greet(shared: Arc<Shared>, incoming: Incoming, unidentified: Arc<()>) {
    let peer = incoming.remote_address();
    let connection = match tokio::time::timeout(PATIENCE, handshake(&shared, incoming)).await {
        Ok(Ok(Some(connection))) => connection,
        Ok(Ok(None)) => return tracing::debug!(%peer, why = NOT_LEADING, "refused a peer"),
        Ok(Err(err)) => return shared.complaints.refused(peer, &err),
        Err(_) => return shared.complaints.refused(peer, &"its handshake takes too long"),
    };
    match identify(&shared, &connection) {
        Ok(Peer::Stranger) => joins(&shared, &connection, None).await,
        Ok(Peer::Returning(certified, identity)) => joins(&shared, &connection, Some((certified, identity))).await,
        Ok(Peer::Node(certified, node, boot)) => {
            drop(unidentified);
            node::serve(&shared, connection, &certified, node, boot).await;
        }
        Ok(Peer::Operator(certified)) => {
            drop(unidentified);
            operator::serve(&shared, connection, &certified).await;
        }
        Err(why @ Unidentifiable::OtherJob { joins: true, .. }) => {
            // A machine that has been a node of an earlier job tries its certificate before the token.
            tracing::info!(peer = %connection.remote_address(), %why, "refused a certificate");
            frame::close(&connection, why.code(), &why.to_string());
        }
        Err(why) => shared::refuse(&shared, &connection, why.code(), &why, &why.to_string()),
    }
}

/// Completes the handshake; `None` if the coordinator does not serve the peer: a node while it does not lead (`TP-5`), or a machine
/// that joins while it admits none. It is refused within the handshake, because a node stays with the first coordinator that completes
/// one.
async fn handshake(shared: &Shared, incoming: Incoming) -> Result<Option<Connection>, ConnectionError> {
    let mut connecting = incoming.accept()?;
    if !shared.leads() || !shared.config.admits {
        let data = connecting.handshake_data().await?.downcast::<HandshakeData>().ok();
        let protocol = data.and_then(|data| data.protocol);
        let joins = protocol.as_deref() == Some(tls::JOIN);
        let is_operator = protocol.as_deref() == Some(tls::OPERATOR);
        if !shared.leads() && !is_operator || !shared.config.admits && joins {
            // Dropping the connection closes it.
            return Ok(None);
        }
    }
    connecting.await.map(Some)
}

/// The peer of a connection.
enum Peer {
    /// A machine without a certificate that joins.
    Stranger,
    /// A node that restarts, or renews its certificate.
    Returning(Certified, NodeIdentity),
    Node(Certified, NodeId, Incarnation),
    Operator(Certified),
}

/// Why a connection is rejected.
#[derive(Debug, thiserror::Error)]
enum Unidentifiable {
    #[error("expected a certificate, found none; without a certificate a peer can only join")]
    NoCertificate,
    #[error("its certificate is for {found}, expected {have}")]
    OtherJob { found: String, have: String, joins: bool },
    #[error("its certificate is for {0}, which does not connect to a coordinator")]
    Role(String),
    #[error("its certificate has expired")]
    Expired,
    #[error(transparent)]
    Certificate(#[from] TrustError),
}

impl Unidentifiable {
    const fn code(&self) -> Code {
        match self {
            Unidentifiable::NoCertificate => Code::Refused,
            Unidentifiable::Expired => Code::Expired,
            Unidentifiable::OtherJob { .. } | Unidentifiable::Role(_) | Unidentifiable::Certificate(_) => Code::Foreign,
        }
    }
}

/// Identifies the peer by its verified TLS certificate alone (`QUIC-2`).
fn identify(shared: &Shared, connection: &Connection) -> Result<Peer, Unidentifiable> {
    let data = connection.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok());
    let joining = data.and_then(|data| data.protocol) == Some(tls::JOIN.to_vec());
    let chain = connection.peer_identity().and_then(|id| id.downcast::<Vec<CertificateDer<'static>>>().ok());
    let Some(leaf) = chain.as_deref().and_then(|chain| chain.first()) else {
        return if joining { Ok(Peer::Stranger) } else { Err(Unidentifiable::NoCertificate) };
    };
    let certified = Certified::read(leaf)?;
    let name = certified.name;
    if name.job != shared.config.job {
        let (found, have) = (name.job.to_string(), shared.config.job.to_string());
        return Err(Unidentifiable::OtherJob { found, have, joins: joining });
    }
    match (joining, name.role) {
        (true, Role::Node { node, boot }) => Ok(Peer::Returning(certified, NodeIdentity { node, boot })),
        (false, Role::Node { .. } | Role::Operator) if certified.not_after <= SystemTime::now() => {
            Err(Unidentifiable::Expired)
        }
        (false, Role::Node { node, boot }) => Ok(Peer::Node(certified, node, boot)),
        (false, Role::Operator) => Ok(Peer::Operator(certified)),
        (true, Role::Operator) | (_, Role::Coordinator) => Err(Unidentifiable::Role(name.to_string())),
    }
}

/// Admits a machine whose token or certificate is valid. One attempt per connection; its proof is invalid on any other
/// connection.
async fn joins(shared: &Arc<Shared>, connection: &Connection, returning: Option<(Certified, NodeIdentity)>) {
    let attempt = tokio::time::timeout(PATIENCE, join(shared, connection, returning)).await;
    let (code, log, reply) = match attempt {
        Ok(Ok(identity)) => {
            tracing::info!(peer = %connection.remote_address(), node = %identity.node, boot = %identity.boot, "joined");
            // The machine closes the connection once it has its certificate.
            let _ = tokio::time::timeout(PATIENCE, connection.closed()).await;
            return;
        }
        Ok(Err(NotJoined::Refused(why))) => {
            let code = if matches!(why, Refused::Displaced { .. }) { Code::Displaced } else { Code::Refused };
            (code, why.to_string(), public_reason(&why))
        }
        Ok(Err(NotJoined::End(End::Lost(err)))) => return shared.complaints.refused(connection.remote_address(), &err),
        Ok(Err(NotJoined::End(end))) => (Code::Refused, end.to_string(), end.to_string()),
        Err(_) => (Code::Refused, "its join takes too long".to_owned(), "the join takes too long".to_owned()),
    };
    shared::refuse(shared, connection, code, &log, &reply);
}

/// The reason as sent to the peer: a peer without the secret must not find out whether a token exists.
fn public_reason(why: &Refused) -> String {
    match why {
        Refused::UnknownToken(_) | Refused::WrongProof(_) => "the token is unknown or wrong".to_owned(),
        other => other.to_string(),
    }
}

enum NotJoined {
    Refused(Refused),
    End(End),
}

impl From<End> for NotJoined {
    fn from(end: End) -> NotJoined {
        NotJoined::End(end)
    }
}

async fn join(
    shared: &Arc<Shared>,
    connection: &Connection,
    returning: Option<(Certified, NodeIdentity)>,
) -> Result<NodeIdentity, NotJoined> {
    let (tx, mut rx) = connection.accept_bi().await.map_err(End::from)?;
    let join: Join = frame::receive(&mut rx).await?;
    let channel = enrol::channel(connection);
    let admission = tokio::task::spawn_blocking({
        let shared = shared.clone();
        move || match (join, returning) {
            (Join::WithToken(application), _) => shared.register().admit(SystemTime::now(), &application, &channel),
            (Join::Again, Some((certified, earlier))) => {
                let identity = shared.register().readmit(SystemTime::now(), earlier.node, certified.fingerprint())?;
                Ok((identity, certified.public_key))
            }
            (Join::Renewal, Some((certified, identity))) => {
                shared.register().confirm(identity, certified.fingerprint())?;
                Ok((identity, certified.public_key))
            }
            (Join::Again | Join::Renewal, None) => Err(Refused::NoCertificate),
        }
    });
    let (identity, public_key) = admission.await.expect("the register does not panic").map_err(NotJoined::Refused)?;
    let role = Role::Node { node: identity.node, boot: identity.boot };
    let grant = shared.grant(&public_key, role).map_err(|err| NotJoined::Refused(Refused::Request(err)))?;
    let frame = wire::encode(&grant).map_err(|err| End::Violation(err.into()))?;
    frame::send(tx, frame.into()).await?;
    Ok(identity)
}
