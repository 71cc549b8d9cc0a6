//! Why data cannot be prepared.

use super::chat_template::ChatTemplateError;
use super::config::DataConfigError;
use super::sources::SourceError;
use super::token_cache_format::TokenCacheError;
use super::tokenize_error::TokenizeError;
use std::path::PathBuf;
use thiserror::Error;

/// Why the data cannot be turned into rows.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Error)]
pub enum PrepareError {
    /// The section contradicts itself.
    #[error(transparent)]
    Config(#[from] DataConfigError),
    /// The files of a data set cannot be found.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The chat template cannot be used.
    #[error("dataset {}: {reason}", path.display())]
    Template { path: PathBuf, reason: ChatTemplateError },
    /// `chat_template: jinja` and `chat_template_jinja` go together.
    #[error("chat_template: jinja and chat_template_jinja go together; found only one of them")]
    JinjaWithoutTemplate,
    /// The file that `chat_template_jinja` names cannot be read.
    #[error("chat_template_jinja: cannot read {}: {reason}", path.display())]
    TemplateFile { path: PathBuf, reason: String },
    /// Conversations need a template.
    #[error(
        "dataset {} has conversations, but the tokenizer has no chat template; set chat_template, for example to chatml",
        path.display()
    )]
    NoTemplate { path: PathBuf },
    /// A file cannot be tokenised.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// The token cache cannot be used.
    #[error(transparent)]
    Cache(#[from] TokenCacheError),
    /// The tokenizer has tokens beyond the model's vocabulary.
    #[error(
        "dataset {} needs token {id} ({token:?}), but the model's vocabulary has {model_size}; the tokenizer's has {tokenizer_size}: use the tokenizer of this model, or name the token under `tokens`, so that the model gets a row for it",
        path.display()
    )]
    Vocabulary { path: PathBuf, id: u32, token: String, tokenizer_size: usize, model_size: usize },
    /// A document does not fit.
    #[error(
        "{}:{line}: this document has {len} tokens, more than sequence_len {limit}; set sequence_len to at least {len}, or excess_length_strategy to drop or truncate",
        path.display()
    )]
    TooLong { path: PathBuf, line: u64, len: usize, limit: usize },
    /// The text does not fill a row.
    #[error("dataset {} has {n_tokens} tokens, less than one row of sequence_len {limit}", path.display())]
    TooShort { path: PathBuf, n_tokens: usize, limit: usize },
    /// No document has a token to predict.
    #[error(
        "dataset {} has nothing to train on: {n_documents} documents, {n_empty} without a token to predict, {n_dropped} dropped as too long{}, {n_short} shorter than min_sample_len, {n_repeated} repeated{}",
        path.display(),
        in_tokens(*dropped_lens),
        left_out(*n_skipped)
    )]
    Empty {
        path: PathBuf,
        n_documents: usize,
        n_empty: usize,
        n_dropped: usize,
        dropped_lens: Option<(usize, usize)>,
        n_short: usize,
        n_repeated: usize,
        n_skipped: u64,
    },
    /// Rows have numbers of 32 bits.
    #[error(
        "the data has {n_rows} rows, more than the {} that a job can have; use a part of it, or a longer sequence_len",
        u32::MAX
    )]
    TooManyRows { n_rows: usize },
    /// The split leaves one side empty.
    #[error(
        "val_set_size {val_set_size} of {n_samples} samples leaves {n_validation} for validation and {n_train} for training; both need at least one"
    )]
    Split { val_set_size: f64, n_samples: usize, n_validation: usize, n_train: usize },
}

/// The lengths of documents between brackets, if there are any.
pub(crate) fn in_tokens(lens: Option<(usize, usize)>) -> String {
    match lens {
        None => String::new(),
        Some((least, most)) if least == most => format!(" ({least} tokens)"),
        Some((least, most)) => format!(" ({least} to {most} tokens)"),
    }
}

/// How many records `skip_bad_records` left out, if any.
fn left_out(n_skipped: u64) -> String {
    if n_skipped == 0 { String::new() } else { format!("; {n_skipped} records that cannot be used were left out") }
}

impl PrepareError {
    /// Whether the work was asked to stop.
    pub(super) fn is_stop(&self) -> bool {
        matches!(self, Self::Tokenize(TokenizeError::Stopped(_)))
    }

    /// Whether a file has no document, or only documents that another one has too. One of several files may be too short, or have no
    /// record of a shard; it is an error only if all are.
    pub(super) fn is_of_nothing(&self) -> bool {
        match self {
            Self::TooShort { .. } => true,
            Self::Empty { n_documents, n_repeated, .. } => n_documents == n_repeated,
            _ => false,
        }
    }
}
