//! What the README.md of a data set of the Hub lists under `configs`.

use std::path::{Path, PathBuf};

use phalanx_storage::foreign_file;
use serde_yaml_ng::Value;

use super::error::SourceError;
use crate::config;

/// A part of a data set: an entry of `configs`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) is_default: bool,
    pub(super) data_dir: Option<PathBuf>,
    /// Patterns of the files of each split.
    pub(super) data_files: Vec<(String, Vec<String>)>,
}

/// Bytes of a README.md that are read.
const CARD_BYTES_MAX: u64 = 16 << 20;

/// The parts that the README.md of `dir` lists; none without one.
pub(super) fn parts_of(dir: &Path) -> Result<Vec<Part>, SourceError> {
    let path = dir.join("README.md");
    let Ok(metadata) = path.metadata() else { return Ok(Vec::new()) };
    if metadata.len() > CARD_BYTES_MAX {
        return Ok(Vec::new());
    }
    let error = |reason: String| SourceError::Description { path: path.clone(), reason };
    let text = foreign_file::read(&path, CARD_BYTES_MAX).map_err(|source| error(source.to_string()))?;
    let text = String::from_utf8_lossy(&text);
    match front(&text) {
        Some(front) => parts_in(front).map_err(error),
        None => Ok(Vec::new()),
    }
}

/// The lines between two lines of three dashes at the beginning.
fn front(text: &str) -> Option<&str> {
    let text = text.trim_start_matches('\u{feff}');
    let body = text.strip_prefix("---\n").or_else(|| text.strip_prefix("---\r\n"))?;
    let ends = body.match_indices("\n---").map(|(at, _)| at);
    let end = ends.into_iter().find(|at| body[at + 4..].lines().next().is_none_or(|rest| rest.trim().is_empty()))?;
    Some(&body[..end])
}

fn parts_in(front: &str) -> Result<Vec<Part>, String> {
    // Only this key is parsed: others, such as descriptions of fields, may be large.
    let lines: Vec<&str> = front.lines().skip_while(|line| !line.starts_with("configs:")).collect();
    let is_other_key = |line: &&&str| !line.starts_with([' ', '-', '#', '\t']) && !line.trim().is_empty();
    let n = lines.iter().skip(1).position(|line| is_other_key(&line)).map_or(lines.len(), |at| at + 1);
    if n == 0 {
        return Ok(Vec::new());
    }
    let keys = config::parse_keys(&lines[..n].join("\n")).map_err(|error| error.to_string())?;
    let entries = keys.get("configs").and_then(Value::as_sequence).cloned().unwrap_or_default();
    Ok(entries.iter().map(part).collect())
}

fn part(entry: &Value) -> Part {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
    let patterns = |value: &Value| match value {
        Value::Sequence(items) => items.iter().filter_map(|item| text(Some(item))).collect(),
        other => text(Some(other)).into_iter().collect::<Vec<_>>(),
    };
    let of_split = |entry: &Value| Some((text(entry.get("split"))?, patterns(entry.get("path")?)));
    let data_files = match entry.get("data_files") {
        Some(Value::Sequence(items)) if items.iter().any(Value::is_mapping) => {
            items.iter().filter_map(of_split).collect()
        }
        Some(Value::Mapping(splits)) => {
            splits.iter().filter_map(|(split, paths)| Some((split.as_str()?.to_owned(), patterns(paths)))).collect()
        }
        Some(other) => vec![("train".to_owned(), patterns(other))],
        None => Vec::new(),
    };
    Part {
        name: text(entry.get("config_name")).unwrap_or_else(|| "default".to_owned()),
        is_default: entry.get("default").and_then(Value::as_bool).unwrap_or(false),
        data_dir: text(entry.get("data_dir")).map(PathBuf::from),
        data_files,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configs_are_read_in_each_form_that_the_hub_documents() {
        let front = "license: mit\nconfigs:\n- config_name: main\n  default: true\n  data_files:\n  - split: train\n    \
                     path: data/train-*\n  - split: test\n    path: [a.jsonl, 'b/*.jsonl']\n- config_name: other\n  \
                     data_dir: x\n- config_name: third\n  data_files: '*.csv'\ndataset_info:\n- {a: [}\n";

        let parts = parts_in(front).unwrap();

        let files = |split: &str, paths: &[&str]| (split.to_owned(), paths.iter().map(|p| (*p).to_owned()).collect());
        assert_eq!(parts.len(), 3);
        assert_eq!((&parts[0].name[..], parts[0].is_default), ("main", true));
        let expected: Vec<(String, Vec<String>)> =
            vec![files("train", &["data/train-*"]), files("test", &["a.jsonl", "b/*.jsonl"])];
        assert_eq!(parts[0].data_files, expected);
        assert_eq!(parts[1].data_dir, Some("x".into()));
        assert_eq!(parts[2].data_files, [files("train", &["*.csv"])]);
    }

    #[test]
    fn front_matter_is_what_two_lines_of_dashes_enclose() {
        assert_eq!(front("---\na: b\n---\n# Title\n---\n"), Some("a: b"));
        assert_eq!(front("---\r\na: b\r\n---\r\n"), Some("a: b\r"));
        assert_eq!(front("# Title\n---\na\n---\n"), None);
    }
}
