//! Memory for a snapshot, for which training waits: in huge pages where the system has them, because pages take time to
//! appear, and filled past the caches.

#![allow(unsafe_code)] // Advice to the kernel about memory and stores past the caches have no safe names.

use std::mem::MaybeUninit;

/// Room for as many bytes behind those that `buffer` has, to be filled soon.
pub(super) fn reserve(buffer: &mut Vec<u8>, n_bytes: usize) {
    if n_bytes <= buffer.capacity() - buffer.len() {
        return;
    }
    buffer.reserve_exact(n_bytes);
    let room = buffer.spare_capacity_mut();
    let skipped = room.as_ptr().align_offset(PAGE_BYTES).min(room.len());
    let pages = &mut room[skipped..];
    // SAFETY: the range is memory of this vector, which nobody reads before it is written; the advice changes no content.
    // A system without huge pages refuses, and loses nothing.
    unsafe { libc::madvise(pages.as_mut_ptr().cast(), pages.len(), libc::MADV_HUGEPAGE) };
}

/// Copies `bytes` behind those that `buffer` has. What is stored in the usual way is read from memory into a cache first, and
/// drives out what training needs next; nobody reads a snapshot soon.
pub(super) fn append(buffer: &mut Vec<u8>, bytes: &[u8]) {
    buffer.reserve(bytes.len());
    let room = &mut buffer.spare_capacity_mut()[..bytes.len()];
    stream(room, bytes);
    let n_bytes = buffer.len() + bytes.len();
    // SAFETY: there is room for them, and all of them have just been written.
    unsafe { buffer.set_len(n_bytes) };
}

/// Fills `room` with as many bytes.
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
            // SAFETY: each of the four parts of a line lies in it on both sides, and lines of `room` begin at multiples of their
            // length, as a store past the caches asks for. The instructions are in every x86-64.
            unsafe {
                let part = _mm_loadu_si128(from.as_ptr().cast::<__m128i>().add(i));
                _mm_stream_si128(line.as_mut_ptr().cast::<__m128i>().add(i), part);
            }
        }
    }
    // SAFETY: the instruction is in every x86-64. Such stores are seen by other threads behind this fence.
    unsafe { _mm_sfence() };
    tail.write_copy_of_slice(behind);
}

/// Fills `room` with as many bytes.
#[cfg(not(target_arch = "x86_64"))]
fn stream(room: &mut [MaybeUninit<u8>], bytes: &[u8]) {
    room.write_copy_of_slice(bytes);
}

/// What a processor's memory is written in.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// What the address that advice is about is a multiple of.
const PAGE_BYTES: usize = 4096;

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
