//! Why the small files of a checkpoint, or what is exported from it, cannot be read or made.

/// Why the small files of a checkpoint, or what is exported from it, cannot be read or made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the fields are named for what they are
pub enum ExportError {
    /// A checkpoint without one of its small files.
    #[error("the checkpoint lacks {file}")]
    Missing { file: &'static str },
    /// A small file that is not JSON.
    #[error("{file}: {source}")]
    Json { file: String, source: serde_json::Error },
    /// A small file that has no JSON form.
    #[error(transparent)]
    Encode(serde_json::Error),
    /// `--merge`, of a run that trained all weights.
    #[error("--merge: this run trained no adapter; export it without")]
    NothingToMerge,
    /// Tensors of adapters, in the checkpoint of a job without any.
    #[error("the checkpoint holds adapters but its job trains none")]
    UnknownAdapters,
}
