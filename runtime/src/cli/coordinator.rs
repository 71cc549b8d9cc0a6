//! `phalanx coordinator`.

use super::JobArgs;
use super::ended::Ended;
use super::push;
use super::signals::stopped_by_signals;
use crate::console::Console;
use crate::coordinate::sentence::sentence;
use crate::coordinate::serve::{CoordinatorEvent, serve};
use crate::coordinate::serving::Serve;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::train::fit::check;
use crate::train::saving::Saving;
use crate::train::saving::resuming::EarlyEnd;
use phalanx_actors::trust::join::parse_addresses;
use std::net::SocketAddr;
use std::time::Duration;

pub(super) const HELP: &str = "Examples:
  phalanx coordinator my.yaml                           nodes on this machine
  phalanx coordinator --listen 10.0.0.1:7070 my.yaml    nodes on this network
  phalanx coordinator --listen 0.0.0.0:7070 --advertise head:7070 my.yaml

The coordinator prints a join string. Run `phalanx node --join <string>` on
each machine. The coordinator itself computes nothing. If it dies, the ranks
continue; start it again with the same file to resume coordination. A second
coordinator with the same file and output_dir, in a shared folder or an object
store, stands by and takes over if the first one fails. Nodes read its address
there; nodes that cannot need the addresses of both coordinators:
  phalanx coordinator --listen 0.0.0.0:7070 --advertise head:7070,b:7070 my.yaml

Ctrl-C and SIGTERM stop the job after the current step and save a checkpoint. A
second Ctrl-C exits at once. The exit codes are those of `phalanx train`.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// UDP address to listen on; the default is a free port that other machines cannot reach.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "IP:PORT")]
    listen: SocketAddr,
    /// Addresses at which nodes reach the coordinators, if there are several or the address differs from --listen.
    #[arg(long, value_name = "HOST:PORT,…")]
    advertise: Option<String>,
    /// Number of machines that may join with the join string.
    #[arg(long, default_value_t = 1024)]
    machines: u32,
    /// Hours for which the join string is valid.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=87_600))]
    join_hours: u64,
    #[command(flatten)]
    job: JobArgs,
}

pub(super) fn run(args: &Args, console: &Console) -> Result<Ended, JobError> {
    let control = stopped_by_signals(console, false)?;
    let config = args.job.load()?;
    let upload = push::prepare(&config.output, true)?;
    if let Some(EarlyEnd { note, report }) = Saving::of_configuration(&config).early_end(&config.output)? {
        console.say(note);
        upload.after(Some(report.steps), console)?;
        return Ok(Ended::Finished);
    }
    let model = check(&config)?;
    let advertise = match &args.advertise {
        Some(text) => parse_addresses(text).map_err(CommandError::Advertise)?,
        None => Vec::new(),
    };
    let how = Serve {
        listen: args.listen,
        advertise,
        n_machines: args.machines,
        token_lifetime: Duration::from_secs(args.join_hours * 3600),
        is_beside_node: false,
    };
    let outcome = serve(&config, &model, &how, None, &control, &|| false, &mut |event| match event {
        CoordinatorEvent::StandsBy => {
            console.say("another coordinator is active; standing by to take over if it fails")
        }
        CoordinatorEvent::Join(join) => console.say(format_args!("join with:  phalanx node --join {join}")),
        CoordinatorEvent::Event(event) => console.say(sentence(&event)),
    });
    // A coordinator that another one has replaced, or that was not needed, ends without a status.
    let status = outcome.status?;
    let is_finished = status.as_ref().is_none_or(|status| !status.requests.stop);
    upload.after(status.filter(|_| is_finished).map(|status| status.checkpoint.step.0), console)?;
    Ok(Ended::of(is_finished, control.stops()))
}
