//! Why the files of a data set cannot be found.

use std::path::PathBuf;

use thiserror::Error;

use crate::config::datasets::DatasetType;
use crate::data::records::ReadError;

/// Why the files of a data set cannot be found.
#[allow(missing_docs, reason = "each variant's message says what its fields are")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SourceError {
    /// There is no such file.
    #[error("dataset {} does not exist{}", path.display(), suggestion(nearest))]
    Missing { path: PathBuf, nearest: Option<String> },
    /// Files are not read from a network.
    #[error("dataset {path} is not on this machine; download it, for example with `{command}`, and set its path")]
    Remote { path: String, command: String },
    /// The folder cannot be read.
    #[error("cannot read the dataset folder {}: {reason}", path.display())]
    Folder { path: PathBuf, reason: String },
    /// The folder has no data.
    #[error(
        "dataset folder {} holds no data file (.jsonl, .json, .csv, .tsv, .parquet, .arrow or .txt)",
        dir.display()
    )]
    NoData { dir: PathBuf },
    /// The folder has no such split.
    #[error("dataset folder {} has no split {split:?}; it has {}", dir.display(), listed(present))]
    NoSplit { dir: PathBuf, split: String, present: Vec<String> },
    /// A single file has no splits.
    #[error("dataset {} is one file, which holds the split \"train\" only, found split {split:?}", path.display())]
    SplitOfFile { path: PathBuf, split: String },
    /// Files that are named one by one have no splits.
    #[error("the files of dataset {} are the split \"train\", found split {split:?}", path.display())]
    SplitOfFiles { path: PathBuf, split: String },
    /// The folder describes no such part.
    #[error("dataset folder {} has no part with the name {name:?}; it has {}", dir.display(), listed(present))]
    NoName { dir: PathBuf, name: String, present: Vec<String> },
    /// The folder describes several parts.
    #[error("dataset folder {} has several parts; set `name` to one of {}", dir.display(), listed(present))]
    SeveralNames { dir: PathBuf, present: Vec<String> },
    /// Files that the path names have no parts.
    #[error("the path of dataset {} names its files, so `{key}` does not apply; remove it", path.display())]
    KeyOfFile { path: PathBuf, key: &'static str },
    /// No file matches.
    #[error("data_files: no file matches {pattern} in {}", dir.display())]
    NoMatch { dir: PathBuf, pattern: String },
    /// A description of the folder cannot be used.
    #[error("cannot use {}: {reason}", path.display())]
    Description { path: PathBuf, reason: String },
    /// The file format is not supported.
    #[error(
        "dataset {} is a {extension} archive; unpack it first, or compress its files one by one with gzip or zstd",
        path.display()
    )]
    Format { path: PathBuf, extension: String },
    /// Parquet is read from its end, which no compressed file allows.
    #[error("dataset {} is a compressed Parquet file; decompress it first", path.display())]
    CompressedParquet { path: PathBuf },
    /// Instructions and conversations need named fields.
    #[error("dataset {} is plain text, which fits type completion only, found {}", path.display(), kind.word())]
    TextOfOtherType { path: PathBuf, kind: DatasetType },
    /// A plain text is not divided into records.
    #[error(
        "dataset {} is one plain text, of which no part can be chosen by `{key}`; remove it, or use records (.jsonl)",
        path.display()
    )]
    PartOfText { path: PathBuf, key: &'static str },
    /// The choice of records is empty.
    #[error("dataset {}: {key} has no record; there are {n_records}", path.display())]
    NoRecord { path: PathBuf, key: String, n_records: u64 },
    /// The records cannot be counted.
    #[error(transparent)]
    Read(#[from] ReadError),
}

fn suggestion(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or_else(String::new, |name| format!("; did you mean {name}?"))
}

fn listed(names: &[String]) -> String {
    /// A data set may have hundreds of languages.
    const NAMES_SHOWN: usize = 20;
    match names {
        [] => "none".to_owned(),
        few if few.len() <= NAMES_SHOWN => few.join(", "),
        many => format!("{}, and {} more", many[..NAMES_SHOWN].join(", "), many.len() - NAMES_SHOWN),
    }
}
