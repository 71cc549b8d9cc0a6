//! A trained model as a Hugging Face directory.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde_json::{Value, json};

use super::dtype::Dtype;
use super::error::HfError;
use super::layout::{PAYLOAD_HASH, encode_header};
use super::pages::{PAGE_BYTES, PageHasher, digests_name, write_digests};
use super::staging::Staging;
use crate::foreign_file;
use phalanx_device::float::Float;

/// Default limit on the bytes of one weight file, as in `transformers` since 2023.
pub const MAX_SHARD_BYTES_DEFAULT: u64 = 5_000_000_000;
/// Values narrowed at a time.
const PIECE_VALUES: usize = 1 << 16;
/// The longest file of a tokenizer that is read; the largest have some 40 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Files that belong to a tokenizer, besides its `config.json`.
const TOKENIZER_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
];

/// Passes values to a visitor, one run after the other.
pub type Show<'a> = dyn Fn(&mut dyn FnMut(&[f32])) + 'a;

/// The values of a tensor, row-major.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    /// In host memory.
    Here(&'a [f32]),
    /// The number of values, and a function that passes them run by run; every call passes the same values.
    Shown(usize, &'a Show<'a>),
}

impl std::fmt::Debug for Values<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} values", self.len())
    }
}

impl Values<'_> {
    const fn len(&self) -> usize {
        match self {
            Values::Here(values) => values.len(),
            Values::Shown(n, _) => *n,
        }
    }

    fn visit(&self, see: &mut dyn FnMut(&[f32])) {
        match self {
            Values::Here(values) => see(values),
            Values::Shown(_, show) => show(see),
        }
    }
}

/// A tensor to write.
#[derive(Clone, Copy, Debug)]
pub struct ExportTensor<'a> {
    /// Its name in the directory.
    pub name: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its values.
    pub values: Values<'a>,
}

/// The content of a model directory.
#[derive(Clone, Copy, Debug)]
pub struct Export<'a> {
    /// `config.json`; its `dtype` or `torch_dtype` is set to the type written.
    pub config: &'a Value,
    /// `generation_config.json`, if the model has one.
    pub generation_config: Option<&'a Value>,
    /// The weights, in the order in which they are written.
    pub tensors: &'a [ExportTensor<'a>],
    /// The type of the weights in the files: F32, BF16 or F16.
    pub dtype: Dtype,
    /// Further files by name, such as those of the tokenizer; see [`read_tokenizer_files`].
    pub files: &'a [(String, Vec<u8>)],
    /// Weights above this are split over several files with an index; see [`MAX_SHARD_BYTES_DEFAULT`].
    pub max_shard_bytes: u64,
}

/// Writes a model directory that appears at `dir` complete or not at all.
///
/// # Errors
/// When `dir` holds anything that is not from an earlier export (nothing is changed then), a tensor is inconsistent, not
/// finite or does not fit the type, or writing fails (`dir` then keeps its previous contents).
pub fn export_model(dir: &Path, export: &Export<'_>) -> Result<(), HfError> {
    check_tensors(export.tensors, export.dtype)?;
    let mut staging = Staging::new(dir)?;
    let mut config = export.config.clone();
    if let Some(keys) = config.as_object_mut() {
        // Readers of either key find the type that is written.
        let given: Vec<&str> = ["dtype", "torch_dtype"].into_iter().filter(|key| keys.contains_key(*key)).collect();
        for key in if given.is_empty() { vec!["torch_dtype"] } else { given } {
            keys.insert(key.into(), json!(torch_name(export.dtype)));
        }
    }
    write_json(&mut staging, "config.json", &config)?;
    if let Some(generation) = export.generation_config {
        write_json(&mut staging, "generation_config.json", generation)?;
    }
    for (name, content) in export.files {
        staging.write(name, |file| file.write_all(content))?;
    }
    write_weights(&mut staging, export)?;
    staging.publish()
}

/// Reads the files of a tokenizer from a model directory, to be exported with the model; absent ones are left out.
///
/// # Errors
/// When a file that exists cannot be read.
pub fn read_tokenizer_files(dir: &Path) -> Result<Vec<(String, Vec<u8>)>, HfError> {
    let mut files = Vec::new();
    for name in TOKENIZER_FILES {
        let path = dir.join(name);
        match foreign_file::read(&path, FILE_BYTES_MAX) {
            Ok(content) => files.push(((*name).to_owned(), content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(HfError::io("read", path, &error)),
        }
    }
    Ok(files)
}

/// Refuses tensors that no reader would accept, before anything is written.
pub(super) fn check_tensors(tensors: &[ExportTensor<'_>], dtype: Dtype) -> Result<(), HfError> {
    let bad = |name: &str, reason: String| HfError::BadExport { name: name.to_owned(), reason };
    // Values from here up round to infinity; each type's largest finite value plus half a step.
    let limit = match dtype {
        Dtype::F32 => f32::INFINITY,
        Dtype::BF16 => f32::from_bits(0x7f7f_8000),
        Dtype::F16 => 65520.0,
        other => return Err(bad("model.safetensors", format!("weights are not written as {}", other.name()))),
    };
    let mut names = std::collections::BTreeSet::new();
    for tensor in tensors {
        if !names.insert(tensor.name) || tensor.name == "__metadata__" {
            return Err(bad(tensor.name, "the name is taken".into()));
        }
        if tensor.shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)) != Some(tensor.values.len()) {
            return Err(bad(
                tensor.name,
                format!("shape {:?} does not hold {} values", tensor.shape, tensor.values.len()),
            ));
        }
        let fits = |x: &f32| x.abs() < limit;
        let (mut first, mut found) = (0, None);
        tensor.values.visit(&mut |run| {
            if found.is_none() && !run.iter().fold(true, |all, x| all & fits(x)) {
                found = run.iter().position(|x| !fits(x)).map(|at| (first + at, run[at]));
            }
            first += run.len();
        });
        if let Some((position, value)) = found {
            return Err(bad(tensor.name, format!("{value} at position {position} is not a finite {}", dtype.name())));
        }
    }
    Ok(())
}

/// Writes one safetensors file, and its digests beside it; values are narrowed a piece at a time.
pub(super) fn write_tensors(
    staging: &mut Staging,
    file_name: &str,
    tensors: &[ExportTensor<'_>],
    dtype: Dtype,
) -> Result<(), HfError> {
    let described: Vec<_> = tensors.iter().map(|t| (t.name, dtype, t.shape)).collect();
    let mut hasher = PageHasher::new();
    let hashed = tensors.iter().try_for_each(|tensor| write_values(&mut hasher, tensor.values, dtype));
    hashed.map_err(|error| HfError::io("hash", file_name, &error))?;
    let (payload_blake3, digests) = hasher.finish();
    // `transformers` requires `format: pt`.
    let metadata = BTreeMap::from([("format", "pt"), (PAYLOAD_HASH, payload_blake3.as_str())]);
    let header = encode_header(&described, &metadata, PAGE_BYTES as usize);
    staging.write(file_name, |file| {
        file.write_all(&header)?;
        tensors.iter().try_for_each(|tensor| write_values(file, tensor.values, dtype))
    })?;
    staging.write(&digests_name(file_name), |file| write_digests(file, &header, &digests))
}

pub(super) fn write_json(staging: &mut Staging, name: &str, value: &Value) -> Result<(), HfError> {
    staging.write(name, |file| {
        serde_json::to_writer_pretty(&mut *file, value)?;
        file.write_all(b"\n")
    })
}

fn write_values(file: &mut impl Write, values: Values<'_>, dtype: Dtype) -> io::Result<()> {
    let mut outcome = Ok(());
    values.visit(&mut |run| {
        if outcome.is_ok() {
            outcome = write_run(file, run, dtype);
        }
    });
    outcome
}

fn write_run(file: &mut impl Write, values: &[f32], dtype: Dtype) -> io::Result<()> {
    if dtype == Dtype::F32 {
        return file.write_all(bytemuck::cast_slice(values));
    }
    let mut staging = vec![0u16; PIECE_VALUES.min(values.len())];
    for piece in values.chunks(PIECE_VALUES) {
        let narrowed = &mut staging[..piece.len()];
        match dtype {
            // Our own rounding vectorises and is 2.8 times as fast as the crate's; for f16 the crate uses the CPU's instruction.
            Dtype::BF16 => {
                let narrowed = bytemuck::cast_slice_mut::<u16, bf16>(narrowed);
                narrowed.iter_mut().zip(piece).for_each(|(out, &x)| *out = Float::from_f32(x));
            }
            _ => bytemuck::cast_slice_mut::<u16, f16>(narrowed).convert_from_f32_slice(piece),
        }
        file.write_all(bytemuck::cast_slice(narrowed))?;
    }
    Ok(())
}

fn write_weights(staging: &mut Staging, export: &Export<'_>) -> Result<(), HfError> {
    let bytes_of = |tensor: &ExportTensor<'_>| (tensor.values.len() * export.dtype.bytes()) as u64;
    let shards = split(export.tensors, export.max_shard_bytes, bytes_of);
    if let [all] = shards.as_slice() {
        return write_tensors(staging, "model.safetensors", all, export.dtype);
    }
    let mut weight_map = serde_json::Map::new();
    for (i, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        weight_map.extend(tensors.iter().map(|tensor| (tensor.name.to_owned(), json!(name))));
        write_tensors(staging, &name, tensors, export.dtype)?;
    }
    let total: u64 = export.tensors.iter().map(bytes_of).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    write_json(staging, "model.safetensors.index.json", &index)
}

/// Splits tensors into at least one run of at most `max` bytes each; a larger tensor gets its own run.
fn split<'t, 'a>(
    tensors: &'t [ExportTensor<'a>],
    max: u64,
    bytes_of: impl Fn(&ExportTensor<'a>) -> u64,
) -> Vec<&'t [ExportTensor<'a>]> {
    let mut shards = Vec::new();
    let (mut first, mut bytes) = (0, 0u64);
    for (i, tensor) in tensors.iter().enumerate() {
        let more = bytes_of(tensor);
        if i > first && bytes.saturating_add(more) > max {
            shards.push(&tensors[first..i]);
            (first, bytes) = (i, 0);
        }
        bytes = bytes.saturating_add(more);
    }
    shards.push(&tensors[first..]);
    shards
}

/// The type of weights that a `config.json` names; F32 if it names none that can be written.
pub fn dtype_of(config: &Value) -> Dtype {
    match ["dtype", "torch_dtype"].iter().find_map(|key| config[*key].as_str()) {
        Some("bfloat16") => Dtype::BF16,
        Some("float16") => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// The name that `config.json` uses for a type of weights.
fn torch_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::BF16 => "bfloat16",
        Dtype::F16 => "float16",
        _ => "float32",
    }
}

#[cfg(test)]
#[path = "export_tests.rs"]
mod tests;
