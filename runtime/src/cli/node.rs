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
  phalanx node --join phx1.…@10.0.0.1:7070              one rank
  phalanx node --join phx1.…@10.0.0.1:7070 --ranks 8    eight ranks

Ranks beyond the mesh are warm spares.

`phalanx coordinator` prints the join string. The node receives the job's
configuration when it joins. SIGTERM or Ctrl-C drains the node: it exits once
other nodes hold its state, and no step is lost. A second signal exits at
once.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Join string that `phalanx coordinator` printed.
    #[arg(long, value_name = "STRING")]
    join: String,
    /// Number of rank processes on this machine.
    #[arg(long, default_value_t = 1)]
    ranks: u32,
    /// Folder for the key and certificate of this node; each node on a machine needs its own.
    #[arg(long, default_value = ".phalanx-node")]
    dir: PathBuf,
    /// Address at which ranks of other nodes reach the ranks of this one [default: the one on the route to the coordinator].
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
