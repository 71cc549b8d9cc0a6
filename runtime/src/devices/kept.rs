//! Measurements of this machine, kept for a week in the user's cache folder: they take longer than what they are needed for.

use super::cache_folder;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Another measurement may find other programs beside it, or another clock rate.
const VALID: Duration = Duration::from_secs(7 * 24 * 3600);
/// The longest file of earlier measurements that is read.
const KNOWN_BYTES_MAX: u64 = 4 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Measurement {
    value: Value,
    /// Seconds since 1970.
    measured_at: u64,
}

type Known = BTreeMap<String, Measurement>;

/// A file of measurements, by what they depend on.
#[derive(Debug)]
pub(crate) struct Measurements {
    /// Without a folder, nothing is kept.
    path: Option<PathBuf>,
}

impl Measurements {
    /// The file of this name in the cache folder.
    pub(crate) fn in_cache(name: &str) -> Measurements {
        Measurements { path: cache_folder().map(|folder| folder.join(name)) }
    }

    #[cfg(test)]
    pub(super) fn at(path: &Path) -> Measurements {
        Measurements { path: Some(path.to_owned()) }
    }

    /// A measurement of the last week. A file that cannot be read or is none of ours has none.
    pub(crate) fn get<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let found = read(self.path.as_deref()?).remove(&described(key)).filter(Measurement::is_valid)?;
        serde_json::from_value(found.value).ok()
    }

    /// Keeps a measurement. A file that cannot be written costs time only. Of processes that write at once, one wins.
    pub(crate) fn keep<T: Serialize>(&self, key: &str, value: &T) {
        let (Some(path), Ok(value)) = (&self.path, serde_json::to_value(value)) else { return };
        let mut known = read(path);
        known.retain(|_, measurement| measurement.is_valid());
        known.insert(described(key), Measurement { value, measured_at: seconds_now() });
        let new = path.with_extension(format!("{}.new", std::process::id()));
        let write = || {
            std::fs::create_dir_all(path.parent().unwrap_or(path))?;
            std::fs::write(&new, serde_json::to_vec_pretty(&known)?)?;
            std::fs::rename(&new, path)
        };
        if let Err(error) = write() {
            tracing::debug!(path = %path.display(), %error, "a measurement of this machine is not kept");
            let _ = std::fs::remove_file(&new);
        }
    }
}

impl Measurement {
    fn is_valid(&self) -> bool {
        let now = seconds_now();
        self.measured_at <= now && now - self.measured_at < VALID.as_secs()
    }
}

/// The key with the program and the processor, on which every measurement depends.
fn described(key: &str) -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = info.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let processor = processor.trim_start_matches([' ', '\t', ':']);
    format!("Phalanx {}; {processor}; {key}", env!("CARGO_PKG_VERSION"))
}

fn read(path: &Path) -> Known {
    let is_short = std::fs::metadata(path).is_ok_and(|metadata| metadata.len() <= KNOWN_BYTES_MAX);
    let bytes = is_short.then(|| std::fs::read(path).ok()).flatten();
    bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurement_is_found_by_its_key_until_it_is_old_and_a_damaged_file_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/rates.json");
        let measurements = Measurements::at(&path);
        assert_eq!(measurements.get::<f64>("a"), None);

        measurements.keep("a", &1.5);
        measurements.keep("b", &[2.0, 3.0]);

        assert_eq!((measurements.get("a"), measurements.get("b")), (Some(1.5), Some([2.0, 3.0])));
        assert_eq!(measurements.get::<String>("a"), None);
        let mut known = read(&path);
        known.values_mut().for_each(|measurement| measurement.measured_at -= VALID.as_secs());
        std::fs::write(&path, serde_json::to_vec(&known).unwrap()).unwrap();
        assert_eq!(measurements.get::<f64>("a"), None);
        measurements.keep("c", &4.0);
        assert_eq!(read(&path).len(), 1, "what is old is removed");
        std::fs::write(&path, "{").unwrap();
        assert_eq!(measurements.get::<f64>("c"), None);
        measurements.keep("c", &5.0);
        assert_eq!(measurements.get("c"), Some(5.0));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
