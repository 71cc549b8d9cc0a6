//! Sends and receives one message per stream; the ways in which connections end.

use crate::trust::name::Name;
use crate::wire::{self, Kind, Message, WireError};
use bytes::Bytes;
use phalanx_strategies::elastic::identity::Term;
use quinn::{Connection, ConnectionError, ReadError, ReadToEndError, RecvStream, SendStream, VarInt};

/// Why we close a connection; the peer logs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Code {
    /// The side is done with the connection.
    Done = 0,
    /// The peer is not admitted.
    Refused = 1,
    /// The peer violated the protocol.
    Violation = 2,
    /// A later boot of the same node has replaced this one.
    Displaced = 3,
    /// The certificate has expired.
    Expired = 4,
    /// The certificate is for another job, or for a role that does not connect.
    Foreign = 5,
}

/// Closes a connection with a reason.
pub(super) fn close(connection: &Connection, code: Code, why: &str) {
    connection.close(VarInt::from_u32(code as u32), why.as_bytes());
}

/// Why a connection has ended.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum End {
    /// The connection was lost or closed.
    #[error("{0}")]
    Lost(#[from] ConnectionError),
    /// The peer violated the protocol.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// The certificate of the handshake has expired (`QUIC-6`).
    #[error("its certificate has expired")]
    Expired,
    /// The coordinator leads an earlier term than another one that this node has met.
    #[error("the coordinator leads {found}, another one leads {have}")]
    Deposed {
        /// The coordinator's term.
        found: Term,
        /// The latest term that the node has met.
        have: Term,
    },
}

impl End {
    /// Whether the peer has closed the connection because it is done.
    pub(super) fn is_done(&self) -> bool {
        let done = VarInt::from_u32(Code::Done as u32);
        matches!(self, End::Lost(ConnectionError::ApplicationClosed(close)) if close.error_code == done)
    }

    /// Closes a connection that ends for a reason that the peer should know.
    pub(super) fn close(&self, connection: &Connection) {
        match self {
            End::Violation(why) => close(connection, Code::Violation, &why.to_string()),
            End::Deposed { .. } => close(connection, Code::Done, &self.to_string()),
            End::Lost(_) | End::Expired => {}
        }
    }
}

/// How a peer violated the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    /// The bytes are not a valid message.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The message exceeds the limit of its kind.
    #[error("expected {expected} of at most {} bytes, found more", expected.limit())]
    Long {
        /// The expected kind.
        expected: Kind,
    },
    /// The peer reset the stream before the end of the message.
    #[error("{0} was reset before its end")]
    Aborted(Kind),
    /// The report is for a node other than the sender (`QUIC-2`).
    #[error("its certificate is for {have}, its report for {found}")]
    Impersonation {
        /// Node of the report.
        found: Name,
        /// Node of the certificate.
        have: Name,
    },
    /// The peer stopped the stream of a message.
    #[error("it stopped the stream of a message")]
    Stopped,
}

/// Reads all bytes of a stream, up to the limit of a kind.
pub(super) async fn receive_bytes(stream: &mut RecvStream, kind: Kind) -> Result<Vec<u8>, End> {
    stream.read_to_end(kind.limit()).await.map_err(|err| match err {
        ReadToEndError::TooLong => Violation::Long { expected: kind }.into(),
        ReadToEndError::Read(ReadError::ConnectionLost(err)) => End::Lost(err),
        ReadToEndError::Read(_) => Violation::Aborted(kind).into(),
    })
}

/// Reads the message of a stream.
pub(super) async fn receive<M: Message>(stream: &mut RecvStream) -> Result<M, End> {
    let frame = receive_bytes(stream, M::KIND).await?;
    Ok(wire::decode(&frame).map_err(Violation::from)?)
}

/// Sends a frame and ends its stream. Returns before the frame has arrived.
pub(super) async fn send(mut stream: SendStream, frame: Bytes) -> Result<(), End> {
    use quinn::WriteError;
    stream.write_chunk(frame).await.map_err(|err| match err {
        WriteError::ConnectionLost(err) => End::Lost(err),
        _ => Violation::Stopped.into(),
    })?;
    // Fails only if the stream was reset, which peers do not do.
    let _ = stream.finish();
    Ok(())
}
