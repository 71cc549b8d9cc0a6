//! `phalanx init`.

use super::say;
use crate::config::datasets::DatasetType;
use crate::config::reference::reference_markdown;
use crate::config::starter::starter_yaml;
use crate::error::JobError;
use crate::error::command::CommandError;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// File to write.
    #[arg(default_value = "phalanx.yaml")]
    file: PathBuf,
    /// Ask no questions; use the given options or their defaults.
    #[arg(long, short)]
    yes: bool,
    /// Hugging Face directory to start from; without it, a small new model.
    #[arg(long, alias = "base_model")]
    base_model: Option<PathBuf>,
    /// Dataset file to train on.
    #[arg(long)]
    dataset: Option<PathBuf>,
    /// Type of the dataset: completion, alpaca or chat_template.
    #[arg(long, alias = "dataset_type")]
    dataset_type: Option<String>,
    /// Print the reference of all keys as Markdown, and write no file.
    #[arg(long)]
    reference: bool,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    if args.reference {
        say(reference_markdown().trim_end());
        return Ok(());
    }
    if args.file.exists() {
        return Err(CommandError::Exists { path: args.file.clone() }.into());
    }
    let asks = !args.yes && std::io::stdin().is_terminal();
    let answer = |question: &str, default: &str| if asks { ask(question, default) } else { default.to_string() };
    let base_model = args.base_model.clone().or_else(|| {
        let answer = answer("Hugging Face directory to start from (empty: a small new model)", "");
        (!answer.is_empty()).then(|| answer.into())
    });
    let dataset = args.dataset.clone().unwrap_or_else(|| answer("Dataset file to train on", "data.txt").into());
    let guess = if dataset.extension().is_some_and(|e| e == "jsonl" || e == "json") { "alpaca" } else { "completion" };
    let kind = args.dataset_type.clone();
    let kind = kind.unwrap_or_else(|| answer("Type of the dataset (completion, alpaca, chat_template)", guess));
    let kind = match kind.as_str() {
        "completion" => DatasetType::Completion,
        "alpaca" => DatasetType::Alpaca,
        "chat_template" => DatasetType::ChatTemplate,
        other => return Err(CommandError::DatasetType { found: other.into() }.into()),
    };
    write(&args.file, &starter_yaml(base_model.as_deref(), &dataset, kind))?;
    say(format_args!("wrote {0}; next:  phalanx estimate {0}  and  phalanx train {0}", args.file.display()));
    Ok(())
}

fn ask(question: &str, default: &str) -> String {
    let shown = if default.is_empty() { String::new() } else { format!(" [{default}]") };
    let _ = write!(std::io::stderr(), "{question}{shown}: ").and_then(|()| std::io::stderr().flush());
    let mut line = String::new();
    let _ = std::io::stdin().lock().read_line(&mut line);
    let line = line.trim();
    if line.is_empty() { default.to_string() } else { line.to_string() }
}

fn write(path: &Path, text: &str) -> Result<(), JobError> {
    std::fs::write(path, text).map_err(|source| JobError::Io { action: "write", path: path.to_owned(), source })
}
