//! Checks of settings, and changes of them by `softgpu_set` or by tests.

use crate::codes::{Code, INVALID_VALUE, OK, refuse};
use crate::engine::faults;
use crate::environment::{SETTINGS, parse_number, text, values};
use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Names with these beginnings belong to the other libraries, which give their own defaults.
const FOREIGN: [&str; 2] = ["SOFTGPU_NCCL", "SOFTGPU_NVML"];

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
