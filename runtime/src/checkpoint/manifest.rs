//! The manifest: which boxes of which tensors lie where, and the hashes of every file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::region::{Region, tiles_exactly};
use crate::hf::dtype::Dtype;

/// The version of the format that is written and read.
pub const FORMAT: u32 = 1;
/// Bytes of a file that one hash covers: small enough to verify in parallel and to name the damaged part.
pub const HASH_CHUNK_BYTES: u64 = 4 << 20;
/// A manifest of a million boxes has about this size; a longer one is not read.
pub const MANIFEST_BYTES_MAX: u64 = 256 << 20;
/// Tensors, boxes of one tensor, files and extras beyond these are refused.
const ENTRIES_MAX: usize = 1 << 20;
/// More dims than any tensor of a model has.
const DIMS_MAX: usize = 8;
/// Hash chunks of one file: 4 TiB.
const CHUNKS_MAX: usize = 1 << 20;
/// More axes than any mesh has.
const AXES_MAX: usize = 16;

/// The content of `MANIFEST`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The job that saved.
    pub job: String,
    /// Steps that were completed.
    pub step: u64,
    /// The generation under which the directory was written.
    pub generation: u64,
    /// How many writers contributed files.
    pub writers: u32,
    /// Sizes of the mesh's axes when it was saved; for people, loading does not need it.
    pub mesh: BTreeMap<String, u64>,
    /// Bytes that one entry of [`FileEntry::blake3`] covers.
    pub hash_chunk_bytes: u64,
    /// Every tensor by name.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Every file by name, except `MANIFEST` and `COMMIT`.
    pub files: BTreeMap<String, FileEntry>,
    /// Small files of the state: their name → the file that holds them whole.
    pub extras: BTreeMap<String, String>,
}

/// A tensor and the boxes that make it up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its global shape.
    pub shape: Vec<u64>,
    /// Boxes that tile the shape exactly.
    pub chunks: Vec<Chunk>,
}

/// One box of a tensor and its bytes, row-major.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// The box.
    #[serde(flatten)]
    pub region: Region,
    /// The file that holds it.
    pub file: String,
    /// Where its bytes start in the file.
    pub byte_offset: u64,
    /// How many they are.
    pub byte_len: u64,
}

/// A file's length and hashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its length.
    pub len: u64,
    /// BLAKE3 of every [`HASH_CHUNK_BYTES`] of it, the last part shorter, in hexadecimal.
    pub blake3: Vec<String>,
}

/// How a manifest contradicts itself or exceeds a limit.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ManifestError {
    /// Not JSON of this form.
    #[error("{0}")]
    Json(String),
    /// Another version.
    #[error("it has format {0}, but this build reads format {FORMAT}")]
    Format(u32),
    /// A field of the manifest differs from the commit marker or the directory's name.
    #[error("its step, generation and writers differ from its COMMIT or its directory")]
    Identity,
    /// More of something than is allowed.
    #[error("it lists {found} {what}, more than the {max} allowed")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// A name that could be a path, or is too long.
    #[error("{0:?} is not a name of 1 to 128 letters, digits, dots, underscores and hyphens")]
    Name(String),
    /// Hashes of a file are malformed or too few or many.
    #[error("the hashes of `{0}` do not cover its length")]
    Hashes(String),
    /// A file is named and not described.
    #[error("`{owner}` lies in `{file}`, which is not listed")]
    NoFile {
        /// Tensor or extra.
        owner: String,
        /// The file.
        file: String,
    },
    /// A box's bytes do not match its shape or lie outside its file.
    #[error("a box of `{0}` is given bytes that do not match its shape or its file")]
    Bytes(String),
    /// Boxes leave a hole or overlap.
    #[error("the boxes of `{0}` do not tile its shape")]
    Tiling(String),
    /// A size of the mesh or the number of writers is zero, or a chunk size is not ours.
    #[error("its {0} is not possible")]
    Number(&'static str),
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

    /// The JSON, indented: people look into it when something is wrong.
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("maps with text keys and numbers always have a JSON form")
    }

    /// Checks everything that reading relies on: limits, names, byte ranges, hashes and tilings.
    ///
    /// # Errors
    /// The first thing wrong.
    pub fn validate(&self) -> Result<(), ManifestError> {
        if self.format != FORMAT {
            return Err(ManifestError::Format(self.format));
        }
        limit("tensors", self.tensors.len(), ENTRIES_MAX)?;
        limit("files", self.files.len(), ENTRIES_MAX)?;
        limit("extras", self.extras.len(), ENTRIES_MAX)?;
        limit("axes", self.mesh.len(), AXES_MAX)?;
        let numbers = [
            ("number of writers", self.writers == 0),
            ("mesh", self.mesh.values().any(|&size| size == 0)),
            ("hash chunk size", self.hash_chunk_bytes != HASH_CHUNK_BYTES),
            ("job name", self.job.len() > 256),
        ];
        if let Some((what, _)) = numbers.into_iter().find(|(_, bad)| *bad) {
            return Err(ManifestError::Number(what));
        }
        self.files.iter().try_for_each(|(name, file)| validate_file(name, file))?;
        self.tensors.iter().try_for_each(|(name, tensor)| self.validate_tensor(name, tensor))?;
        for (name, file) in &self.extras {
            check_name(name)?;
            if !self.files.contains_key(file) {
                return Err(ManifestError::NoFile { owner: name.clone(), file: file.clone() });
            }
        }
        Ok(())
    }

    fn validate_tensor(&self, name: &str, tensor: &TensorEntry) -> Result<(), ManifestError> {
        check_name(name)?;
        limit("dims", tensor.shape.len(), DIMS_MAX)?;
        limit("boxes", tensor.chunks.len(), ENTRIES_MAX)?;
        let regions: Vec<Region> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        if tensor.dtype.bytes_of(&tensor.shape).is_none() || !tiles_exactly(&tensor.shape, &regions) {
            return Err(ManifestError::Tiling(name.to_owned()));
        }
        for chunk in &tensor.chunks {
            let Some(file) = self.files.get(&chunk.file) else {
                return Err(ManifestError::NoFile { owner: name.to_owned(), file: chunk.file.clone() });
            };
            let end = chunk.byte_offset.checked_add(chunk.byte_len);
            let inside = end.is_some_and(|end| end <= file.len);
            if !inside || tensor.dtype.bytes_of(&chunk.region.shape) != Some(chunk.byte_len) {
                return Err(ManifestError::Bytes(name.to_owned()));
            }
        }
        Ok(())
    }
}

/// Whether a name is an id: letters, digits, dots, underscores and hyphens, at most 128, not starting with a dot.
pub fn is_name(name: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
    (1..=128).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(plain)
}

fn check_name(name: &str) -> Result<(), ManifestError> {
    if is_name(name) { Ok(()) } else { Err(ManifestError::Name(name.chars().take(200).collect())) }
}

fn limit(what: &'static str, found: usize, max: usize) -> Result<(), ManifestError> {
    if found <= max { Ok(()) } else { Err(ManifestError::TooMany { what, found, max }) }
}

fn validate_file(name: &str, file: &FileEntry) -> Result<(), ManifestError> {
    check_name(name)?;
    limit("hashes of a file", file.blake3.len(), CHUNKS_MAX)?;
    let hex = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    let well_formed = file.blake3.iter().all(|hash| hash.len() == 64 && hash.bytes().all(hex));
    if !well_formed || file.blake3.len() as u64 != file.len.div_ceil(HASH_CHUNK_BYTES) {
        return Err(ManifestError::Hashes(name.to_owned()));
    }
    Ok(())
}
