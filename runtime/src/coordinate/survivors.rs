//! Whether ranks of a job that no coordinator leads are alive. Nothing records the death of all machines at once; but ranks that
//! have lost their coordinator look for the next one, and report to it within [`Timing::takeover_grace`].

use crate::config::JobConfig;
use crate::control_place::ControlPlace;
use crate::coordinate::advertised::{advertised, outward};
use crate::coordinate::job_number::job_of;
use crate::coordinate::serving::{Serve, last_address, write_address};
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use phalanx_actors::quic::listener::Listener;
use phalanx_actors::quic::listener_config::ListenerConfig;
use phalanx_actors::transport::{Downlink, Inbound};
use phalanx_strategies::elastic::identity::Generation;
use phalanx_strategies::elastic::message::Report;
use phalanx_strategies::elastic::timing::Timing;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// For how many times the grace of a takeover nobody reports before the job counts as over: a mistake would end it.
const GRACES: u32 = 3;
/// The shortest time for that, whatever the grace.
const PATIENCE_MIN: Duration = Duration::from_secs(3);
/// Interval of checks for reports.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Whether a node reports ranks of the job within some seconds. The lease of the job is this coordinator's.
///
/// # Errors
/// When this machine cannot listen, or the place of the job cannot be read or written.
pub(super) fn report(
    config: &JobConfig,
    serve: &Serve,
    place: &ControlPlace,
    stops: &dyn Fn() -> bool,
) -> Result<bool, JobError> {
    let timing = config.elastic.timing();
    let secrets = place.secrets();
    let settings = ListenerConfig {
        listen: last_address(config, serve.listen),
        timing,
        // A machine that joined now would join a job that may be over.
        admits: false,
        ..ListenerConfig::new(&secrets, job_of(place)?)
    };
    let (listener, mut inbox) = Listener::start(settings).map_err(ControlPlaneError::from)?;
    write_address(place, &advertised(listener.address(), &serve.advertise, outward)?)?;
    let deadline = Instant::now() + patience(&timing);
    let mut lives = false;
    while !lives && !stops() && Instant::now() < deadline {
        lives = match inbox.try_recv() {
            Ok(Inbound::Report(report)) => has_ranks(&report),
            Ok(Inbound::Heartbeats(reports)) => reports.iter().any(has_ranks),
            Ok(_) => false,
            Err(_) => {
                sleep(POLL_INTERVAL);
                false
            }
        };
    }
    listener.close();
    Ok(lives)
}

fn patience(timing: &Timing) -> Duration {
    (timing.takeover_grace * GRACES).max(PATIENCE_MIN)
}

/// Whether a node has ranks that were told of a world. A node that has just started has none.
fn has_ranks(report: &Report) -> bool {
    report.members.iter().any(|member| member.generation > Generation::default())
}
