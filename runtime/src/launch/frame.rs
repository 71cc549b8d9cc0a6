//! Frames between a launcher and a rank: four bytes of length, little-endian, then the content: JSON, or a frequent message in
//! the encoding of its own.

use serde::Serialize;
use thiserror::Error;

/// Bytes of the longest frame. Frames carry events, desired states and digests, of up to a hundred thousand tensors, but never
/// tensors.
pub const FRAME_BYTES_MAX: usize = 8 << 20;
/// Bytes of the length prefix.
const PREFIX_BYTES: usize = 4;

/// Why a frame cannot be sent or received.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// Longer than allowed.
    #[error("a frame of {found} bytes is longer than the {FRAME_BYTES_MAX} allowed")]
    TooLong {
        /// The length.
        found: usize,
    },
    /// The stream ended inside a frame.
    #[error("the stream ended {missing} bytes before the end of a frame")]
    CutShort {
        /// Missing bytes, as far as known from the received part.
        missing: usize,
    },
    /// The value cannot be encoded as JSON.
    #[error("cannot encode a frame: {0}")]
    Json(String),
    /// The socket failed.
    #[error("the channel between launcher and rank failed: {0}")]
    Broken(String),
}

/// Encodes a value as a frame.
///
/// # Errors
/// When the value cannot be encoded as JSON or is too long.
pub fn encode(value: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut frame = Vec::new();
    encode_into(value, &mut frame)?;
    Ok(frame)
}

/// Encodes a value as a frame into `frame`, whose content it replaces.
///
/// # Errors
/// As [`encode`].
pub fn encode_into(value: &impl Serialize, frame: &mut Vec<u8>) -> Result<(), FrameError> {
    fill(frame, |frame| serde_json::to_writer(frame, value).map_err(|error| FrameError::Json(error.to_string())))
}

/// Makes a frame of this content in `frame`, whose content it replaces.
///
/// # Errors
/// When the content is too long.
pub fn enclose_into(content: &[u8], frame: &mut Vec<u8>) -> Result<(), FrameError> {
    fill(frame, |frame| {
        frame.extend_from_slice(content);
        Ok(())
    })
}

fn fill(frame: &mut Vec<u8>, write: impl FnOnce(&mut Vec<u8>) -> Result<(), FrameError>) -> Result<(), FrameError> {
    frame.clear();
    frame.extend([0; PREFIX_BYTES]);
    write(frame)?;
    let found = frame.len() - PREFIX_BYTES;
    if found > FRAME_BYTES_MAX {
        return Err(FrameError::TooLong { found });
    }
    frame[..PREFIX_BYTES].copy_from_slice(&(found as u32).to_le_bytes());
    Ok(())
}

/// Cuts a stream into the contents of its frames.
#[derive(Debug, Default)]
pub struct FrameCutter {
    bytes: Vec<u8>,
    /// Start of the first frame that has not been taken.
    start: usize,
}

impl FrameCutter {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the next complete frame. A frame that is too long is discarded, with everything after it.
    ///
    /// # Errors
    /// [`FrameError::TooLong`], permanently: the start of the next frame is unknown.
    pub fn next_frame(&mut self) -> Result<Option<Vec<u8>>, FrameError> {
        let rest = &self.bytes[self.start..];
        let Some((prefix, rest)) = rest.split_first_chunk::<PREFIX_BYTES>() else { return Ok(None) };
        let found = u32::from_le_bytes(*prefix) as usize;
        if found > FRAME_BYTES_MAX {
            self.bytes.truncate(self.start + PREFIX_BYTES);
            return Err(FrameError::TooLong { found });
        }
        let content = rest.get(..found).map(<[u8]>::to_vec);
        if content.is_some() {
            self.start += PREFIX_BYTES + found;
        }
        Ok(content)
    }

    /// Number of missing bytes of an incomplete frame; `None` between frames.
    pub fn missing(&self) -> Option<usize> {
        let rest = &self.bytes[self.start..];
        match rest.split_first_chunk::<PREFIX_BYTES>() {
            None if rest.is_empty() => None,
            None => Some(PREFIX_BYTES - rest.len()),
            Some((prefix, rest)) => Some((u32::from_le_bytes(*prefix) as usize).saturating_sub(rest.len())),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frame_that_is_too_long_is_rejected_by_both_ends_at_once() {
        let mut cutter = FrameCutter::default();

        cutter.push(&(FRAME_BYTES_MAX as u32 + 1).to_le_bytes());

        assert_eq!(cutter.next_frame(), Err(FrameError::TooLong { found: FRAME_BYTES_MAX + 1 }));
        cutter.push(&[0; 100]);
        assert_eq!(cutter.next_frame(), Err(FrameError::TooLong { found: FRAME_BYTES_MAX + 1 }));
        assert!(matches!(encode(&"x".repeat(FRAME_BYTES_MAX)), Err(FrameError::TooLong { .. })));
        assert!(encode(&"x".repeat(FRAME_BYTES_MAX - 2)).is_ok());
    }

    #[test]
    fn stream_end_inside_a_frame_differs_from_one_between_frames() {
        let frame = encode(&"four").unwrap();
        let mut cutter = FrameCutter::default();
        assert_eq!(cutter.missing(), None);

        cutter.push(&frame[..3]);
        assert_eq!(cutter.missing(), Some(1));
        cutter.push(&frame[3..frame.len() - 2]);
        assert_eq!((cutter.next_frame(), cutter.missing()), (Ok(None), Some(2)));
        cutter.push(&frame[frame.len() - 2..]);
        assert_eq!((cutter.next_frame(), cutter.missing()), (Ok(Some(b"\"four\"".to_vec())), None));
    }

    proptest! {
        #[test]
        fn frames_survive_any_cut_of_the_stream(
            texts in proptest::collection::vec(".{0,40}", 0..6),
            cuts in proptest::collection::vec(1usize..30, 1..8),
        ) {
            let stream: Vec<u8> = texts.iter().flat_map(|text| encode(text).unwrap()).collect();
            let mut cutter = FrameCutter::default();
            let mut found = Vec::new();
            let mut rest = stream.as_slice();
            for n in cuts.iter().cycle() {
                let (part, later) = rest.split_at((*n).min(rest.len()));
                cutter.push(part);
                while let Some(frame) = cutter.next_frame().unwrap() {
                    found.push(serde_json::from_slice::<String>(&frame).unwrap());
                }
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }

            prop_assert_eq!(found, texts);
            prop_assert_eq!(cutter.missing(), None);
        }
    }
}
