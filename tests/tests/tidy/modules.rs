//! The modules of the workspace as the compiler sees them without tests: which file defines which name.

use crate::tokens::{Token, group, tokens, without_tests};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A `use`, with its names as a path from the module that has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    pub path: Vec<String>,
    /// The name in this module; `None` for a glob.
    pub name: Option<String>,
}

/// A module: a file, or an inline module of one.
#[derive(Debug, Default)]
pub struct Module {
    pub file: PathBuf,
    pub parent: Option<usize>,
    pub root: usize,
    pub children: BTreeMap<String, usize>,
    pub defines: BTreeSet<String>,
    pub uses: Vec<Use>,
    /// Paths of two or more names in code.
    pub paths: Vec<Vec<String>>,
    pub words: BTreeSet<String>,
}

/// All modules of the workspace.
#[derive(Debug, Default)]
pub struct Modules {
    pub all: Vec<Module>,
    /// The library of each crate, by the name in paths.
    pub crates: BTreeMap<String, usize>,
}

impl Modules {
    /// Reads the library and the programs of crates, each a folder with sources beside its `Cargo.toml`.
    pub fn read(root: &Path, crates: &[&str]) -> Result<Self> {
        let mut modules = Self::default();
        for folder in crates {
            let folder = root.join(folder);
            let manifest = fs::read_to_string(folder.with_file_name("Cargo.toml"))?;
            let name = manifest.lines().find_map(|line| line.strip_prefix("name = \""));
            let name = name.context("a package has a name")?.trim_end_matches('"').replace('-', "_");
            let programs = fs::read_dir(folder.join("bin")).into_iter().flatten().flatten().map(|entry| entry.path());
            let programs = programs.map(|path| if path.is_dir() { path.join("main.rs") } else { path });
            let mut roots: Vec<PathBuf> =
                programs.chain([folder.join("main.rs")]).filter(|path| path.exists()).collect();
            roots.sort();
            for program in roots {
                modules.read_root(program)?;
            }
            let library = folder.join("lib.rs");
            if library.exists() {
                let at = modules.read_root(library)?;
                modules.crates.insert(name, at);
            }
        }
        for module in &mut modules.all {
            module.file = module.file.strip_prefix(root).unwrap_or(&module.file).to_owned();
        }
        Ok(modules)
    }

    fn read_root(&mut self, file: PathBuf) -> Result<usize> {
        let folder = file.parent().context("a root has a folder")?.to_owned();
        let at = self.all.len();
        self.read_file(file, None, at, &folder)?;
        Ok(at)
    }

    fn read_file(&mut self, file: PathBuf, parent: Option<usize>, root: usize, folder: &Path) -> Result<usize> {
        let source = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        self.add(file, parent, root, folder, &without_tests(&tokens(&source)))
    }

    fn add(
        &mut self,
        file: PathBuf,
        parent: Option<usize>,
        root: usize,
        folder: &Path,
        tokens: &[Token],
    ) -> Result<usize> {
        let this = self.all.len();
        self.all.push(Module { file: file.clone(), parent, root, ..Module::default() });
        let (mut at, mut path_attribute) = (0, None);
        while at < tokens.len() {
            let rest = &tokens[at..];
            let word = rest[0].word().unwrap_or_default();
            let name = rest.get(1).and_then(Token::word).unwrap_or_default().to_owned();
            match word {
                "mod" if rest.get(2).is_some_and(|t| t.is(';')) => {
                    let inner = folder.join(&name);
                    let found = match path_attribute.take() {
                        Some(path) => file.with_file_name(path),
                        None if inner.with_extension("rs").exists() => inner.with_extension("rs"),
                        None => inner.join("mod.rs"),
                    };
                    let child = self.read_file(found, Some(this), root, &inner)?;
                    self.all[this].children.insert(name, child);
                    at += 3;
                }
                "mod" if rest.get(2).is_some_and(|t| t.is('{')) => {
                    let n = group(&rest[2..]);
                    let child = self.add(file.clone(), Some(this), root, &folder.join(&name), &rest[3..1 + n])?;
                    self.all[this].children.insert(name, child);
                    at += 2 + n;
                }
                "path" if rest.get(1).is_some_and(|t| t.is('=')) => {
                    path_attribute =
                        rest.get(2).and_then(|t| if let Token::Text(text) = t { Some(text.clone()) } else { None });
                    at += 3;
                }
                "use" => {
                    let n = rest.iter().position(|t| t.is(';')).unwrap_or(rest.len());
                    tree(&rest[1..n], &[], &mut self.all[this].uses);
                    at += n;
                }
                _ => at += self.all[this].note(rest),
            }
        }
        Ok(this)
    }
}

impl Module {
    /// Notes a definition or a path that begins here; the number of tokens read.
    fn note(&mut self, tokens: &[Token]) -> usize {
        let Some(first) = tokens[0].word() else { return 1 };
        let name = tokens.get(1).and_then(Token::word);
        match (first, name) {
            // Also of macros' arguments, and of functions in blocks, which does no harm.
            ("struct" | "enum" | "union" | "trait" | "type" | "fn" | "const" | "static", Some(name)) => {
                if name == "fn" || name == "mut" || name == "unsafe" {
                    return 1;
                }
                self.defines.insert(name.to_owned());
                return 2;
            }
            ("macro_rules", _) => {
                self.defines.extend(tokens.get(2).and_then(Token::word).map(str::to_owned));
                return 3;
            }
            _ => {}
        }
        let mut path = vec![first.to_owned()];
        let mut at = 1;
        while tokens.get(at) == Some(&Token::PathSeparator) {
            let Some(next) = tokens.get(at + 1).and_then(Token::word) else { break };
            path.push(next.to_owned());
            at += 2;
        }
        self.words.extend(path.iter().cloned());
        if path.len() > 1 {
            self.paths.push(path);
        }
        at
    }
}

/// The names that a tree of a `use` brings.
fn tree(tokens: &[Token], prefix: &[String], uses: &mut Vec<Use>) {
    let (mut path, mut at) = (prefix.to_vec(), 0);
    while at < tokens.len() {
        match &tokens[at] {
            Token::Word(word) if word == "as" => {
                let name = tokens.get(at + 1).and_then(Token::word).unwrap_or("_").to_owned();
                uses.push(Use { path, name: Some(name) });
                return;
            }
            Token::Word(word) if word == "self" && !path.is_empty() => {}
            Token::Word(word) => path.push(word.clone()),
            Token::Symbol('*') => {
                uses.push(Use { path, name: None });
                return;
            }
            Token::Symbol('{') => {
                let inner = &tokens[at + 1..tokens.len() - 1];
                let (mut depth, mut begin) = (0, 0);
                for (at, token) in inner.iter().enumerate() {
                    match token {
                        Token::Symbol('{') => depth += 1,
                        Token::Symbol('}') => depth -= 1,
                        Token::Symbol(',') if depth == 0 => {
                            tree(&inner[begin..at], &path, uses);
                            begin = at + 1;
                        }
                        _ => {}
                    }
                }
                if begin < inner.len() {
                    tree(&inner[begin..], &path, uses);
                }
                return;
            }
            _ => {}
        }
        at += 1;
    }
    let name = path.last().cloned();
    uses.push(Use { path, name });
}
