//! Records of a data file that are left out because they cannot be used, and the file that lists them.
//!
//! The tokens in the cache keep what was left out, so that a run that finds them there lists it, too, under the path that the data
//! has now. The name of a list has a part of the tokens' key: jobs that share a folder of prepared data do not overwrite each
//! other's lists, and all ranks of a job write the same ones.

use super::token_cache::{TokenFile, create_temporary, io_error};
use super::token_cache_format::{SkippedRecord, TokenCacheError};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Characters of a data file's name in the name of its list.
const NAME_CHARS_MAX: usize = 100;

/// The end of a list's name.
pub(crate) const EXTENSION: &str = "skipped.jsonl";

/// Writes the list of a data file into the folder of its tokens, unless it is there. None if there is nothing to list, or the
/// folder takes no file, as one that is shared may.
pub(super) fn write_list(dir: &Path, key: &[u8; 32], data: &Path, tokens: &TokenFile) -> Option<PathBuf> {
    if tokens.n_skipped() == 0 {
        return None;
    }
    let path = dir.join(list_name(data, key));
    let text = list(data, tokens);
    if std::fs::read(&path).is_ok_and(|found| found == text.as_bytes()) {
        return Some(path);
    }
    match replace(&path, &text) {
        Ok(()) => Some(path),
        Err(error) => {
            tracing::warn!(dataset = %data.display(), %error, "the records that are left out cannot be listed");
            None
        }
    }
}

fn list_name(data: &Path, key: &[u8; 32]) -> String {
    let name: String = data.file_name().unwrap_or_default().to_string_lossy().chars().take(NAME_CHARS_MAX).collect();
    format!("{name}-{}.{EXTENSION}", &blake3::Hash::from_bytes(*key).to_hex()[..8])
}

fn list(data: &Path, tokens: &TokenFile) -> String {
    let path = data.display().to_string();
    let line = |record: &SkippedRecord| {
        let line = serde_json::json!({ "path": path, "line": record.line, "error": record.error });
        format!("{line}\n")
    };
    let mut text: String = tokens.skipped().iter().map(line).collect();
    let n_more = tokens.n_skipped() - tokens.skipped().len() as u64;
    if n_more > 0 {
        text += &format!("{}\n", serde_json::json!({ "path": path, "more": n_more }));
    }
    text
}

/// Gives a complete file the name.
fn replace(path: &Path, text: &str) -> Result<(), TokenCacheError> {
    let (temporary, mut file) = create_temporary(path)?;
    let renamed = file.write_all(text.as_bytes()).and_then(|()| std::fs::rename(&temporary, path));
    renamed.map_err(|error| {
        // It is never read, it only takes space.
        let _ = std::fs::remove_file(&temporary);
        io_error("write", path, &error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::token_cache::TokenWriter;
    use crate::data::token_cache_format::LISTED_MAX;

    const KEY: [u8; 32] = [7; 32];

    fn tokens(dir: &Path, n_skipped: u64) -> TokenFile {
        let mut writer = TokenWriter::create(dir, &KEY).unwrap();
        (1..=n_skipped).for_each(|line| writer.skip(SkippedRecord { line, error: "why".to_owned() }));
        writer.count_records(2 * n_skipped);
        writer.finish().unwrap()
    }

    #[test]
    fn list_names_each_record_up_to_a_limit_and_counts_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let tokens = tokens(dir.path(), LISTED_MAX as u64 + 5);

        let path = write_list(dir.path(), &KEY, Path::new("d/a.jsonl"), &tokens).unwrap();

        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), LISTED_MAX + 1);
        assert_eq!(lines[1], r#"{"path":"d/a.jsonl","line":2,"error":"why"}"#);
        assert_eq!(lines[LISTED_MAX], r#"{"path":"d/a.jsonl","more":5}"#);
        assert_eq!(path.file_name().unwrap(), "a.jsonl-07070707.skipped.jsonl");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2, "nothing but tokens and list");
    }

    #[test]
    fn list_that_cannot_be_written_ends_no_run_and_nothing_skipped_has_no_list() {
        let dir = tempfile::tempdir().unwrap();
        let data = Path::new("a.jsonl");
        assert_eq!(write_list(dir.path(), &KEY, data, &tokens(dir.path(), 0)), None);
        let tokens = tokens(dir.path(), 1);

        // Root ignores permissions, so a folder that is not there stands for one that takes no file.
        assert_eq!(write_list(&dir.path().join("absent"), &KEY, data, &tokens), None);
        assert!(write_list(dir.path(), &KEY, data, &tokens).is_some());
    }
}
