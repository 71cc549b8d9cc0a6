//! Requests for memory ahead of its use.
//!
//! Processors foresee accesses within a page only, and some foresee few streams at once. Kernels that read several short rows in turns
//! ask for the next ones themselves.
#![allow(unsafe_code)] // An intrinsic.

/// Asks for a cache line, which need not exist: a hint without an effect on results.
#[inline(always)]
pub(crate) fn prefetch<T>(line: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing, whatever the address. Every x86-64 processor has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Asks for what lies four cache lines after `line`. Packing reads as many lines in turns as a panel has, or rows as a chunk; a processor
/// foresees fewer streams.
#[inline(always)]
pub(crate) fn prefetch_ahead(line: *const u8) {
    prefetch(line.wrapping_add(256));
}
