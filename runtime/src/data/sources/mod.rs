//! The files of a data set, and which of their records are read.

mod card;
pub(crate) mod choice;
mod error;
mod folder;
mod format;

use std::path::{Path, PathBuf};

use super::config::DatasetConfig;
use super::data_file::DataFile;
use super::records::{ReadError, count};
use crate::config::datasets::{DatasetType, FileFormat};
use crate::config::split::{Slice, Split};
use choice::{Choice, Shard};
pub use error::SourceError;
use phalanx_storage::foreign_file;
use phalanx_storage::hub::cache::HubCache;
use phalanx_storage::hub::error::HubError;
use phalanx_storage::hub::name::Kind;

/// A file of a data set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceFile {
    pub(crate) path: PathBuf,
    pub(crate) format: FileFormat,
    /// Its records that are read.
    pub(crate) choice: Choice,
}

/// What a data set is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Training,
    Evaluation,
}

/// The files of a data set, in the order in which they are read.
pub(crate) fn files_of(dataset: &DatasetConfig, purpose: Purpose, seed: u64) -> Result<Vec<SourceFile>, SourceError> {
    let found = Found::of(dataset)?;
    let split = dataset.split.clone().unwrap_or_else(|| Split::whole(found.default_split(purpose)));
    let ds_type = dataset.ds_type.or_else(|| loader(dataset));
    let mut slices = Vec::new();
    for slice in split.slices() {
        let files = found.split(&slice.split)?;
        let format = |path: PathBuf| Ok((format::format_of(ds_type, &path)?, path));
        let files = files.into_iter().map(format).collect::<Result<Vec<_>, SourceError>>()?;
        slices.push((slice, files));
    }
    if let Some((_, path)) = slices.iter().flat_map(|(_, files)| files).find(|(format, _)| *format == FileFormat::Text)
    {
        check_text(dataset, &split, path)?;
    }
    let key = || format!("split {}", split.text());
    let mut chosen = Vec::new();
    let mut n_records = 0;
    for (slice, files) in slices {
        n_records += choose(slice, files, dataset.shards.is_some(), &mut chosen)?;
    }
    if chosen.is_empty() {
        return Err(SourceError::NoRecord { path: dataset.path.clone(), key: key(), n_records });
    }
    match dataset.shards {
        Some((count, index)) => in_shard(dataset, chosen, seed, count, index),
        None => Ok(chosen.into_iter().map(|(file, range)| file.with(Choice::new(range, None))).collect()),
    }
}

/// A file and its format.
type Typed = (FileFormat, PathBuf);

/// A range of records of a file.
type Ranged = (SourceFile, std::ops::Range<u64>);

impl SourceFile {
    fn with(self, choice: Choice) -> Self {
        Self { choice, ..self }
    }
}

/// Adds the files that have records of a slice; returns how many records the split has, if that was needed.
fn choose(slice: &Slice, files: Vec<Typed>, is_counted: bool, chosen: &mut Vec<Ranged>) -> Result<u64, SourceError> {
    let file = |(format, path): Typed| SourceFile { path, format, choice: Choice::ALL };
    let without_count = slice.without_count().filter(|_| files.len() == 1 && !is_counted);
    if slice.is_whole() && !is_counted {
        chosen.extend(files.into_iter().map(|typed| (file(typed), 0..u64::MAX)));
        return Ok(0);
    }
    if let Some(range) = without_count.filter(|range| !range.is_empty()) {
        chosen.extend(files.into_iter().map(|typed| (file(typed), range.clone())));
        return Ok(0);
    }
    let counted = files.into_iter().map(|(format, path)| Ok((count(&DataFile::open(&path)?, format)?, (format, path))));
    let counted = counted.collect::<Result<Vec<_>, SourceError>>()?;
    let n_records = counted.iter().map(|(n, _)| n).sum();
    let range = slice.of(n_records);
    let mut first = 0;
    for (n, typed) in counted {
        let within = |record: u64| record.clamp(first, first + n) - first;
        let part = within(range.start)..within(range.end);
        if !part.is_empty() {
            chosen.push((file(typed), part));
        }
        first += n;
    }
    Ok(n_records)
}

/// The records of one of several random parts.
fn in_shard(
    dataset: &DatasetConfig,
    chosen: Vec<Ranged>,
    seed: u64,
    count: u64,
    index: u64,
) -> Result<Vec<SourceFile>, SourceError> {
    let n_records = chosen.iter().map(|(_, range)| range.end - range.start).sum();
    if n_records < count {
        let key = format!("shards {count}");
        return Err(SourceError::NoRecord { path: dataset.path.clone(), key, n_records });
    }
    let mut first = 0;
    let part = |(file, range): Ranged| {
        let shard = Shard::new(seed, n_records, count, index, first);
        first += range.end - range.start;
        file.with(Choice::new(range, Some(shard)))
    };
    Ok(chosen.into_iter().map(part).collect())
}

/// A plain text is one document.
fn check_text(dataset: &DatasetConfig, split: &Split, path: &Path) -> Result<(), SourceError> {
    let path = path.to_owned();
    if dataset.kind != DatasetType::Completion {
        return Err(SourceError::TextOfOtherType { path, kind: dataset.kind });
    }
    if split.slices().iter().any(|slice| !slice.is_whole()) {
        return Err(SourceError::PartOfText { path, key: "split" });
    }
    match dataset.shards {
        Some(_) => Err(SourceError::PartOfText { path, key: "shards" }),
        None => Ok(()),
    }
}

/// Where the files of a data set are.
enum Found {
    /// One file.
    File(PathBuf),
    /// Files that the user names.
    Named { path: PathBuf, files: Vec<PathBuf> },
    /// A folder with splits.
    Folder { dir: PathBuf, splits: folder::Splits, is_any: bool },
}

/// Formats that a path can name instead of a folder.
const FORMATS: [(&str, FileFormat); 5] = [
    ("json", FileFormat::Json),
    ("csv", FileFormat::Csv),
    ("parquet", FileFormat::Parquet),
    ("arrow", FileFormat::Arrow),
    ("text", FileFormat::Text),
];

/// The format that `path` names, as in `datasets.load_dataset("json", data_files=…)`.
fn loader(dataset: &DatasetConfig) -> Option<FileFormat> {
    let named = FORMATS.into_iter().find(|(name, _)| dataset.path == Path::new(name));
    named.filter(|_| !dataset.data_files.is_empty() && !dataset.path.exists()).map(|(_, format)| format)
}

impl Found {
    fn of(dataset: &DatasetConfig) -> Result<Self, SourceError> {
        let path = &dataset.path;
        if loader(dataset).is_some() {
            return Ok(Self::Named { path: path.clone(), files: folder::named(Path::new("."), &dataset.data_files)? });
        }
        if path.is_dir() {
            if !dataset.data_files.is_empty() {
                return Ok(Self::Named { path: path.clone(), files: folder::named(path, &dataset.data_files)? });
            }
            let splits = folder::splits(path, dataset.name.as_deref())?;
            return Ok(Self::Folder { dir: path.clone(), splits, is_any: dataset.split.is_none() });
        }
        let keys = [("name", dataset.name.is_some()), ("data_files", !dataset.data_files.is_empty())];
        let of_folder = keys.into_iter().find(|(_, is_set)| *is_set);
        let of_folder = of_folder.map(|(key, _)| SourceError::KeyOfFile { path: path.clone(), key });
        if !dataset.files.is_empty() {
            return of_folder.map_or_else(|| Ok(Self::Named { path: path.clone(), files: dataset.files.clone() }), Err);
        }
        let Ok(metadata) = path.metadata() else { return Err(missing(path)) };
        foreign_file::check_regular(&metadata).map_err(|error| ReadError::file(path, &error))?;
        of_folder.map_or_else(|| Ok(Self::File(path.clone())), Err)
    }

    /// The split that is read if the user names none.
    fn default_split(&self, purpose: Purpose) -> &'static str {
        match (self, purpose) {
            (Self::Folder { .. }, Purpose::Evaluation) => "test",
            _ => "train",
        }
    }

    /// The files of a split.
    fn split(&self, split: &str) -> Result<Vec<PathBuf>, SourceError> {
        let split_name = || split.to_owned();
        let is_train = split == "train";
        match self {
            Self::File(path) if is_train => Ok(vec![path.clone()]),
            Self::File(path) => Err(SourceError::SplitOfFile { path: path.clone(), split: split_name() }),
            Self::Named { files, .. } if is_train => Ok(files.clone()),
            Self::Named { path, .. } => Err(SourceError::SplitOfFiles { path: path.clone(), split: split_name() }),
            Self::Folder { dir, splits, is_any } => {
                let only = splits.values().next().filter(|_| *is_any && splits.len() == 1);
                if let Some(files) = splits.get(split).or(only) {
                    return Ok(files.iter().map(|file| dir.join(file)).collect());
                }
                let file = folder::file_of_split(dir, split);
                let present = || splits.keys().cloned().collect();
                let none = || SourceError::NoSplit { dir: dir.clone(), split: split_name(), present: present() };
                file.map(|file| vec![file]).ok_or_else(none)
            }
        }
    }
}

/// Where a data set is: at its path, or in the cache of the Hub. With `is_loader`, `path` may be a format such as json.
///
/// # Errors
/// When it has the form of a name on the Hub, but is neither here nor in the cache.
pub(crate) fn located(
    path: &Path,
    revision: Option<&str>,
    is_loader: bool,
    cache: &HubCache,
) -> Result<PathBuf, HubError> {
    let is_file_name = folder::is_data(path) || nearest_name(path).is_some();
    let is_format = is_loader && FORMATS.iter().any(|(name, _)| path == Path::new(name));
    match is_file_name || is_format {
        true => Ok(path.to_owned()),
        false => cache.resolve(Kind::Dataset, path, revision),
    }
}

/// Why there is no such file, with a way out.
fn missing(path: &Path) -> SourceError {
    let text = path.to_string_lossy();
    let command = match text.split_once("://") {
        Some(("http" | "https", _)) => Some(format!("curl -LO {text}")),
        Some(("s3", _)) => Some(format!("aws s3 cp --recursive {text} FOLDER")),
        Some(("gs" | "gcs", _)) => Some(format!("gcloud storage cp -r {text} FOLDER")),
        Some(_) => Some(format!("rclone copy {text} FOLDER")),
        None => None,
    };
    match command {
        Some(command) => SourceError::Remote { path: text.into_owned(), command },
        None => SourceError::Missing { path: path.to_owned(), nearest: nearest_name(path) },
    }
}

/// The most similar file name beside `path`, if any is similar.
fn nearest_name(path: &Path) -> Option<String> {
    let wanted = path.file_name()?.to_str()?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let names = std::fs::read_dir(dir).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let scored = names.map(|name| (strsim::jaro_winkler(wanted, &name), name));
    // Below that, names share hardly more than their extension.
    let best = scored.filter(|(score, _)| *score > 0.8).max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    best.map(|(_, name)| name)
}

#[cfg(test)]
mod tests;
