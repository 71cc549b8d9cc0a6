//! `phalanx coordinator`.

use super::signals::on_signal;
use super::{JobArgs, say};
use crate::control::Control;
use crate::coordinate::sentence::sentence;
use crate::coordinate::serve::{CoordinatorEvent, Serve, serve};
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::train::fit::check;
use phalanx_actors::trust::join::parse_addresses;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub(super) const HELP: &str = "Examples:
  phalanx coordinator my.yaml                                      nodes on this machine only
  phalanx coordinator --listen 10.0.0.1:7070 my.yaml               nodes on the network of this address
  phalanx coordinator --listen 0.0.0.0:7070 --advertise head:7070 my.yaml

It prints one join string; `phalanx node --join <string>` on each machine does the rest. The coordinator computes nothing
and may die: ranks go on, and one that is started again with the same file goes on coordinating. One that is started
beside it, with the same output_dir on a file system that both see, stands by until then; give both the addresses of both:
  phalanx coordinator --listen 0.0.0.0:7070 --advertise head:7070,other:7070 my.yaml
Ctrl-C stops the job after the step that runs, saved.";

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
        Some(text) => parse_addresses(text).map_err(CommandError::Advertise)?,
        None => Vec::new(),
    };
    let how = Serve {
        listen: args.listen,
        advertise,
        n_machines: args.machines,
        token_lifetime: Duration::from_secs(args.join_hours * 3600),
    };
    let control = Arc::new(Control::default());
    let asked = Arc::clone(&control);
    on_signal(move || {
        asked.stop();
        say("\nstopping after the current step; saving a checkpoint (press again to exit at once)");
    })?;
    let outcome = serve(&config, &model, &how, &control, &|| false, &mut |told| match told {
        CoordinatorEvent::StandsBy => {
            say("another coordinator is active; this one stands by and takes over if it fails")
        }
        CoordinatorEvent::Join(join) => say(format_args!("join with:  phalanx node --join {join}")),
        CoordinatorEvent::Event(event) => say(sentence(&event)),
    });
    outcome.status.map(drop)
}
