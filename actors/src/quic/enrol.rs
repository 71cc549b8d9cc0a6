//! Enrols a machine as a node: by the token of a join string the first time, by its certificate at each later start.

use super::dial::{self, Sockets};
use super::frame::{self, End};
use super::{QuicError, transport};
use crate::trust::credential::{Applicant, Credential, Grant};
use crate::trust::join::{Address, JoinString};
use crate::trust::register::Application;
use crate::trust::token::{CHANNEL_BYTES, CHANNEL_LABEL, Proof};
use crate::trust::{TrustError, name, tls};
use crate::wire::{self, Kind, Message};
use phalanx_strategies::elastic::timing::Timing;
use quinn::Connection;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The name of a node's credential in its directory.
pub const NODE: &str = "node";

/// A machine's application to become a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Join {
    /// The machine has a token.
    WithToken(Application),
    /// The machine restarts, and has the certificate of this connection, which may have expired.
    Again,
    /// The node goes on, and renews the certificate of this connection, which may have expired.
    Renewal,
}

impl Message for Join {
    const KIND: Kind = Kind::Join;
}

/// A renewal request. The connection identifies the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Renew;

impl Message for Renew {
    const KIND: Kind = Kind::Renew;
}

/// Keying material unique to a TLS connection.
pub(super) fn channel(connection: &Connection) -> [u8; CHANNEL_BYTES] {
    let mut channel = [0; CHANNEL_BYTES];
    connection
        .export_keying_material(&mut channel, CHANNEL_LABEL, b"")
        .expect("CHANNEL_BYTES can be exported after a handshake");
    channel
}

/// Enrols this machine as a node, or restarts its node. Keeps the credential in `dir`. Each call is a new boot.
///
/// # Errors
/// When no coordinator answers, or the coordinator rejects the machine. The machine may try again.
pub async fn enrol(join: &JoinString, dir: &Path, timing: &Timing) -> Result<Credential, QuicError> {
    timing.check()?;
    let kept = match Credential::load(dir, NODE) {
        Err(damaged @ TrustError::Damaged { .. }) => {
            tracing::warn!(%damaged, "using the token");
            None
        }
        loaded => loaded?.filter(|kept| is_good(kept, join)),
    };
    if let Some(kept) = kept {
        match again(join, &kept, timing).await {
            Ok(credential) => {
                credential.save(dir, NODE)?;
                return Ok(credential);
            }
            // The register may be an older copy without this node, or a later job may use the same folder. If no
            // coordinator answers, the attempt with the token reports it.
            Err(why) => tracing::info!(%why, "the certificate was not accepted; using the token"),
        }
    }
    let applicant = Applicant::open(dir, NODE)?;
    let grant = with_token(join, &applicant, timing).await?;
    if name::public_key(&grant.authority.as_slice().into()) != Ok(join.authority) {
        return Err(QuicError::Refused("its certificate is not from the authority of the join string".to_owned()));
    }
    let credential = applicant.granted(grant)?;
    credential.save(dir, NODE)?;
    Ok(credential)
}

/// Whether a credential belongs to the job of the join string.
fn is_good(credential: &Credential, join: &JoinString) -> bool {
    name::public_key(credential.authority()) == Ok(join.authority)
}

async fn again(join: &JoinString, kept: &Credential, timing: &Timing) -> Result<Credential, QuicError> {
    let tls = tls::member(kept, tls::JOIN)?;
    let grant = exchange(&join.addresses, tls, timing, |_| Join::Again).await?;
    Ok(kept.renewed(grant)?)
}

/// Renews the certificate of a node that goes on, by its key: its certificate may have expired (`TRUST-7`).
///
/// # Errors
/// When no coordinator answers, or the coordinator rejects the node.
pub(super) async fn renewal(
    addresses: &[Address],
    kept: &Credential,
    timing: &Timing,
) -> Result<Credential, QuicError> {
    let tls = tls::member(kept, tls::JOIN)?;
    let grant = exchange(addresses, tls, timing, |_| Join::Renewal).await?;
    Ok(kept.renewed(grant)?)
}

async fn with_token(join: &JoinString, applicant: &Applicant, timing: &Timing) -> Result<Grant, QuicError> {
    let signing_request = applicant.signing_request()?;
    exchange(&join.addresses, tls::stranger(join.authority)?, timing, |connection| {
        // The handshake has verified that the server holds the key of the join string (`TRUST-2`).
        let proof = Proof::new(&join.token.secret, &channel(connection), &signing_request);
        Join::WithToken(Application { token: join.token.id, proof, signing_request })
    })
    .await
}

/// Connects, sends one join and closes the connection.
async fn exchange(
    addresses: &[Address],
    tls: rustls::ClientConfig,
    timing: &Timing,
    join_for: impl FnOnce(&Connection) -> Join,
) -> Result<Grant, QuicError> {
    let sockets = Sockets::default();
    let config = dial::client(tls, transport::member(timing));
    let connection = dial::dial(&sockets, addresses, &config, timing.detection_time * 4).await?;
    let grant = ask(&connection, &join_for(&connection)).await.map_err(refusal);
    sockets.close(timing.detection_time).await;
    grant
}

/// Sends a message and waits for the certificate in its answer.
pub(super) async fn ask<M: Message>(connection: &Connection, message: &M) -> Result<Grant, End> {
    let bytes = wire::encode(message).map_err(frame::Violation::from)?;
    let (tx, mut rx) = connection.open_bi().await?;
    frame::send(tx, bytes.into()).await?;
    frame::receive(&mut rx).await
}

/// The error of an end for a member.
pub(super) fn refusal(end: End) -> QuicError {
    match end {
        End::Lost(err) => dial::failure(err),
        other => QuicError::Lost(other.to_string()),
    }
}
