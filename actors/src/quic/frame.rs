//! One message, one stream; and how connections end.

use crate::trust::name::Name;
use crate::wire::{self, Kind, Message, WireError};
use bytes::Bytes;
use quinn::{Connection, ConnectionError, ReadError, ReadToEndError, RecvStream, SendStream, VarInt};

/// Why we close a connection; the other side reads it in its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Code {
    /// Nothing more is to be said.
    Done = 0,
    /// Not one of us.
    Refused = 1,
    /// Not by the protocol.
    Violation = 2,
    /// A later connection of the same node has come.
    Displaced = 3,
    /// The certificate has.
    Expired = 4,
}

/// Closes a connection with a reason.
pub(super) fn close(connection: &Connection, code: Code, why: &str) {
    connection.close(VarInt::from_u32(code as u32), why.as_bytes());
}

/// Why a connection is at its end.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum End {
    /// It broke, or was closed.
    #[error("{0}")]
    Lost(#[from] ConnectionError),
    /// The other side breaks the protocol.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The certificate with which it began has expired (`QUIC-6`).
    #[error("its certificate has expired")]
    Expired,
}

/// How a peer breaks the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    /// Its bytes are no message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// It goes on and on.
    #[error("expected {expected} of at most {} bytes, found more", expected.limit())]
    Long {
        /// What it should be.
        expected: Kind,
    },
    /// It stops in the middle.
    #[error("{0} was broken off")]
    Aborted(Kind),
    /// It speaks for another one (`QUIC-2`).
    #[error("its certificate is for {have}, its report for {found}")]
    Impersonation {
        /// Node of its certificate.
        found: Name,
        /// Who it is.
        have: Name,
    },
    /// It refuses what every coordinator sends.
    #[error("it cuts messages short")]
    Stopped,
}

/// The bytes of a stream, which shall be of a kind.
pub(super) async fn receive_bytes(stream: &mut RecvStream, kind: Kind) -> Result<Vec<u8>, End> {
    stream.read_to_end(kind.limit()).await.map_err(|err| match err {
        ReadToEndError::TooLong => Violation::Long { expected: kind }.into(),
        ReadToEndError::Read(ReadError::ConnectionLost(err)) => End::Lost(err),
        ReadToEndError::Read(_) => Violation::Aborted(kind).into(),
    })
}

/// The message of a stream.
pub(super) async fn receive<M: Message>(stream: &mut RecvStream) -> Result<M, End> {
    let frame = receive_bytes(stream, M::KIND).await?;
    Ok(wire::decode(&frame).map_err(Violation::from)?)
}

/// Sends a frame and ends its stream. It is under way when this returns, not there.
pub(super) async fn send(mut stream: SendStream, frame: Bytes) -> Result<(), End> {
    use quinn::WriteError;
    stream.write_chunk(frame).await.map_err(|err| match err {
        WriteError::ConnectionLost(err) => End::Lost(err),
        _ => Violation::Stopped.into(),
    })?;
    // It fails only if the stream was reset, which peers do not do.
    let _ = stream.finish();
    Ok(())
}
