//! The messages of the program, in its sources.

use crate::page::root;
use std::fs;
use std::path::Path;

/// What the first cells of all tables say, as far as it is code; `…` stands for names and numbers.
pub fn first_cells(prose: &str) -> Vec<String> {
    let cells = prose.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" | ").map(|(cell, _)| cell));
    cells.map(|cell| cell.split('`').next().unwrap_or_default().to_owned()).collect()
}

/// The text of all crates that users run, with strings on one line each.
pub fn product_text() -> String {
    let mut text = String::new();
    for folder in ["strategies/src", "actors/src", "runtime"] {
        read(&root().join(folder), &mut text);
    }
    let mut joined = String::new();
    for part in text.split("\\\n") {
        joined += if joined.is_empty() { part } else { part.trim_start() };
    }
    joined
}

fn read(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "tests") {
            read(&path, text);
        } else if path.extension().is_some_and(|e| e == "rs") {
            *text += &fs::read_to_string(&path).unwrap();
        }
    }
}

/// Whether the parts of a message between its ellipses are all in the sources.
pub fn has(source: &str, message: &str) -> bool {
    let parts = message.split('…').map(|part| part.trim_matches([' ', ';', ':', ',']));
    let parts: Vec<&str> = parts.filter(|part| part.len() > 3).collect();
    !parts.is_empty() && parts.iter().all(|part| source.contains(part))
}
