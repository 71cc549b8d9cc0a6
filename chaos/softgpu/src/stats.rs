//! Counters for tests.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Something that is counted.
#[derive(Clone, Copy)]
pub enum Stat {
    Kernels,
    Copies,
    Products,
    HostFunctions,
    GraphLaunches,
    Compilations,
    CacheHits,
    Executions,
    Loads,
}

const NAMES: [&str; 9] = [
    "kernels",
    "copies",
    "products",
    "host_functions",
    "graph_launches",
    "compilations",
    "cache_hits",
    "executions",
    "loads",
];
static COUNTS: [AtomicU64; 9] = [const { AtomicU64::new(0) }; 9];

/// A library loads this kernel, unless it has done so before.
pub fn load(kernel: String) {
    static LOADED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if LOADED.lock().expect("nothing panics here").insert(kernel) {
        count(Stat::Loads);
    }
}

pub fn count(what: Stat) {
    COUNTS[what as usize].fetch_add(1, Relaxed);
}

/// Value of a counter: `loads` are kernels of cuBLASLt and cuDNN that a call, also in a capture, was the first to need; `kernels`, `copies` (memory sets too), `products`, `host_functions`, `graph_launches`, `executions` (cuDNN's)
/// count what was executed; `compilations` and `cache_hits` what NVRTC did; `streams`, `events`, `graphs`, `graph_execs`, `modules`,
/// `device_allocations`, `device_bytes`, `pinned_allocations`, `cudnn_descriptors` and `cudnn_handles` are what exists now. Unknown names give `u64::MAX`.
///
/// # Safety
/// `name` is a string that ends in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softgpu_stat(name: *const c_char) -> u64 {
    // SAFETY: by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    if let Some(at) = NAMES.iter().position(|n| *n == name) {
        return COUNTS[at].load(Relaxed);
    }
    let existing =
        crate::engine::stat(&name).or_else(|| crate::memory::stat(&name)).or_else(|| crate::module::stat(&name));
    let existing = existing.or_else(|| crate::cudnn::stat(&name));
    existing.unwrap_or_else(|| {
        eprintln!("softgpu: unknown counter {name}");
        u64::MAX
    })
}
