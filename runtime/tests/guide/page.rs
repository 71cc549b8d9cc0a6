//! A page of Markdown: its fenced blocks, and its prose.

use std::fs;
use std::path::{Path, PathBuf};

/// A page of the README or the guide.
pub struct Page {
    pub path: PathBuf,
    /// The whole text.
    pub text: String,
    pub blocks: Vec<Block>,
    /// The text outside of blocks.
    pub prose: String,
}

/// A fenced block.
pub struct Block {
    /// First word behind the fence.
    pub language: String,
    /// The other words.
    pub marks: Vec<String>,
    pub text: String,
    /// Line of the fence, from 1.
    pub line: usize,
}

impl Page {
    pub fn read(path: &Path) -> Page {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (mut blocks, mut prose, mut open): (Vec<Block>, String, bool) = (Vec::new(), String::new(), false);
        for (at, line) in text.lines().enumerate() {
            match (line.trim_start().strip_prefix("```"), open) {
                (Some(info), false) => {
                    let mut words = info.split([' ', ',']).map(str::to_owned);
                    let language = words.next().unwrap_or_default();
                    blocks.push(Block { language, marks: words.collect(), text: String::new(), line: at + 1 });
                    open = true;
                }
                (Some(_), true) => open = false,
                (None, true) => blocks.last_mut().expect("a block is open").text += &format!("{line}\n"),
                (None, false) => prose += &format!("{line}\n"),
            }
        }
        assert!(!open, "{}: the last block has no end", path.display());
        Page { path: path.to_owned(), text, blocks, prose }
    }

    /// Where a block is, for messages.
    pub fn place(&self, block: &Block) -> String {
        format!("{}:{}", self.path.strip_prefix(root()).unwrap_or(&self.path).display(), block.line)
    }
}

impl Block {
    pub fn runs(&self) -> bool {
        self.marks.iter().any(|mark| mark == "run")
    }

    /// Whether the block shows how a mistake is refused.
    pub fn is_refused(&self) -> bool {
        self.marks.iter().any(|mark| mark == "refused")
    }

    /// The file that the block is written to.
    pub fn file(&self) -> Option<&str> {
        self.marks.iter().find_map(|mark| mark.strip_prefix("file="))
    }
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is above this crate").to_owned()
}

/// The folder of the guide's pages.
pub fn book() -> PathBuf {
    root().join("runtime/book/src")
}

/// The README and every page of the guide.
pub fn all() -> Vec<Page> {
    let mut paths: Vec<PathBuf> = fs::read_dir(book()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "md"));
    paths.sort();
    paths.push(root().join("README.md"));
    paths.iter().map(|path| Page::read(path)).collect()
}

/// All other Markdown below these folders of the project.
pub fn others(folders: &[&str]) -> Vec<Page> {
    let (mut waiting, mut pages): (Vec<PathBuf>, Vec<Page>) =
        (folders.iter().map(|name| root().join(name)).collect(), Vec::new());
    while let Some(folder) = waiting.pop() {
        for path in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            let is_built = path.file_name().is_some_and(|name| name == "target");
            if path.is_dir() && !is_built && path != book() {
                waiting.push(path);
            } else if path.extension().is_some_and(|e| e == "md") {
                pages.push(Page::read(&path));
            }
        }
    }
    pages
}
