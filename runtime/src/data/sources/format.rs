//! The format of a data file, by its name.

use std::path::Path;

use super::error::SourceError;
use crate::config::datasets::FileFormat;
use crate::data::records::Compression;

/// The extension that tells the format, as `csv` in `data.csv.gz`.
pub(super) fn extension_of(path: &Path) -> String {
    let compression = Compression::of(path);
    let named = if compression == Compression::None { path } else { Path::new(path.file_stem().unwrap_or_default()) };
    named.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase()
}

/// The format of a file by `ds_type` or its name, as in `data.csv` and `data.jsonl.gz`.
pub(super) fn format_of(ds_type: Option<FileFormat>, path: &Path) -> Result<FileFormat, SourceError> {
    let extension = extension_of(path);
    let format = match (ds_type, extension.as_str()) {
        (_, "zip" | "tar" | "tgz" | "7z" | "bz2" | "xz") => {
            return Err(SourceError::Format { path: path.to_owned(), extension });
        }
        (Some(format), _) => format,
        (None, "json" | "jsonl" | "ndjson") => FileFormat::Json,
        (None, "csv") => FileFormat::Csv,
        (None, "tsv" | "tab") => FileFormat::Tsv,
        (None, "parquet") => FileFormat::Parquet,
        (None, "arrow" | "feather") => FileFormat::Arrow,
        (None, _) => FileFormat::Text,
    };
    match (format, Compression::of(path)) {
        (FileFormat::Parquet, Compression::Gzip | Compression::Zstd) => {
            Err(SourceError::CompressedParquet { path: path.to_owned() })
        }
        _ => Ok(format),
    }
}
