//! Tests that cross crates, and what they share: what fuzzing asserts, reference files, the benchmark step, the measuring of memory.

#[cfg(feature = "decoders")]
pub mod decoders;
pub mod matrix;
pub mod reference;
pub mod step;

/// Largest resident memory of this process so far, from the kernel.
pub fn peak_rss_bytes() -> u64 {
    status_kib("VmHWM:") * 1024
}

/// Resident memory of this process now.
pub fn rss_bytes() -> u64 {
    status_kib("VmRSS:") * 1024
}

fn status_kib(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix(key)).unwrap_or("0");
    line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
}
