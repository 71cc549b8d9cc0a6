//! The files of a data set folder: as `datasets.save_to_disk` writes it, as the Hub lays it out, or plain.
//!
//! Which files are which split follows `datasets`: what README.md lists under `configs`; else `data/SPLIT-00000-of-00001.*`;
//! else folders and then files whose names have a word for a split; else all files are the split train.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use glob::{MatchOptions, Pattern};
use phalanx_storage::foreign_file;
use serde_json::Value as Json;

use super::card::{Part, parts_of};
use super::error::SourceError;
use super::format::extension_of;

/// Files of each split, in order of name, as paths inside the folder.
pub(super) type Splits = BTreeMap<String, Vec<PathBuf>>;

/// Files in a folder and its folders; no data set has nearly as many.
const FILES_MAX: usize = 1 << 20;

/// Folders in folders.
const DEPTH_MAX: usize = 16;

/// Bytes of a description in JSON.
const DESCRIPTION_BYTES_MAX: u64 = 16 << 20;

const DATA: [&str; 10] = ["jsonl", "json", "ndjson", "csv", "tsv", "tab", "parquet", "arrow", "feather", "txt"];

/// Files that describe a data set, and are none.
const DESCRIPTIONS: [&str; 5] =
    ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"];

const WORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// The splits of the folder's part `name`, or of its only part.
pub(super) fn splits(dir: &Path, name: Option<&str>) -> Result<Splits, SourceError> {
    if let Some(splits) = saved(dir)? {
        return Ok(splits);
    }
    let files = files_in(dir)?;
    let part = chosen(dir, name, parts_of(dir)?)?;
    let (root, listed) = match part {
        Some(part) => (part.data_dir.unwrap_or_default(), part.data_files),
        // Without a list, a name is that of a folder.
        None => (name.filter(|name| dir.join(name).is_dir()).map(PathBuf::from).unwrap_or_default(), Vec::new()),
    };
    let within: Vec<&PathBuf> = files.iter().filter(|file| file.starts_with(&root)).collect();
    let mut splits = Splits::new();
    for (split, patterns) in listed {
        for pattern in patterns {
            let pattern = root.join(&pattern);
            let found = matching(&within, &pattern.to_string_lossy());
            if found.is_empty() {
                return Err(SourceError::NoMatch { dir: dir.to_owned(), pattern: pattern.display().to_string() });
            }
            splits.entry(split.clone()).or_default().extend(found);
        }
    }
    if splits.is_empty() {
        splits = inferred(&within, &root);
    }
    match splits.is_empty() {
        true => Err(SourceError::NoData { dir: dir.join(root) }),
        false => Ok(splits),
    }
}

/// The files that match patterns or are named, in the order of the patterns.
pub(super) fn named(dir: &Path, patterns: &[String]) -> Result<Vec<PathBuf>, SourceError> {
    let mut files = None;
    let mut found = Vec::new();
    for pattern in patterns {
        // Of `datasets`, relative to the working folder; of Axolotl's examples, to the data set.
        if let Some(file) = [dir.join(pattern), PathBuf::from(pattern)].into_iter().find(|file| file.is_file()) {
            found.push(file);
            continue;
        }
        let files = match &files {
            Some(files) => files,
            None => files.insert(files_in(dir)?),
        };
        let matches = matching(&files.iter().collect::<Vec<_>>(), pattern.trim_start_matches("./"));
        if matches.is_empty() {
            return Err(SourceError::NoMatch { dir: dir.to_owned(), pattern: pattern.clone() });
        }
        found.extend(matches.into_iter().map(|file| dir.join(file)));
    }
    Ok(found)
}

/// The file of the folder with the name of a split, such as `extra.jsonl`.
pub(super) fn file_of_split(dir: &Path, split: &str) -> Option<PathBuf> {
    DATA.iter().map(|extension| dir.join(format!("{split}.{extension}"))).find(|file| file.is_file())
}

/// The part that the user means, if README.md lists any.
fn chosen(dir: &Path, name: Option<&str>, parts: Vec<Part>) -> Result<Option<Part>, SourceError> {
    let names = || parts.iter().map(|part| part.name.clone()).collect::<Vec<_>>();
    match (name, parts.len()) {
        (None, 0) => Ok(None),
        (Some(name), 0) if dir.join(name).is_dir() && is_inside(Path::new(name)) => Ok(None),
        (Some("default"), 0) => Ok(None),
        (Some(name), _) => match parts.iter().find(|part| part.name == name) {
            Some(part) => Ok(Some(part.clone())),
            None => Err(SourceError::NoName { dir: dir.to_owned(), name: name.to_owned(), present: names() }),
        },
        (None, 1) => Ok(parts.into_iter().next()),
        (None, _) => match parts.iter().find(|part| part.is_default || part.name == "default") {
            Some(part) => Ok(Some(part.clone())),
            None => Err(SourceError::SeveralNames { dir: dir.to_owned(), present: names() }),
        },
    }
}

/// The splits of a folder that `datasets.save_to_disk` wrote.
fn saved(dir: &Path) -> Result<Option<Splits>, SourceError> {
    if let Some(description) = description(&dir.join("dataset_dict.json"))? {
        let names: Vec<&str> =
            description["splits"].as_array().into_iter().flatten().filter_map(Json::as_str).collect();
        let mut splits = Splits::new();
        for name in names.into_iter().filter(|name| is_inside(Path::new(name))) {
            let files = saved_files(&dir.join(name))?.unwrap_or_default();
            splits.insert(name.to_owned(), files.into_iter().map(|file| Path::new(name).join(file)).collect());
        }
        return Ok(Some(splits));
    }
    let files = saved_files(dir)?;
    Ok(files.map(|files| Splits::from([("train".to_owned(), files)])))
}

fn saved_files(dir: &Path) -> Result<Option<Vec<PathBuf>>, SourceError> {
    let path = dir.join("state.json");
    let Some(state) = description(&path)? else { return Ok(None) };
    let Some(listed) = state["_data_files"].as_array() else { return Ok(None) };
    let file = |entry: &Json| {
        let name = entry["filename"].as_str().map(PathBuf::from).filter(|name| is_inside(name));
        let reason = || "an entry of `_data_files` names no file of the folder".to_owned();
        name.ok_or_else(|| SourceError::Description { path: path.clone(), reason: reason() })
    };
    listed.iter().map(file).collect::<Result<_, _>>().map(Some)
}

/// A small file in JSON, if it exists.
fn description(path: &Path) -> Result<Option<Json>, SourceError> {
    let error = |reason: String| SourceError::Description { path: path.to_owned(), reason };
    if !foreign_file::is_there(path).map_err(|source| error(source.to_string()))? {
        return Ok(None);
    }
    let bytes = foreign_file::read(path, DESCRIPTION_BYTES_MAX).map_err(|source| error(source.to_string()))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|source| error(source.to_string()))
}

/// Whether a path that a file names stays in its folder.
fn is_inside(path: &Path) -> bool {
    path.components().all(|part| matches!(part, Component::Normal(_))) && path.components().next().is_some()
}

/// The data files of a folder and of its folders, in order of name.
fn files_in(dir: &Path) -> Result<Vec<PathBuf>, SourceError> {
    let mut files = Vec::new();
    let mut folders = vec![(PathBuf::new(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        let error = |reason: String| SourceError::Folder { path: dir.join(&folder), reason };
        let entries = std::fs::read_dir(dir.join(&folder)).map_err(|source| error(source.to_string()))?;
        for entry in entries {
            let entry = entry.map_err(|source| error(source.to_string()))?;
            let (name, path) = (entry.file_name(), folder.join(entry.file_name()));
            if name.to_string_lossy().starts_with(['.', '_']) {
                continue;
            }
            // The Hub's cache has links to files; links to folders could lead in circles.
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && depth < DEPTH_MAX {
                folders.push((path, depth + 1));
            } else if !is_folder && is_data(&path) && dir.join(&path).is_file() {
                files.push(path);
            }
            if files.len() + folders.len() > FILES_MAX {
                return Err(error(format!("it has more than {FILES_MAX} files")));
            }
        }
    }
    files.sort();
    Ok(files)
}

pub(super) fn is_data(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    DATA.contains(&&extension_of(path)[..]) && !DESCRIPTIONS.iter().any(|description| name == *description)
}

fn matching(files: &[&PathBuf], pattern: &str) -> Vec<PathBuf> {
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
    let Ok(pattern) = Pattern::new(pattern) else { return Vec::new() };
    files.iter().filter(|file| pattern.matches_path_with(file, options)).map(|file| (*file).clone()).collect()
}

/// The splits to which a file belongs.
type Rule<'a> = dyn Fn(&PathBuf) -> BTreeSet<String> + 'a;

/// The splits that names of files and folders tell.
fn inferred(files: &[&PathBuf], root: &Path) -> Splits {
    let inner = |file: &PathBuf| file.strip_prefix(root).unwrap_or(file).to_owned();
    let sharded = |file: &PathBuf| sharded_split(&inner(file)).into_iter().collect::<BTreeSet<String>>();
    let folders = |file: &PathBuf| words_in(inner(file).parent().into_iter().flat_map(Path::components));
    let names =
        |file: &PathBuf| words_in(inner(file).file_name().map(Path::new).into_iter().flat_map(Path::components));
    let rules: [&Rule<'_>; 3] = [&sharded, &folders, &names];
    for rule in rules {
        let mut splits = Splits::new();
        for file in files {
            for split in rule(file) {
                splits.entry(split).or_default().push((*file).clone());
            }
        }
        if !splits.is_empty() {
            return splits.into_iter().map(|(split, files)| (split, of_one_format(files))).collect();
        }
    }
    let all = of_one_format(files.iter().map(|file| (*file).clone()).collect());
    if all.is_empty() { Splits::new() } else { Splits::from([("train".to_owned(), all)]) }
}

/// The split of `data/SPLIT-00000-of-00001.parquet`.
fn sharded_split(file: &Path) -> Option<String> {
    let name = file.strip_prefix("data").ok()?.to_str()?;
    let (split, numbers) = name.split_once("-of-").and_then(|(start, end)| Some((start.rsplit_once('-')?, end)))?;
    let is_number = |text: &str| text.len() >= 5 && text.as_bytes()[..5].iter().all(u8::is_ascii_digit);
    (is_number(split.1) && split.1.len() == 5 && is_number(numbers) && !name.contains('/')).then(|| split.0.to_owned())
}

/// The splits whose words are in names, between marks and digits.
fn words_in<'a>(names: impl Iterator<Item = Component<'a>>) -> BTreeSet<String> {
    let is_mark = |c: char| "-._ ".contains(c) || c.is_ascii_digit();
    let mut splits = BTreeSet::new();
    for name in names {
        let name = name.as_os_str().to_string_lossy();
        for (split, words) in WORDS {
            if name.split(is_mark).any(|word| words.contains(&word)) {
                splits.insert(split.to_owned());
            }
        }
    }
    splits
}

/// The files of the format that most of them have; a folder of data may have notes and tables beside it.
fn of_one_format(files: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let format = |file: &Path| match &extension_of(file)[..] {
        "jsonl" | "ndjson" => "json".to_owned(),
        other => other.to_owned(),
    };
    for file in &files {
        *counts.entry(format(file)).or_default() += 1;
    }
    let rank = |name: &str| DATA.iter().rev().position(|known| *known == name);
    let most = counts.into_iter().max_by_key(|(name, count)| (*count, rank(name)));
    files.into_iter().filter(|file| most.as_ref().is_some_and(|(name, _)| *name == format(file))).collect()
}
