//! The files that the pattern of a data set matches.
//!
//! Folders below the fixed part of a pattern with `**` are searched without following links to folders, as by `datasets` and by
//! bash: a link such as `latest -> .` would otherwise give each file many times.

use crate::error::JobError;
use crate::error::plan::PlanError;
use std::fs::read_dir;
use std::path::{Path, PathBuf};

/// The characters that make a path a pattern.
const WILD: [char; 3] = ['*', '?', '['];

/// The files that match a pattern, in order of name; none for a path without a pattern, whether it exists or not.
///
/// # Errors
/// When it is no valid pattern, when no file matches it, or when files that it may match cannot be read.
pub(super) fn matching(path: &Path) -> Result<Vec<PathBuf>, JobError> {
    let text = path.to_string_lossy();
    if path.exists() || !text.contains(WILD) {
        return Ok(Vec::new());
    }
    let pattern = || text.to_string();
    let parsed = glob::Pattern::new(&text).map_err(|source| PlanError::Pattern { pattern: pattern(), source })?;
    let unreadable = |(path, source)| PlanError::Unreadable { pattern: pattern(), path, source };
    let paths = match text.contains("**") {
        true => below(&text, &parsed).map_err(unreadable)?,
        false => {
            let found = glob::glob(&text).map_err(|source| PlanError::Pattern { pattern: pattern(), source })?;
            let found: Result<Vec<_>, _> = found.collect();
            found.map_err(|error| unreadable((error.path().to_owned(), error.into())))?
        }
    };
    if let Some(path) = skipped_name(&text, &parsed) {
        return Err(PlanError::NameNotUtf8 { pattern: pattern(), path }.into());
    }
    let files: Vec<PathBuf> = paths.into_iter().filter(|p| !p.is_dir()).collect();
    if files.is_empty() {
        return Err(PlanError::NoFile { pattern: pattern() }.into());
    }
    Ok(files)
}

/// The part of a pattern in front of its first wild component, and the number of components after it.
fn fixed_part(text: &str) -> (PathBuf, usize) {
    let components = || Path::new(text).components();
    let base: PathBuf = components().take_while(|part| !part.as_os_str().to_string_lossy().contains(WILD)).collect();
    let n_levels = components().count() - base.components().count();
    (base, n_levels)
}

/// The paths below the fixed part of a pattern that match it, or the folder that cannot be read.
fn below(text: &str, pattern: &glob::Pattern) -> Result<Vec<PathBuf>, (PathBuf, std::io::Error)> {
    let options = glob::MatchOptions { require_literal_separator: true, ..glob::MatchOptions::new() };
    let mut found = Vec::new();
    let mut folders = vec![fixed_part(text).0];
    while let Some(folder) = folders.pop() {
        let here = if folder.as_os_str().is_empty() { Path::new(".") } else { &folder };
        if !here.is_dir() {
            continue;
        }
        let error = |source| (here.to_owned(), source);
        for entry in read_dir(here).map_err(error)? {
            let entry = entry.map_err(error)?;
            let path = folder.join(entry.file_name());
            if entry.file_type().map_err(error)?.is_dir() {
                folders.push(path);
            } else if pattern.matches_path_with(&path, options) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// A file with a name that is no UTF-8, and that the pattern would match if it were: patterns skip such names.
fn skipped_name(text: &str, pattern: &glob::Pattern) -> Option<PathBuf> {
    let (base, n_levels) = fixed_part(text);
    let depth = if text.contains("**") { usize::MAX } else { n_levels };
    let mut folders = vec![(if base.as_os_str().is_empty() { PathBuf::from(".") } else { base }, 1)];
    while let Some((folder, level)) = folders.pop() {
        for entry in read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let as_text = path.to_string_lossy();
            if path.to_str().is_none() && pattern.matches(as_text.trim_start_matches("./")) {
                return Some(path);
            }
            // Links are not followed, so that none leads in a circle.
            if level < depth && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push((path, level + 1));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_to_folders_give_no_file_twice() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b] = ["a.jsonl", "sub/b.jsonl"].map(|name| dir.path().join(name));
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        std::fs::write(&a, "").unwrap();
        std::fs::write(&b, "").unwrap();
        std::fs::write(dir.path().join("sub/c.txt"), "").unwrap();
        for (target, link) in [(".", "latest"), ("..", "sub/again"), ("sub", "newest"), ("a.jsonl", "link.jsonl")] {
            symlink(target, dir.path().join(link)).unwrap();
        }
        let of = |pattern: &str| matching(&dir.path().join(pattern)).unwrap();

        assert_eq!(of("**/*.jsonl"), [a.clone(), dir.path().join("link.jsonl"), b.clone()]);
        assert_eq!(of("newest/**/*.jsonl"), [dir.path().join("newest/b.jsonl")]);
        assert_eq!(of("*/b.jsonl").len(), 2, "one level is as in a shell, which follows links");
    }
}
