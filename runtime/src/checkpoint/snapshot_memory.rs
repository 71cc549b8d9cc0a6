//! Memory for a snapshot: in huge pages where the system has them, because training waits while its pages appear.

#![allow(unsafe_code)] // Advice to the kernel about memory has no safe name.

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

/// What the address that advice is about is a multiple of.
const PAGE_BYTES: usize = 4096;
