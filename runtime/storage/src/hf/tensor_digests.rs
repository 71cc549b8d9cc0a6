//! Digests of the tensors of a model directory, kept in a file so that unchanged weights are not read again.

use super::error::HfError;
use super::source::TensorSource;
use crate::foreign_file;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The digest of each tensor, by name: the first 16 bytes of the BLAKE3 hash of its element type, shape and bytes, in hexadecimal.
pub type TensorDigests = BTreeMap<String, String>;

/// The longest file of known digests that is read.
const KNOWN_BYTES_MAX: u64 = 64 << 20;
/// A file that changed so shortly before it was read may change again without a new time: file systems count in steps.
const SETTLED: Duration = Duration::from_secs(2);

/// A file and everything that changes when its content does. Device and inode distinguish files of equal path on two machines
/// that share the file of known digests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileVersion {
    path: PathBuf,
    bytes: u64,
    device: u64,
    inode: u64,
    modified_ns: i128,
    changed_ns: i128,
}

#[derive(Serialize, Deserialize)]
struct Known {
    files: Vec<FileVersion>,
    tensors: TensorDigests,
}

/// The digests of the `wanted` tensors of a source. `known` names a file of earlier digests; it is used if no weight file has changed
/// since, and otherwise replaced. A file that cannot be read or written costs time only.
///
/// # Errors
/// When a tensor cannot be read.
pub fn tensor_digests(
    source: &TensorSource,
    wanted: impl Fn(&str) -> bool,
    known: &Path,
) -> Result<TensorDigests, HfError> {
    let files = versions(source)?;
    let names: Vec<&str> = source.names().filter(|name| wanted(name)).collect();
    if let Some(mut earlier) = read(known).filter(|earlier| earlier.files == files)
        && names.iter().all(|name| earlier.tensors.contains_key(*name))
    {
        earlier.tensors.retain(|name, _| wanted(name));
        return Ok(earlier.tensors);
    }
    let digest = |name: &&str| Ok(((*name).to_owned(), source.digest(name)?));
    let tensors: TensorDigests = names.par_iter().map(digest).collect::<Result<_, HfError>>()?;
    let found = Known { files, tensors };
    // A file that changed while it was read has another version now.
    if versions(source)? == found.files && found.files.iter().all(FileVersion::is_settled) {
        write(known, &found);
    }
    Ok(found.tensors)
}

fn versions(source: &TensorSource) -> Result<Vec<FileVersion>, HfError> {
    source.files().map(FileVersion::of).collect()
}

impl FileVersion {
    fn of(path: &Path) -> Result<FileVersion, HfError> {
        let found = std::fs::canonicalize(path).and_then(|path| Ok((std::fs::metadata(&path)?, path)));
        let (metadata, path) = found.map_err(|error| HfError::io("read", path, &error))?;
        let nanoseconds = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Ok(FileVersion {
            path,
            bytes: metadata.len(),
            device: metadata.dev(),
            inode: metadata.ino(),
            modified_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since = (now.as_nanos() as i128).saturating_sub(self.changed_ns.max(self.modified_ns));
        since > SETTLED.as_nanos() as i128
    }
}

fn read(path: &Path) -> Option<Known> {
    serde_json::from_slice(&foreign_file::read(path, KNOWN_BYTES_MAX).ok()?).ok()
}

fn write(path: &Path, known: &Known) {
    let temp = path.with_extension(format!("{}.new", std::process::id()));
    let written = || {
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::write(&temp, serde_json::to_vec(known)?)?;
        std::fs::rename(&temp, path)
    };
    if let Err(error) = written() {
        tracing::warn!(%error, path = %path.display(), "digests of weights cannot be kept; the next start reads all weights");
        let _ = std::fs::remove_file(&temp);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// A directory with two tensors of two elements each.
    fn model(dir: &Path) -> PathBuf {
        let header = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend([1.0f32, 2.0, 1.0, 2.0].iter().flat_map(|x| x.to_le_bytes()));
        let path = dir.join("model.safetensors");
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn age(path: &Path, seconds: u64) {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
    }

    fn digests(dir: &Path) -> TensorDigests {
        tensor_digests(&TensorSource::open(dir).unwrap(), |_| true, &dir.join("known.json")).unwrap()
    }

    #[test]
    fn changed_tensor_has_another_digest_and_the_others_keep_theirs() {
        let dir = tempfile::tempdir().unwrap();
        let path = model(dir.path());
        let first = digests(dir.path());
        assert_eq!(first["a"], first["b"], "equal contents");

        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[1], std::fs::metadata(&path).unwrap().len() - 8).unwrap();
        age(&path, 3600);

        let second = digests(dir.path());
        assert_eq!(second["a"], first["a"]);
        assert_ne!(second["b"], first["b"]);
    }

    #[test]
    fn known_digests_of_other_versions_of_a_file_and_unreadable_ones_are_not_used() {
        let dir = tempfile::tempdir().unwrap();
        model(dir.path());
        let source = TensorSource::open(dir.path()).unwrap();
        let known = dir.path().join("known.json");
        let wrong: TensorDigests = ["a", "b"].map(|name| (name.to_owned(), "00".to_owned())).into();
        let mut files = versions(&source).unwrap();
        write(&known, &Known { files: files.clone(), tensors: wrong.clone() });
        assert_eq!(digests(dir.path()), wrong, "the same version");

        files[0].inode += 1;
        write(&known, &Known { files, tensors: wrong.clone() });
        assert_ne!(digests(dir.path()), wrong);

        std::fs::write(&known, b"{").unwrap();
        assert_eq!(digests(dir.path()).len(), 2);
    }

    #[test]
    fn digests_of_a_file_that_has_just_changed_are_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        model(dir.path());
        digests(dir.path());
        assert!(!dir.path().join("known.json").exists());
    }
}
