//! Why a checkpoint cannot be exported, or its small files cannot be encoded.

use crate::data::gguf_vocabulary::VocabularyError;
use std::path::PathBuf;

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
    /// The weights that a run did not train are not in its checkpoint, and the base model has moved.
    #[error(
        "checkpoint {} has the weights that its run trained; the others are in its base model {}, which is no model directory \
         here: name its directory with `--base_model`",
        checkpoint.display(), base.display()
    )]
    NoBase { checkpoint: PathBuf, base: PathBuf },
    /// The base model has changed, or another directory was named.
    #[error(
        "tensor `{tensor}` of base model {} has other values than when checkpoint {} was saved; name the base model of its run with \
         `--base_model`",
        base.display(), checkpoint.display()
    )]
    OtherBase { checkpoint: PathBuf, base: PathBuf, tensor: String },
    /// The checkpoint of a job without adapters contains tensors of adapters.
    #[error("the checkpoint contains adapters, but its job trains none")]
    UnknownAdapters,
    /// `--gguf` with another name of a file.
    #[error("{} must end in .gguf", path.display())]
    NotGguf { path: PathBuf },
    /// llama.cpp has no such model, or another order of its rows.
    #[error("a model of family {family} cannot be written to a GGUF file; supported are {known}")]
    GgufFamily { family: String, known: String },
    /// A reward model.
    #[error("a reward model cannot be written to a GGUF file; export a directory for transformers, without `--gguf`")]
    GgufScores,
    /// A tensor that this family does not have in llama.cpp.
    #[error("the tensor {tensor} has no place in a GGUF file")]
    GgufTensor { tensor: String },
    /// The tokenizer has no counterpart in llama.cpp.
    #[error(transparent)]
    Vocabulary(VocabularyError),
    /// `--gguf` with a checkpoint.
    #[error(
        "a GGUF file is made of a model directory, and {} is a checkpoint or a run: name the run's `model` folder, or export the checkpoint to a directory first",
        path.display()
    )]
    GgufOfCheckpoint { path: PathBuf },
    /// An adapter is exported as it is.
    #[error("{} is an adapter; `--merge` writes it and its base model as one", path.display())]
    AdapterAlone { path: PathBuf },
    /// `--merge` with a whole model.
    #[error("{} is a whole model; export it without `--merge`", path.display())]
    WholeModel { path: PathBuf },
}
