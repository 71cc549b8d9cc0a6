//! `phalanx completions` and `phalanx man`: what shells and `man` know of the command line.

use super::{Cli, print};
use crate::error::JobError;
use clap::CommandFactory;
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
    clap_complete::generate(args.shell, &mut Cli::command(), "phalanx", &mut script);
    print(&script);
}

pub(super) fn man(args: &ManArgs) -> Result<(), JobError> {
    let cannot = |source| JobError::Io { action: "write manual pages to", path: args.dir.clone(), source };
    fs::create_dir_all(&args.dir).map_err(cannot)?;
    clap_mangen::generate_to(Cli::command(), &args.dir).map_err(cannot)
}
