//! Bytes of a tensor on their way to one peer.

use phalanx_device::Stream;
use std::ops::Range;

/// Bytes of a tensor that go to one peer.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub group: usize,
    pub stream: Stream,
    pub index: u64,
    /// Position of the receiver.
    pub peer: u32,
    pub stage: u32,
    pub operand: u32,
    /// Range of the operand's bytes for that peer.
    pub range: Range<usize>,
    /// Their checksum, if it is known; then they are one chunk.
    pub checksum: Option<u32>,
}
