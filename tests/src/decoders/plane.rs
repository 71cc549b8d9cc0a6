//! Messages between ranks below tensors: frames over TCP, and the control memory that ranks of a machine share.

use super::Target;
use phalanx::fuzzing::{HEADER_BYTES, WORLD, announcement, header_again, header_of, read_control_memory};

pub(super) const TARGET: Target = Target { name: "plane", run, seeds };

/// Bytes of an operation's descriptor.
const ANNOUNCEMENT_BYTES: usize = 40;
/// Bytes of a tensor chunk, the largest body of a frame.
const BODY_BYTES_MAX: usize = 256 << 10;

/// A header is written as it was read and announces at most a chunk; an announcement keeps its words and bytes; control memory
/// with any content can be read.
fn run(bytes: &[u8]) {
    if let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        if let Some((again, len)) = header_again(header, WORLD) {
            assert_eq!((&again, len <= BODY_BYTES_MAX), (header, true));
        }
        if let Some((words, text, copy)) = announcement(body) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!((bytes.as_slice(), copy.as_slice()), body.split_at(ANNOUNCEMENT_BYTES));
            assert!(text.len() < 200, "{text}");
        }
    }
    if let Some((at, bytes)) = bytes.split_first_chunk::<4>() {
        let _ = read_control_memory(u32::from_le_bytes(*at) as usize, bytes);
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let announce = |n: usize| [&header_of(WORLD, n as u32)[..], &vec![1; n]].concat();
    let frames = [0, 8, 100].map(|n| announce(ANNOUNCEMENT_BYTES + n));
    // The reason of an abort, and what a rank waits for.
    let memory =
        [(72u32, 200), (4096, 120), (4096 + 64, 80)].map(|(at, n)| [&at.to_le_bytes()[..], &vec![2; n]].concat());
    frames.into_iter().chain(memory).collect()
}
