//! A writer's index: the boxes that it wrote, their positions in its files, and the hashes of the files.

use std::collections::BTreeMap;

use phalanx_strategies::boxes::TensorBox;
use serde::{Deserialize, Serialize};

use crate::checkpoint::format::{FORMAT, ManifestError, check_name, is_hash, limit};
use crate::hf::dtype::Dtype;

/// Limit on the total length of all indexes: about the size of indexes of a million boxes.
pub const INDEX_BYTES_MAX: u64 = 1 << 30;
/// Hash chunks of one file: 4 TiB.
const CHUNKS_MAX: usize = 1 << 22;

/// The content of a writer's index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// [`FORMAT`].
    pub format: u32,
    /// The job that saved it.
    pub job: String,
    /// Steps that were completed.
    pub step: u64,
    /// The generation under which the directory was written.
    pub generation: u64,
    /// The writer's number.
    pub writer: u32,
    /// Every tensor with boxes of this writer, by name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// The writer's files by name.
    pub files: BTreeMap<String, FileEntry>,
    /// Small files of the state: their name → the file that holds them whole.
    pub extras: BTreeMap<String, String>,
}

/// A tensor and boxes of it: all of them in a checkpoint, one writer's in its index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its global shape.
    pub shape: Vec<usize>,
    /// The boxes; those of all writers tile the shape exactly.
    pub chunks: Vec<Chunk>,
}

/// One box of a tensor and its bytes, row-major.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// The box.
    #[serde(flatten)]
    pub region: TensorBox,
    /// The file that holds it.
    pub file: String,
    /// Where its bytes start in the file.
    pub byte_offset: u64,
    /// Number of its bytes.
    pub byte_len: u64,
}

/// A file's length and hashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its length.
    pub len: u64,
    /// BLAKE3 of every hash chunk of it, the last one shorter, in hexadecimal.
    pub blake3: Vec<String>,
}

/// Prefix of the names of all files of a writer.
pub(super) fn file_prefix(writer: u32) -> String {
    format!("rank-{writer:05}-")
}

/// The name of a writer's index.
pub fn index_name(writer: u32) -> String {
    file_prefix(writer) + "index.json"
}

impl Index {
    /// Parses JSON and checks what concerns this writer alone; boxes are checked together with those of all writers.
    ///
    /// # Errors
    /// When it is not JSON of this form, has another format version, or lists files of another writer.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let index: Self = serde_json::from_slice(bytes).map_err(|error| ManifestError::Json(error.to_string()))?;
        if index.format != FORMAT {
            return Err(ManifestError::Format(index.format));
        }
        let prefix = file_prefix(index.writer);
        match index.files.keys().find(|file| !file.starts_with(&prefix)) {
            Some(file) => {
                check_name(file)?;
                Err(ManifestError::Foreign { writer: index.writer, file: file.clone() })
            }
            None => Ok(index),
        }
    }

    /// The JSON, on one line: an index has many numbers and few human readers.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("maps with text keys and numbers always have a JSON form")
    }
}

impl FileEntry {
    /// Checks that the hashes cover the length.
    pub(super) fn validate(&self, name: &str, hash_chunk_bytes: u64) -> Result<(), ManifestError> {
        check_name(name)?;
        limit("hashes of a file", self.blake3.len(), CHUNKS_MAX)?;
        let covered = self.blake3.len() as u64 == self.len.div_ceil(hash_chunk_bytes);
        let well_formed = self.blake3.iter().all(|hash| is_hash(hash));
        if covered && well_formed { Ok(()) } else { Err(ManifestError::Hashes(name.to_owned())) }
    }
}
