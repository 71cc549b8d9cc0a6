//! Errors about model directories; each message is one sentence with the file and tensor.

use std::path::PathBuf;

use thiserror::Error;

use super::layout::LayoutError;

/// Why a model directory could not be read or written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HfError {
    /// A file operation failed.
    #[error("cannot {action} {}: {reason}", path.display())]
    Io {
        /// The attempted operation: "read", "write".
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        reason: String,
    },
    /// The directory for an export is a link that leads nowhere.
    #[error("{} is a link to {}, which does not exist: mount that disk, or remove the link", dir.display(), target.display())]
    Unmounted {
        /// The link.
        dir: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// The directory holds no safetensors weights.
    #[error("{} has neither model.safetensors nor model.safetensors.index.json{}", dir.display(), if *has_pickle { "; convert its pickled weights to safetensors first" } else { "" })]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// Whether it holds `pytorch_model*.bin`, which can run code when loaded and is never read.
        has_pickle: bool,
    },
    /// The bytes of a file are not those that were written.
    #[error("{} is damaged: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Products would multiply other weights than those of the file.
    #[error(
        "tensor `{tensor}` of {} has weights up to {found} in magnitude, but products in FP8 know none beyond {largest}; set \
         `fp8: false`, or store the weights with `load_in_4bit: true` instead", dir.display()
    )]
    BeyondFp8 {
        /// The model directory.
        dir: PathBuf,
        /// The tensor.
        tensor: String,
        /// The largest magnitude that was read.
        found: String,
        /// The largest one of a weight in FP8.
        largest: String,
    },
    /// Bytes of a tensor are not those that were written.
    #[error("{} is damaged: bytes {start}..{end}, which hold a part of tensor `{tensor}`, are not those that were saved", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The tensor that was read.
        tensor: String,
        /// First byte of the page that differs from its digest.
        start: u64,
        /// Byte after that page.
        end: u64,
    },
    /// A JSON file is malformed.
    #[error("{} is damaged: {reason}", path.display())]
    BadJson {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The index names a file that could lie outside the directory.
    #[error("{} places tensor `{tensor}` in {shard:?}, which is not a plain file name ending in .safetensors", index.display())]
    BadShardName {
        /// The index file.
        index: PathBuf,
        /// The tensor.
        tensor: String,
        /// The name as written.
        shard: String,
    },
    /// A safetensors file whose header does not describe its bytes.
    #[error("{} {}: {layout}", path.display(), if matches!(layout, LayoutError::UnknownType { .. }) { "cannot be read" } else { "is damaged" })]
    BadLayout {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        layout: LayoutError,
    },
    /// A tensor that the caller or the index names does not exist.
    #[error("{} has no tensor `{tensor}`", path.display())]
    NoTensor {
        /// The file or directory that was searched.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// More tensors than any model has.
    #[error("{} has {found} tensors, and at most {max} are read; remove those that the model does not use", path.display())]
    TooManyTensors {
        /// The file.
        path: PathBuf,
        /// Their number.
        found: usize,
        /// The largest number.
        max: usize,
    },
    /// A head that the configuration takes for the embedding.
    #[error(
        "`tie_word_embeddings` is true in the model configuration, but {} has an lm_head.weight that differs from {embedding}; \
         set it to false, or remove the wrong tensor",
        dir.display()
    )]
    Untied {
        /// The directory.
        dir: PathBuf,
        /// Name of the embedding's tensor.
        embedding: String,
    },
    /// A tensor's shape differs from the model's.
    #[error("tensor `{tensor}` in {} has shape {found:?}, but the model needs {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape the model needs.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor is not of a floating-point type that widens to f32.
    #[error("tensor `{tensor}` in {} has type {found}, but weights must be F32, F16 or BF16", path.display())]
    NotFloat {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: &'static str,
    },
    /// The caller's buffer or rows do not match the tensor; a fault of the calling code, not of the file.
    #[error("rows {start}..{end} of tensor `{tensor}` of shape {shape:?} do not fit a buffer of {len} values")]
    Request {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// First row.
        start: usize,
        /// Row after the last.
        end: usize,
        /// Length of the buffer.
        len: usize,
    },
    /// A run of elements outside the tensor; a fault of the calling code, not of the file.
    #[error("tensor `{tensor}` of shape {shape:?} does not have {len} elements from {start} on")]
    Run {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
        /// First element.
        start: usize,
        /// Length of the buffer.
        len: usize,
    },
    /// A weight is NaN or infinite, which is never intended.
    #[error("tensor `{tensor}` in {} holds {value} at position {position}", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Position in row-major order.
        position: usize,
        /// "NaN", "inf" or "-inf".
        value: String,
    },
    /// The directory of an export holds something other than an earlier export.
    #[error("{} holds {found}, which is not from an earlier export; choose another directory or empty it", dir.display())]
    Occupied {
        /// The directory.
        dir: PathBuf,
        /// A file in it that we did not write.
        found: String,
    },
    /// The tensors or files of an export are inconsistent.
    #[error("cannot export `{name}`: {reason}")]
    BadExport {
        /// The tensor or file.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl HfError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>, error: &std::io::Error) -> Self {
        Self::Io { action, path: path.into(), reason: error.to_string() }
    }
}
