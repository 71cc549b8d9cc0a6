//! Memory for a snapshot. Training waits for the copy, so the memory uses huge pages where available (page faults take
//! time) and is filled with non-temporal stores.

#![allow(unsafe_code)] // `madvise` and non-temporal stores have no safe wrappers.

use phalanx_device::huge_pages;
use std::mem::MaybeUninit;

/// Reserves room for `n_bytes` more bytes, which the caller is about to write.
pub(super) fn reserve(buffer: &mut Vec<u8>, n_bytes: usize) {
    if n_bytes <= buffer.capacity() - buffer.len() {
        return;
    }
    buffer.reserve_exact(n_bytes);
    huge_pages::request(buffer.spare_capacity_mut());
}

/// Appends `bytes`. Ordinary stores would load the lines into the cache first and evict data that training needs next; the
/// snapshot is not read soon.
pub(super) fn append(buffer: &mut Vec<u8>, bytes: &[u8]) {
    buffer.reserve(bytes.len());
    let room = &mut buffer.spare_capacity_mut()[..bytes.len()];
    stream(room, bytes);
    let n_bytes = buffer.len() + bytes.len();
    // SAFETY: the capacity suffices, and all of these bytes have just been written.
    unsafe { buffer.set_len(n_bytes) };
}

/// Fills `room` with `bytes` of the same length.
#[cfg(target_arch = "x86_64")]
fn stream(room: &mut [MaybeUninit<u8>], bytes: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    assert_eq!(room.len(), bytes.len());
    let first = room.as_ptr().align_offset(LINE_BYTES).min(room.len());
    let (head, room) = room.split_at_mut(first);
    let (before, bytes) = bytes.split_at(first);
    let (lines, tail) = room.split_at_mut(room.len() / LINE_BYTES * LINE_BYTES);
    let (middle, behind) = bytes.split_at(lines.len());
    head.write_copy_of_slice(before);
    for (line, from) in lines.chunks_exact_mut(LINE_BYTES).zip(middle.chunks_exact(LINE_BYTES)) {
        for i in 0..LINE_BYTES / size_of::<__m128i>() {
            // SAFETY: the four parts of a line are in bounds on both sides, and lines of `room` are aligned to their
            // length, as non-temporal stores require. Every x86-64 has the instructions.
            unsafe {
                let part = _mm_loadu_si128(from.as_ptr().cast::<__m128i>().add(i));
                _mm_stream_si128(line.as_mut_ptr().cast::<__m128i>().add(i), part);
            }
        }
    }
    // SAFETY: every x86-64 has the instruction. Other threads see non-temporal stores after this fence.
    unsafe { _mm_sfence() };
    tail.write_copy_of_slice(behind);
}

/// Fills `room` with `bytes` of the same length.
#[cfg(not(target_arch = "x86_64"))]
fn stream(room: &mut [MaybeUninit<u8>], bytes: &[u8]) {
    room.write_copy_of_slice(bytes);
}

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_bytes_at_any_offset_is_copied_whole() {
        let all: Vec<u8> = (0..1_000u32).map(|i| (i * 31 % 251) as u8).collect();
        for first in 0..70 {
            for len in [0, 1, 15, 63, 64, 65, 127, 128, 500, 900] {
                let mut buffer = all[..first].to_vec();

                append(&mut buffer, &all[first..first + len]);

                assert_eq!(buffer, all[..first + len]);
            }
        }
    }
}
