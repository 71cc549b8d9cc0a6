//! How a machine becomes a node: with the token of a join string the first time, with its certificate at each start
//! after that.

use super::dial::{self, Sockets};
use super::frame::{self, End};
use super::{QuicError, transport};
use crate::trust::credential::{Applicant, Credential, Grant};
use crate::trust::join::JoinString;
use crate::trust::register::Application;
use crate::trust::token::{CHANNEL_BYTES, CHANNEL_LABEL, Proof};
use crate::trust::{name, tls};
use crate::wire::{self, Kind, Message};
use phalanx_strategies::elastic::timing::Timing;
use quinn::Connection;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::SystemTime;

/// The name of a node's credential in its directory.
pub const NODE: &str = "node";

/// A machine's application to become a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Join {
    /// It has a token.
    WithToken(Application),
    /// It has the certificate that it shows, and starts again.
    Again,
}

impl Message for Join {
    const KIND: Kind = Kind::Join;
}

/// A renewal request of a node, which the connection identifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Renew;

impl Message for Renew {
    const KIND: Kind = Kind::Renew;
}

/// What no two TLS connections have in common.
pub(super) fn channel(connection: &Connection) -> [u8; CHANNEL_BYTES] {
    let mut channel = [0; CHANNEL_BYTES];
    connection
        .export_keying_material(&mut channel, CHANNEL_LABEL, b"")
        .expect("so few bytes can always be exported after a handshake");
    channel
}

/// Makes this machine a node, or starts it again if it is one; the credential is kept in `dir`. Each call is a new boot.
///
/// # Errors
/// When no coordinator answers, or it refuses. The machine may try again.
pub async fn enrol(join: &JoinString, dir: &Path, timing: &Timing) -> Result<Credential, QuicError> {
    timing.check()?;
    let kept = Credential::load(dir, NODE)?.filter(|kept| is_good(kept, join));
    if let Some(kept) = kept {
        match again(join, &kept, timing).await {
            Ok(credential) => {
                credential.save(dir, NODE)?;
                return Ok(credential);
            }
            // The register may be an older copy, for which this machine is a new one, or the job a later one in the
            // same folder. If no coordinator answers, the attempt with the token reports it.
            Err(why) => tracing::info!(%why, "the certificate is no longer good; using the token"),
        }
    }
    let applicant = Applicant::open(dir, NODE)?;
    let grant = with_token(join, &applicant, timing).await?;
    if name::public_key(&grant.authority.as_slice().into()) != Ok(join.authority) {
        return Err(QuicError::Refused("its certificate is of another authority than the join string's".to_owned()));
    }
    let credential = applicant.granted(grant)?;
    credential.save(dir, NODE)?;
    Ok(credential)
}

/// Whether a credential is of this job and has not expired.
fn is_good(credential: &Credential, join: &JoinString) -> bool {
    name::public_key(credential.authority()) == Ok(join.authority)
        && SystemTime::now() < credential.certified().not_after
}

async fn again(join: &JoinString, kept: &Credential, timing: &Timing) -> Result<Credential, QuicError> {
    let tls = tls::member(kept, tls::JOIN)?;
    let grant = exchange(join, tls, timing, |_| Join::Again).await?;
    Ok(kept.renewed(grant)?)
}

async fn with_token(join: &JoinString, applicant: &Applicant, timing: &Timing) -> Result<Grant, QuicError> {
    let signing_request = applicant.signing_request()?;
    exchange(join, tls::stranger(join.authority)?, timing, |connection| {
        // The server has shown in the handshake that it holds the key of the join string (`TRUST-2`).
        let proof = Proof::new(&join.token.secret, &channel(connection), &signing_request);
        Join::WithToken(Application { token: join.token.id, proof, signing_request })
    })
    .await
}

/// Connects, asks and hangs up.
async fn exchange(
    join: &JoinString,
    tls: rustls::ClientConfig,
    timing: &Timing,
    say: impl FnOnce(&Connection) -> Join,
) -> Result<Grant, QuicError> {
    let sockets = Sockets::default();
    let config = dial::client(tls, transport::member(timing));
    let connection = dial::dial(&sockets, &join.addresses, &config, timing.detection_time * 4).await?;
    let grant = ask(&connection, &say(&connection)).await.map_err(refusal);
    sockets.close(timing.detection_time).await;
    grant
}

/// Sends a message and waits for the certificate that answers it.
pub(super) async fn ask<M: Message>(connection: &Connection, message: &M) -> Result<Grant, End> {
    let bytes = wire::encode(message).map_err(frame::Violation::from)?;
    let (tx, mut rx) = connection.open_bi().await?;
    frame::send(tx, bytes.into()).await?;
    frame::receive(&mut rx).await
}

/// What an end means to a member.
pub(super) fn refusal(end: End) -> QuicError {
    match end {
        End::Lost(err) => dial::failure(err),
        other => QuicError::Lost(other.to_string()),
    }
}
