//! Serves a node's connection at the coordinator.

use super::enrol::Renew;
use super::frame::{self, Code, End, Violation};
use super::shared;
use super::shared::{Connected, NOT_LEADING, Shared};
use crate::transport::Inbound;
use crate::trust::name::{Certified, Name, Role};
use crate::wire;
use bytes::Bytes;
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use phalanx_strategies::elastic::message::Report;
use quinn::Connection;
use std::convert::Infallible;
use std::time::SystemTime;
use tokio::sync::watch;

/// Serves a node until its connection ends.
pub(super) async fn serve(
    shared: &Shared,
    connection: Connection,
    certified: &Certified,
    node: NodeId,
    boot: Incarnation,
) {
    let (desired_state, mut desired_states) = watch::channel(None);
    match enter(shared, node, Connected { boot, connection: connection.clone(), desired_state }) {
        Ok(()) => {}
        Err(NotEntered::NotLeading) => return frame::close(&connection, Code::Done, NOT_LEADING),
        Err(NotEntered::Displaced(have)) => {
            let why = displaced(node, have, boot);
            return shared::refuse(shared, &connection, Code::Displaced, &why, &why);
        }
    }
    let peer = connection.remote_address();
    tracing::info!(%node, %boot, %peer, "a node connected");
    let lifetime = certified.not_after.duration_since(SystemTime::now()).unwrap_or_default();
    // Fails only while the process ends.
    let _ = shared.inbound.send(Inbound::Connected { node, boot, peer: Some(peer) }).await;
    let sender = Sender { shared, name: certified.name };
    let end = tokio::select! {
        end = heartbeats(&sender, &connection) => end,
        end = news(&sender, &connection) => end,
        end = renewals(shared, &connection, certified) => end,
        end = send_desired_states(&connection, &mut desired_states) => end,
        () = tokio::time::sleep(lifetime) => Err(End::Expired),
    };
    let Err(end) = end;
    let why = end.to_string();
    match end {
        // Only nodes compare terms.
        End::Lost(_) | End::Deposed { .. } => {}
        End::Violation(_) => shared::refuse(shared, &connection, Code::Violation, &format!("{node}: {why}"), &why),
        End::Expired => shared::refuse(shared, &connection, Code::Expired, &format!("{node}: {why}"), &why),
    }
    if leave(shared, node, &connection) {
        tracing::info!(%node, %boot, %why, "a node disconnected");
        let _ = shared.inbound.send(Inbound::Disconnected { node, boot, why }).await;
    }
}

/// Why a connection is not registered.
enum NotEntered {
    /// This later boot is connected already.
    Displaced(Incarnation),
    /// The coordinator does not lead (`TP-5`).
    NotLeading,
}

/// Registers a connection (`QUIC-3`).
fn enter(shared: &Shared, node: NodeId, connected: Connected) -> Result<(), NotEntered> {
    let mut nodes = shared.nodes();
    if !shared.leads() {
        return Err(NotEntered::NotLeading);
    }
    if let Some(have) = nodes.get(&node)
        && have.boot > connected.boot
    {
        return Err(NotEntered::Displaced(have.boot));
    }
    let boot = connected.boot;
    if let Some(older) = nodes.insert(node, connected) {
        if older.boot < boot {
            frame::close(&older.connection, Code::Displaced, &displaced(node, boot, older.boot));
        } else {
            frame::close(&older.connection, Code::Done, "replaced by a later connection of this node");
        }
    }
    Ok(())
}

/// Why an earlier boot of a node is rejected.
fn displaced(node: NodeId, later: Incarnation, earlier: Incarnation) -> String {
    format!(
        "{node} has started again with the same key (its later boot is {later}, this one {earlier}); \
         each node needs a folder of its own"
    )
}

/// Removes a connection. Returns false if a later one had replaced it.
fn leave(shared: &Shared, node: NodeId, connection: &Connection) -> bool {
    let mut nodes = shared.nodes();
    let current = nodes.get(&node).is_some_and(|have| have.connection.stable_id() == connection.stable_id());
    if current {
        nodes.remove(&node);
    }
    current
}

/// The authenticated node of a connection.
struct Sender<'a> {
    shared: &'a Shared,
    name: Name,
}

impl Sender<'_> {
    /// Decodes a report and checks that it is the sender's own (`QUIC-2`).
    fn report(&self, frame: &[u8]) -> Result<Report, Violation> {
        let report: Report = wire::decode(frame)?;
        let found = Name { job: report.job, role: Role::Node { node: report.node, boot: report.boot } };
        if found != self.name {
            return Err(Violation::Impersonation { found, have: self.name });
        }
        Ok(report)
    }
}

async fn heartbeats(sender: &Sender<'_>, connection: &Connection) -> Result<Infallible, End> {
    loop {
        let frame = connection.read_datagram().await?;
        sender.shared.batch.put(sender.report(&frame)?);
    }
}

/// One at a time, to keep their order. While the coordinator does not read, the node cannot send.
async fn news(sender: &Sender<'_>, connection: &Connection) -> Result<Infallible, End> {
    loop {
        let mut stream = connection.accept_uni().await?;
        let frame = frame::receive_bytes(&mut stream, wire::Kind::Report).await?;
        let report = sender.report(&frame)?;
        let _ = sender.shared.inbound.send(Inbound::Report(report)).await;
    }
}

async fn renewals(shared: &Shared, connection: &Connection, certified: &Certified) -> Result<Infallible, End> {
    loop {
        let (tx, mut rx) = connection.accept_bi().await?;
        let Renew = frame::receive(&mut rx).await?;
        let grant = match shared.grant(&certified.public_key, certified.name.role) {
            Ok(grant) => grant,
            Err(why) => {
                tracing::error!(%why, name = %certified.name, "cannot renew a certificate");
                continue;
            }
        };
        let frame = wire::encode(&grant).map_err(Violation::from)?;
        frame::send(tx, frame.into()).await?;
    }
}

async fn send_desired_states(
    connection: &Connection,
    desired_states: &mut watch::Receiver<Option<Bytes>>,
) -> Result<Infallible, End> {
    loop {
        if desired_states.changed().await.is_err() {
            // A later connection has replaced this one and is about to close it.
            return Err(connection.closed().await.into());
        }
        // Opens the stream first: a newer desired state replaces this one until a stream is available.
        let stream = connection.open_uni().await?;
        let desired_state = desired_states.borrow_and_update().clone();
        if let Some(desired_state) = desired_state {
            frame::send(stream, desired_state).await?;
        }
    }
}
