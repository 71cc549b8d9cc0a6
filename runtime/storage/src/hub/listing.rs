//! The list of a repository's files, as the Hub gives it.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::cache::is_inside;
use super::error::HubError;
use super::name::Kind;

/// Files of a repository; the largest data sets have fewer.
const FILES_MAX: usize = 1 << 18;

/// Folders in folders of a repository.
const DEPTH_MAX: usize = 32;

/// The files of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listing {
    pub(super) commit: String,
    pub(super) files: Vec<RemoteFile>,
}

/// A file of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RemoteFile {
    /// Its path in the repository, which stays inside it.
    pub(super) path: PathBuf,
    pub(super) n_bytes: u64,
    pub(super) hash: Hash,
}

/// The hash of a file's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Hash {
    /// SHA-256, of files in large file storage.
    Sha256(String),
    /// SHA-1 of a blob of git.
    Git(String),
}

impl Hash {
    /// In hexadecimal; the name of the file in the cache.
    pub(super) fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Git(hex) => hex,
        }
    }
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default, rename = "blobId")]
    blob_id: Option<String>,
    #[serde(default)]
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: u64,
}

impl Listing {
    /// Reads the Hub's answer, and trusts none of its names.
    pub(super) fn read(json: &[u8]) -> Result<Self, HubError> {
        let wrong = |reason: String| HubError::Listing { reason };
        let answer: Answer = serde_json::from_slice(json).map_err(|error| wrong(error.to_string()))?;
        if !is_hex(&answer.sha, 40) {
            return Err(wrong(format!("{:?} is no commit", shortened(&answer.sha))));
        }
        if answer.siblings.len() > FILES_MAX {
            return Err(wrong(format!("it has {} files, more than {FILES_MAX}", answer.siblings.len())));
        }
        let file = |sibling: Sibling| {
            let name = shortened(&sibling.rfilename);
            let path = PathBuf::from(&sibling.rfilename);
            let is_plain =
                !sibling.rfilename.contains(['\\', '\0']) && path.as_os_str().len() == sibling.rfilename.len();
            if !(is_plain && is_inside(&path) && path.components().count() <= DEPTH_MAX) {
                return Err(wrong(format!("{name:?} is no path inside the repository")));
            }
            let (hash, n_bytes) = match (sibling.lfs, sibling.blob_id, sibling.size) {
                (Some(lfs), _, _) if is_hex(&lfs.sha256, 64) => (Hash::Sha256(lfs.sha256), lfs.size),
                (None, Some(blob), Some(size)) if is_hex(&blob, 40) => (Hash::Git(blob), size),
                _ => return Err(wrong(format!("{name:?} has no hash or no size"))),
            };
            Ok(RemoteFile { path, n_bytes, hash })
        };
        let files = answer.siblings.into_iter().map(file).collect::<Result<_, _>>()?;
        Ok(Self { commit: answer.sha, files })
    }
}

fn is_hex(text: &str, n: usize) -> bool {
    text.len() == n && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Weights in formats that Phalanx never reads, and demonstrations beside the model.
const UNREAD: [&str; 12] =
    ["bin", "pt", "pth", "ckpt", "h5", "msgpack", "gguf", "onnx", "ot", "tflite", "mlmodel", "npz"];

/// Whether a file is of use for training: of a model, not its weights in other formats; of a data set, every file.
pub(super) fn is_wanted(kind: Kind, path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let folder = path.parent().and_then(|folder| folder.components().next());
    let is_of_others =
        folder.is_some_and(|folder| ["original", "onnx", "metal"].iter().any(|o| folder.as_os_str() == *o));
    kind == Kind::Dataset || !(is_of_others || UNREAD.contains(&extension))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn listing(name: &str) -> Result<Listing, HubError> {
        let json = serde_json::json!({
            "sha": COMMIT,
            "siblings": [{"rfilename": name, "size": 3, "blobId": "a".repeat(40)}],
        });
        Listing::read(json.to_string().as_bytes())
    }

    #[test]
    fn path_that_leaves_the_repository_is_refused() {
        assert_eq!(listing("data/a.jsonl").unwrap().files[0].path, Path::new("data/a.jsonl"));
        let deep = "a/".repeat(40) + "b";
        for name in ["../a", "/etc/passwd", "a/../../b", "", ".", "./a/..", "a\\..\\b", "a\0b", &deep] {
            let error = listing(name).unwrap_err().to_string();
            assert!(error.contains("no path inside the repository"), "{name:?}: {error}");
        }
    }

    #[test]
    fn file_without_a_hash_is_refused() {
        let with = |file: serde_json::Value| {
            Listing::read(serde_json::json!({"sha": COMMIT, "siblings": [file]}).to_string().as_bytes())
        };

        let lfs = serde_json::json!({"rfilename": "a", "lfs": {"sha256": "b".repeat(64), "size": 9}});
        assert_eq!(with(lfs).unwrap().files[0].n_bytes, 9);
        for file in [
            serde_json::json!({"rfilename": "a", "size": 3}),
            serde_json::json!({"rfilename": "a", "size": 3, "blobId": "../x"}),
            serde_json::json!({"rfilename": "a", "lfs": {"sha256": "B".repeat(64), "size": 9}}),
        ] {
            assert!(with(file.clone()).is_err(), "{file}");
        }
        assert!(Listing::read(br#"{"sha": "../../x", "siblings": []}"#).is_err());
    }

    #[test]
    fn weights_in_formats_that_are_not_read_are_left_out() {
        let wanted = |kind, path: &str| is_wanted(kind, Path::new(path));

        assert!(["config.json", "model.safetensors", "tokenizer.model"].iter().all(|path| wanted(Kind::Model, path)));
        assert!(["pytorch_model.bin", "original/a.json", "m.gguf"].iter().all(|path| !wanted(Kind::Model, path)));
        assert!(wanted(Kind::Dataset, "original/a.bin"));
    }
}
