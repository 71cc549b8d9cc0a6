//! The only place that turns messages into bytes and back.
//!
//! A frame is four bytes of envelope (two of magic, protocol version, kind) and a body in bincode's standard
//! configuration. A frame is as long as its carrier (a stream, a datagram, a file), so no length field is needed;
//! readers stop at [`Kind::limit`].
//!
//! Invariants:
//! - `WIRE-1` Bytes of strangers give a message or an error; they never panic and never take more memory than a small
//!   multiple of the limit of their kind. bincode counts *decoded* bytes against the limit, and a vector takes memory
//!   as its elements arrive.
//! - `WIRE-2` A frame has one meaning: another version, another kind and bytes left over are errors.
//! - `WIRE-3` The bytes of a version do not change; a change of any message is another version.
//! - `WIRE-4` What is decoded does not contradict itself: see [`Message::check`].

use phalanx_strategies::elastic::message::{DesiredState, Report};
use phalanx_strategies::elastic::validate::InvalidMessage;
use serde::{Serialize, de::DeserializeOwned};
use std::fmt;

/// Version of the protocol. Peers of another one do not even finish their handshake: it is part of the ALPN name, too.
pub const VERSION: u8 = 4;

const MAGIC: [u8; 2] = *b"px";
const ENVELOPE_BYTES: usize = 4;

/// What a stranger may make us decode before it has shown that it belongs to the job.
const STRANGER_BYTES_MAX: usize = 4 << 10;
/// What one peer may make us decode. A report of 64 ranks with eight shards each takes 22 KiB.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// What a coordinator may make a node decode. The world plan of 10,000 ranks, each of which fetches six pieces, takes
/// 4.9 MiB decoded (see the test); twice that is room for bigger worlds and still nothing to a machine that trains.
const DESIRED_STATE_BYTES_MAX: usize = 12 << 20;

/// What a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// From a node to the coordinator: all that it knows.
    Report = 1,
    /// From the coordinator to a node: all that it wants.
    DesiredState = 2,
    /// From a machine that wants to be a node.
    Join = 3,
    /// To a node: its certificate.
    Grant = 4,
    /// From a node whose certificate is about to expire.
    Renew = 5,
    /// From an operator; the receiver defines the body.
    Request = 6,
    /// To an operator; likewise.
    Answer = 7,
    /// A file: joined nodes and valid tokens.
    Register = 8,
}

impl Kind {
    /// Length of the longest frame of this kind, and of what it may decode to.
    pub const fn limit(self) -> usize {
        match self {
            Kind::Join | Kind::Renew => STRANGER_BYTES_MAX,
            Kind::Report | Kind::Grant | Kind::Request | Kind::Answer => MESSAGE_BYTES_MAX,
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
        })
    }
}

/// What can travel.
pub trait Message: Serialize + DeserializeOwned {
    /// What its frames say that they hold.
    const KIND: Kind;

    /// Validates relations between its fields (`WIRE-4`).
    ///
    /// # Errors
    /// When no conforming peer would send it.
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

impl Message for DesiredState {
    const KIND: Kind = Kind::DesiredState;

    fn check(&self) -> Result<(), InvalidMessage> {
        DesiredState::check(self)
    }
}

/// Why bytes are not a message, or a message has no bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// It cannot be told what they are.
    #[error("expected {expected}, found {found} bytes, which is less than an envelope")]
    Short {
        /// What it should be.
        expected: Kind,
        /// How many bytes there are.
        found: usize,
    },
    /// They are refused unread.
    #[error("expected {expected} of at most {limit} bytes, found {found}")]
    Long {
        /// What it should be.
        expected: Kind,
        /// How many bytes it may have.
        limit: usize,
        /// Found length.
        found: usize,
    },
    /// They are not of this protocol.
    #[error("expected {expected} that begins with {MAGIC:02x?}, found {found:02x?}")]
    Foreign {
        /// What it should be.
        expected: Kind,
        /// How they begin.
        found: [u8; 2],
    },
    /// They are of another release.
    #[error("expected {expected} of protocol version {VERSION}, found version {found}")]
    Version {
        /// What it should be.
        expected: Kind,
        /// Their version.
        found: u8,
    },
    /// They are another message.
    #[error("expected {expected} (kind {}), found kind {found}", *expected as u8)]
    Kind {
        /// What it should be.
        expected: Kind,
        /// Their kind.
        found: u8,
    },
    /// The body is not of its type.
    #[error("the body of {expected} is malformed: {why}")]
    Malformed {
        /// What it should be.
        expected: Kind,
        /// In the words of the decoder.
        why: String,
    },
    /// It contradicts itself.
    #[error("{expected} cannot be: {found}")]
    InvalidMessage {
        /// What it should be.
        expected: Kind,
        /// How.
        found: InvalidMessage,
    },
    /// The message ends before the bytes do.
    #[error("expected {expected}, found {found} bytes after it")]
    Trailing {
        /// What it should be.
        expected: Kind,
        /// How many bytes are left over.
        found: usize,
    },
}

/// The frame of a message.
///
/// # Errors
/// [`WireError::Long`] when the other side would not take it; [`WireError::Malformed`] when the type cannot be written.
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

/// The message in a frame (`WIRE-1`, `WIRE-2`).
///
/// # Errors
/// Whatever is wrong with it.
pub fn decode<M: Message>(frame: &[u8]) -> Result<M, WireError> {
    let body = open(M::KIND, frame)?;
    let expected = M::KIND;
    let config = bincode::config::standard();
    // The limit is a part of the configuration's type, so each has its own line.
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

/// Whether a frame is of a kind, as far as its envelope says.
///
/// # Errors
/// Whatever is wrong with the envelope.
pub fn check(expected: Kind, frame: &[u8]) -> Result<(), WireError> {
    open(expected, frame).map(|_| ())
}

/// Checks the envelope and returns what is in it.
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
