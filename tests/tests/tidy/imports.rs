//! Which file imports which: from where a name is used to the file that defines it.
//!
//! A path, in a `use` or in code, is followed as the compiler follows it, name by name: through modules, through `use` under another
//! name, and through re-exports, which therefore count as their origin. A module that is only named on the way counts as nothing.
//! Names that a macro defines count as the file of the module. A file with submodules is composed of them: what it takes from them
//! is no import, but what they take from it is one.

use crate::modules::{Modules, Use};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Module(usize),
    /// An item, and the module that defines it.
    Item(usize),
}

/// Files and the files that they import.
pub type Imports = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

pub fn imports(modules: &Modules) -> Imports {
    let mut found = Imports::new();
    for (at, module) in modules.all.iter().enumerate() {
        let imported = found.entry(module.file.clone()).or_default();
        let of_uses = module.uses.iter().flat_map(|u| modules.used(at, u));
        let of_paths = module.paths.iter().flat_map(|path| modules.resolve(at, path, &mut BTreeSet::new()));
        for target in of_uses.chain(of_paths) {
            if let Target::Item(of) = target {
                imported.insert(modules.all[of].file.clone());
            }
        }
        let inside = submodules(&module.file);
        imported.retain(|file| *file != module.file && !file.starts_with(&inside));
    }
    found
}

/// The folder of a file's submodules.
fn submodules(file: &Path) -> PathBuf {
    let is_folder = ["mod.rs", "lib.rs", "main.rs"].iter().any(|name| file.ends_with(name));
    if is_folder { file.with_file_name("") } else { file.with_extension("") }
}

impl Modules {
    /// What a `use` imports; of a glob, what its module names of it.
    fn used(&self, at: usize, u: &Use) -> Vec<Target> {
        let targets = self.resolve(at, &u.path, &mut BTreeSet::new());
        if u.name.is_some() {
            return targets;
        }
        let mut found = Vec::new();
        for target in targets {
            match target {
                Target::Module(of) => {
                    let words = self.all[at].words.iter().filter(|word| !self.all[at].defines.contains(*word));
                    found.extend(words.flat_map(|word| self.member(of, word, &mut BTreeSet::new())));
                }
                item => found.push(item),
            }
        }
        found
    }

    /// What a path of a module leads to; nothing if it leads out of the workspace.
    fn resolve(&self, at: usize, path: &[String], seen: &mut BTreeSet<(usize, String)>) -> Vec<Target> {
        let Some((first, rest)) = path.split_first() else { return Vec::new() };
        let module = &self.all[at];
        let begin = match first.as_str() {
            "crate" => vec![Target::Module(module.root)],
            "self" => vec![Target::Module(at)],
            "super" => module.parent.map(Target::Module).into_iter().collect(),
            name => {
                let own = self.member(at, name, seen);
                match self.crates.get(name) {
                    Some(library) if own.is_empty() => vec![Target::Module(*library)],
                    _ => own,
                }
            }
        };
        begin.into_iter().flat_map(|target| self.follow(target, rest, seen)).collect()
    }

    fn follow(&self, from: Target, rest: &[String], seen: &mut BTreeSet<(usize, String)>) -> Vec<Target> {
        let (Target::Module(module), Some((name, rest))) = (&from, rest.split_first()) else { return vec![from] };
        if name == "super" {
            let up = self.all[*module].parent.map(Target::Module);
            return up.into_iter().flat_map(|up| self.follow(up, rest, seen)).collect();
        }
        let found = self.member(*module, name, seen);
        if found.is_empty() {
            return vec![Target::Item(*module)];
        }
        found.into_iter().flat_map(|target| self.follow(target, rest, seen)).collect()
    }

    /// What a name of a module stands for.
    fn member(&self, at: usize, name: &str, seen: &mut BTreeSet<(usize, String)>) -> Vec<Target> {
        if !seen.insert((at, name.to_owned())) {
            return Vec::new();
        }
        let module = &self.all[at];
        let mut found: Vec<Target> =
            module.children.get(name).map(|child| Target::Module(*child)).into_iter().collect();
        if module.defines.contains(name) {
            found.push(Target::Item(at));
        }
        for u in module.uses.iter().filter(|u| u.name.as_deref() == Some(name)) {
            found.extend(self.resolve(at, &u.path, &mut seen.clone()));
        }
        if found.is_empty() {
            for u in module.uses.iter().filter(|u| u.name.is_none()) {
                let sources = self.resolve(at, &u.path, &mut seen.clone());
                for target in sources {
                    if let Target::Module(of) = target {
                        found.extend(self.member(of, name, seen));
                    }
                }
            }
        }
        found.sort();
        found.dedup();
        found
    }
}

/// The circles: files each of which imports, over others, every other one of its circle. The largest first.
pub fn circles(imports: &Imports) -> Vec<BTreeSet<&Path>> {
    let reached = |from: &PathBuf| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            for to in imports.get(file).into_iter().flatten() {
                if seen.insert(to.as_path()) {
                    next.push(to);
                }
            }
        }
        seen
    };
    let reaches: BTreeMap<&Path, BTreeSet<&Path>> =
        imports.keys().map(|file| (file.as_path(), reached(file))).collect();
    let mut circles: BTreeSet<BTreeSet<&Path>> = BTreeSet::new();
    for (file, reached) in &reaches {
        if reached.contains(file) {
            let back = |to: &&Path| reaches.get(to).is_some_and(|from_there| from_there.contains(file));
            circles.insert(reached.iter().copied().filter(back).collect());
        }
    }
    let mut circles: Vec<_> = circles.into_iter().collect();
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    circles
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Result;
    use std::fs;

    /// The imports of a crate with these files.
    fn imports_of(files: &[(&str, &str)]) -> Result<Imports> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("Cargo.toml"), "[package]\nname = \"one\"\n")?;
        for (name, source) in files {
            let path = folder.path().join("src").join(name);
            fs::create_dir_all(path.parent().unwrap())?;
            fs::write(path, source)?;
        }
        Ok(imports(&Modules::read(folder.path(), &["src"])?))
    }

    fn of(imports: &Imports, file: &str) -> Vec<String> {
        imports[Path::new(file)].iter().map(|file| file.display().to_string()).collect()
    }

    #[test]
    fn re_export_counts_as_the_file_that_defines_the_name() -> Result<()> {
        let found = imports_of(&[
            ("lib.rs", "mod a;\nmod b;\npub mod front;\n"),
            ("front.rs", "pub use crate::a::*;\npub use super::b::{self as other, Hidden as Shown};\n"),
            ("a.rs", "pub struct Apple;\n#[cfg(test)]\nmod tests { use crate::b::Hidden; }\n"),
            (
                "b.rs",
                "use crate::front::Apple;\npub struct Hidden(Apple);\npub fn f() -> crate::front::Shown { crate::front::other::f() }\n",
            ),
        ])?;

        assert_eq!(of(&found, "src/b.rs"), ["src/a.rs"]);
        assert_eq!(of(&found, "src/front.rs"), ["src/b.rs"]);
        assert_eq!(of(&found, "src/a.rs"), [""; 0]);
        Ok(())
    }

    #[test]
    fn circle_through_paths_in_code_is_found_and_texts_and_comments_are_no_code() -> Result<()> {
        let found = imports_of(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;\n"),
            ("a.rs", "pub fn f<'a>(x: &'a str) -> char { use crate::b; b::g(); '\\'' }\n"),
            ("b.rs", "pub fn g() { super::c::h::<crate::c::H>() }\n"),
            (
                "c.rs",
                "pub struct H;\npub fn h<T>() { let _ = (r#\"crate::b::g\"#, \"\\\"crate::b::g\", crate::a::f(\"\")); } // crate::b::g\n",
            ),
        ])?;

        assert_eq!(of(&found, "src/c.rs"), ["src/a.rs"]);
        assert_eq!(circles(&found).len(), 1);
        assert_eq!(circles(&found)[0].len(), 3);
        Ok(())
    }

    #[test]
    fn submodule_may_be_used_by_its_module_but_counts_if_it_imports_it() -> Result<()> {
        let found = imports_of(&[
            ("lib.rs", "mod a;\n"),
            ("a.rs", "mod inner;\nmod other;\npub struct A;\nfn f() { inner::f() }\n"),
            ("a/inner.rs", "use super::A;\nuse super::other::O;\npub fn f() {}\n"),
            ("a/other.rs", "pub struct O;\nuse super::super::a::inner;\nfn x() { inner::f() }\n"),
        ])?;

        assert_eq!(of(&found, "src/a.rs"), [""; 0]);
        assert_eq!(of(&found, "src/a/inner.rs"), ["src/a/other.rs", "src/a.rs"]);
        assert_eq!(circles(&found).len(), 1);
        Ok(())
    }
}
