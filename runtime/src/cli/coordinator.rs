//! `phalanx coordinator`.

use super::{JobArgs, say};
use crate::train::JobError;
use crate::train::elastic::serve::{Serve, Told, serve};
use crate::train::session::check;
use phalanx_actors::events::{Event, IncidentLine, What};
use phalanx_actors::trust::join::parse_addresses;
use phalanx_strategies::elastic::message::Ending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) const HELP: &str = "Examples:
  phalanx coordinator my.yaml                                      nodes on this machine only
  phalanx coordinator --listen 10.0.0.1:7070 my.yaml               nodes on the network of this address
  phalanx coordinator --listen 0.0.0.0:7070 --advertise head:7070 my.yaml

It prints one join string; `phalanx node --join <string>` on each machine does the rest. The coordinator computes nothing
and may die: ranks go on, and one that is started again with the same file goes on coordinating. Ctrl-C stops the job
after the step that runs, saved.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Where to listen, UDP; by default a free port that no other machine can reach.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "IP:PORT")]
    listen: SocketAddr,
    /// Where nodes find it, if that is another address, or one of several coordinators; separated by commas.
    #[arg(long, value_name = "HOST:PORT,…")]
    advertise: Option<String>,
    /// How many machines may join with the join string.
    #[arg(long, default_value_t = 1024)]
    machines: u32,
    /// For how many hours machines may join with it.
    #[arg(long, default_value_t = 24)]
    join_hours: u64,
    #[command(flatten)]
    job: JobArgs,
}

pub(super) fn run(args: &Args) -> Result<(), JobError> {
    let config = args.job.load()?;
    let model = check(&config)?;
    let advertise = match &args.advertise {
        Some(text) => parse_addresses(text).map_err(|error| JobError::Unusable(format!("--advertise: {error}")))?,
        None => Vec::new(),
    };
    let how = Serve {
        listen: args.listen,
        advertise,
        n_machines: args.machines,
        token_lifetime: Duration::from_secs(args.join_hours * 3600),
    };
    let stop = stop_on_signal()?;
    serve(&config, model.n_microbatches, &how, &|| stop.load(Ordering::Acquire), &mut |told| match told {
        Told::Join(join) => say(format_args!("join with:  phalanx node --join {join}")),
        Told::Event(event) => say(sentence(&event)),
    })
}

/// An event for people.
fn sentence(event: &Event) -> String {
    match &event.what {
        What::Leads => format!("coordinating ({})", event.term),
        What::StepsDown => "another coordinator has taken over".into(),
        What::World(world) => {
            format!("{}: {} ranks ({}) from {}", world.generation, world.seats.len(), world.mesh, world.step)
        }
        What::Incident(line) => incident(line),
        What::Checkpoint(checkpoint) => format!("saved at {}", checkpoint.step),
        What::Ended { ending: Ending::Finished } => "the job is done".into(),
        What::Ended { ending: Ending::Failed(why) } => format!("the job has failed: {why}"),
        What::NodesTold => "all nodes know".into(),
    }
}

/// An incident for people: what happened, and how long each phase of the recovery took.
pub(super) fn incident(line: &IncidentLine) -> String {
    let also = if line.also.is_empty() { String::new() } else { format!(" (and {} more)", line.also.len()) };
    let p = &line.phases_ms;
    format!(
        "{}: {}{also} · detect {:.1} · agree {:.1} · abort {:.1} · regroup {:.1} · heal {:.1} · resume {:.1} = {:.1} ms; on with {}",
        line.generation,
        line.cause,
        p.detect,
        p.agree,
        p.abort,
        p.regroup,
        p.heal,
        p.resume,
        line.total_ms,
        line.first_step
    )
}

/// The first Ctrl-C or SIGTERM asks the job to stop, the second ends this process.
pub(super) fn stop_on_signal() -> Result<Arc<AtomicBool>, JobError> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let stop = Arc::new(AtomicBool::new(false));
    let io = |source| JobError::Io { action: "listen for signals of", path: "this process".into(), source };
    for signal in [SIGINT, SIGTERM] {
        // In this order: the second one finds the flag set.
        signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop)).map_err(io)?;
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(io)?;
    }
    Ok(stop)
}
