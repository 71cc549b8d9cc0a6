//! The manifest: the job and step of a checkpoint, and the hash of every writer's index.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::format::{FORMAT, ManifestError, is_hash, limit};
use super::index::INDEX_BYTES_MAX;

/// Bytes of a file that one hash covers: few enough that a rank of another mesh verifies few bytes that it does not need,
/// and that a chunk is still in cache when it is hashed.
pub const HASH_CHUNK_BYTES: u64 = 1 << 20;
/// Largest chunk size that is read; earlier builds wrote it.
const HASH_CHUNK_BYTES_MAX: u64 = 4 << 20;
/// Limit on the length of a manifest. A format-1 manifest lists every box; format 2 is much shorter.
pub const MANIFEST_BYTES_MAX: u64 = 256 << 20;
/// More ranks than any job has.
pub const WRITERS_MAX: u32 = 1 << 16;
/// More axes than any mesh has.
const AXES_MAX: usize = 16;

/// The content of `MANIFEST`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The job that saved it.
    pub job: String,
    /// Steps that were completed.
    pub step: u64,
    /// The generation under which the directory was written.
    pub generation: u64,
    /// Sizes of the mesh's axes at the save; informational, not needed to load.
    pub mesh: BTreeMap<String, u64>,
    /// Whether all of the state had other copies, which agreed with it. Earlier builds did not compare them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub verified: bool,
    /// Whether no copy of the state differed from another one; also true for a state without copies, which has nothing to be
    /// compared with. False if copies were not compared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compared: bool,
    /// Bytes that one hash of a data file covers.
    pub hash_chunk_bytes: u64,
    /// The index of every writer, in the order of writers.
    pub indexes: Vec<IndexEntry>,
}

/// A writer's index as it was committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexEntry {
    /// Its length.
    pub len: u64,
    /// Its BLAKE3 in hexadecimal.
    pub blake3: String,
}

impl Manifest {
    /// Reads and validates JSON.
    ///
    /// # Errors
    /// As [`Manifest::validate`], and when it is not JSON of this form.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| ManifestError::Json(error.to_string()))?;
        manifest.validate()?;
        Ok(manifest)
    }

    /// The JSON, indented for people who investigate a problem.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("maps with text keys and numbers always have a JSON form")
    }

    /// Checks everything that reading relies on.
    ///
    /// # Errors
    /// The first thing wrong.
    pub fn validate(&self) -> Result<(), ManifestError> {
        if self.format != FORMAT {
            return Err(ManifestError::Format(self.format));
        }
        check_about(&self.job, &self.mesh, self.hash_chunk_bytes)?;
        if self.indexes.is_empty() {
            return Err(ManifestError::Number("number of writers"));
        }
        limit("writers", self.indexes.len(), WRITERS_MAX as usize)?;
        let bytes = self.indexes.iter().try_fold(0u64, |sum, index| sum.checked_add(index.len));
        if bytes.is_none_or(|bytes| bytes > INDEX_BYTES_MAX) {
            return Err(ManifestError::Number("length of the indexes"));
        }
        match self.indexes.iter().position(|index| !is_hash(&index.blake3)) {
            Some(writer) => Err(ManifestError::Hashes(super::index::index_name(writer as u32))),
            None => Ok(()),
        }
    }
}

/// The format version of a manifest, whatever else the manifest contains.
pub(super) fn format_of(bytes: &[u8]) -> Result<u32, ManifestError> {
    #[derive(Deserialize)]
    struct Probe {
        format: u32,
    }
    let probe: Probe = serde_json::from_slice(bytes).map_err(|error| ManifestError::Json(error.to_string()))?;
    Ok(probe.format)
}

/// Checks the fields that every format has.
pub(super) fn check_about(job: &str, mesh: &BTreeMap<String, u64>, hash_chunk_bytes: u64) -> Result<(), ManifestError> {
    limit("axes", mesh.len(), AXES_MAX)?;
    let numbers = [
        ("mesh", mesh.values().any(|&size| size == 0)),
        ("hash chunk size", !(HASH_CHUNK_BYTES..=HASH_CHUNK_BYTES_MAX).contains(&hash_chunk_bytes)),
        ("job name", job.len() > 256),
    ];
    numbers.into_iter().find(|(_, bad)| *bad).map_or(Ok(()), |(what, _)| Err(ManifestError::Number(what)))
}
