//! A model directory, or an adapter merged into its base model, as another model directory or as a file of llama.cpp.

use super::export::{ExportFrom, shown};
use super::gguf::export_gguf;
use super::model_source::{ModelSource, forward_spec};
use super::weights;
use crate::devices;
use crate::error::JobError;
use phalanx_device::{Backing, Machine};
use phalanx_storage::gguf::Encoding;
use phalanx_storage::hf::dtype::Dtype;
use phalanx_storage::hf::export::{
    Export, ExportTensor, MAX_SHARD_BYTES_DEFAULT, Values, dtype_of, export_model, read_tokenizer_files,
};
use phalanx_strategies::compile::{Compiled, compile_forward};
use phalanx_strategies::model::{BatchShape, Head, ModelConfig};
use std::path::Path;

/// Writes a model directory; `dtype` is by default the type that the model's configuration names.
///
/// # Errors
/// When the model cannot be read, or `to` cannot be written.
pub fn reexport(source: &ModelSource, to: &Path, dtype: Option<Dtype>) -> Result<(), JobError> {
    let config = source.config()?;
    let generation = source.generation_config()?;
    let files = tokenizer_files(source)?;
    let (machine, compiled) = load(source, &source.model()?)?;
    let from = ExportFrom { machine: &*machine, compiled: &compiled };
    let tensors = weights::parameters(&compiled);
    let shown: Vec<_> = tensors.iter().map(|tensor| shown(&from, tensor)).collect();
    let list: Vec<ExportTensor<'_>> = tensors
        .iter()
        .zip(&shown)
        .map(|(tensor, shown)| ExportTensor {
            name: &tensor.name,
            shape: &tensor.shape,
            values: Values::Shown(tensor.held.n_elements(), &**shown),
        })
        .collect();
    let export = Export {
        config: &config,
        generation_config: Some(&generation).filter(|generation| !generation.is_null()),
        tensors: &list,
        dtype: dtype.unwrap_or_else(|| dtype_of(&config)),
        files: &files,
        max_shard_bytes: MAX_SHARD_BYTES_DEFAULT,
    };
    Ok(export_model(to, &export)?)
}

/// The files of a tokenizer: as they are used here, and the others that belong to it. `tokenizer.json` has the tokens of
/// `added_tokens.json`, whose ids may be others.
fn tokenizer_files(source: &ModelSource) -> Result<Vec<(String, Vec<u8>)>, JobError> {
    let mut files: Vec<_> = source.tokenizer()?.files().collect();
    let others = read_tokenizer_files(source.tokenizer_dir())?.into_iter();
    let is_left = |name: &String| !RESOLVED.contains(&name.as_str());
    files.extend(others.filter(|(name, _)| is_left(name)));
    Ok(files)
}

/// Files that are written as the tokenizer resolves them.
const RESOLVED: [&str; 5] =
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "added_tokens.json"];

/// Writes a GGUF file.
///
/// # Errors
/// As [`reexport`], and when llama.cpp has no such model or tokenizer.
pub fn to_gguf(source: &ModelSource, to: &Path, encoding: Encoding) -> Result<(), JobError> {
    let model = source.model()?;
    let tokenizer = source.tokenizer()?;
    let (machine, compiled) = load(source, &model)?;
    export_gguf(to, &*machine, &compiled, &model, &tokenizer, encoding)
}

fn load(source: &ModelSource, model: &ModelConfig) -> Result<(Box<dyn Machine>, Compiled), JobError> {
    let device = devices::host();
    let path = || source.base.join("config.json").display().to_string();
    let forward = model
        .forward(BatchShape { n_rows: 1, seq_len: 2 }, Head::Loss)
        .map_err(|source| JobError::Model { path: path(), source })?;
    let compiled = compile_forward(forward, &forward_spec(), device.target())?;
    let mut machine = device.machine(&[&compiled], &Backing::default())?;
    source.load(&mut *machine, &compiled, model)?;
    Ok((machine, compiled))
}
