//! The wire format: a header of 72 bytes, then up to 256 KiB.
//!
//! The header has a checksum of itself and one of the bytes that follow (CRC-32C, which finds every burst of up to 32 damaged bits;
//! Castagnoli et al. 1993). TCP's own checksum of 16 bits misses about one damaged packet in 65,536, and finds nothing that a
//! network card or a switch damages before it computes it anew (Stone and Partridge 2000, "When the CRC and TCP checksum disagree").
//!
//! - `FRAME-1` No bit of a frame is used before its checksum is verified: first the header's, then that of the bytes that follow. Bytes
//!   of a tensor are stored where they belong before, but nothing reads them there.

use crc_fast::{CrcAlgorithm, Digest, crc32_iscsi};
use phalanx_device::descriptor::DESCRIPTOR_WORDS;
use phalanx_device::world_id::WorldId;
use phalanx_device::{CollectiveError, Stream};

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = FIELD_BYTES + 8;
/// Bytes of its fields; the checksums follow.
pub(super) const FIELD_BYTES: usize = 64;
/// Most bytes of tensors in one frame.
pub(super) const CHUNK_BYTES: usize = 256 << 10;
/// Operations on tensors of up to this many bytes in total are sent with their announcement.
pub(super) const FLAT_BYTES: usize = 4096;
/// Longest reason of an abort.
pub(super) const REASON_BYTES: usize = 1024;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// An operation was started: its descriptor, and the sender's contribution if the operation is flat.
    Announce,
    /// Some bytes of a tensor.
    Data,
    /// The world is aborted, with the reason.
    Abort,
    /// One group is aborted, with the reason.
    AbortGroup,
    /// The sender has finished all operations and leaves.
    Leave,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: FrameKind,
    pub id: WorldId,
    /// Index of the group in the world.
    pub group: u32,
    pub lane: Lane,
    /// Number of the operation in its stream.
    pub index: u64,
    /// Index of the tensor in the operation.
    pub operand: u32,
    /// 0 for contributions, 1 for sums.
    pub stage: u32,
    /// Offset from the start of the bytes that the receiver expects in this stage.
    pub offset: u64,
    /// Bytes that follow.
    pub len: u32,
}

/// A stream from the side of the frame's sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Operations of the group.
    Group,
    /// The sender of the frame sends the messages.
    Out,
    /// The sender of the frame receives the messages.
    In,
}

impl Lane {
    /// The lane of the sender's own stream.
    pub(super) fn of(stream: Stream) -> Lane {
        match stream {
            Stream::Group => Lane::Group,
            Stream::SendTo(_) => Lane::Out,
            Stream::RecvFrom(_) => Lane::In,
        }
    }

    /// The receiver's stream for a frame from the member at position `peer`.
    pub(super) fn seen_from_other_side(self, peer: u32) -> Stream {
        match self {
            Lane::Group => Stream::Group,
            Lane::Out => Stream::RecvFrom(peer),
            Lane::In => Stream::SendTo(peer),
        }
    }
}

impl Header {
    /// A header without further fields.
    pub(super) fn bare(kind: FrameKind, id: WorldId) -> Header {
        Header { kind, id, group: 0, lane: Lane::Group, index: 0, operand: 0, stage: 0, offset: 0, len: 0 }
    }

    /// The header of a frame, with both checksums; `of_body` is the [`checksum`] of the bytes that follow.
    pub(super) fn seal(&self, of_body: u32) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..FIELD_BYTES].copy_from_slice(&self.encode());
        header[FIELD_BYTES..HEADER_BYTES - 4].copy_from_slice(&of_body.to_le_bytes());
        let own = checksum(&header[..HEADER_BYTES - 4]);
        header[HEADER_BYTES - 4..].copy_from_slice(&own.to_le_bytes());
        header
    }

    /// Verifies and decodes the header of a frame of rank `peer`; also returns the check of the bytes that follow (`FRAME-1`).
    ///
    /// # Errors
    /// [`CollectiveError::Damaged`], or those of [`Header::decode`].
    pub(super) fn open(
        bytes: &[u8; HEADER_BYTES],
        expected: WorldId,
        peer: u32,
    ) -> Result<(Header, BodyCheck), CollectiveError> {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|b| bytes[at + b]));
        if checksum(&bytes[..HEADER_BYTES - 4]) != word(HEADER_BYTES - 4) {
            return Err(CollectiveError::Damaged { peer });
        }
        let fields = bytes.first_chunk().expect("a header has its fields");
        let check = BodyCheck { expected: word(FIELD_BYTES), found: Digest::new(CrcAlgorithm::Crc32Iscsi), peer };
        Ok((Header::decode(fields, expected)?, check))
    }

    /// Encodes the fields.
    pub(super) fn encode(&self) -> [u8; FIELD_BYTES] {
        let kind: u32 = match self.kind {
            FrameKind::Announce => 1,
            FrameKind::Data => 2,
            FrameKind::Abort => 3,
            FrameKind::Leave => 4,
            FrameKind::AbortGroup => 5,
        };
        let lane: u32 = match self.lane {
            Lane::Group => 0,
            Lane::Out => 1,
            Lane::In => 2,
        };
        let mut bytes = [0; FIELD_BYTES];
        let small = [kind, lane, self.group, self.operand, self.stage, self.len];
        for (to, x) in bytes.chunks_exact_mut(4).zip(small) {
            to.copy_from_slice(&x.to_le_bytes());
        }
        let large = [self.index, self.offset, self.id.job, self.id.generation, self.id.incarnation];
        for (to, x) in bytes[24..].chunks_exact_mut(8).zip(large) {
            to.copy_from_slice(&x.to_le_bytes());
        }
        bytes
    }

    /// Decodes the fields of a peer's header.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] for a kind or a length that no member sends; [`CollectiveError::Stale`] for a frame of
    /// another world.
    pub(super) fn decode(bytes: &[u8; FIELD_BYTES], expected: WorldId) -> Result<Header, CollectiveError> {
        let small = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| bytes[4 * i + b]));
        let large = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| bytes[24 + 8 * i + b]));
        let invalid = |field, expected, found| CollectiveError::Invalid { field, expected, found };
        let (kind, len_max) = match small(0) {
            1 => (FrameKind::Announce, 8 * DESCRIPTOR_WORDS + FLAT_BYTES),
            2 => (FrameKind::Data, CHUNK_BYTES),
            3 => (FrameKind::Abort, REASON_BYTES),
            4 => (FrameKind::Leave, 0),
            5 => (FrameKind::AbortGroup, REASON_BYTES),
            other => return Err(invalid("kind of a frame", 5, u64::from(other))),
        };
        let lane = match small(1) {
            0 => Lane::Group,
            1 => Lane::Out,
            2 => Lane::In,
            other => return Err(invalid("stream of a frame", 2, u64::from(other))),
        };
        let (group, operand, stage, len) = (small(2), small(3), small(4), small(5));
        if len as usize > len_max {
            return Err(invalid("length of a frame", len_max as u64, u64::from(len)));
        }
        let id = WorldId { job: large(2), generation: large(3), incarnation: large(4) };
        if id != expected {
            return Err(CollectiveError::Stale { expected, found: id });
        }
        Ok(Header { kind, id, group, lane, index: large(0), operand, stage, offset: large(1), len })
    }
}

/// The checksum of bytes: CRC-32C.
pub(super) fn checksum(bytes: &[u8]) -> u32 {
    crc32_iscsi(bytes)
}

/// Compares the bytes that follow a header with their checksum, in pieces as they arrive.
#[derive(Debug)]
#[must_use]
pub(super) struct BodyCheck {
    expected: u32,
    found: Digest,
    peer: u32,
}

impl BodyCheck {
    /// Takes the next bytes into account.
    pub(super) fn add(&mut self, piece: &[u8]) {
        self.found.update(piece);
    }

    /// Verifies all bytes.
    ///
    /// # Errors
    /// [`CollectiveError::Damaged`]
    pub(super) fn verify(self) -> Result<(), CollectiveError> {
        let is_intact = self.found.finalize() == u64::from(self.expected);
        if is_intact { Ok(()) } else { Err(CollectiveError::Damaged { peer: self.peer }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    proptest! {
        #[test]
        fn decoder_refuses_random_headers_or_keeps_them_within_limits(bytes in prop::array::uniform32(any::<u8>()), kind in 0..7u32, lane in 0..4u32) {
            let mut all = Header::bare(FrameKind::Data, ID).encode();
            all[8..40].copy_from_slice(&bytes);
            all[..4].copy_from_slice(&kind.to_le_bytes());
            all[4..8].copy_from_slice(&lane.to_le_bytes());

            if let Ok(header) = Header::decode(&all, ID) {
                prop_assert!(header.len as usize <= CHUNK_BYTES);
                prop_assert_eq!(header.encode(), all);
            }
        }
    }

    // FRAME-1
    #[test]
    fn every_flipped_bit_of_a_frame_is_found() {
        let body = b"some bytes of a tensor";
        let header = Header { len: body.len() as u32, ..Header::bare(FrameKind::Data, ID) }.seal(checksum(body));
        let mut frame = [&header[..], body].concat();
        let verify = |frame: &[u8]| {
            let (header, body) = frame.split_first_chunk().unwrap();
            let (_, mut check) = Header::open(header, ID, 7)?;
            body.chunks(5).for_each(|piece| check.add(piece));
            check.verify()
        };

        assert_eq!(verify(&frame), Ok(()));
        for bit in 0..8 * frame.len() {
            frame[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(verify(&frame), Err(CollectiveError::Damaged { peer: 7 }), "bit {bit}");
            frame[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn header_round_trips_through_its_bytes() {
        let header = Header {
            kind: FrameKind::Data,
            id: ID,
            group: 4,
            lane: Lane::In,
            index: 1 << 40,
            operand: 6,
            stage: 1,
            offset: 7 << 33,
            len: CHUNK_BYTES as u32,
        };

        assert_eq!(Header::decode(&header.encode(), ID), Ok(header));
    }

    #[test]
    fn frame_of_another_generation_is_refused() {
        let found = WorldId { generation: 1, ..ID };

        let outcome = Header::decode(&Header::bare(FrameKind::Leave, found).encode(), ID);

        assert_eq!(outcome, Err(CollectiveError::Stale { expected: ID, found }));
    }
}
