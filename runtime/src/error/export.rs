//! Why a checkpoint cannot be exported, or its small files cannot be encoded.

/// Why a checkpoint cannot be exported, or its small files cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum ExportError {
    /// A small file is missing from the checkpoint.
    #[error("the checkpoint has no {file}")]
    Missing { file: &'static str },
    /// A small file is not valid JSON.
    #[error("{file}: {source}")]
    Json { file: String, source: serde_json::Error },
    /// A small file cannot be encoded as JSON.
    #[error(transparent)]
    Encode(serde_json::Error),
    /// `--merge` with a run that trained all weights.
    #[error("this run trained no adapter; export it without `--merge`")]
    NothingToMerge,
    /// The checkpoint of a job without adapters contains tensors of adapters.
    #[error("the checkpoint contains adapters, but its job trains none")]
    UnknownAdapters,
}
