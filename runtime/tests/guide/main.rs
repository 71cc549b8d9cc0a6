//! The README and the guide in `runtime/book` are true: commands are accepted, configurations are valid, what can run here runs and
//! prints what the pages show, links lead somewhere, and messages of the troubleshooting page are in the program.
//!
//! The page "Contributing" of the guide says which marks of a block ask for what.

mod commands;
mod configurations;
mod links;
mod output;
mod page;
mod sources;

use page::{Page, root};
use std::collections::BTreeSet;
use std::fs;

const README_LINES_MAX: usize = 180;
const README_WORDS_MAX: usize = 1500;

/// Commands that users find elsewhere, too, and that other tests run.
const FIRST_COMMANDS: [&str; 2] =
    ["cargo run --release -- train examples/own-source.yaml", "cargo run --release -- demo"];

#[test]
fn readme_fits_a_screen_and_begins_with_the_two_commands() {
    let readme = Page::read(&root().join("README.md"));

    let (lines, words) = (readme.text.lines().count(), readme.text.split_whitespace().count());

    assert!(lines <= README_LINES_MAX && words <= README_WORDS_MAX, "{lines} lines, {words} words");
    for command in FIRST_COMMANDS {
        let block = readme.blocks.iter().find(|block| block.text.trim() == command);
        assert!(block.is_some_and(|block| block.language == "sh"), "no block of its own: {command}");
    }
}

#[test]
fn commands_of_readme_and_guide_are_accepted_by_the_command_line() {
    let mut n_commands = 0;
    for page in page::all() {
        for block in page.blocks.iter().filter(|block| !block.is_refused()) {
            for words in commands::of_phalanx(block) {
                n_commands += 1;
                commands::check(&words).unwrap_or_else(|why| panic!("{}: {words:?}: {why}", page.place(block)));
            }
        }
    }
    println!("{n_commands} commands");
    assert!(n_commands > 60, "{n_commands}");
}

#[test]
fn configurations_of_readme_and_guide_are_valid() {
    let mut n_configurations = 0;
    for page in page::all() {
        for block in page.blocks.iter().filter(|block| block.language == "yaml") {
            n_configurations += 1;
            configurations::check(&block.text).unwrap_or_else(|why| panic!("{}: {why}", page.place(block)));
        }
    }
    println!("{n_configurations} configurations");
    assert!(n_configurations > 15, "{n_configurations}");
}

#[test]
fn links_of_readme_and_guide_lead_to_files_and_headings() {
    let faults: Vec<String> = page::all().iter().flat_map(links::faults).collect();

    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn links_of_all_other_pages_of_the_project_lead_to_files_and_headings() {
    let pages = page::others(&[links::FOLDERS.as_slice(), &[".github"]].concat());
    let faults: Vec<String> = pages.iter().flat_map(links::faults).collect();

    assert!(pages.len() > 10, "{} pages", pages.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn summary_lists_every_page_of_the_guide() {
    let folder = root().join("runtime/book/src");
    let summary = Page::read(&folder.join("SUMMARY.md"));
    let listed: BTreeSet<String> = links::targets(&summary.prose).into_iter().collect();
    let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());

    let pages: BTreeSet<String> = names.filter(|name| name.ends_with(".md") && name != "SUMMARY.md").collect();

    assert_eq!(listed, pages);
}

#[test]
fn messages_of_the_troubleshooting_page_are_in_the_program() {
    let page = Page::read(&root().join("runtime/book/src/troubleshooting.md"));
    let messages = sources::first_cells(&page.prose);
    let source = sources::product_text();

    let unknown: Vec<&String> = messages.iter().filter(|message| !sources::has(&source, message)).collect();

    assert!(messages.len() > 40, "{messages:?}");
    assert!(unknown.is_empty(), "{unknown:#?}");
}
