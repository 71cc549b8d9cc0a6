//! `phalanx rank`: what `phalanx train` starts for every rank of a mesh; not for people.

use crate::train::elastic::rank;
use std::io::Write;
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Its node, place and incarnation, for whoever looks at the list of processes.
    #[arg(long)]
    worker: String,
    /// Descriptor of the socket to the launcher.
    #[arg(long)]
    channel: i32,
    /// Descriptor of the socket through which shared memory comes.
    #[arg(long)]
    passage: i32,
}

pub(super) fn run(args: &Args) -> ExitCode {
    match rank::run(args.channel, args.passage) {
        Ok(code) => ExitCode::from(code as u8),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: rank {}: {error}", args.worker);
            ExitCode::from(2)
        }
    }
}
