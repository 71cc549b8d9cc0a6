//! `phalanx completions` and `phalanx man`: what shells and `man` know of the command line.

use super::{Cli, print};
use crate::config::reference;
use crate::error::JobError;
use clap::{Arg, Command, CommandFactory};
use clap_complete::Shell;
use std::fs;
use std::path::PathBuf;

pub(super) const COMPLETIONS_HELP: &str = "Examples:
  phalanx completions bash > ~/.local/share/bash-completion/completions/phalanx
  phalanx completions zsh > ~/.zfunc/_phalanx
  phalanx completions fish > ~/.config/fish/completions/phalanx.fish";

pub(super) const MAN_HELP: &str = "Examples:
  phalanx man ~/.local/share/man/man1
  man phalanx-train";

#[derive(Debug, clap::Args)]
pub(super) struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

#[derive(Debug, clap::Args)]
pub(super) struct ManArgs {
    /// Directory for the pages, one for each command; it is created.
    dir: PathBuf,
}

pub(super) fn completions(args: &CompletionsArgs) {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut with_keys(Cli::command()), "phalanx", &mut script);
    print(&script);
}

/// Commands that take a job's file and overrides of its keys.
const OF_JOBS: [&str; 5] = ["train", "estimate", "prepare", "plan", "eval"];

/// The commands with every key of a job's file as an option, so that shells complete it.
fn with_keys(mut cli: Command) -> Command {
    let keys = reference();
    for name in OF_JOBS {
        cli = cli.mut_subcommand(name, |command| {
            let of = |arg: &Arg| [Some(arg.get_id().to_string()), arg.get_long().map(str::to_owned)];
            let known: Vec<String> = command.get_arguments().flat_map(of).flatten().collect();
            let new = keys.iter().filter(|doc| !known.iter().any(|name| name == doc.key));
            command.args(new.map(|doc| Arg::new(doc.key).long(doc.key).help(doc.doc.clone())))
        });
    }
    cli
}

pub(super) fn man(args: &ManArgs) -> Result<(), JobError> {
    let cannot = |source| JobError::Io { action: "write manual pages to", path: args.dir.clone(), source };
    fs::create_dir_all(&args.dir).map_err(cannot)?;
    clap_mangen::generate_to(Cli::command(), &args.dir).map_err(cannot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_job_are_completed_for_every_command_that_takes_one() {
        let cli = with_keys(Cli::command());

        for name in OF_JOBS {
            let command = cli.find_subcommand(name).unwrap();
            let longs: Vec<&str> = command.get_arguments().filter_map(Arg::get_long).collect();
            for key in ["learning_rate", "max_steps", "output_dir", "lora_r"] {
                assert!(longs.contains(&key), "{name} --{key}");
            }
        }
    }
}
