//! `phalanx init`.

use super::say;
use crate::config::datasets::DatasetType;
use crate::config::error::ConfigError;
use crate::config::foreign::import::Imported;
use crate::config::pair_form::PairForm;
use crate::config::preference::Rl;
use crate::config::reference::reference_markdown;
use crate::config::starter::{self, Extent, Start};
use crate::config::{JobConfig, foreign, read_text};
use crate::data::config::DatasetConfig;
use crate::data::recognised::{Recognised, columns};
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::shell::quoted;
use crate::train::data_plan;
use crate::train::located;
use serde_yaml_ng::{Mapping, Value};
use std::fs::File;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// File to write.
    #[arg(default_value = "phalanx.yaml")]
    file: PathBuf,
    /// Ask no questions on the terminal or of standard input; use the given options or their defaults.
    #[arg(long, short)]
    yes: bool,
    /// Hugging Face directory to start from; without it, a small new model.
    #[arg(long, alias = "base_model")]
    base_model: Option<PathBuf>,
    /// Dataset file to train on.
    #[arg(long)]
    dataset: Option<PathBuf>,
    /// Type of the dataset: completion, alpaca, chat_template, sharegpt, or preference for pairs of answers and labelled ones [default: by
    /// the columns of its first record].
    #[arg(long, alias = "dataset_type")]
    dataset_type: Option<String>,
    /// Configuration to convert: of Axolotl, LLaMA-Factory, TRL, Accelerate (YAML), DeepSpeed (JSON) or torchtitan (TOML), or
    /// a file with Hugging Face's TrainingArguments.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Number of ranks to train on; each GPU runs one.
    #[arg(long)]
    ranks: Option<usize>,
    /// Aim of the training: full for all weights, or lora for low-rank adapters beside them.
    #[arg(long)]
    goal: Option<String>,
    /// Write every key with its meaning; those that are not set are comments with their defaults.
    #[arg(long)]
    commented: bool,
    /// Print the reference of all keys as Markdown, and write no file.
    #[arg(long)]
    reference: bool,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    if args.reference {
        say(reference_markdown().trim_end());
        return Ok(());
    }
    if args.file.symlink_metadata().is_ok() {
        return Err(CommandError::Exists { path: args.file.clone() }.into());
    }
    let answers = Answers::of(args, !args.yes && args.from.is_none())?;
    let mut wanted = answers.keys();
    let imported = match &args.from {
        Some(path) => {
            wanted.extend(args.named());
            Some(import(path, &wanted)?)
        }
        None => None,
    };
    let mut given = imported.as_ref().map(|imported| imported.keys.clone()).unwrap_or_default();
    given.extend(wanted);
    // A file that is converted may say what is trained on pairs.
    if let Some(rl) = answers.rl.filter(|_| !given.contains_key("reward_model")) {
        given.entry("rl".into()).or_insert(rl.word().into());
    }
    let names_only = imported.as_ref().is_some_and(|imported| imported.is_of_trainer);
    let start = imported.as_ref().is_none_or(|imported| !imported.is_whole).then(|| answers.start(names_only));
    let title = match &imported {
        Some(imported) => format!("A training job, converted from a configuration of {}.", imported.tool),
        None => "A training job.".into(),
    };
    let text = starter::file(&title, &given, start.as_ref(), if args.commented { Extent::All } else { Extent::Set });
    // First, because what was left out may be why the rest is refused.
    for note in imported.iter().flat_map(|imported| &imported.notes) {
        say(format_args!("note: {note}"));
    }
    // A file that cannot be used would only move the errors to the next command.
    let notes = match JobConfig::from_yaml_str(&text, &[]) {
        Ok(job) => job.notes,
        Err(ConfigError::AutoAxis) => Vec::new(),
        Err(error) => return Err(imported.iter().fold(error, |error, imported| imported.located(error)).into()),
    };
    write(&args.file, &text)?;
    for note in notes.into_iter().chain(answers.guesses.iter().cloned()) {
        say(format_args!("note: {note}"));
    }
    let (file, named) = (args.file.display(), quoted(&args.file));
    say(format_args!("wrote {file}; next:  phalanx estimate {named}  and  phalanx train {named}"));
    Ok(())
}

impl Args {
    /// The keys that options name; they go before those of a file that is converted.
    fn named(&self) -> Mapping {
        let mut keys = Mapping::new();
        if let Some(base_model) = &self.base_model {
            keys.insert("base_model".into(), base_model.to_string_lossy().into());
        }
        if let Some(dataset) = &self.dataset {
            let kind = self.dataset_type.clone().unwrap_or_else(|| guessed_type(dataset, recognised(dataset)));
            let entry = [("path", dataset.to_string_lossy().into_owned()), ("type", kind)];
            let entry: Mapping = entry.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
            keys.insert("datasets".into(), vec![Value::Mapping(entry)].into());
        }
        keys
    }
}

/// The types that a starter file can have.
const KINDS: [DatasetType; 5] = [
    DatasetType::Completion,
    DatasetType::Alpaca,
    DatasetType::ChatTemplate,
    DatasetType::Sharegpt,
    DatasetType::Preference(PairForm::Columns),
];

/// What the first record of a data set tells, if it can be read.
fn recognised(dataset: &Path) -> Option<Recognised> {
    Recognised::of(&described(dataset)?)
}

/// A data set by its path alone, if there is one.
fn described(dataset: &Path) -> Option<DatasetConfig> {
    let text = starter::starter_yaml(None, dataset, DatasetType::Completion);
    let job = JobConfig::from_yaml_str(&text, &[]).ok()?;
    data_plan::data_config(&job).ok()?.datasets.into_iter().next()
}

/// What the user should look at: paths that lead nowhere yet, and a type that no column told.
fn guesses(base_model: Option<&Path>, dataset: &Path, kind: Option<&String>) -> Vec<String> {
    let is_missing =
        |path: &&Path| (path.starts_with(".") || path.starts_with("..") || path.is_absolute()) && !path.exists();
    let model = base_model.filter(is_missing).map(|path| format!("there is no folder {}", path.display()));
    let columns = described(dataset).and_then(|dataset| columns(&dataset));
    let data = match (&columns, kind) {
        (None, _) if dataset.extension().is_some() && !dataset.to_string_lossy().contains('*') && !dataset.exists() => {
            Some(format!("there is no file {}", dataset.display()))
        }
        (Some(columns), Some(kind)) => Some(format!(
            "no known type has the columns of {} ({}); `type: {kind}` is a guess: set the type, and the keys that name its columns",
            dataset.display(),
            columns.join(", ")
        )),
        _ => None,
    };
    model.into_iter().chain(data).collect()
}

/// The type of a data set, else that which files with this ending mostly have.
fn guessed_type(dataset: &Path, recognised: Option<Recognised>) -> String {
    let is_json = dataset.extension().is_some_and(|e| e == "jsonl" || e == "json");
    let by_ending = if is_json { DatasetType::Alpaca } else { DatasetType::Completion };
    recognised.map_or(by_ending, |found| found.kind).word()
}

/// Reads the configuration of another tool; files that it names are looked up beside it too. The keys in `wanted` go before those
/// of a whole job.
fn import(path: &Path, wanted: &Mapping) -> Result<Imported, JobError> {
    let beside = |file: &Path| path.parent().map(|folder| folder.join(file));
    let read = |file: &Path| read_text(file).or_else(|error| beside(file).map_or(Err(error), |file| read_text(&file)));
    let yaml = |value: &Value| serde_yaml_ng::to_string(value).unwrap_or_default();
    let overrides: Vec<(String, String)> =
        wanted.iter().map(|(key, value)| (key.as_str().unwrap_or_default().to_owned(), yaml(value))).collect();
    let pairs_at = |dataset: &Path| recognised(dataset).and_then(|found| found.rl);
    Ok(foreign::import::import(path, &overrides, &read, &pairs_at)?)
}

/// What the user wants, from options and from answers on standard input; after its end, defaults.
struct Answers {
    base_model: Option<PathBuf>,
    dataset: PathBuf,
    dataset_type: DatasetType,
    /// What is trained on pairs.
    rl: Option<Rl>,
    has_messages: bool,
    ranks: Option<usize>,
    lora: bool,
    /// What is in the file without having been found in the data, as sentences.
    guesses: Vec<String>,
}

impl Answers {
    fn of(args: &Args, asks: bool) -> Result<Answers, JobError> {
        let answer = |question: &str, default: &str| if asks { ask(question, default) } else { default.to_string() };
        let base_model = args.base_model.clone().or_else(|| {
            let answer = answer("Hugging Face directory to start from (empty: a small new model)", "");
            (!answer.is_empty()).then(|| answer.into())
        });
        let dataset = args.dataset.clone().unwrap_or_else(|| answer("Dataset file to train on", "data.txt").into());
        let recognised = recognised(&dataset);
        let kind = args.dataset_type.clone();
        let kind = kind.unwrap_or_else(|| {
            let question = "Type of the dataset (completion, alpaca, chat_template, sharegpt, preference)";
            answer(question, &guessed_type(&dataset, recognised))
        });
        let is_guessed = args.dataset_type.is_none() && !asks && recognised.is_none();
        // A file that is converted names its own data.
        let guesses = match args.from {
            Some(_) => Vec::new(),
            None => guesses(base_model.as_deref(), &dataset, is_guessed.then_some(&kind)),
        };
        let dataset_type = KINDS.into_iter().find(|known| known.word() == kind);
        let dataset_type = dataset_type.ok_or(CommandError::DatasetType { found: kind })?;
        let rl = dataset_type.is_pair().then(|| recognised.and_then(|found| found.rl).unwrap_or(Rl::Dpo));
        let has_messages = dataset_type.is_conversation()
            || dataset_type.is_pair() && recognised.is_some_and(|found| found.has_messages);
        let ranks = match args.ranks {
            Some(ranks) => Some(ranks),
            None => {
                let found = answer("GPUs, or ranks on processors, to train on", "1");
                Some(found.parse().map_err(|_| CommandError::Ranks { found })?)
            }
        };
        let default = if base_model.is_some() { "lora" } else { "full" };
        let goal = args.goal.clone();
        let goal = match goal {
            Some(goal) => goal,
            None if asks => answer("Train all weights (full) or adapters beside them (lora)", default),
            None => "full".into(),
        };
        let lora = match goal.as_str() {
            "full" => false,
            "lora" => true,
            _ => return Err(CommandError::Goal { found: goal }.into()),
        };
        Ok(Answers {
            base_model,
            dataset,
            dataset_type,
            rl,
            has_messages,
            ranks: ranks.filter(|n| *n != 1),
            lora,
            guesses,
        })
    }

    fn start(&self, names_only: bool) -> Start<'_> {
        let Answers { base_model, dataset, dataset_type, .. } = self;
        Start { base_model: base_model.as_deref(), dataset, dataset_type: *dataset_type, names_only }
    }

    /// The keys that follow from the answers: each rank holds a shard of the state.
    fn keys(&self) -> Mapping {
        let mut keys = Mapping::new();
        if let Some(ranks) = self.ranks {
            keys.insert("nproc_per_node".into(), ranks.into());
            keys.insert("dp_shard_size".into(), "auto".into());
        }
        if self.lora {
            keys.insert("adapter".into(), "lora".into());
            keys.insert("lora_target_linear".into(), true.into());
        }
        if self.has_messages && !self.has_template() {
            keys.insert("chat_template".into(), "chatml".into());
        }
        keys
    }

    /// Whether the base model comes with a chat template, as one that cannot be read yet may.
    fn has_template(&self) -> bool {
        let Some(base_model) = &self.base_model else { return false };
        let tokenizer = located::model(base_model).ok().and_then(|dir| Tokenizer::from_dir(&dir).ok());
        tokenizer.is_none_or(|tokenizer| tokenizer.chat_template().is_some())
    }
}

fn ask(question: &str, default: &str) -> String {
    let shown = if default.is_empty() { String::new() } else { format!(" [{default}]") };
    let _ = write!(std::io::stderr(), "{question}{shown}: ").and_then(|()| std::io::stderr().flush());
    let mut line = String::new();
    let _ = std::io::stdin().lock().read_line(&mut line);
    let line = line.trim();
    if line.is_empty() { default.to_string() } else { line.to_string() }
}

/// Writes a new file, all of it or nothing: half a file would refuse the next attempt.
fn write(path: &Path, text: &str) -> Result<(), JobError> {
    let error = |source| JobError::Io { action: "write", path: path.to_owned(), source };
    let mut file = File::create_new(path).map_err(error)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(|source| {
        // The first error matters more than one about the rest.
        let _ = std::fs::remove_file(path);
        error(source)
    })
}
