//! The command line: one file for each command.

mod calibrate;
mod chat;
mod cluster;
mod coordinator;
mod demo;
mod ended;
mod env;
mod estimate;
mod eval;
mod event_lines;
mod export;
mod fetch;
mod flags_behind;
mod forecast;
mod generate;
mod init;
mod inspect;
mod measured;
mod model_args;
mod node;
mod operate;
mod plan;
mod prepare;
mod probe;
mod push;
mod serve;
mod shell;
mod signals;
mod train;
mod version;

use crate::api::embed::program::{RankProgram, log_to, rank_process};
use crate::config::JobConfig;
use crate::config::error::ConfigError;
use crate::console::{Console, printable, printable_json};
use crate::devices;
use crate::error::command::CommandError;
use crate::error::{JobError, chain};
use crate::process_limits;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use ended::Ended;
use phalanx_storage::home;
use std::any::TypeId;
use std::backtrace::BacktraceStatus;
use std::io::{ErrorKind as IoErrorKind, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use version::Build;

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
    /// Coordinate a job on several machines, and print the join string for its nodes.
    #[command(after_help = coordinator::HELP)]
    Coordinator(coordinator::Args),
    /// Join a job as a node, with ranks on this machine.
    #[command(after_help = node::HELP)]
    Node(node::Args),
    /// Train on two nodes of this machine, kill a rank and a node, and compare the final weights.
    #[command(after_help = demo::HELP)]
    Demo(demo::Args),
    /// Show the nodes, ranks, step and incidents of a running job.
    #[command(after_help = operate::HELP)]
    Status(operate::StatusArgs),
    /// Move the state of a node to other nodes, then release the node.
    #[command(after_help = operate::HELP)]
    Drain(operate::DrainArgs),
    /// Change the mesh of a running job without losing a step.
    #[command(after_help = operate::HELP)]
    Resize(operate::ResizeArgs),
    /// Save a checkpoint of a running job after its current step.
    #[command(after_help = operate::HELP)]
    Save(operate::Which),
    /// Stop a running job after its current step, and save a checkpoint.
    #[command(after_help = operate::HELP)]
    Stop(operate::Which),
    /// Estimate the memory, parameters, arithmetic and time of a job, without reading data or training.
    #[command(after_help = estimate::HELP)]
    Estimate(estimate::Args),
    /// Tokenize the data of a job, and show what is trained on.
    #[command(after_help = prepare::HELP)]
    Prepare(prepare::Args),
    /// Download a model or a data set of the Hugging Face Hub.
    #[command(after_help = fetch::HELP)]
    Fetch(fetch::Args),
    /// Upload a model to the Hugging Face Hub.
    #[command(after_help = push::HELP)]
    Push(push::Args),
    /// Search for the arrangement that trains a job fastest on given machines, without training.
    #[command(after_help = plan::HELP)]
    Plan(plan::Args),
    /// Export a checkpoint as a directory that `transformers` can load.
    #[command(after_help = export::HELP)]
    Export(export::Args),
    /// Show the contents of a checkpoint or a model directory.
    Inspect(inspect::Args),
    /// Measure the loss and the perplexity of a model on the data of a job.
    #[command(after_help = eval::HELP)]
    Eval(eval::Args),
    /// Continue a text with a trained model.
    #[command(after_help = generate::HELP)]
    Generate(generate::Args),
    /// Talk with a trained model through its chat template.
    #[command(after_help = chat::HELP)]
    Chat(chat::Args),
    /// Answer requests of OpenAI's HTTP API with a trained model.
    #[command(after_help = serve::HELP)]
    Serve(serve::Args),
    /// Describe this machine for a bug report.
    Env(env::Args),
    /// Write a configuration file to start from, or convert one of another tool.
    Init(init::Args),
    /// Print the completions of commands and flags for a shell.
    #[command(after_help = shell::COMPLETIONS_HELP)]
    Completions(shell::CompletionsArgs),
    /// Write the manual pages.
    #[command(after_help = shell::MAN_HELP)]
    Man(shell::ManArgs),
}

/// A job's file and overrides of its keys: `--learning_rate 1e-4` or `--learning_rate=1e-4`.
#[derive(Debug, clap::Args)]
struct JobArgs {
    /// The job's YAML file.
    config: PathBuf,
    /// Override a key of the file; write keys of sections with dots, as in `--model.hidden_size 64`.
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
            let (key, value) = match key.split_once('=') {
                Some((key, value)) => (key.to_string(), value.to_string()),
                None => (key.to_string(), words.next().ok_or_else(|| CommandError::NoValue { word: named() })?.clone()),
            };
            pairs.push((key, value));
        }
        Ok(pairs)
    }

    /// Loads the job, and reports what became of keys of other tools.
    fn load(&self) -> Result<JobConfig, JobError> {
        let mut keys = self.overrides()?;
        let mut config = JobConfig::load(&self.config, &keys);
        if config.as_ref().is_err_and(ConfigError::lacks_ranks) {
            let (key, n_ranks, why) = ranks_of_this_machine();
            keys.push((key.into(), n_ranks.to_string()));
            config = JobConfig::load(&self.config, &keys);
            if let Ok(config) = &mut config {
                config.notes.push(format!("`dp_shard_size: auto` is {n_ranks} here: {why}"));
            }
        }
        let config = config?;
        report_notes(&config);
        Ok(config)
    }
}

/// The key that says how many ranks a job without a number of ranks has: one for each GPU, else those of the other axes.
fn ranks_of_this_machine() -> (&'static str, usize, &'static str) {
    match devices::gpu().map_or(0, |device| device.gpus().len()) {
        0 => ("dp_shard_size", 1, "this machine has no GPU, and `nproc_per_node` is not set"),
        n_gpus => ("nproc_per_node", n_gpus, "`nproc_per_node` is the number of GPUs of this machine"),
    }
}

/// Reports what became of keys of other tools, on standard error: standard output may be JSON.
fn report_notes(config: &JobConfig) {
    config.notes.iter().for_each(|note| report_note(note));
}

fn report_note(note: &str) {
    let _ = writeln!(std::io::stderr(), "note: {}", printable(note));
}

/// Runs the command line. The exit code is 2 if the input is at fault, and 1 if the run failed otherwise. In a batch job it is
/// 75 or 3 if the run was stopped before its last step; see `ended`. `commit` is that of the sources, for `phalanx --version`.
pub fn main(commit: Option<&'static str>) -> ExitCode {
    process_limits::prepare_process();
    let build = Build { commit };
    let program = rank_process();
    let words = flags_behind::in_front(std::env::args_os(), &command());
    let cli = command().try_get_matches_from(words).and_then(|found| Cli::from_arg_matches(&found));
    let cli = cli.unwrap_or_else(|error| match error.kind() {
        ErrorKind::DisplayVersion => {
            say(format_args!("phalanx {build}"));
            std::process::exit(0)
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let _ = writeln!(std::io::stderr(), "{}", printable(&in_one_line(&error)));
            std::process::exit(2)
        }
        _ => error.exit(),
    });
    let console = match Console::start() {
        Ok(console) => console,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: cannot start a thread for the output: {error}");
            return ExitCode::FAILURE;
        }
    };
    abort_on_panic(&console);
    // Environment variables are read only here, where the process starts.
    let log = console.err().clone();
    log_to(move || log.clone());
    if !handles_signals(&cli.command)
        && let Err(error) = signals::end_as_first_process()
    {
        console.err().say(format_args!("error: {}", chain(&error)));
        return ExitCode::FAILURE;
    }
    let code = run(cli.command, &program, build, &console);
    console.finish(END_PATIENCE);
    code
}

/// Whether a command installs handlers of its own for requests to end.
const fn handles_signals(command: &Command) -> bool {
    matches!(command, Command::Train(_) | Command::Coordinator(_) | Command::Node(_) | Command::Serve(_))
}

/// The commands and their flags, for completions, manual pages and whoever checks a command without running it. Their paths may
/// begin with `~`, which shells leave as it is behind `--dir=`.
#[must_use]
pub fn command() -> clap::Command {
    let expands = |arg: clap::Arg| match arg.get_value_parser().type_id() == TypeId::of::<PathBuf>() {
        true => arg.value_parser(PathBufValueParser::new().map(home::expanded)),
        false => arg,
    };
    Cli::command().mut_subcommands(|subcommand| subcommand.mut_args(expands))
}

/// An invalid value in one sentence, with the valid ones if they are few; the rest of what clap tells is in the help.
fn in_one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(valid)) if !valid.is_empty() => format!("{first}: use {}", valid.join(", ")),
        _ => first.to_owned(),
    }
}

/// How long the process waits at its end for a reader that reads nothing.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// The process is the unit of failure: a panic on any thread ends all of it, so that no part of a job survives.
fn abort_on_panic(console: &Console) {
    let console = console.clone();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let backtrace = std::backtrace::Backtrace::capture();
        let trace =
            if backtrace.status() == BacktraceStatus::Captured { format!("\n{backtrace}") } else { String::new() };
        // Not through the lock of standard error, which a thread may hold that waits for its reader.
        console.err().say(format_args!("thread '{}' {panic}{trace}", thread.name().unwrap_or("without a name")));
        console.finish(END_PATIENCE);
        std::process::abort();
    }));
}

fn run(command: Command, program: &RankProgram, build: Build, console: &Console) -> ExitCode {
    let mut ended = Ended::Finished;
    let result = match command {
        Command::Train(args) => train::run(&args, program, console).map(|how| ended = how),
        Command::Coordinator(args) => coordinator::run(&args, console).map(|how| ended = how),
        Command::Node(args) => node::run(&args, program, console).map(|how| ended = how),
        Command::Demo(args) => demo::run(&args, console),
        Command::Status(args) => operate::status(&args, console),
        Command::Drain(args) => operate::drain(&args),
        Command::Resize(args) => operate::resize(&args),
        Command::Save(args) => operate::save(&args),
        Command::Stop(args) => operate::stop(&args),
        Command::Estimate(args) => estimate::run(&args),
        Command::Prepare(args) => prepare::run(&args, console),
        Command::Fetch(args) => fetch::run(&args, console),
        Command::Push(args) => push::run(&args, console),
        Command::Plan(args) => plan::run(&args),
        Command::Export(args) => export::run(&args, console),
        Command::Inspect(args) => inspect::run(&args),
        Command::Eval(args) => eval::run(&args, console),
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Serve(args) => serve::run(&args, console),
        Command::Env(args) => env::run(&args, build),
        Command::Init(args) => init::run(&args),
        Command::Completions(args) => {
            shell::completions(&args);
            Ok(())
        }
        Command::Man(args) => shell::man(&args),
    };
    match result {
        Ok(()) => ended.exit_code(),
        Err(error) => {
            console.err().say(format_args!("error: {}", chain(&error)));
            ExitCode::from(if error.is_input() { 2 } else { 1 })
        }
    }
}

/// Aligns columns of numbers to the right.
fn right(table: &mut comfy_table::Table, columns: &[usize]) {
    for i in columns {
        if let Some(column) = table.column_mut(*i) {
            column.set_cell_alignment(comfy_table::CellAlignment::Right);
        }
    }
}

/// Prints a line of a command that has nothing left to do but print; commands that run a job use [`Console`]. If the reader
/// has closed the pipe, the process exits without an error, since nobody wants the rest.
fn say(text: impl std::fmt::Display) {
    print(printable(&format!("{text}\n")).as_bytes());
}

/// Prints JSON as [`say`] prints a line.
fn say_json(value: &serde_json::Value, indents: bool) {
    print(json_line(value, indents).as_bytes());
}

fn json_line(value: &serde_json::Value, indents: bool) -> String {
    let text = if indents { format!("{value:#}") } else { value.to_string() };
    format!("{}\n", printable_json(&text))
}

/// Prints the result of a command that has told of its work on the console. A result that cannot be written is an error.
fn conclude(console: &Console, text: impl std::fmt::Display) {
    conclude_styled(console, printable(&text.to_string()));
}

/// As [`conclude`], for JSON.
fn conclude_json(console: &Console, value: &serde_json::Value, indents: bool) {
    console.finish(END_PATIENCE);
    print(json_line(value, indents).as_bytes());
}

/// As [`conclude`], for a text with colours whose foreign parts went through [`printable`].
fn conclude_styled(console: &Console, text: impl std::fmt::Display) {
    console.finish(END_PATIENCE);
    print(format!("{text}\n").as_bytes());
}

/// Prints bytes as [`say`] does.
fn print(bytes: &[u8]) {
    let mut out = std::io::stdout();
    let Err(error) = out.write_all(bytes).and_then(|()| out.flush()) else { return };
    if error.kind() == IoErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    let _ = writeln!(std::io::stderr(), "error: {}", CommandError::Output(error));
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tilde_in_a_path_behind_an_equals_sign_stands_for_the_home_folder() {
        let found = command().try_get_matches_from(["phalanx", "eval", "~/job.yaml", "--model=~/m"]).unwrap();

        let eval = found.subcommand_matches("eval").unwrap();

        let home = std::env::home_dir().unwrap();
        assert_eq!(eval.get_one::<PathBuf>("model"), Some(&home.join("m")));
        assert_eq!(eval.get_one::<PathBuf>("config"), Some(&home.join("job.yaml")));
    }

    #[test]
    fn longest_text_of_serve_has_at_least_a_token() {
        let serve = |n: &str| command().try_get_matches_from(["phalanx", "serve", "m", "--max-len", n]);

        let refused = serve("0").unwrap_err();

        assert!(refused.to_string().contains("'--max-len <MAX_LEN>'") && refused.exit_code() == 2, "{refused}");
        assert!(serve("1").is_ok());
    }

    #[test]
    fn examples_in_help_texts_fit_80_columns() {
        let commands = Cli::command();
        let texts: Vec<String> =
            commands.get_subcommands().filter_map(|command| Some(command.get_after_help()?.to_string())).collect();

        assert!(texts.len() > 8);
        for line in texts.iter().flat_map(|text| text.lines()) {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
