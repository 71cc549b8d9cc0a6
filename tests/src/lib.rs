//! Helpers of the tests that cross crates: assertions of the fuzz targets, reference files, the benchmark step, memory figures.

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

/// Memory of each child of this process (PSS: pages mapped by several processes are divided among them). File pages do not
/// count, since the system may drop them.
pub fn children_pss_bytes() -> Vec<u64> {
    // The kernel lists a child under the thread that started it.
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let children: String =
        tasks.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default()).collect();
    let of = |pid: &str| {
        let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        (kib(&rollup, "Pss_Anon:") + kib(&rollup, "Pss_Shmem:")) * 1024
    };
    children.split_whitespace().map(of).collect()
}

fn status_kib(key: &str) -> u64 {
    kib(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), key)
}

fn kib(table: &str, key: &str) -> u64 {
    let line = table.lines().find_map(|l| l.strip_prefix(key)).unwrap_or("0");
    line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0)
}
