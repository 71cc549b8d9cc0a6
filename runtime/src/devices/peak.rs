//! The peak rate of a device's products, the reference for utilisation. Processors are measured once in a week, since a measurement
//! takes as long as all else before the first step of a small model.

use super::cache_folder;
use phalanx_device::Device;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Another measurement may find other neighbours on the machine, or another clock rate.
const VALID: Duration = Duration::from_secs(7 * 24 * 3600);
/// The longest file of earlier measurements that is read.
const KNOWN_BYTES_MAX: u64 = 1 << 20;

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Peak {
    flops: f64,
    /// Seconds since 1970.
    measured_at: u64,
}

type Known = BTreeMap<String, Peak>;

/// FLOP/s of products on the threads of the current pool, of operands in bf16 or f32: kept from an earlier start, or measured.
pub(crate) fn peak_flops(device: &dyn Device, bf16: bool) -> f64 {
    match cache_folder() {
        Some(folder) => kept(device, bf16, &folder.join("peaks.json")),
        None => device.peak_flops(bf16),
    }
}

/// Measures, and replaces what is kept.
pub(crate) fn measured_peak_flops(device: &dyn Device, bf16: bool) -> f64 {
    let flops = device.peak_flops(bf16);
    if let Some(folder) = cache_folder() {
        keep(&folder.join("peaks.json"), key(device, bf16), flops);
    }
    flops
}

fn kept(device: &dyn Device, bf16: bool, path: &Path) -> f64 {
    let (key, now) = (key(device, bf16), seconds_now());
    let earlier = read(path).get(&key).copied();
    let is_valid = |peak: &Peak| {
        let is_rate = peak.flops.is_finite() && peak.flops > 0.0;
        is_rate && peak.measured_at <= now && now - peak.measured_at < VALID.as_secs()
    };
    if let Some(peak) = earlier.filter(is_valid) {
        return peak.flops;
    }
    let flops = device.peak_flops(bf16);
    keep(path, key, flops);
    flops
}

/// What the rate depends on.
fn key(device: &dyn Device, bf16: bool) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = info.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let processor = processor.trim_start_matches([' ', '\t', ':']);
    let (version, engine) = (env!("CARGO_PKG_VERSION"), device.engine(bf16));
    let (n_threads, format) = (rayon::current_num_threads(), if bf16 { "bf16" } else { "f32" });
    format!("{version}; {}; {processor}; {engine}; {format}; {n_threads} threads", device.name())
}

fn read(path: &Path) -> Known {
    let is_short = std::fs::metadata(path).is_ok_and(|metadata| metadata.len() <= KNOWN_BYTES_MAX);
    let bytes = is_short.then(|| std::fs::read(path).ok()).flatten();
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

/// A file that cannot be written costs time only. Of processes that write at once, one wins.
fn keep(path: &Path, key: String, flops: f64) {
    let mut known = read(path);
    known.retain(|_, peak| seconds_now().saturating_sub(peak.measured_at) < VALID.as_secs());
    known.insert(key, Peak { flops, measured_at: seconds_now() });
    let new: PathBuf = path.with_extension(format!("{}.new", std::process::id()));
    let written = (|| {
        std::fs::create_dir_all(path.parent().unwrap_or(path))?;
        std::fs::write(&new, serde_json::to_vec_pretty(&known)?)?;
        std::fs::rename(&new, path)
    })();
    if let Err(error) = written {
        tracing::debug!(path = %path.display(), %error, "the peak of products is not kept");
    }
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::host;

    #[test]
    fn peak_is_measured_once_for_each_number_of_threads_and_again_when_it_is_old_or_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let (path, device) = (dir.path().join("new/peaks.json"), host());
        let on = |n_threads: usize| device.on_device_thread(n_threads, || kept(&*device, false, &path)).unwrap();
        let change = |change: &dyn Fn(&mut Peak)| {
            let mut known = read(&path);
            known.values_mut().for_each(change);
            std::fs::write(&path, serde_json::to_vec(&known).unwrap()).unwrap();
        };

        let measured = on(1);

        assert!(measured > 0.0);
        change(&|peak| peak.flops = 5.0);
        assert_eq!(on(1), 5.0);
        assert!(on(2) > 5.0);
        change(&|peak| *peak = Peak { flops: 5.0, measured_at: peak.measured_at - VALID.as_secs() });
        assert!(on(1) > 5.0);
        change(&|peak| peak.flops = -1.0);
        assert!(on(1) > 5.0);
        std::fs::write(&path, "{").unwrap();
        assert!(on(1) > 5.0);
        assert_eq!(read(&path).len(), 1);
    }
}
