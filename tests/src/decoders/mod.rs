//! What must hold of every decoder whatever bytes it is given: one body for the fuzz targets of `tests/fuzz/` and for the test
//! that keeps them from rotting (`tests/tests/decoders.rs`).
//!
//! Every body asserts what `tests/fuzz/README.md` says of it. That nothing panics, runs for ever or takes memory out of
//! proportion needs no words here: the fuzzer watches that.

mod checkpoint;
mod config;
mod coordinator;
mod data;
mod environment;
mod honest;
mod member;
mod model;
mod plane;
mod rank_messages;
mod store;
mod trust;
mod wire;

/// Some decoders that are fuzzed together.
#[derive(Clone, Copy)]
pub struct Target {
    /// What the target is called.
    pub name: &'static str,
    /// Decodes some bytes and asserts what must hold of the outcome.
    pub run: fn(&[u8]),
    /// Inputs that get past the first checks.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub const TARGETS: [Target; 12] = [
    wire::TARGET,
    trust::TARGET,
    store::TARGET,
    coordinator::TARGET,
    member::TARGET,
    rank_messages::TARGET,
    plane::TARGET,
    checkpoint::TARGET,
    model::TARGET,
    data::TARGET,
    config::TARGET,
    environment::TARGET,
];

/// Runs the target of this name.
///
/// # Panics
/// When there is none, or the bytes show that a decoder is wrong.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of this name");
    (target.run)(bytes);
}

/// Cuts the next piece off: two bytes of length, little-endian, or as much as there is.
fn piece<'a>(bytes: &mut &'a [u8]) -> &'a [u8] {
    let Some((len, rest)) = bytes.split_first_chunk::<2>() else { return std::mem::take(bytes) };
    let (piece, rest) = rest.split_at((u16::from_le_bytes(*len) as usize).min(rest.len()));
    *bytes = rest;
    piece
}

/// What [`piece`] cuts off.
fn as_piece(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_le_bytes(), bytes].concat()
}
