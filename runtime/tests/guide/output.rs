//! Pages that run: their blocks in order, in a scratch folder, as a person would type them.

use crate::commands::typed;
use crate::page::{Block, Page, root};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Longest time of a block. `timeout` ends the processes that a block has started, too.
const SECONDS_MAX: &str = "400";

/// Runs the blocks of a page that are marked for it.
fn run(name: &str) {
    let page = Page::read(&root().join("runtime/book/src").join(name));
    let scratch = tempfile::tempdir().unwrap();
    let mut n_runs = 0;
    for block in &page.blocks {
        if let Some(file) = block.file() {
            fs::write(scratch.path().join(file), &block.text).unwrap();
        } else if block.runs() {
            n_runs += 1;
            let said = said_by(block, scratch.path(), &page.place(block));
            compare(block, &said).unwrap_or_else(|line| panic!("{}: no line `{line}` in\n{said}", page.place(block)));
        }
    }
    println!("{name}: {n_runs} blocks");
    assert!(n_runs > 0, "{name} has no block to run");
}

fn said_by(block: &Block, folder: &Path, place: &str) -> String {
    let binary = Path::new(env!("CARGO_BIN_EXE_phalanx"));
    let path = std::env::var("PATH").unwrap_or_default();
    let script = format!("set -euo pipefail\nexec 2>&1\n{}", typed(block));
    let mut command = Command::new("timeout");
    command.args([SECONDS_MAX, "bash", "-c", &script]).current_dir(folder).stdin(std::process::Stdio::null());
    command.env("PATH", format!("{}:{path}", binary.parent().expect("it is in a folder").display()));
    command.env("HF_HUB_OFFLINE", "1").env("HF_HUB_CACHE", folder.join("hub"));
    // These tests may run in a batch job, where a stopped run has another exit code.
    ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST"]
        .iter()
        .for_each(|name| _ = command.env_remove(name));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{place}: {}\n{said}", output.status);
    said
}

/// Finds the lines that a block shows in what it printed. Any order will do: saves, for example, are reported when they are done.
/// The error is the first line that is not there.
fn compare<'a>(block: &'a Block, said: &str) -> Result<(), &'a str> {
    let said: Vec<String> = said.lines().map(plain).collect();
    let shown = block.text.lines().filter(|line| block.language == "console" && !line.starts_with("$ "));
    let mut shown = shown.map(|line| (line, plain(line))).filter(|(_, plain)| !plain.is_empty());
    let absent = shown.find(|(_, plain)| !said.iter().any(|line| is_like(plain, line)));
    absent.map_or(Ok(()), |(line, _)| Err(line))
}

/// A line without what depends on the machine: numbers, units of time and of memory, frames of tables, and the norm of the
/// gradient, which narrow lines leave out.
fn plain(line: &str) -> String {
    let unframed: String = line.chars().map(|c| if "│┌┐└┘╞╡═─".contains(c) { ' ' } else { c }).collect();
    let mut words: Vec<String> = Vec::new();
    for word in unframed.split_whitespace() {
        let word = without_numbers(word);
        let is_time = ["ms", "s", "#s", "#m", "#h", "#d"].contains(&word.as_str());
        match words.last().map(String::as_str) {
            Some("#") if is_time => *words.last_mut().expect("there is one") = "#t".into(),
            Some("#t") if is_time => {}
            Some("#") if ["B", "KiB", "MiB", "GiB"].contains(&word.as_str()) => {}
            Some("grad") if word == "#" => _ = words.pop(),
            _ if is_time => words.push("#t".into()),
            _ => words.push(word),
        }
    }
    words.join(" ")
}

/// A word with `#` for each number.
fn without_numbers(word: &str) -> String {
    let (mut out, mut chars) = (String::new(), word.chars().peekable());
    while let Some(c) = chars.next() {
        if !c.is_ascii_digit() {
            out.push(c);
            continue;
        }
        let mut last = c;
        while let Some(next) = chars.next_if(|c| c.is_ascii_digit() || "., e-+".contains(*c)) {
            last = next;
        }
        out.push('#');
        // Thousands or millions of tokens; and a full stop or comma at the end belongs to the sentence.
        let ends = chars.clone().count() == 1 && last.is_ascii_digit();
        _ = chars.next_if(|unit| ends && ['k', 'M'].contains(unit));
        out.extend(Some(last).filter(|c| !c.is_ascii_digit()));
    }
    out
}

/// Whether a line has the parts of the shown one between its ellipses, in order.
fn is_like(shown: &str, line: &str) -> bool {
    let parts: Vec<&str> = shown.split('…').collect();
    let mut rest = line;
    for (i, part) in parts.iter().map(|part| part.trim()).enumerate() {
        let Some(at) = rest.find(part) else { return false };
        if i == 0 && at > 0 {
            return false;
        }
        rest = &rest[at + part.len()..];
    }
    rest.is_empty() || parts.last().is_some_and(|part| part.trim().is_empty())
}

macro_rules! pages {
    ($($test:ident: $page:literal,)+) => {
        const PAGES: &[&str] = &[$($page),+];

        $(
            #[test]
            fn $test() {
                run($page);
            }
        )+
    };
}

pages! {
    getting_started_prints_what_it_shows: "getting-started.md",
    data_page_prints_what_it_shows: "data.md",
    adapters_page_prints_what_it_shows: "adapters.md",
    preference_page_prints_what_it_shows: "preference.md",
    memory_page_prints_what_it_shows: "memory.md",
    meshes_page_prints_what_it_shows: "meshes.md",
    checkpoints_page_prints_what_it_shows: "checkpoints.md",
    stores_page_prints_what_it_shows: "stores.md",
    clusters_page_prints_what_it_shows: "clusters.md",
    serving_page_prints_what_it_shows: "serving.md",
}

#[test]
fn every_page_with_blocks_to_run_is_run() {
    let pages: Vec<String> = crate::page::all()
        .iter()
        .filter(|page| page.blocks.iter().any(Block::runs))
        .map(|page| page.path.file_name().expect("it has a name").to_string_lossy().into_owned())
        .collect();

    let mut here = PAGES.to_vec();
    here.sort_unstable();

    assert_eq!(pages, here);
}

#[test]
fn line_is_like_the_shown_one_but_for_numbers() {
    let shown = plain("step    40  loss  2.21637  grad 1.56  lr 1.71e-6  1772 tok/s  0 left  ETA 1m 02s");

    assert!(is_like(&shown, &plain("step    40  loss  2.5  lr 1.7e-6  17 tok/s  3 left  ETA 4s")));
    assert!(!is_like(&shown, &plain("step    40  loss  2.5  lr 1.7e-6  17 tok/s  3 done  ETA 4s")));
    assert!(is_like(&plain("saved … run/checkpoints"), &plain("saved 40 run/checkpoints")));
    assert!(!is_like(&plain("saved … run/checkpoints"), &plain("saved 40 run/checkpoints/step-40.g0001")));
}
