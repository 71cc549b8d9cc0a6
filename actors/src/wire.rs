//! The only encoder and decoder of messages.
//!
//! A frame is four bytes of envelope (two of magic, protocol version, kind) and a body in bincode's standard
//! configuration. A frame needs no length field because it fills its carrier (a stream, a datagram, a file); readers stop
//! at [`Kind::limit`].
//!
//! Invariants:
//! - `WIRE-1` Decoding untrusted bytes gives a message or an error; it never panics and never takes more memory than a
//!   small multiple of the limit of the kind. bincode counts *decoded* bytes against the limit, and a vector takes memory
//!   as its elements arrive.
//! - `WIRE-2` A frame has one meaning: another version, another kind and trailing bytes are errors.
//! - `WIRE-3` The encoding of a version does not change; a change of any message requires another version.
//! - `WIRE-4` A decoded message is consistent: see [`Message::check`].

use phalanx_strategies::elastic::message::{DesiredState, MemberReport, Report};
use phalanx_strategies::elastic::validate::InvalidMessage;
use serde::{Serialize, de::DeserializeOwned};
use std::fmt;

/// Version of the protocol. It is part of the ALPN names, so the handshake of peers with different versions fails.
pub const VERSION: u8 = 9;

const MAGIC: [u8; 2] = *b"px";
const ENVELOPE_BYTES: usize = 4;

/// Decoding limit for a peer without a certificate.
const STRANGER_BYTES_MAX: usize = 4 << 10;
/// Decoding limit for a member. A report of 64 ranks with eight shards each takes 22 KiB.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Decoding limit for desired states. The world plan of 10,000 ranks that fetch six pieces each takes 4.9 MiB decoded (see
/// the test); twice that leaves room for larger worlds and is negligible for a training machine.
const DESIRED_STATE_BYTES_MAX: usize = 12 << 20;

/// The kind of a frame's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// From a node to the coordinator: the node's complete state.
    Report = 1,
    /// From the coordinator to a node: the complete desired state.
    DesiredState = 2,
    /// From a joining machine.
    Join = 3,
    /// To a node: the node's certificate.
    Grant = 4,
    /// From a node whose certificate is about to expire.
    Renew = 5,
    /// From an operator; the receiver defines the body.
    Request = 6,
    /// To an operator; the sender defines the body.
    Answer = 7,
    /// A file: joined nodes and valid tokens.
    Register = 8,
    /// From a rank process to its node: the rank's status.
    StatusReport = 9,
}

impl Kind {
    /// Most bytes of a frame of this kind, encoded and decoded.
    pub const fn limit(self) -> usize {
        match self {
            Kind::Join | Kind::Renew => STRANGER_BYTES_MAX,
            Kind::Report | Kind::StatusReport | Kind::Grant | Kind::Request | Kind::Answer => MESSAGE_BYTES_MAX,
            Kind::DesiredState | Kind::Register => DESIRED_STATE_BYTES_MAX,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Report => "a report",
            Kind::DesiredState => "a desired state",
            Kind::Join => "a join",
            Kind::Grant => "a grant",
            Kind::Renew => "a renewal",
            Kind::Request => "a request",
            Kind::Answer => "an answer",
            Kind::Register => "a register",
            Kind::StatusReport => "a status report",
        })
    }
}

/// A message that can be sent as a frame.
pub trait Message: Serialize + DeserializeOwned {
    /// Kind of the message's frames.
    const KIND: Kind;

    /// Validates relations between the fields (`WIRE-4`).
    ///
    /// # Errors
    /// When no conforming peer would send the message.
    fn check(&self) -> Result<(), InvalidMessage> {
        Ok(())
    }
}

impl Message for Report {
    const KIND: Kind = Kind::Report;

    fn check(&self) -> Result<(), InvalidMessage> {
        Report::check(self)
    }
}

impl Message for MemberReport {
    const KIND: Kind = Kind::StatusReport;

    fn check(&self) -> Result<(), InvalidMessage> {
        MemberReport::check(self)
    }
}

impl Message for DesiredState {
    const KIND: Kind = Kind::DesiredState;

    fn check(&self) -> Result<(), InvalidMessage> {
        DesiredState::check(self)
    }
}

/// Why a frame cannot be decoded, or a message cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The frame is shorter than an envelope.
    #[error("expected {expected}, found {found} bytes, which is less than an envelope")]
    Short {
        /// The expected kind.
        expected: Kind,
        /// Length of the frame.
        found: usize,
    },
    /// The frame exceeds the limit of its kind.
    #[error("expected {expected} of at most {limit} bytes, found {found}")]
    Long {
        /// The expected kind.
        expected: Kind,
        /// Maximum length.
        limit: usize,
        /// Found length.
        found: usize,
    },
    /// The frame is not of this protocol.
    #[error("expected {expected} that begins with {MAGIC:02x?}, found {found:02x?}")]
    Foreign {
        /// The expected kind.
        expected: Kind,
        /// First bytes of the frame.
        found: [u8; 2],
    },
    /// The frame has another protocol version.
    #[error("expected {expected} of protocol version {VERSION}, found version {found}")]
    Version {
        /// The expected kind.
        expected: Kind,
        /// Version of the frame.
        found: u8,
    },
    /// The frame holds another kind of message.
    #[error("expected {expected} (kind {}), found kind {found}", *expected as u8)]
    Kind {
        /// The expected kind.
        expected: Kind,
        /// Kind of the frame.
        found: u8,
    },
    /// The body does not decode to its type.
    #[error("the body of {expected} is malformed: {why}")]
    Malformed {
        /// The expected kind.
        expected: Kind,
        /// The decoder's error.
        why: String,
    },
    /// The message is inconsistent.
    #[error("{expected} is invalid: {found}")]
    InvalidMessage {
        /// The expected kind.
        expected: Kind,
        /// The inconsistency.
        found: InvalidMessage,
    },
    /// Bytes follow the message.
    #[error("expected {expected}, found {found} bytes after it")]
    Trailing {
        /// The expected kind.
        expected: Kind,
        /// Number of trailing bytes.
        found: usize,
    },
}

/// Encodes a message as a frame.
///
/// # Errors
/// [`WireError::Long`] when the frame exceeds its limit; [`WireError::Malformed`] when the type cannot be encoded.
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, WireError> {
    let expected = M::KIND;
    let mut frame = vec![MAGIC[0], MAGIC[1], VERSION, expected as u8];
    bincode::serde::encode_into_std_write(message, &mut frame, bincode::config::standard())
        .map_err(|err| WireError::Malformed { expected, why: err.to_string() })?;
    if frame.len() > expected.limit() {
        return Err(WireError::Long { expected, limit: expected.limit(), found: frame.len() });
    }
    Ok(frame)
}

/// Decodes the message in a frame (`WIRE-1`, `WIRE-2`).
///
/// # Errors
/// When the frame is invalid.
pub fn decode<M: Message>(frame: &[u8]) -> Result<M, WireError> {
    let body = open(M::KIND, frame)?;
    let expected = M::KIND;
    let config = bincode::config::standard();
    // The limit is part of the configuration's type, so each limit has its own line.
    let decoded = match expected.limit() {
        STRANGER_BYTES_MAX => bincode::serde::decode_from_slice(body, config.with_limit::<STRANGER_BYTES_MAX>()),
        MESSAGE_BYTES_MAX => bincode::serde::decode_from_slice(body, config.with_limit::<MESSAGE_BYTES_MAX>()),
        _ => bincode::serde::decode_from_slice(body, config.with_limit::<DESIRED_STATE_BYTES_MAX>()),
    };
    let (message, n_read): (M, usize) =
        decoded.map_err(|err| WireError::Malformed { expected, why: err.to_string() })?;
    match body.len() - n_read {
        0 => {}
        found => return Err(WireError::Trailing { expected, found }),
    }
    message.check().map_err(|found| WireError::InvalidMessage { expected, found })?;
    Ok(message)
}

/// Whether these bytes begin like a frame of any kind and version.
pub fn is_frame(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// Checks only the envelope of a frame.
///
/// # Errors
/// When the envelope is invalid or of another kind.
pub fn check(expected: Kind, frame: &[u8]) -> Result<(), WireError> {
    open(expected, frame).map(|_| ())
}

/// Checks the envelope and returns the body.
fn open(expected: Kind, frame: &[u8]) -> Result<&[u8], WireError> {
    let limit = expected.limit();
    if frame.len() > limit {
        return Err(WireError::Long { expected, limit, found: frame.len() });
    }
    let Some(([m0, m1, version, kind], body)) = frame.split_first_chunk::<ENVELOPE_BYTES>() else {
        return Err(WireError::Short { expected, found: frame.len() });
    };
    if [*m0, *m1] != MAGIC {
        return Err(WireError::Foreign { expected, found: [*m0, *m1] });
    }
    if *version != VERSION {
        return Err(WireError::Version { expected, found: *version });
    }
    if *kind != expected as u8 {
        return Err(WireError::Kind { expected, found: *kind });
    }
    Ok(body)
}

#[cfg(test)]
mod tests;
