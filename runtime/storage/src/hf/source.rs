//! The weights of a model directory, read as f32 from one safetensors file or from the shards of an index.
//!
//! Reads are positioned reads, not a memory map: a file that another process truncates gives an error instead of a
//! killed process, f32 weights go straight from the page cache into the caller's buffer, and no `unsafe` is needed.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use serde::Deserialize;

use super::dtype::Dtype;
use super::error::HfError;
use super::layout::{Entry, read_hashed_header};

/// The longest JSON file that is read from a model directory.
const JSON_BYTES_MAX: u64 = 100_000_000;
/// Values that one thread reads and widens at a time: 1 MiB of f32, which stays in the second-level cache.
const PIECE_VALUES: usize = 1 << 18;

/// The tensors of a model directory; cheap to open, since only headers are read.
#[derive(Debug)]
pub struct TensorSource {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Tensor>,
    /// Bytes of weights that were read, headers not counted.
    bytes_read: AtomicU64,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    file: File,
}

#[derive(Debug)]
struct Tensor {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    start: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl TensorSource {
    /// Opens `model.safetensors`, or else the shards that `model.safetensors.index.json` names, and checks every header.
    ///
    /// # Errors
    /// When neither exists, a header does not describe its file, the index names a file that may lie outside `dir`, or a
    /// shard lacks a tensor that the index places in it.
    pub fn open(dir: &Path) -> Result<Self, HfError> {
        let single = dir.join("model.safetensors");
        if single.is_file() {
            return Self::open_file(&single);
        }
        let index_path = dir.join("model.safetensors.index.json");
        if !index_path.is_file() {
            let has_pickle =
                ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| dir.join(name).exists());
            return Err(HfError::NoWeights { dir: dir.to_owned(), has_pickle });
        }
        let index: Index = serde_json::from_value(read_json(&index_path)?)
            .map_err(|error| HfError::BadJson { path: index_path.clone(), reason: error.to_string() })?;
        let mut source = Self::empty(dir);
        let mut wanted: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &index.weight_map {
            if !is_shard_name(shard) {
                let (tensor, shard) = (tensor.clone(), shard.clone());
                return Err(HfError::BadShardName { index: index_path, tensor, shard });
            }
            wanted.entry(shard).or_default().push(tensor);
        }
        for (shard, names) in wanted {
            source.add_shard(&dir.join(shard), Some(&names))?;
        }
        Ok(source)
    }

    /// Opens one safetensors file, whatever its name.
    ///
    /// # Errors
    /// When it cannot be read or its header does not describe it.
    pub fn open_file(path: &Path) -> Result<Self, HfError> {
        let mut source = Self::empty(path);
        source.add_shard(path, None)?;
        Ok(source)
    }

    fn empty(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), shards: Vec::new(), tensors: BTreeMap::new(), bytes_read: AtomicU64::new(0) }
    }

    /// Bytes of weights that were read so far: of a rank that has a part of the model, about that part of the files.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Every tensor's name, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether the tensor exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The shape of a tensor.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn shape(&self, name: &str) -> Result<&[usize], HfError> {
        Ok(&self.tensor(name)?.shape)
    }

    /// The stored type of a tensor.
    ///
    /// # Errors
    /// When it does not exist.
    pub fn dtype(&self, name: &str) -> Result<Dtype, HfError> {
        Ok(self.tensor(name)?.dtype)
    }

    /// Checks that a tensor exists in the shape that the model needs.
    ///
    /// # Errors
    /// When it does not.
    pub fn check_shape(&self, name: &str, expected: &[usize]) -> Result<(), HfError> {
        let tensor = self.tensor(name)?;
        if tensor.shape == expected {
            return Ok(());
        }
        Err(HfError::Shape {
            path: self.shards[tensor.shard].path.clone(),
            tensor: name.to_owned(),
            expected: expected.to_vec(),
            found: tensor.shape.clone(),
        })
    }

    /// Reads a whole tensor, row-major, widened to f32.
    ///
    /// # Errors
    /// When it does not exist, has not as many values as `out`, is not F32, F16 or BF16, cannot be read, or holds NaN or
    /// infinity; `out` may have been written then.
    pub fn read_into(&self, name: &str, out: &mut [f32]) -> Result<(), HfError> {
        let n_rows = self.tensor(name)?.shape.first().copied().unwrap_or(1);
        self.read_rows_into(name, 0..n_rows, out)
    }

    /// Reads rows (positions along dim 0) of a tensor, widened to f32; a scalar counts as one row.
    ///
    /// # Shapes
    /// tensor: `[R, …]`, `out`: `rows.len() × …`
    ///
    /// # Errors
    /// As [`TensorSource::read_into`], and when rows or the length of `out` do not match the tensor.
    pub fn read_rows_into(&self, name: &str, rows: Range<usize>, out: &mut [f32]) -> Result<(), HfError> {
        let tensor = self.tensor(name)?;
        let n_rows = tensor.shape.first().copied().unwrap_or(1);
        // Saturates only beside a zero: the bytes of the tensor are in the file.
        let row_values = tensor.shape.iter().skip(1).fold(1, |n: usize, &dim| n.saturating_mul(dim));
        if rows.start > rows.end || rows.end > n_rows || out.len() != (rows.end - rows.start) * row_values {
            return Err(HfError::Request {
                tensor: name.to_owned(),
                shape: tensor.shape.clone(),
                start: rows.start,
                end: rows.end,
                len: out.len(),
            });
        }
        self.read_run_into(name, rows.start * row_values, out)
    }

    /// Reads a run of elements, the first of which has this index in row-major order, widened to f32.
    ///
    /// # Errors
    /// As [`TensorSource::read_into`], and when the run does not lie in the tensor.
    pub fn read_run_into(&self, name: &str, first: usize, out: &mut [f32]) -> Result<(), HfError> {
        let tensor = self.tensor(name)?;
        let shard = &self.shards[tensor.shard];
        let n = tensor.shape.iter().fold(1, |n: usize, &dim| n.saturating_mul(dim));
        if first.checked_add(out.len()).is_none_or(|end| end > n) {
            let (tensor, shape) = (name.to_owned(), tensor.shape.clone());
            return Err(HfError::Run { tensor, shape, start: first, len: out.len() });
        }
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            let (path, tensor_name) = (shard.path.clone(), name.to_owned());
            return Err(HfError::NotFloat { path, tensor: tensor_name, found: tensor.dtype.name() });
        }
        let start = tensor.start + (first * tensor.dtype.bytes()) as u64;
        let bad = read_widened(&shard.file, start, tensor.dtype, out)
            .map_err(|error| HfError::io("read", &shard.path, &error))?;
        self.bytes_read.fetch_add((out.len() * tensor.dtype.bytes()) as u64, Ordering::Relaxed);
        match bad {
            Some(position) => Err(HfError::NotFinite {
                path: shard.path.clone(),
                tensor: name.to_owned(),
                position: first + position,
                value: out[position].to_string(),
            }),
            None => Ok(()),
        }
    }

    fn tensor(&self, name: &str) -> Result<&Tensor, HfError> {
        self.tensors.get(name).ok_or_else(|| HfError::NoTensor { path: self.dir.clone(), tensor: name.to_owned() })
    }

    /// Adds the tensors of a file: all of them, or those that an index wants, which must exist.
    fn add_shard(&mut self, path: &Path, wanted: Option<&[&str]>) -> Result<(), HfError> {
        let file = File::open(path).map_err(|error| HfError::io("read", path, &error))?;
        let metadata = file.metadata().map_err(|error| HfError::io("read", path, &error))?;
        let (entries, hash) = read_hashed_header(&file, metadata.len())
            .map_err(|layout| HfError::BadLayout { path: path.to_owned(), layout })?;
        if let Some(hash) = hash {
            let payload = entries.first().map_or(metadata.len(), |first| first.start);
            check_payload(path, &file, payload, &hash)?;
        }
        let shard = self.shards.len();
        self.shards.push(Shard { path: path.to_owned(), file });
        let mut found: BTreeMap<String, Entry> = entries.into_iter().map(|entry| (entry.name.clone(), entry)).collect();
        if let Some(names) = wanted {
            if let Some(missing) = names.iter().find(|name| !found.contains_key(**name)) {
                return Err(HfError::NoTensor { path: path.to_owned(), tensor: (*missing).to_owned() });
            }
            found.retain(|name, _| names.binary_search(&name.as_str()).is_ok());
        }
        for (name, entry) in found {
            self.tensors.insert(name, Tensor { shard, dtype: entry.dtype, shape: entry.shape, start: entry.start });
        }
        Ok(())
    }
}

/// Compares the bytes from `start` on with the hash that the file gives for them.
fn check_payload(path: &Path, file: &File, start: u64, hash: &str) -> Result<(), HfError> {
    let io = |error: std::io::Error| HfError::io("read", path, &error);
    let mut reader = std::io::BufReader::with_capacity(1 << 20, file);
    std::io::Seek::seek(&mut reader, std::io::SeekFrom::Start(start)).map_err(io)?;
    let mut hasher = blake3::Hasher::new();
    std::io::copy(&mut reader, &mut hasher).map_err(io)?;
    if hasher.finalize().to_hex().as_str() == hash {
        return Ok(());
    }
    let reason = "its weights are not those that were saved: their hash differs from the one in its header".into();
    Err(HfError::BadFile { path: path.to_owned(), reason })
}

/// Reads a JSON file of a model directory.
///
/// # Errors
/// When it cannot be read, is longer than 100 MB or is not JSON.
pub fn read_json(path: &Path) -> Result<serde_json::Value, HfError> {
    let metadata = std::fs::metadata(path).map_err(|error| HfError::io("read", path, &error))?;
    if metadata.len() > JSON_BYTES_MAX {
        let reason = format!("it has {} bytes, more than the {JSON_BYTES_MAX} allowed", metadata.len());
        return Err(HfError::BadJson { path: path.to_owned(), reason });
    }
    let text = std::fs::read(path).map_err(|error| HfError::io("read", path, &error))?;
    serde_json::from_slice(&text).map_err(|error| HfError::BadJson { path: path.to_owned(), reason: error.to_string() })
}

/// A plain file name: no path can hide in it.
fn is_shard_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    name.len() <= 255 && !name.starts_with('.') && name.ends_with(".safetensors") && name.chars().all(plain)
}

/// Reads values from byte `start` on into `out`; the position of the first NaN or infinity, if there is one.
fn read_widened(file: &File, start: u64, dtype: Dtype, out: &mut [f32]) -> std::io::Result<Option<usize>> {
    let first_bad = AtomicUsize::new(usize::MAX);
    let pieces = out.par_chunks_mut(PIECE_VALUES).enumerate();
    pieces.try_for_each_init(Vec::new, |staging: &mut Vec<u16>, (piece, out)| {
        let from = start + (piece * PIECE_VALUES * dtype.bytes()) as u64;
        if dtype == Dtype::F32 {
            file.read_exact_at(bytemuck::cast_slice_mut(out), from)?;
        } else {
            staging.resize(out.len(), 0);
            file.read_exact_at(bytemuck::cast_slice_mut(staging), from)?;
            match dtype {
                Dtype::BF16 => bytemuck::cast_slice::<u16, bf16>(staging).convert_to_f32_slice(out),
                _ => bytemuck::cast_slice::<u16, f16>(staging).convert_to_f32_slice(out),
            }
        }
        // Two passes over a piece in cache: the first has no branch per value.
        if out.iter().fold(false, |bad, x| bad | !x.is_finite())
            && let Some(position) = out.iter().position(|x| !x.is_finite())
        {
            first_bad.fetch_min(piece * PIECE_VALUES + position, Ordering::Relaxed);
        }
        Ok::<_, std::io::Error>(())
    })?;
    Ok(Some(first_bad.into_inner()).filter(|&position| position != usize::MAX))
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
