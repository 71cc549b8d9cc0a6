//! The operator's side: sends a request and receives its answer.

use super::dial::{self, Sockets};
use super::frame;
use super::{QuicError, transport};
use crate::trust::credential::Credential;
use crate::trust::join::Address;
use crate::trust::tls;
use crate::wire::Kind;
use phalanx_strategies::elastic::timing::Timing;
use quinn::Connection;
use std::time::Duration;

/// A connection of an operator.
pub struct Operator {
    sockets: Sockets,
    connection: Connection,
}

impl Operator {
    /// Connects to the first coordinator that answers.
    ///
    /// # Errors
    /// When no coordinator answers.
    pub async fn connect(
        addresses: &[Address],
        credential: &Credential,
        timing: &Timing,
    ) -> Result<Operator, QuicError> {
        let config = dial::client(tls::member(credential, tls::OPERATOR)?, transport::member(timing));
        let sockets = Sockets::default();
        let connection = dial::dial(&sockets, addresses, &config, timing.detection_time * 4).await?;
        Ok(Operator { sockets, connection })
    }

    /// Sends the frame of a [`Kind::Request`] and waits for the frame of its [`Kind::Answer`], without a timeout.
    ///
    /// # Errors
    /// When the coordinator rejects the request, or the connection is lost.
    pub async fn ask(&self, request: Vec<u8>) -> Result<Vec<u8>, QuicError> {
        let lost = |err: &dyn std::fmt::Display| QuicError::Lost(err.to_string());
        let (tx, mut rx) = self.connection.open_bi().await.map_err(|err| lost(&err))?;
        frame::send(tx, request.into()).await.map_err(|err| lost(&err))?;
        frame::receive_bytes(&mut rx, Kind::Answer).await.map_err(|err| match err {
            frame::End::Violation(frame::Violation::Aborted(_)) => {
                QuicError::Refused("it does not answer this request".to_owned())
            }
            other => lost(&other),
        })
    }

    /// Closes the connection.
    pub async fn close(self) {
        self.sockets.close(Duration::from_secs(1)).await;
    }
}
