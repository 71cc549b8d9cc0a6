//! `phalanx node`.

use super::say;
use super::signals::on_signal;
use super::train::show;
use crate::api::embed::program::RankProgram;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::node::join::{JoinAs, Leave, enter, join};
use crate::train::progress::{Progress, Tokenising};
use phalanx_actors::trust::join::JoinString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) const HELP: &str = "Examples:
  phalanx node --join phx1.…@10.0.0.1:7070              one rank on this machine
  phalanx node --join phx1.…@10.0.0.1:7070 --ranks 8    eight, beyond the mesh as warm spares

The join string is what `phalanx coordinator` printed; the job's configuration comes with it. SIGTERM or Ctrl-C drains the
node: its ranks are released once others have their state, and nothing is lost; a second one ends it at once.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// What the coordinator printed.
    #[arg(long, value_name = "STRING")]
    join: String,
    /// Rank processes on this machine.
    #[arg(long, default_value_t = 1)]
    ranks: u32,
    /// Where this node keeps its key and certificate; another node on the same machine needs another folder.
    #[arg(long, default_value = ".phalanx-node")]
    dir: PathBuf,
    /// The address at which ranks of other nodes reach those of this one, if it is not that towards the coordinator.
    #[arg(long, value_name = "IP")]
    advertise: Option<IpAddr>,
}

pub(super) fn run(args: &Args, program: &RankProgram) -> Result<(), JobError> {
    let parsed: JoinString = args.join.parse().map_err(CommandError::Join)?;
    if args.ranks == 0 {
        return Err(CommandError::NoRanks.into());
    }
    let program = program.path().to_owned();
    let credential = enter(&parsed, &args.dir)?;
    let how = JoinAs {
        join: parsed,
        credential,
        dir: args.dir.clone(),
        n_slots: args.ranks,
        advertise: args.advertise,
        program,
    };
    let leaves = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&leaves);
    on_signal(move || {
        asked.store(true, Ordering::Release);
        say("\ndraining: exiting once other nodes hold this node's state (press again to exit at once)");
    })?;
    let leaves = || if leaves.load(Ordering::Acquire) { Leave::Drain } else { Leave::Stay };
    let (mut progress, mut tokenising) = (None, Tokenising::default());
    let outcome = join(how, &leaves, &mut |event| {
        tokenising.see(event);
        show(event, &mut progress, 10);
    });
    if let Some(p) = &progress {
        Progress::finish(p);
    }
    outcome.map(drop)
}
