//! Huge pages for memory that is read and written as a whole: a page fault then covers 2 MiB instead of 4 KiB, and so does an address
//! translation.
#![allow(unsafe_code)] // `madvise` has no safe wrapper.

use std::mem::MaybeUninit;

const PAGE_BYTES: usize = 4096;

/// Requests huge pages for the whole pages of `memory` that are not allocated yet. A refusal is ignored.
pub fn request<T>(memory: &mut [MaybeUninit<T>]) {
    let start = memory.as_mut_ptr().cast::<u8>();
    let n_bytes = size_of_val(memory);
    let skipped = start.align_offset(PAGE_BYTES).min(n_bytes);
    // SAFETY: the range lies in `memory`, and the advice changes no content.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::madvise(start.add(skipped).cast(), n_bytes - skipped, libc::MADV_HUGEPAGE)
    };
}
