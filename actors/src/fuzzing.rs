//! Access to private decoders for fuzz targets. The assertions are in the targets.

use crate::operator::{Answer, Request};
use crate::quic::fuzzing::{Join, Renew};
use crate::store::sealed;
use crate::trust::credential::Grant;
use crate::trust::keys::{read_key, requested_key};
use crate::trust::{join, register};
use crate::wire::{self, Kind, Message};
use phalanx_strategies::elastic::message::{DesiredState, MemberReport, Record, Report};
use phalanx_strategies::elastic::succession::Lease;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::fuzz::cases;

/// All kinds of frames.
pub const KINDS: [Kind; 9] = [
    Kind::Report,
    Kind::DesiredState,
    Kind::Join,
    Kind::Grant,
    Kind::Renew,
    Kind::Request,
    Kind::Answer,
    Kind::Register,
    Kind::StatusReport,
];

/// Decodes a frame as if this kind were expected, and encodes it again.
pub fn frame_again(expected: Kind, frame: &[u8]) -> Option<Vec<u8>> {
    fn again<M: Message>(frame: &[u8]) -> Option<Vec<u8>> {
        let message: M = wire::decode(frame).ok()?;
        Some(wire::encode(&message).expect("a decoded message can be encoded"))
    }
    match expected {
        Kind::Report => again::<Report>(frame),
        Kind::DesiredState => again::<DesiredState>(frame),
        Kind::Join => again::<Join>(frame),
        Kind::Grant => again::<Grant>(frame),
        Kind::Renew => again::<Renew>(frame),
        Kind::Request => again::<Request>(frame),
        Kind::Answer => again::<Answer>(frame),
        Kind::Register => register::fuzzing::again(frame),
        Kind::StatusReport => again::<MemberReport>(frame),
    }
}

/// Valid frames of the kinds without a public type.
pub fn private_frames() -> Vec<Vec<u8>> {
    let encoded = |frame: Result<Vec<u8>, _>| frame.expect("the frame is short");
    let joins = crate::quic::fuzzing::joins().map(|join| encoded(wire::encode(&join)));
    joins.into_iter().chain([encoded(wire::encode(&Renew)), register::fuzzing::example()]).collect()
}

/// Whether the bytes are a signing request, and whether they are a private key.
pub fn key_material(der: &[u8]) -> (bool, bool) {
    (requested_key(der).is_ok(), read_key(der).is_ok())
}

/// The join string with this body and these addresses, and a valid checksum.
pub fn join_word(body: &[u8; join::BODY_BYTES], addresses: &str) -> String {
    join::word(body, addresses)
}

/// The store's file of a record or a lease with this body.
pub fn stored(body: &str) -> String {
    sealed::sealed(body)
}

/// Reads the store's file of a record.
pub fn record_of(text: &str) -> Option<Record> {
    sealed::decode(text).ok().filter(|record: &Record| record.check().is_ok())
}

/// Decodes a file of the store as a record and as a lease, and encodes the results again.
pub fn stored_again(text: &str) -> [Option<String>; 2] {
    fn again<T: DeserializeOwned + Serialize>(text: &str) -> Option<String> {
        sealed::decode::<T>(text).ok().map(|value| sealed::encode(&value))
    }
    [again::<Record>(text), again::<Lease>(text)]
}
