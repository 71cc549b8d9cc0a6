//! The weights of a model directory, read as f32 from one safetensors file or from the shards of an index.
//!
//! Reads are positioned reads, not a memory map: a file that another process truncates gives an error instead of a
//! killed process, f32 weights go straight from the page cache into the caller's buffer, and no `unsafe` is needed.
//! From a file with digests (`pages`), whole pages are read and verified, each once; otherwise only elements.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use serde::Deserialize;

use super::dtype::Dtype;
use super::error::HfError;
use super::layout::{Entry, Header, read_header};
use super::pages::{CountedFile, Digests, digests_from, first_damaged};
use super::windows::{Bad, WINDOW_BYTES, Window, windows};
use crate::foreign_file;

/// The longest JSON file that is read from a model directory.
const JSON_BYTES_MAX: u64 = 100_000_000;

/// Most tensors of a file. The largest models have some ten thousand; every process of a job keeps the table of all of them.
const TENSORS_MAX: usize = 1 << 18;

/// The tensors of a model directory; cheap to open, since only headers are read.
#[derive(Debug)]
pub struct TensorSource {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Tensor>,
    /// Tensors that are not in the shard in which the index places them.
    missing: BTreeMap<String, String>,
    bytes_read: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Shard {
    file: CountedFile,
    payload_start: u64,
    digests: Option<Digests>,
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
    /// As in transformers, the shards themselves tell which tensors they hold: an entry of the index for a tensor that is not
    /// there matters only to who reads that tensor.
    ///
    /// # Errors
    /// When neither exists, a header does not describe its file, the index names a file that may lie outside `dir`, or two
    /// shards hold different tensors of one name.
    pub fn open(dir: &Path) -> Result<Self, HfError> {
        let single = dir.join("model.safetensors");
        if is_there(&single)? {
            return Self::open_file(&single);
        }
        let index_path = dir.join("model.safetensors.index.json");
        if !is_there(&index_path)? {
            let has_pickle =
                ["pytorch_model.bin", "pytorch_model.bin.index.json"].iter().any(|name| dir.join(name).exists());
            return Err(HfError::NoWeights { dir: dir.to_owned(), has_pickle });
        }
        let index: Index = serde_json::from_value(read_json(&index_path)?)
            .map_err(|error| HfError::BadJson { path: index_path.clone(), reason: error.to_string() })?;
        let mut source = Self::empty(dir);
        let index_bytes = std::fs::metadata(&index_path).map_err(|error| HfError::io("read", &index_path, &error))?;
        source.bytes_read.fetch_add(index_bytes.len(), Ordering::Relaxed);
        for (tensor, shard) in &index.weight_map {
            if !is_shard_name(shard) {
                let (tensor, shard) = (tensor.clone(), shard.clone());
                return Err(HfError::BadShardName { index: index_path, tensor, shard });
            }
        }
        for shard in index.weight_map.values().collect::<BTreeSet<_>>() {
            for (name, tensor) in source.add_shard(&dir.join(shard))? {
                if let Some(other) = source.tensors.insert(name.clone(), tensor) {
                    source.check_equal(&name, &other)?;
                }
            }
        }
        let is_missing = |(tensor, _): &(String, String)| !source.tensors.contains_key(tensor);
        source.missing = index.weight_map.into_iter().filter(is_missing).collect();
        Ok(source)
    }

    /// Opens one safetensors file, whatever its name.
    ///
    /// # Errors
    /// When it cannot be read or its header does not describe it.
    pub fn open_file(path: &Path) -> Result<Self, HfError> {
        let mut source = Self::empty(path);
        source.tensors = source.add_shard(path)?.collect();
        Ok(source)
    }

    fn empty(dir: &Path) -> Self {
        let (tensors, missing) = (BTreeMap::new(), BTreeMap::new());
        Self { dir: dir.to_owned(), shards: Vec::new(), tensors, missing, bytes_read: Arc::default() }
    }

    /// Bytes read from the directory's files so far: weights, headers, the index and digests.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// The directory or file that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
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
            path: self.shards[tensor.shard].file.path.clone(),
            tensor: name.to_owned(),
            expected: expected.to_vec(),
            found: tensor.shape.clone(),
        })
    }

    /// The files that hold the tensors.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.file.path.as_path())
    }

    /// The first 16 bytes of the BLAKE3 hash of a tensor's element type, shape and bytes, in hexadecimal.
    ///
    /// # Errors
    /// When it does not exist or cannot be read.
    pub fn digest(&self, name: &str) -> Result<String, HfError> {
        self.digest_of(self.tensor(name)?)
    }

    fn digest_of(&self, tensor: &Tensor) -> Result<String, HfError> {
        let Tensor { shard, dtype, shape, start } = tensor;
        let file = &self.shards[*shard].file;
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{} {shape:?} ", dtype.name()).as_bytes());
        // Opening the file has checked that it holds the whole tensor.
        let end = start + dtype.bytes_of(shape).unwrap_or_default();
        let mut window = vec![0; WINDOW_BYTES.min(end - start) as usize];
        let mut at = *start;
        while at < end {
            let window = &mut window[..(end - at).min(WINDOW_BYTES) as usize];
            file.read_exact_at(window, at).map_err(|error| HfError::io("read", &file.path, &error))?;
            hasher.update(window);
            at += window.len() as u64;
        }
        Ok(hasher.finalize().to_hex()[..32].to_owned())
    }

    /// Reads a whole tensor, row-major, widened to f32.
    ///
    /// # Errors
    /// When it does not exist, has another length than `out`, is not F32, F16 or BF16, cannot be read, or holds NaN or
    /// infinity; the content of `out` is then unspecified.
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
        // Saturates only if another dim is zero, because the file holds all bytes of the tensor.
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

    /// Reads a run of elements from the row-major index `first` on, widened to f32.
    ///
    /// # Errors
    /// As [`TensorSource::read_into`], and when the run exceeds the tensor.
    pub fn read_run_into(&self, name: &str, first: usize, out: &mut [f32]) -> Result<(), HfError> {
        let all = 0..out.len();
        self.read_runs_into(name, [(first, all)], out)
    }

    /// Reads runs of elements, widened to f32. A run is the row-major index of its first element and a range of `out`; both
    /// ascend from run to run. The rest of `out` does not change.
    ///
    /// # Errors
    /// As [`TensorSource::read_into`], and when a run exceeds the tensor or begins before the end of the previous run.
    pub fn read_runs_into(
        &self,
        name: &str,
        runs: impl IntoIterator<Item = (usize, Range<usize>)>,
        out: &mut [f32],
    ) -> Result<(), HfError> {
        let tensor = self.tensor(name)?;
        let runs: Vec<(usize, Range<usize>)> = runs.into_iter().filter(|(_, at)| !at.is_empty()).collect();
        check_runs(name, &tensor.shape, &runs, out.len())?;
        let shard = &self.shards[tensor.shard];
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            let (path, tensor_name) = (shard.file.path.clone(), name.to_owned());
            return Err(HfError::NotFloat { path, tensor: tensor_name, found: tensor.dtype.name() });
        }
        let around = |bytes: Range<u64>| shard.digests.as_ref().map_or(bytes.clone(), |d| d.pages_around(bytes));
        let lies = (shard.payload_start, tensor.start, tensor.dtype.bytes());
        let windows = windows(runs.into_iter(), out, lies, around);
        match shard.read(name, tensor.dtype, windows)? {
            Some((position, value)) => Err(HfError::NotFinite {
                path: shard.file.path.clone(),
                tensor: name.to_owned(),
                position,
                value: value.to_string(),
            }),
            None => Ok(()),
        }
    }

    fn tensor(&self, name: &str) -> Result<&Tensor, HfError> {
        self.tensors.get(name).ok_or_else(|| {
            let path = self.missing.get(name).map_or_else(|| self.dir.clone(), |shard| self.dir.join(shard));
            HfError::NoTensor { path, tensor: name.to_owned() }
        })
    }

    /// Adds a file and returns its tensors.
    fn add_shard(&mut self, path: &Path) -> Result<impl Iterator<Item = (String, Tensor)> + use<>, HfError> {
        let file = CountedFile::open(path, &self.bytes_read)?;
        let header = read_header(|out, start| file.read_exact_at(out, start), file.len)
            .map_err(|layout| HfError::BadLayout { path: path.to_owned(), layout })?;
        if header.entries.len() > TENSORS_MAX {
            let (path, found) = (path.to_owned(), header.entries.len());
            return Err(HfError::TooManyTensors { path, found, max: TENSORS_MAX });
        }
        let digests = Digests::open(&file, &header)?;
        if digests.is_none() {
            check_payload(&file, &header)?;
        }
        let Header { entries, payload_start, .. } = header;
        let shard = self.shards.len();
        self.shards.push(Shard { file, payload_start, digests });
        let tensor =
            move |Entry { name, dtype, shape, start, .. }: Entry| (name, Tensor { shard, dtype, shape, start });
        Ok(entries.into_iter().map(tensor))
    }

    /// Checks that a tensor is the same in another shard.
    fn check_equal(&self, name: &str, other: &Tensor) -> Result<(), HfError> {
        let tensor = self.tensor(name)?;
        if self.digest_of(tensor)? == self.digest_of(other)? {
            return Ok(());
        }
        let [file, other] = [tensor, other].map(|tensor| &self.shards[tensor.shard].file.path);
        let reason = format!("it holds another tensor `{name}` than {}", other.display());
        Err(HfError::BadFile { path: file.clone(), reason })
    }
}

impl Shard {
    /// Reads the windows of a tensor and verifies their pages, if there are digests. Returns the first value that is NaN or
    /// infinite.
    fn read(&self, tensor: &str, dtype: Dtype, windows: Vec<Window<'_>>) -> Result<Option<Bad>, HfError> {
        let (Some(first), Some(last)) = (windows.first(), windows.last()) else { return Ok(None) };
        let all = first.bytes.start..last.bytes.end;
        let digests = self.digests.as_ref().map(|digests| digests.read(&all)).transpose()?;
        let verify = |start: u64, bytes: &[u8]| {
            let damaged = first_damaged(bytes, digests_from(digests.as_ref()?, start - all.start))?;
            let (start, end) = (start + damaged.start, start + damaged.end);
            Some(HfError::Damaged { path: self.file.path.clone(), tensor: tensor.to_owned(), start, end })
        };
        let read = |staging: &mut Vec<u64>, mut window: Window<'_>| {
            let bytes = window.bytes.clone();
            let io = |error: std::io::Error| HfError::io("read", &self.file.path, &error);
            let damaged = if let Some(place) = window.in_place(dtype) {
                self.file.read_exact_at(place, bytes.start).map_err(io)?;
                verify(bytes.start, place)
            } else {
                let len = (bytes.end - bytes.start) as usize;
                staging.resize(len.div_ceil(8), 0);
                let staging = &mut bytemuck::cast_slice_mut(staging)[..len];
                self.file.read_exact_at(staging, bytes.start).map_err(io)?;
                window.widen(dtype, staging);
                verify(bytes.start, staging)
            };
            damaged.map_or(Ok(window.first_bad()), Err)
        };
        let earlier = |a: Option<Bad>, b: Option<Bad>| match (a, b) {
            (Some(a), Some(b)) => Some(if a.0 < b.0 { a } else { b }),
            (a, b) => a.or(b),
        };
        let found = windows.into_par_iter().map_init(Vec::new, read);
        found.try_reduce(|| None, |a, b| Ok(earlier(a, b)))
    }
}

/// Refuses runs that exceed the tensor or `out`, or do not ascend.
fn check_runs(name: &str, shape: &[usize], runs: &[(usize, Range<usize>)], len: usize) -> Result<(), HfError> {
    let n_elements = shape.iter().fold(1, |n: usize, &dim| n.saturating_mul(dim));
    let (mut element, mut place) = (0, 0);
    for (first, at) in runs {
        let end = first.checked_add(at.len());
        if *first < element || at.start < place || at.end > len || end.is_none_or(|end| end > n_elements) {
            let (tensor, shape) = (name.to_owned(), shape.to_vec());
            return Err(HfError::Run { tensor, shape, start: *first, len: at.len() });
        }
        (element, place) = (end.unwrap_or(n_elements), at.end);
    }
    Ok(())
}

/// Compares the payload of a file without page digests with the hash in its header, if the header has one.
fn check_payload(file: &CountedFile, header: &Header) -> Result<(), HfError> {
    let Some(expected) = &header.payload_blake3 else { return Ok(()) };
    let mut hasher = blake3::Hasher::new();
    let mut window = vec![0; WINDOW_BYTES as usize];
    let mut start = header.payload_start;
    while start < file.len {
        let window = &mut window[..(file.len - start).min(WINDOW_BYTES) as usize];
        file.read_exact_at(window, start).map_err(|error| HfError::io("read", &file.path, &error))?;
        hasher.update(window);
        start += window.len() as u64;
    }
    if hasher.finalize().to_hex().as_str() == expected {
        return Ok(());
    }
    let reason = "the hash of its weights differs from the one in its header".into();
    Err(HfError::BadFile { path: file.path.clone(), reason })
}

/// Reads a JSON file of a model directory.
///
/// # Errors
/// When it cannot be read, is no regular file, is longer than 100 MB or is not JSON.
pub fn read_json(path: &Path) -> Result<serde_json::Value, HfError> {
    let text = foreign_file::read(path, JSON_BYTES_MAX).map_err(|error| HfError::io("read", path, &error))?;
    serde_json::from_slice(&text).map_err(|error| HfError::BadJson { path: path.to_owned(), reason: error.to_string() })
}

fn is_there(path: &Path) -> Result<bool, HfError> {
    foreign_file::is_there(path).map_err(|error| HfError::io("read", path, &error))
}

/// Whether this is a plain file name rather than a path.
fn is_shard_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    name.len() <= 255 && !name.starts_with('.') && name.ends_with(".safetensors") && name.chars().all(plain)
}

#[cfg(test)]
#[path = "source_tests.rs"]
mod tests;
