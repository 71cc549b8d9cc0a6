//! Guarantees of every decoder for any input, shared by the fuzz targets of `tests/fuzz/` and a test of the workspace
//! (`tests/tests/decoders.rs`).
//!
//! Each target asserts the guarantees listed in `tests/fuzz/README.md`. The fuzzer itself detects panics, endless loops and
//! excessive memory.

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
mod served;
mod store;
mod trust;
mod wire;

/// Decoders that are fuzzed together.
#[derive(Clone, Copy)]
pub struct Target {
    /// Name of the target.
    pub name: &'static str,
    /// Decodes the input and asserts the guarantees.
    pub run: fn(&[u8]),
    /// Inputs that pass the first checks.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: [Target; 13] = [
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
    served::TARGET,
];

/// Runs the target of this name.
///
/// # Panics
/// When there is none, or the input violates a guarantee.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target of this name");
    (target.run)(bytes);
}

/// Splits off the next piece: two bytes of length, little-endian, then as many bytes, or all that are left.
fn piece<'a>(bytes: &mut &'a [u8]) -> &'a [u8] {
    let Some((len, rest)) = bytes.split_first_chunk::<2>() else { return std::mem::take(bytes) };
    let (piece, rest) = rest.split_at((u16::from_le_bytes(*len) as usize).min(rest.len()));
    *bytes = rest;
    piece
}

/// Encodes bytes so that [`piece`] returns them.
fn as_piece(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_le_bytes(), bytes].concat()
}
