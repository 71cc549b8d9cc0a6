//! The command line: one file for each command.

mod calibrate;
mod cluster;
mod coordinator;
mod demo;
mod env;
mod estimate;
mod export;
mod forecast;
mod generate;
mod init;
mod inspect;
mod node;
mod operate;
mod plan;
mod probe;
mod signals;
mod train;

use crate::api::embed::program::{log_to_stderr, rank_process};
use crate::error::command::CommandError;
use crate::error::{JobError, chain};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Elastic training of language models.
#[derive(Debug, Parser)]
#[command(name = "phalanx", version, about, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train the model that a YAML file describes.
    #[command(after_help = train::HELP)]
    Train(train::Args),
    /// Coordinate a job over several machines; prints the join string of its nodes.
    #[command(after_help = coordinator::HELP)]
    Coordinator(coordinator::Args),
    /// Take part in a job with the ranks of this machine.
    #[command(after_help = node::HELP)]
    Node(node::Args),
    /// Train on two nodes of this machine, kill a rank and a node, and compare the weights.
    #[command(after_help = demo::HELP)]
    Demo(demo::Args),
    /// Show what a running job is doing: nodes, ranks, step, incidents.
    #[command(after_help = operate::HELP)]
    Status(operate::StatusArgs),
    /// Leave a node of a running job and release it.
    #[command(after_help = operate::HELP)]
    Drain(operate::DrainArgs),
    /// Give a running job another mesh, any that its model fits; no step is lost.
    #[command(after_help = operate::HELP)]
    Resize(operate::ResizeArgs),
    /// Let a running job write a checkpoint.
    #[command(after_help = operate::HELP)]
    Save(operate::Which),
    /// End a running job after its step, saved.
    #[command(after_help = operate::HELP)]
    Stop(operate::Which),
    /// Say what a run would need: memory, parameters, arithmetic, time. Reads no data and trains nothing.
    #[command(after_help = estimate::HELP)]
    Estimate(estimate::Args),
    /// Search for the arrangement of given machines that trains a job fastest. Trains nothing.
    #[command(after_help = plan::HELP)]
    Plan(plan::Args),
    /// Turn a checkpoint into a directory that `transformers` loads.
    #[command(after_help = export::HELP)]
    Export(export::Args),
    /// Show what a checkpoint or a model directory contains.
    Inspect(inspect::Args),
    /// Continue a text with a model, to look at the result of training.
    #[command(after_help = generate::HELP)]
    Generate(generate::Args),
    /// Describe this machine, for a bug report.
    Env(env::Args),
    /// Write a commented YAML file to start from.
    Init(init::Args),
}

/// Overrides of keys on the command line: `--learning_rate 1e-4` or `--learning_rate=1e-4`.
#[derive(Debug, clap::Args)]
struct JobArgs {
    /// The job's YAML file.
    config: PathBuf,
    /// Any key of the file as `--key value`; sections with dots, as in `--model.hidden_size 64`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "--KEY VALUE")]
    overrides: Vec<String>,
}

impl JobArgs {
    fn overrides(&self) -> Result<Vec<(String, String)>, CommandError> {
        let mut pairs = Vec::new();
        let mut words = self.overrides.iter();
        while let Some(word) = words.next() {
            let named = || word.clone();
            let key = word.strip_prefix("--").ok_or_else(|| CommandError::NoOverride { word: named() })?;
            if ["slurm", "torchrun"].contains(&key) {
                return Err(CommandError::FlagAfterFile { word: named() });
            }
            let (key, value) = match key.split_once('=') {
                Some((key, value)) => (key.to_string(), value.to_string()),
                None => (key.to_string(), words.next().ok_or_else(|| CommandError::NoValue { word: named() })?.clone()),
            };
            pairs.push((key, value));
        }
        Ok(pairs)
    }

    fn load(&self) -> Result<crate::config::JobConfig, JobError> {
        Ok(crate::config::JobConfig::load(&self.config, &self.overrides()?)?)
    }
}

/// Runs the command line; the exit code is 2 where the input is at fault, 1 where the run is.
pub fn main() -> ExitCode {
    let program = rank_process();
    let cli = Cli::try_parse().unwrap_or_else(|error| match error.kind() {
        // One sentence, as for every other value that does not fit; what else to try is in the help.
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let text = error.to_string();
            let _ = writeln!(std::io::stderr(), "{}", text.lines().next().unwrap_or_default());
            std::process::exit(2)
        }
        _ => error.exit(),
    });
    // Environment variables are read here, where the process starts, and nowhere else.
    log_to_stderr();
    let result = match cli.command {
        Command::Train(args) => train::run(&args, &program),
        Command::Coordinator(args) => coordinator::run(&args),
        Command::Node(args) => node::run(&args, &program),
        Command::Demo(args) => demo::run(&args),
        Command::Status(args) => operate::status(&args),
        Command::Drain(args) => operate::drain(&args),
        Command::Resize(args) => operate::resize(&args),
        Command::Save(args) => operate::save(&args),
        Command::Stop(args) => operate::stop(&args),
        Command::Estimate(args) => estimate::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Env(args) => env::run(&args),
        Command::Init(args) => init::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {}", chain(&error));
            ExitCode::from(if error.is_input() { 2 } else { 1 })
        }
    }
}

/// Aligns columns of figures.
fn right(table: &mut comfy_table::Table, columns: &[usize]) {
    for i in columns {
        if let Some(column) = table.column_mut(*i) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
}

/// Prints a line; a reader that went away ends the program quietly.
fn say(text: impl std::fmt::Display) {
    if writeln!(std::io::stdout(), "{text}").is_err() {
        std::process::exit(0);
    }
}
