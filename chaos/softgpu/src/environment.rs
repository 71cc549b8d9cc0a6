//! The settings and their values: environment variables, read once.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock};

/// The value of a setting as text.
pub fn text(name: &str) -> String {
    let default = SETTINGS.iter().find(|s| s.name == name).map_or("", |s| s.default);
    values().get(name).cloned().unwrap_or_else(|| default.into())
}

/// The value of a setting as a number.
pub fn number(name: &str) -> u64 {
    parse_number(&text(name)).unwrap_or(0)
}

/// The value of a setting that is not in [`SETTINGS`].
#[allow(dead_code)]
pub fn foreign(name: &str, otherwise: u64) -> u64 {
    values().get(name).and_then(|v| parse_number(v)).unwrap_or(otherwise)
}

/// One setting, for the documentation.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Name of the environment variable.
    pub name: &'static str,
    /// Value where it is not set.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
}

pub(super) const fn setting_of(name: &'static str, default: &'static str, meaning: &'static str) -> Setting {
    Setting { name, default, meaning }
}

/// All settings of the driver, NVRTC, cuBLASLt and cuDNN. Counts and bytes may end in `K`, `M` or `G` (powers of 1024).
pub const SETTINGS: &[Setting] = &[
    setting_of(
        "SOFTGPU_SEED",
        "0",
        "decides every order that is left open: of streams, graph nodes, blocks, warps, threads",
    ),
    setting_of("SOFTGPU_DEVICES", "1", "number of devices; `CUDA_VISIBLE_DEVICES` selects among them by index or UUID"),
    setting_of("SOFTGPU_ARCH", "90", "compute capability of all devices: 80, 86, 89, 90, 100 or 120"),
    setting_of("SOFTGPU_MEMORY", "4G", "bytes of memory of each device"),
    setting_of("SOFTGPU_DRIVER_VERSION", "13000", "what cuDriverGetVersion gives"),
    setting_of("SOFTGPU_INIT_CODE", "0", "what cuInit returns"),
    setting_of("SOFTGPU_CONTEXT_CODE", "0", "what cuDevicePrimaryCtxRetain returns"),
    setting_of("SOFTGPU_TAKEN", "0", "bytes of each device that other processes have taken"),
    setting_of(
        "SOFTGPU_HOLD_US",
        "2000",
        "longest time that work is held back while no thread waits for it, in microseconds",
    ),
    setting_of("SOFTGPU_THREADS", "2", "OS threads that run the blocks of a kernel"),
    setting_of(
        "SOFTGPU_GUARD",
        "auto",
        "how host accesses to device memory are found: keys (always), idle (while the device has no work), off; auto: keys where the processor has them, else idle",
    ),
    setting_of(
        "SOFTGPU_CACHE",
        "",
        "folder of compiled kernels; empty: `softgpu-cache` in the folder for temporary files",
    ),
    setting_of("SOFTGPU_CXX", "g++", "the host compiler"),
    setting_of("SOFTGPU_FAULT", "", "errors to plant: `<launch>:<code>`, several separated by commas"),
    setting_of("SOFTGPU_HANG", "", "kernels that never end: `<launch>`, several separated by commas"),
    setting_of(
        "SOFTGPU_ALLOC_FAIL",
        "0",
        "number of the allocation of device memory that fails, counted from 1; 0: none",
    ),
    setting_of("SOFTGPU_SLOW_US", "0", "microseconds that each kernel takes longer"),
    setting_of(
        "SOFTGPU_COPY_US",
        "0",
        "microseconds that each copy between a device and pinned memory takes longer; other streams go on meanwhile",
    ),
    setting_of("SOFTGPU_STREAM_WRITES", "1", "whether streams have writes of words; 0: not, as in WSL"),
    setting_of("SOFTGPU_CAPTURE_US", "0", "microseconds that each capture takes longer, once it has begun"),
    setting_of("SOFTGPU_SLOW_PERCENT", "100", "duration of each kernel, in percent of what it takes"),
    setting_of(
        "SOFTGPU_CUDNN_VERSION",
        "91901",
        "what cudnnGetVersion gives; before 90600 accumulators are not set to zero",
    ),
    setting_of(
        "SOFTGPU_CUDNN_REFUSE",
        "",
        "graphs that cuDNN has no engine for: forward, backward (attention), other; first: the first engine of each graph has no plan; several separated by commas",
    ),
    setting_of("SOFTGPU_CONTROL", "", "folder of changes to the settings of running processes, and of their signs"),
    setting_of(
        "SOFTGPU_PEAKS",
        "",
        "folder in which each process leaves the most bytes that it had on a device, as the file `<pid>`",
    ),
];

pub(super) fn values() -> MutexGuard<'static, BTreeMap<String, String>> {
    static VALUES: OnceLock<Mutex<BTreeMap<String, String>>> = OnceLock::new();
    let read = || std::env::vars().filter(|(name, _)| name.starts_with("SOFTGPU_")).collect();
    VALUES.get_or_init(|| Mutex::new(read())).lock().expect("no panic while settings are held")
}

pub(super) fn parse_number(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}
