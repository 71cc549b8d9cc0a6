//! Why an adapter cannot be merged into its base model.

use std::path::PathBuf;

/// Why an adapter cannot be merged into its base model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum MergeError {
    /// `--base_model` beside a whole model.
    #[error("{} is no adapter (it has no adapter_config.json), so it has no base model; remove `--base_model`", dir.display())]
    NoAdapter { dir: PathBuf },
    /// The base model is not on this machine, or has moved.
    #[error(
        "the base model of adapter {} is {}, which is no model directory here; name its directory with `--base_model`",
        dir.display(), base.display()
    )]
    NoBase { dir: PathBuf, base: PathBuf },
    /// An adapter of a kind that is not supported.
    #[error("adapter {}: `{key}` is {found}, {wanted}", dir.display())]
    Setting { dir: PathBuf, key: String, found: String, wanted: String },
    /// A tensor that has no place in the base model.
    #[error("adapter {} has tensor {tensor}, which does not fit the base model: {why}", dir.display())]
    Tensor { dir: PathBuf, tensor: String, why: String },
    /// A tensor that the settings of the adapter call for.
    #[error("adapter {} lacks tensor {tensor}, although {why}", dir.display())]
    Lacks { dir: PathBuf, tensor: String, why: &'static str },
}
