//! Access to private decoders for fuzz targets.

/// Bytes of the fields of a header: fuzzing begins behind the checksums, which random bytes do not pass.
pub const HEADER_BYTES: usize = super::frame::FIELD_BYTES;

use super::frame::{FrameKind, Header};
use super::group::Announced;
use phalanx_device::world_id::WorldId;

/// The header of an announcement in a world, followed by `len` bytes.
pub fn header_of(world: WorldId, len: u32) -> [u8; HEADER_BYTES] {
    Header { len, ..Header::bare(FrameKind::Announce, world) }.encode()
}

/// Decodes and re-encodes the header of a frame; also returns the number of bytes that follow it.
pub fn header_again(bytes: &[u8; HEADER_BYTES], world: WorldId) -> Option<([u8; HEADER_BYTES], usize)> {
    let header = Header::decode(bytes, world).ok()?;
    Some((header.encode(), header.len as usize))
}

/// Decodes the body of an announcement; returns the words and the text of its descriptor, and its flat bytes.
pub fn announcement(body: &[u8]) -> Option<(Vec<u64>, String, Vec<u8>)> {
    let mut announced = Announced::unused();
    announced.decode(body).ok()?;
    let copy: &[u8] = bytemuck::cast_slice(&announced.flat_copy);
    let words = announced.descriptor.encode().to_vec();
    Some((words, announced.descriptor.to_string(), copy[..announced.flat_bytes].to_vec()))
}
