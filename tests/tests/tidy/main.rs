//! Project rules that no compiler checks: layers and import cycles of folders, circles and imports of files, sizes of files, functions
//! and the README, words.

mod imports;
mod modules;
mod tokens;

use crate::imports::circles;
use crate::modules::Modules;
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The sources of all crates, bottom-up.
const CRATES: [&str; 16] = [
    "strategies/src",
    "actors/src",
    "runtime/device/src",
    "runtime/cpu/src",
    "runtime/cuda/src",
    "runtime/collective/src",
    "runtime/storage/src",
    "runtime/src",
    "chaos/src",
    "chaos/softgpu/src",
    "chaos/ptxsim/src",
    "chaos/kernelcheck/src",
    "tests/src",
    "tests/gpu/src",
    "tests/needs/src",
    "examples/src",
];

/// The crates whose folders may import each other: the contract of a communicator is one idea in several files, and the settings,
/// engine and memory of the software GPU still import each other.
const FOLDER_CYCLES: [&str; 2] = ["runtime/device/src", "chaos/softgpu/src"];

/// The folders and top-level files of the `phalanx` crate, bottom-up: each imports only itself and lower layers.
const LAYERS: [&str; 24] = [
    "units",
    "shell",
    "console",
    "journal",
    "process_end",
    "process_limits",
    "memory_limit",
    "config",
    "data",
    "frontend",
    "launch",
    "error",
    "events",
    "control",
    "control_place",
    "checkpoint_claim",
    "devices",
    "train",
    "rank",
    "node",
    "coordinate",
    "api",
    "serve",
    "cli",
];

/// Modules that expose private decoders to fuzz targets; they import from every folder.
const FUZZING_MODULES: [&str; 2] = ["fuzzing", "fuzz"];

const LINES_OF_FILE_MAX: usize = 800;
const LINES_OF_FUNCTION_MAX: usize = 70;

/// Longer functions that are not split, each with its reason.
const LONG_FUNCTIONS: [(&str, &str); 1] = [
    // One guard after another, in the order of the rules.
    ("strategies/src/elastic/coordinator/next_world.rs", "next_world"),
];

/// The folders of what users install; simulators and tests are not among them.
const PRODUCT: [&str; 3] = ["strategies", "actors", "runtime"];

const CIRCLES_MAX: usize = 15;
const FILES_OF_PRODUCT_CIRCLE_MAX: usize = 3;
const IMPORTS_OF_FILE_MAX: usize = 30;
const FUNCTIONS_OVER_60_LINES_MAX: usize = 5;
const README_LINES_MAX: usize = 180;
const README_WORDS_MAX: usize = 1_500;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace is above this crate").to_owned()
}

/// All Rust files below a folder, relative to it.
fn rust_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("reading {}", next.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push(path.strip_prefix(folder)?.to_owned());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// All Rust files of the workspace, except build outputs.
fn all_files() -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for folder in ["strategies", "actors", "runtime", "chaos", "tests", "examples"] {
        files.extend(rust_files(&root().join(folder))?.into_iter().map(|file| Path::new(folder).join(file)));
    }
    files.retain(|file| !file.components().any(|part| part.as_os_str().to_string_lossy().starts_with("target")));
    Ok(files)
}

/// Source without comments and without the test module at its end.
fn production(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    let code = text[..end].lines().map(|line| line.find("//").map_or(line, |at| &line[..at]));
    code.collect::<Vec<_>>().join("\n")
}

/// The top-level modules that a file imports from its crate, except its own.
fn imported_modules(file: &Path, code: &str) -> BTreeSet<String> {
    let modules: Vec<String> = file.with_extension("").iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let depth = modules.len() - usize::from(modules.last().is_some_and(|last| last == "mod"));
    let own = &modules[0];
    let mut named = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            Some(list) => named.extend(first_identifiers(list)),
            None => named.extend([identifier(rest)]),
        }
    }
    let ups = "super::".repeat(depth);
    for (at, _) in code.match_indices(&ups) {
        let rest = &code[at + ups.len()..];
        let is_inner = code[..at].ends_with("super::") || rest.starts_with("super::");
        if !is_inner && depth > 0 {
            named.insert(identifier(rest));
        }
    }
    named.remove(own);
    named
}

fn identifier(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The first identifier of each path in a braced list, which may nest.
fn first_identifiers(list: &str) -> Vec<String> {
    let (mut depth, mut found, mut begins) = (0, Vec::new(), true);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => begins = true,
            c if c.is_whitespace() => {}
            _ if begins && depth == 0 => {
                found.push(identifier(&list[at..]));
                begins = false;
            }
            _ => {}
        }
    }
    found
}

/// Imports between the top-level modules of a crate, each with a file that has it.
fn imports_between_modules(folder: &str) -> Result<BTreeMap<(String, String), PathBuf>> {
    let source = root().join(folder);
    let mut found = BTreeMap::new();
    let top = |file: &Path| file.iter().next().map(|part| part.to_string_lossy().replace(".rs", ""));
    let files = rust_files(&source)?;
    let modules: BTreeSet<String> = files.iter().filter_map(|file| top(file)).collect();
    for file in &files {
        let from = top(file).context("a file has a name")?;
        let is_test = file.iter().any(|part| part.to_string_lossy().starts_with("tests"))
            || file.to_string_lossy().ends_with("_tests.rs");
        if is_test || FUZZING_MODULES.contains(&from.as_str()) || from == "lib" || from == "main" {
            continue;
        }
        for to in imported_modules(file, &production(&fs::read_to_string(source.join(file))?)) {
            if modules.contains(&to) && !FUZZING_MODULES.contains(&to.as_str()) {
                found.entry((from.clone(), to)).or_insert_with(|| Path::new(folder).join(file));
            }
        }
    }
    Ok(found)
}

/// The modules of an import cycle, if there is one.
fn cycle(imports: &BTreeMap<(String, String), PathBuf>) -> Option<Vec<String>> {
    let reaches = |from: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(module) = next.pop() {
            for (_, to) in imports.keys().filter(|(a, _)| *a == module) {
                if seen.insert(to.clone()) {
                    next.push(to.clone());
                }
            }
        }
        seen
    };
    let modules: BTreeSet<&String> = imports.keys().map(|(from, _)| from).collect();
    let start = modules.into_iter().find(|module| reaches(module).contains(*module))?;
    Some(reaches(start).into_iter().filter(|module| reaches(module).contains(start)).collect())
}

/// Length and name of each function, found by rustfmt's indentation.
fn functions(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let words = ["pub ", "pub(crate) ", "pub(super) ", "const ", "async ", "unsafe ", "default "];
        let mut rest = code;
        while let Some(shorter) = words.iter().find_map(|word| rest.strip_prefix(word)) {
            rest = shorter;
        }
        let Some(name) = rest.strip_prefix("fn ").map(identifier) else { continue };
        let indent = &line[..line.len() - code.len()];
        let is_end = |l: &str| l.strip_prefix(indent).is_some_and(|l| l.starts_with('}') || l == ";");
        let is_short = line.ends_with(';') || line.ends_with('}');
        let n = if is_short { 1 } else { lines[at..].iter().position(|l| is_end(l)).map_or(1, |n| n + 1) };
        found.push((n, name));
    }
    found
}

#[test]
fn folders_of_the_runtime_crate_import_only_from_lower_layers() -> Result<()> {
    let layer = |module: &str| LAYERS.iter().position(|l| *l == module);
    let imports = imports_between_modules("runtime/src")?;

    for ((from, to), file) in &imports {
        let importer = layer(from).with_context(|| format!("{from} has no layer; add it to LAYERS"))?;
        let imported = layer(to).with_context(|| format!("{to} has no layer; add it to LAYERS"))?;
        ensure!(imported <= importer, "{} imports {to}, which is above {from}", file.display());
    }
    ensure!(imports.len() > 30, "found only {} imports between folders", imports.len());
    Ok(())
}

#[test]
fn folders_of_a_crate_have_no_import_cycles() -> Result<()> {
    for folder in CRATES.into_iter().filter(|folder| !FOLDER_CYCLES.contains(folder)) {
        let imports = imports_between_modules(folder)?;
        if let Some(cycle) = cycle(&imports) {
            let on_it = |(from, to): &&(String, String)| cycle.contains(from) && cycle.contains(to);
            let files: Vec<_> =
                imports.keys().filter(on_it).map(|k| format!("{} -> {}: {}", k.0, k.1, imports[k].display())).collect();
            anyhow::bail!("{folder}: {} import each other:\n{}", cycle.join(", "), files.join("\n"));
        }
    }
    Ok(())
}

#[test]
fn files_have_at_most_800_lines_and_functions_at_most_70() -> Result<()> {
    let mut long = BTreeSet::new();
    for file in all_files()? {
        let text = fs::read_to_string(root().join(&file))?;
        let n_lines = text.lines().count();
        ensure!(n_lines <= LINES_OF_FILE_MAX, "{} has {n_lines} lines, more than {LINES_OF_FILE_MAX}", file.display());
        let name_of = |(n, name): (usize, String)| (n > LINES_OF_FUNCTION_MAX).then_some((n, name));
        for (n, name) in functions(&text).into_iter().filter_map(name_of) {
            let key = (file.to_string_lossy().into_owned(), name);
            let is_known = LONG_FUNCTIONS.iter().any(|(file, name)| (*file, *name) == (key.0.as_str(), key.1.as_str()));
            ensure!(is_known, "{}: `{}` has {n} lines, more than {LINES_OF_FUNCTION_MAX}", key.0, key.1);
            long.insert(key);
        }
    }

    for (file, name) in LONG_FUNCTIONS {
        ensure!(long.contains(&(file.to_owned(), name.to_owned())), "{file}: `{name}` is no longer long");
    }
    Ok(())
}

#[test]
fn files_import_few_others_and_few_import_each_other() -> Result<()> {
    let imports = imports::imports(&Modules::read(&root(), &CRATES)?);
    let mut many: Vec<(usize, &PathBuf)> = imports.iter().map(|(file, imported)| (imported.len(), file)).collect();
    many.sort_by(|a, b| b.cmp(a));
    let circles = circles(&imports);
    let is_product = |circle: &&BTreeSet<&Path>| circle.iter().any(|file| PRODUCT.iter().any(|p| file.starts_with(p)));
    let largest = circles.iter().find(is_product).map_or(0, BTreeSet::len);
    println!("{} files, {} circles, the largest of {largest} files", imports.len(), circles.len());
    for circle in &circles {
        println!("circle: {circle:?}");
    }
    for (n, file) in many.iter().filter(|(n, _)| *n > IMPORTS_OF_FILE_MAX) {
        println!("{} imports {n} files", file.display());
    }

    ensure!(imports.len() > 1_000, "found only {} files", imports.len());
    ensure!(many[0].0 > 25, "no file imports more than {} others", many[0].0);
    ensure!(circles.len() <= CIRCLES_MAX, "{} circles of files, more than {CIRCLES_MAX}", circles.len());
    let limit = FILES_OF_PRODUCT_CIRCLE_MAX;
    ensure!(largest <= limit, "{largest} files of the product import each other, more than {limit}");
    let ((n, file), limit) = (many[0], IMPORTS_OF_FILE_MAX);
    ensure!(n <= limit, "{} imports {n} files, more than {limit}", file.display());
    Ok(())
}

#[test]
fn few_functions_have_more_than_60_lines() -> Result<()> {
    let mut long = Vec::new();
    for file in all_files()? {
        let text = fs::read_to_string(root().join(&file))?;
        long.extend(functions(&text).into_iter().filter(|(n, _)| *n > 60).map(|(n, name)| (n, name, file.clone())));
    }

    let limit = FUNCTIONS_OVER_60_LINES_MAX;
    ensure!(long.len() <= limit, "{} functions have more than 60 lines, more than {limit}: {long:#?}", long.len());
    Ok(())
}

#[test]
fn readme_fits_a_few_screens() -> Result<()> {
    let readme = fs::read_to_string(root().join("README.md"))?;

    let (n_lines, n_words) = (readme.lines().count(), readme.split_whitespace().count());

    ensure!(n_lines <= README_LINES_MAX, "README.md has {n_lines} lines, more than {README_LINES_MAX}");
    ensure!(n_words <= README_WORDS_MAX, "README.md has {n_words} words, more than {README_WORDS_MAX}");
    Ok(())
}

#[test]
fn imports_are_found_in_every_form() {
    let code = "use crate::train::{plan, team};\nuse crate::{\n    config::JobConfig, data::{rows, packing},\n};\nlet x = super::super::api::start();";

    let found = imported_modules(Path::new("rank/heal/mod.rs"), code);

    let expected = ["api", "config", "data", "train"].map(str::to_owned);
    assert_eq!(found, BTreeSet::from(expected));
}

#[test]
fn cycle_is_found_and_a_tree_has_none() {
    let import = |a: &str, b: &str| ((a.to_owned(), b.to_owned()), PathBuf::new());
    let tree = BTreeMap::from([import("a", "b"), import("a", "c"), import("b", "c")]);
    let mut cyclic = tree.clone();
    cyclic.extend([import("c", "b")]);

    assert_eq!(cycle(&tree), None);
    assert_eq!(cycle(&cyclic), Some(vec!["b".to_owned(), "c".to_owned()]));
}

/// The start of a printed skip, split so that this file does not match.
const PRINTED_SKIP: &str = concat!("ln!(", "\"skip");

#[test]
fn tests_report_skips_through_phalanx_needs() -> Result<()> {
    for file in all_files()? {
        let text = fs::read_to_string(root().join(&file))?.to_lowercase();
        let dense: String = text.split_whitespace().collect();
        ensure!(
            !dense.contains(PRINTED_SKIP),
            "{}: the harness drops a printed skip; call phalanx_needs::skip",
            file.display()
        );
    }
    Ok(())
}

/// The only file outside the CPU device's crate that names it, the folder that offers its kernels to users' models, and the
/// crate that compares a GPU with it.
const NAME_THE_CPU: [&str; 3] = ["runtime/src/devices.rs", "runtime/src/frontend/", "tests/gpu/"];

#[test]
fn only_one_file_outside_its_crate_names_the_cpu_device() -> Result<()> {
    let (crate_name, device) = (["phalanx", "cpu"].join("_"), ["Cpu", "Device"].concat());
    let mut found = Vec::new();
    for file in all_files()?.into_iter().filter(|file| !file.starts_with("runtime/cpu")) {
        let text = fs::read_to_string(root().join(&file))?;
        if text.contains(&crate_name) || text.contains(&device) {
            found.push(file.display().to_string());
        }
    }

    let allowed = |file: &String| NAME_THE_CPU.iter().any(|prefix| file.starts_with(prefix));
    ensure!(found.iter().any(|file| file == NAME_THE_CPU[0]), "{} names no device", NAME_THE_CPU[0]);
    found.retain(|file| !allowed(file));
    ensure!(found.is_empty(), "these name the CPU device or its crate: {found:?}");
    Ok(())
}

/// Words that the project's vocabulary replaces, as parts of identifiers or texts.
const REPLACED_WORDS: [&str; 26] = [
    "seat",
    "seats",
    "lesson",
    "lessons",
    "taught",
    "tutor",
    "heir",
    "heirs",
    "lacking",
    "muster",
    "rift",
    "breach",
    "chorus",
    "excuse",
    "stillborn",
    "courier",
    "scribe",
    "laggard",
    "wishes",
    "formation",
    "learner",
    "learners",
    "pulse",
    "unsound",
    "desk",
    "basket",
];

/// The words of a line of code; identifiers are split into their parts.
fn words(code: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    for c in code.chars().chain([' ']) {
        let begins = c.is_uppercase() && !word.ends_with(char::is_uppercase);
        if !c.is_alphanumeric() || begins {
            words.extend((!word.is_empty()).then(|| std::mem::take(&mut word).to_lowercase()));
        }
        word.extend(c.is_alphanumeric().then_some(c));
    }
    words
}

#[test]
fn no_identifier_or_text_has_a_replaced_word() -> Result<()> {
    for file in all_files()?.into_iter().filter(|file| !file.ends_with("tests/tests/tidy/main.rs")) {
        let text = fs::read_to_string(root().join(&file))?;
        for (at, line) in text.lines().enumerate() {
            // The name of a stream of random numbers; a new name would change every simulated history.
            let code = line.replace("\"learners\"", "");
            let code = code.split("//").next().unwrap_or_default();
            let found = words(code).into_iter().find(|word| REPLACED_WORDS.contains(&word.as_str()));
            ensure!(
                found.is_none(),
                "{}:{}: the vocabulary replaces `{}`: {line}",
                file.display(),
                at + 1,
                found.unwrap_or_default()
            );
        }
    }
    Ok(())
}

#[test]
fn identifiers_are_split_into_words() {
    assert_eq!(words("let MetricsMerge = n_seats(describe);"), ["let", "metrics", "merge", "n", "seats", "describe"]);
}
