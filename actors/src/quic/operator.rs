//! Serves an operator's connection at the coordinator.

use super::frame::{self, Code, End};
use super::shared;
use super::shared::Shared;
use crate::transport::Inbound;
use crate::trust::name::Certified;
use crate::wire::{self, Kind};
use quinn::{Connection, RecvStream, SendStream};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::oneshot;

/// Serves an operator until its connection ends.
pub(super) async fn serve(shared: &Arc<Shared>, connection: Connection, certified: &Certified) {
    tracing::info!(peer = %connection.remote_address(), "an operator connected");
    let lifetime = certified.not_after.duration_since(SystemTime::now()).unwrap_or_default();
    let end = tokio::select! {
        end = requests(shared, &connection) => end,
        () = tokio::time::sleep(lifetime) => Err(End::Expired),
    };
    let Err(end) = end;
    if let End::Expired = end {
        shared::refuse(shared, &connection, Code::Expired, &end, &end.to_string());
    }
}

/// Serves requests concurrently, up to the limit of streams.
async fn requests(shared: &Arc<Shared>, connection: &Connection) -> Result<Infallible, End> {
    loop {
        let (tx, rx) = connection.accept_bi().await?;
        let (shared, connection) = (shared.clone(), connection.clone());
        tokio::spawn(async move {
            if let Err(end @ End::Violation(_)) = answer(&shared, tx, rx).await {
                let why = format!("an operator: {end}");
                shared::refuse(&shared, &connection, Code::Violation, &why, &end.to_string());
            }
        });
    }
}

async fn answer(shared: &Shared, mut tx: SendStream, mut rx: RecvStream) -> Result<(), End> {
    let frame = frame::receive_bytes(&mut rx, Kind::Request).await?;
    wire::check(Kind::Request, &frame).map_err(frame::Violation::from)?;
    let (answer, answered) = oneshot::channel();
    let _ = shared.inbound.send(Inbound::Request { frame, answer }).await;
    match answered.await {
        Ok(bytes) => frame::send(tx, bytes.into()).await,
        Err(_) => {
            // Fails only if the stream is closed, and then the peer is gone.
            let _ = tx.reset((Code::Refused as u32).into());
            Ok(())
        }
    }
}
