//! Links between pages and to files of the project, and paths of the project in prose.

use crate::page::{self, Page, root};
use std::fs;
use std::path::Path;

/// The folders of the workspace.
pub const FOLDERS: [&str; 6] = ["runtime/", "strategies/", "actors/", "examples/", "tests/", "chaos/"];

/// The targets of links and pictures in a text.
pub fn targets(prose: &str) -> Vec<String> {
    let rests = prose.match_indices("](").map(|(at, _)| &prose[at + 2..]);
    rests.filter_map(|rest| rest.split_once(')').map(|(target, _)| target.to_owned())).collect()
}

/// What is wrong with the links and paths of a page, a sentence each.
pub fn faults(page: &Page) -> Vec<String> {
    let folder = page.path.parent().expect("a page is in a folder");
    let is_of_book = folder == page::book();
    let mut faults = Vec::new();
    for target in targets(&page.prose).into_iter().filter(|target| !target.contains("://")) {
        let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
        let path = if file.is_empty() { page.path.clone() } else { folder.join(file) };
        if !path.exists() {
            faults.push(format!("{}: {target} is not there", page.path.display()));
        } else if is_of_book && file.contains('/') {
            faults.push(format!("{}: {target} is not a page of the guide", page.path.display()));
        } else if !anchor.is_empty() && !headings(&path).iter().any(|heading| heading == anchor) {
            faults.push(format!("{}: {target} has no such heading", page.path.display()));
        }
    }
    let absent = paths(&page.prose).filter(|path| !root().join(path).exists());
    faults.extend(absent.map(|path| format!("{}: `{path}` is not in the project", page.path.display())));
    faults
}

/// Paths of the project in code spans, except patterns and those with a name to fill in.
fn paths(prose: &str) -> impl Iterator<Item = &str> {
    let spans = prose.split('`').skip(1).step_by(2);
    spans.filter(|span| {
        let is_path = FOLDERS.iter().any(|folder| span.starts_with(folder)) && !span.contains(' ');
        is_path && !span.contains(['*', '…']) && !span.contains("NAME")
    })
}

/// The anchors of a page's headings, also of what it includes.
fn headings(path: &Path) -> Vec<String> {
    let page = Page::read(path);
    let mut anchors = Vec::new();
    for line in page.prose.lines() {
        if let Some(file) = line.strip_prefix("{{#include ").and_then(|rest| rest.strip_suffix("}}")) {
            anchors.extend(headings(&path.with_file_name(file)));
        } else if line.starts_with('#') {
            anchors.push(anchor(line.trim_start_matches('#').trim()));
        }
    }
    anchors
}

/// The anchor of a heading, as forges and mdBook form it.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[test]
fn anchors_are_those_of_forges() {
    assert_eq!(anchor("Keys of an item of `datasets`"), "keys-of-an-item-of-datasets");
    assert_eq!(anchor("What takes memory, and what to do"), "what-takes-memory-and-what-to-do");
    assert!(fs::exists(root().join("README.md")).unwrap());
}
