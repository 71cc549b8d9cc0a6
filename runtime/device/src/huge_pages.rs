//! Huge pages for memory that is read and written as a whole: a page fault then covers 2 MiB instead of 4 KiB, and so does an address
//! translation.
#![allow(unsafe_code)] // `madvise` has no safe wrapper.

use std::mem::MaybeUninit;

const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Requests huge pages for the pages of `memory` that are not allocated yet, if it can hold one. A refusal is ignored.
pub fn request<T>(memory: &mut [MaybeUninit<T>]) {
    let start = memory.as_mut_ptr().cast::<u8>();
    let n_bytes = size_of_val(memory);
    if n_bytes < HUGE_PAGE_BYTES || cfg!(not(target_os = "linux")) {
        return;
    }
    let skipped = start.align_offset(PAGE_BYTES).min(n_bytes);
    // SAFETY: the range lies in `memory`, and the advice changes no content.
    #[cfg(target_os = "linux")]
    unsafe {
        libc::madvise(start.add(skipped).cast(), n_bytes - skipped, libc::MADV_HUGEPAGE)
    };
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// The flags of the mapping that contains an address.
    fn flags_at(address: usize) -> String {
        let table = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_it = false;
        for line in table.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let bound = |text: &str| usize::from_str_radix(text, 16).ok();
            if let Some((start, end)) = range.and_then(|(start, end)| bound(start).zip(bound(end))) {
                is_it = (start..end).contains(&address);
            } else if let (true, Some(flags)) = (is_it, line.strip_prefix("VmFlags:")) {
                return flags.to_owned();
            }
        }
        panic!("{address:x} is not mapped");
    }

    #[test]
    fn requested_memory_may_have_huge_pages_and_keeps_its_contents() {
        let mut memory: Vec<u8> = Vec::with_capacity(16 << 20);
        memory.extend([7; 100]);
        let middle = memory.as_ptr() as usize + (8 << 20);
        assert!(!flags_at(middle).contains(" hg"));

        request(memory.spare_capacity_mut());

        let has_huge_pages = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!((flags_at(middle).contains(" hg"), &memory[..]), (has_huge_pages, &[7; 100][..]));
    }
}
