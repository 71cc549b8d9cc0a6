//! `phalanx node`.

use super::ended::Ended;
use super::signals::on_signal;
use super::train::show;
use crate::api::embed::program::RankProgram;
use crate::console::Console;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::control_plane::ControlPlaneError;
use crate::node::enrolment::{JobEnd, ending_of, enter};
use crate::node::folder::{NodeFolder, default_path};
use crate::node::join::{JoinAs, join};
use crate::node::leave::Leave;
use crate::train::progress::{Progress, Tokenising};
use phalanx_actors::trust::join::JoinString;
use phalanx_strategies::elastic::message::Ending;
use std::cell::Cell;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(super) const HELP: &str = "Examples:
  phalanx node --join phx1.…@10.0.0.1:7070              one rank
  phalanx node --join phx1.…@10.0.0.1:7070 --ranks 8    eight ranks
  phalanx node --join-file join.txt                     the string is in a file
  PHALANX_JOIN=phx1.…@10.0.0.1:7070 phalanx node        or in the environment

Other users of the machine can read the value of --join in the list of
processes; a file that only you can read, or the environment, keeps it secret.

Ranks beyond the mesh are warm spares.

`phalanx coordinator` prints the join string. The node receives the job's
configuration when it joins. Its key and certificate are in a folder that only
one running node may use. SIGTERM or Ctrl-C drains the node: it exits once
other nodes hold its state, and no step is lost. If no coordinator can be
reached, it exits after some seconds. The exit code is that of the job, if the
folder of the job can be read here, else 0. A second Ctrl-C exits at once.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Join string that `phalanx coordinator` printed [default: the variable PHALANX_JOIN].
    #[arg(long, value_name = "STRING", conflicts_with = "join_file")]
    join: Option<String>,
    /// File with the join string.
    #[arg(long, value_name = "FILE")]
    join_file: Option<PathBuf>,
    /// Number of rank processes on this machine.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=65_536))]
    ranks: u32,
    /// Folder for the key and certificate of this node; each node on a machine needs its own [default: .phalanx-node/HOSTNAME].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Address at which ranks of other nodes reach the ranks of this one [default: the one on the route to the coordinator].
    #[arg(long, value_name = "IP")]
    advertise: Option<IpAddr>,
}

/// Environment variable with the join string.
const JOIN: &str = "PHALANX_JOIN";
/// Maximum bytes of a file with a join string.
const JOIN_BYTES_MAX: u64 = 64 << 10;

/// The join string, and where it comes from.
fn join_string(args: &Args) -> Result<(String, String), JobError> {
    if let Some(join) = &args.join {
        return Ok((join.clone(), "--join".to_owned()));
    }
    if let Some(path) = &args.join_file {
        let mut text = String::new();
        let read = File::open(path).and_then(|file| file.take(JOIN_BYTES_MAX).read_to_string(&mut text));
        read.map_err(|source| JobError::Io { action: "read", path: path.clone(), source })?;
        return Ok((text, format!("--join-file {}", path.display())));
    }
    match std::env::var(JOIN) {
        Ok(text) => Ok((text, JOIN.to_owned())),
        Err(_) => Err(CommandError::NoJoin.into()),
    }
}

pub(super) fn run(args: &Args, program: &RankProgram, console: &Console) -> Result<Ended, JobError> {
    let leaves = Arc::new(AtomicBool::new(false));
    let (asked, terminal) = (Arc::clone(&leaves), console.clone());
    let drain = move || {
        asked.store(true, Ordering::Release);
        terminal.say("\ndraining: exiting once others hold this state (Ctrl-C again exits at once)");
    };
    let has_ranks = Arc::new(AtomicBool::new(false));
    let followed = Arc::clone(&has_ranks);
    on_signal(drain, move || followed.load(Ordering::Acquire))?;
    let (text, origin) = join_string(args)?;
    let parsed: JoinString = text.trim().parse().map_err(|source| CommandError::Join { origin, source })?;
    if args.ranks == 0 {
        return Err(CommandError::NoRanks.into());
    }
    let program = program.executable().clone();
    let dir = args.dir.clone().unwrap_or_else(|| default_path(sysinfo::System::host_name().ok().as_deref()));
    let folder = NodeFolder::lock(&dir)?;
    let credential = match enter(&parsed, &folder) {
        // A machine that comes late has nothing to do, and its restart would change nothing.
        Err(JobError::ControlPlane(over @ ControlPlaneError::JobOver { ending: Ending::Finished, .. })) => {
            console.say(over);
            return Ok(Ended::Finished);
        }
        entered => entered?,
    };
    let of_job = parsed.clone();
    let how = JoinAs { join: parsed, credential, folder, n_slots: args.ranks, advertise: args.advertise, program };
    let is_drained = || leaves.load(Ordering::Acquire);
    if is_drained() {
        return Ok(Ended::Finished);
    }
    let asked = Cell::new(None);
    // Polled once the node takes part.
    let leave = || {
        has_ranks.store(true, Ordering::Release);
        Leave::after_signal(is_drained(), &asked)
    };
    let (mut progress, mut tokenising) = (None, Tokenising::new(console));
    let outcome = join(how, &leave, &mut |event| {
        tokenising.see(event);
        show(event, &mut progress, 10, console);
    });
    if let Some(p) = &progress {
        Progress::finish(p);
    }
    let failure = outcome?.failure;
    // What waits for a node waits for its job. A node that was drained has done its part.
    match ending_of(&of_job).filter(|_| !is_drained()) {
        Some(JobEnd { ending: Ending::Failed(reason), .. }) => Err(failure.unwrap_or(JobError::JobFailed(reason))),
        end => Ok(Ended::of(end.is_none_or(|end| !end.is_stopped), false)),
    }
}
