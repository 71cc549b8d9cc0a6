//! Everything that a checkpoint contains: the merged indexes of all its writers.

use std::collections::BTreeMap;

use phalanx_strategies::boxes::TensorBox;
use phalanx_strategies::boxes::tiling::tiles_exactly;
use serde::{Deserialize, Serialize};

use super::format::{FORMAT, ManifestError, check_name, limit};
use super::index::{FileEntry, Index, TensorEntry};
use super::manifest::{Manifest, WRITERS_MAX, check_about};

/// Limit on tensors, boxes of one tensor, files and extras.
const ENTRIES_MAX: usize = 1 << 20;
/// More dims than any tensor of a model has.
const DIMS_MAX: usize = 8;

/// The contents of a checkpoint. In format 1, with a single writer, this was the `MANIFEST` itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contents {
    /// The format in which it was saved.
    pub format: u32,
    /// The job that saved it.
    pub job: String,
    /// Steps that were completed.
    pub step: u64,
    /// The generation under which the directory was written.
    pub generation: u64,
    /// How many writers contributed files.
    pub writers: u32,
    /// Sizes of the mesh's axes at the save; informational, not needed to load.
    pub mesh: BTreeMap<String, u64>,
    /// See [`Manifest::verified`].
    #[serde(default)]
    pub verified: bool,
    /// See [`Manifest::compared`].
    #[serde(default)]
    pub compared: bool,
    /// Bytes that one hash of a data file covers.
    pub hash_chunk_bytes: u64,
    /// Every tensor by name, its boxes in the order of their offsets.
    pub tensors: BTreeMap<String, TensorEntry>,
    /// Every data file and extra by name.
    pub files: BTreeMap<String, FileEntry>,
    /// Small files of the state: their name → the file that holds them whole.
    pub extras: BTreeMap<String, String>,
}

impl Contents {
    /// Joins the indexes that a manifest names, given in its order, and validates the whole.
    ///
    /// # Errors
    /// When writers disagree or their boxes do not tile every tensor exactly once, and as [`Contents::validate`].
    pub fn join(manifest: &Manifest, indexes: Vec<Index>) -> Result<Self, ManifestError> {
        let mut contents = Self {
            format: manifest.format,
            job: manifest.job.clone(),
            step: manifest.step,
            generation: manifest.generation,
            writers: manifest.indexes.len() as u32,
            mesh: manifest.mesh.clone(),
            verified: manifest.verified,
            compared: manifest.compared,
            hash_chunk_bytes: manifest.hash_chunk_bytes,
            tensors: BTreeMap::new(),
            files: BTreeMap::new(),
            extras: BTreeMap::new(),
        };
        for (writer, index) in (0..).zip(indexes) {
            contents.add(writer, index)?;
        }
        contents.sort();
        contents.validate()?;
        Ok(contents)
    }

    /// Reads a manifest of format 1.
    ///
    /// # Errors
    /// As [`Contents::validate`], and when it is not JSON of this form.
    pub fn decode_format_1(bytes: &[u8]) -> Result<Self, ManifestError> {
        let mut contents: Self =
            serde_json::from_slice(bytes).map_err(|error| ManifestError::Json(error.to_string()))?;
        contents.sort();
        contents.validate()?;
        Ok(contents)
    }

    /// Checks everything that reading relies on: limits, names, byte ranges, hashes and tilings.
    ///
    /// # Errors
    /// The first thing wrong.
    pub fn validate(&self) -> Result<(), ManifestError> {
        if !(1..=FORMAT).contains(&self.format) {
            return Err(ManifestError::Format(self.format));
        }
        limit("tensors", self.tensors.len(), ENTRIES_MAX)?;
        limit("files", self.files.len(), ENTRIES_MAX)?;
        limit("extras", self.extras.len(), ENTRIES_MAX)?;
        check_about(&self.job, &self.mesh, self.hash_chunk_bytes)?;
        if !(1..=WRITERS_MAX).contains(&self.writers) {
            return Err(ManifestError::Number("number of writers"));
        }
        self.files.iter().try_for_each(|(name, file)| file.validate(name, self.hash_chunk_bytes))?;
        self.tensors.iter().try_for_each(|(name, tensor)| self.validate_tensor(name, tensor))?;
        for (name, file) in &self.extras {
            check_name(name)?;
            if !self.files.contains_key(file) {
                return Err(ManifestError::NoFile { owner: name.clone(), file: file.clone() });
            }
        }
        Ok(())
    }

    fn add(&mut self, writer: u32, index: Index) -> Result<(), ManifestError> {
        let ours = (self.job.as_str(), self.step, self.generation, writer);
        if ours != (index.job.as_str(), index.step, index.generation, index.writer) {
            return Err(ManifestError::Identity);
        }
        for (name, tensor) in index.tensors {
            match self.tensors.get_mut(&name) {
                None => drop(self.tensors.insert(name, tensor)),
                Some(known) if (known.dtype, &known.shape) != (tensor.dtype, &tensor.shape) => {
                    return Err(ManifestError::Disagreement { name, writer });
                }
                Some(known) => known.chunks.extend(tensor.chunks),
            }
        }
        // File names begin with their writer's number, so they differ between writers.
        self.files.extend(index.files);
        for (name, file) in index.extras {
            if let Some(duplicate) = self.extras.insert(name.clone(), file) {
                drop(duplicate);
                return Err(ManifestError::Twice(name));
            }
        }
        Ok(())
    }

    fn sort(&mut self) {
        for tensor in self.tensors.values_mut() {
            tensor.chunks.sort_unstable_by(|a, b| a.region.cmp(&b.region));
        }
    }

    fn validate_tensor(&self, name: &str, tensor: &TensorEntry) -> Result<(), ManifestError> {
        check_name(name)?;
        limit("dims", tensor.shape.len(), DIMS_MAX)?;
        limit("boxes", tensor.chunks.len(), ENTRIES_MAX)?;
        let regions: Vec<TensorBox> = tensor.chunks.iter().map(|chunk| chunk.region.clone()).collect();
        if tensor.dtype.bytes_of(&tensor.shape).is_none() || !tiles_exactly(&tensor.shape, &regions) {
            return Err(ManifestError::Tiling(name.to_owned()));
        }
        for chunk in &tensor.chunks {
            let Some(file) = self.files.get(&chunk.file) else {
                return Err(ManifestError::NoFile { owner: name.to_owned(), file: chunk.file.clone() });
            };
            let end = chunk.byte_offset.checked_add(chunk.byte_len);
            let inside = end.is_some_and(|end| end <= file.len);
            if !inside || tensor.dtype.bytes_of(&chunk.region.extent) != Some(chunk.byte_len) {
                return Err(ManifestError::Bytes(name.to_owned()));
            }
        }
        Ok(())
    }
}
