//! Settings: environment variables, read once, and changes of them by `softgpu_set`.

use crate::codes::{Code, INVALID_VALUE, OK, refuse};
use crate::engine::faults;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

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

const fn setting_of(name: &'static str, default: &'static str, meaning: &'static str) -> Setting {
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

/// Names with these beginnings belong to the other libraries, which give their own defaults.
const FOREIGN: [&str; 2] = ["SOFTGPU_NCCL", "SOFTGPU_NVML"];

fn values() -> MutexGuard<'static, BTreeMap<String, String>> {
    static VALUES: OnceLock<Mutex<BTreeMap<String, String>>> = OnceLock::new();
    let read = || std::env::vars().filter(|(name, _)| name.starts_with("SOFTGPU_")).collect();
    VALUES.get_or_init(|| Mutex::new(read())).lock().expect("no panic while settings are held")
}

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

/// Whether all settings have names and values that are understood; what is wrong goes to stderr.
pub fn check() -> Code {
    let all: Vec<(String, String)> = values().iter().map(|(n, v)| (n.clone(), v.clone())).collect();
    for (name, value) in all {
        let code = check_one(&name, &value);
        if code != OK {
            return code;
        }
    }
    OK
}

fn check_one(name: &str, value: &str) -> Code {
    if FOREIGN.iter().any(|f| name.starts_with(f)) {
        return OK;
    }
    if !SETTINGS.iter().any(|s| s.name == name) {
        return refuse(INVALID_VALUE, format_args!("unknown setting {name}"));
    }
    let is_valid = match name {
        "SOFTGPU_CACHE" | "SOFTGPU_CXX" | "SOFTGPU_CONTROL" | "SOFTGPU_PEAKS" => true,
        "SOFTGPU_GUARD" => ["auto", "keys", "idle", "fast", "off"].contains(&value),
        "SOFTGPU_FAULT" => faults::parse_faults(value).is_some(),
        "SOFTGPU_HANG" => faults::parse_hangs(value).is_some(),
        "SOFTGPU_CUDNN_REFUSE" => crate::cudnn::is_known_refusal(value),
        "SOFTGPU_ARCH" => crate::device::is_known_arch(value),
        _ => parse_number(value).is_some(),
    };
    if is_valid { OK } else { refuse(INVALID_VALUE, format_args!("{name} cannot be `{value}`")) }
}

fn parse_number(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Changes a setting of the running process. Setting the seed restarts the sequence of orders; setting a fault restarts
/// the counters of launches or allocations and clears sticky errors. Returns 0, or 1 if the name or value is not known.
///
/// # Safety
/// Both arguments are strings that end in NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn softgpu_set(name: *const c_char, value: *const c_char) -> Code {
    // SAFETY: by the caller.
    let (name, value) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(value)) };
    change(&name.to_string_lossy(), &value.to_string_lossy())
}

fn change(name: &str, value: &str) -> Code {
    let code = check_one(name, value);
    if code == OK {
        values().insert(name.to_owned(), value.to_owned());
        crate::engine::setting_changed(name);
        crate::nccl::setting_changed(name);
    }
    code
}

fn control_folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let folder = || Some(text("SOFTGPU_CONTROL")).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    FOLDER.get_or_init(folder).as_deref()
}

/// Tells a test that this process has come to a point: leaves the file `<what>-<pid>` in the folder `SOFTGPU_CONTROL`. Waits there
/// as long as the folder has the file `hold-<what>`, at most [`HOLD_MAX`].
pub fn reach(what: &str) {
    let Some(folder) = control_folder() else { return };
    let (begun, hold) = (Instant::now(), folder.join(format!("hold-{what}")));
    let _ = std::fs::write(folder.join(format!("{what}-{}", std::process::id())), "");
    while hold.exists() && begun.elapsed() < HOLD_MAX {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A test that does not let go has ended.
const HOLD_MAX: Duration = Duration::from_secs(60);

/// Takes over the changes that a test has left for this process in the folder `SOFTGPU_CONTROL`: the file whose name is the
/// process id, or the file `next`, which the first process takes that has taken no file before. Lines are `NAME=VALUE`.
/// Called before each kernel, allocation, and launch or initialisation of NCCL.
pub fn take_changes() {
    static TAKES_NEXT: AtomicBool = AtomicBool::new(true);
    let Some(folder) = control_folder() else { return };
    let pid = std::process::id().to_string();
    let next = TAKES_NEXT.swap(false, Relaxed).then(|| "next".to_owned());
    for name in next.into_iter().chain([pid.clone()]) {
        // Only one process can rename a file; its time of change tells when it was taken.
        let taken = folder.join(format!("taken-{pid}"));
        if std::fs::rename(folder.join(name), &taken).is_err() {
            continue;
        }
        let changes = std::fs::read_to_string(&taken).unwrap_or_default();
        for (name, value) in changes.lines().filter_map(|line| line.split_once('=')) {
            change(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_may_have_a_binary_unit() {
        assert_eq!(["7", "3K", "2M", "1G"].map(parse_number), [Some(7), Some(3072), Some(2 << 20), Some(1 << 30)]);
        assert_eq!(["", "K", "x", "-1", "99999999999G"].map(parse_number), [None; 5]);
    }

    #[test]
    fn readme_lists_every_setting_with_its_default() {
        let readme = include_str!("../README.md");
        for s in SETTINGS {
            let row = format!(
                "| `{}` | {} |",
                s.name,
                if s.default.is_empty() { String::new() } else { format!("`{}`", s.default) }
            );
            assert!(readme.contains(&row), "{row}");
        }
    }
}
