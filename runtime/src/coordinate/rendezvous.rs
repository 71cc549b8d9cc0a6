//! Rendezvous of machines that a cluster started with the same command: node 0 coordinates and writes the join string to a
//! private file in the shared job folder, or in the job's object store; the other nodes wait for that file. Node 1 also runs a
//! standby of the coordinator, so that the job outlives node 0; a node 0 that comes back later is a node with a standby, too.

use crate::config::JobConfig;
use crate::control::Control;
use crate::control_place::{CONTROL, ControlPlace};
use crate::coordinate::advertised::outward;
use crate::coordinate::head_node::{LocalNode, lead};
use crate::coordinate::sentence::sentence;
use crate::coordinate::serve::{CoordinatorEvent, serve};
use crate::coordinate::serving::Serve;
use crate::coordinate::standby::is_renewed;
use crate::coordinate::together::report_of;
use crate::error::JobError;
use crate::error::control_plane::ControlPlaneError;
use crate::events::{Event, Report};
use crate::launch::environment::LaunchContext;
use crate::launch::executable::Executable;
use crate::node::enrolment::enter;
use crate::node::folder::NodeFolder;
use crate::node::join::{JoinAs, join, towards};
use crate::node::leave::Leave;
use crate::node::node_loop::Outcome;
use crate::train::fit::check;
use crate::train::saving::Saving;
use crate::train::saving::resuming::EarlyEnd;
use phalanx_actors::trust::TrustError;
use phalanx_actors::trust::join::{Address, JoinString};
use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// This machine as one of the machines of a launch.
pub(crate) struct Rendezvous<'a> {
    pub(crate) config: &'a JobConfig,
    pub(crate) launch_context: &'a LaunchContext,
    pub(crate) program: Executable,
    /// Rank processes of this machine.
    pub(crate) n_slots: u32,
    /// How long this machine waits for node 0.
    pub(crate) patience: Duration,
}

/// Interval of polling for the join string.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The name of this machine for itself.
const LOCALHOST: &str = "localhost";
/// Lifetime of the join string: longer than any allocation lasts.
const JOIN_LIFETIME: Duration = Duration::from_secs(60 * 24 * 3600);

impl Rendezvous<'_> {
    /// Takes part until the job ends or this machine leaves it. The machine that coordinated last, node 0 or its standby,
    /// returns the report. Stopping it stops the job with a checkpoint; stopping another node drains that node.
    pub(crate) fn run(
        self,
        control: &Control,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Option<Report>, JobError> {
        if let Some(EarlyEnd { report, note }) = Saving::of_configuration(self.config).early_end(&self.config.output)? {
            on_event(&Event::Note(note));
            return Ok((self.launch_context.node == 0).then_some(report));
        }
        let place = ControlPlace::of(&self.config.output.output_dir, &self.config.elastic.timing())?;
        if self.launch_context.node > 0 || self.is_led_by_the_standby(&place) {
            return self.follow(&place, control, on_event);
        }
        // The file may remain from an earlier launch.
        let _ = place.remove(&self.join_file());
        let report = self.lead(&place, control, on_event);
        let _ = place.remove(&self.join_file());
        report.map(Some)
    }

    /// Whether this launch has a join string, and a coordinator that renews its lease: node 0 has died, and this machine in its place
    /// is a node as any other.
    fn is_led_by_the_standby(&self, place: &ControlPlace) -> bool {
        let join_string = place.secrets().read(&self.join_file()).ok().flatten();
        let timing = self.config.elastic.timing();
        join_string.is_some_and(|text| !text.is_empty()) && is_renewed(&*place.store_as_it_is(), &timing) == Some(true)
    }

    /// Name of the file with the join string of this launch.
    fn join_file(&self) -> String {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
        let launch: String =
            self.launch_context.launch.chars().map(|letter| if plain(letter) { letter } else { '_' }).collect();
        format!("join.{launch}")
    }

    fn lead(
        &self,
        place: &ControlPlace,
        control: &Control,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Report, JobError> {
        let model = check(self.config)?;
        let head = Head::of(&self.launch_context.head, self.launch_context.port.unwrap_or(0), outward)?;
        head.note.into_iter().for_each(|note| on_event(&Event::Note(note)));
        let how = Serve {
            listen: head.listen,
            advertise: head.addresses,
            n_machines: 1024,
            token_lifetime: JOIN_LIFETIME,
            is_beside_node: false,
        };
        let here = LocalNode { program: self.program.clone(), n_slots: self.n_slots, advertise: head.reached };
        let mut written = Ok(());
        let mut tell = |string: &str| {
            written = place.secrets().write(&self.join_file(), string.as_bytes());
            if written.is_err() {
                control.stop();
            }
        };
        let report = lead(self.config, &model, &how, here, control, &mut tell, on_event);
        written.map_err(ControlPlaneError::from)?;
        report
    }

    fn follow(
        &self,
        place: &ControlPlace,
        control: &Control,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Option<Report>, JobError> {
        let LaunchContext { node, head, launch, .. } = self.launch_context;
        let dir = self.config.output.folder().join(CONTROL).join(format!("node-{node}.{launch}"));
        let folder = NodeFolder::lock(&dir)?;
        let deadline = Instant::now() + self.patience;
        let (mut last, name, mut is_told) = (None, self.join_file(), false);
        let path = place.path(&name);
        while !control.stops() {
            // An expired join string belongs to an earlier launch; the file will be replaced.
            let found = match place.secrets().read(&name) {
                // The store of the job may be busy.
                Err(error @ TrustError::Store(_)) => {
                    last = Some(ControlPlaneError::from(error).into());
                    None
                }
                found => found.map_err(ControlPlaneError::from)?.filter(|text| !text.is_empty()),
            };
            if found.is_none() && !std::mem::replace(&mut is_told, true) {
                on_event(&Event::Note(format!(
                    "node {node} is waiting for {}, which node 0 on {head} writes",
                    path.display()
                )));
            }
            let entered = found.map(|text| {
                let string: JoinString =
                    String::from_utf8_lossy(&text).parse().map_err(ControlPlaneError::JoinString)?;
                Ok((enter(&string, &folder)?, string))
            });
            match entered {
                Some(Ok((credential, join_string))) => {
                    let (program, n_slots, here) = (self.program.clone(), self.n_slots, towards(&join_string));
                    let how = JoinAs { join: join_string, credential, folder, n_slots, advertise: None, program };
                    let asked = Cell::new(None);
                    // Polled once the node takes part.
                    let leaves = || {
                        control.set_has_ranks();
                        Leave::after_signal(control.stops(), &asked)
                    };
                    return self.beside_standby(here, control, || join(how, &leaves, on_event));
                }
                Some(Err(error)) => last = Some(error),
                None => {}
            }
            if Instant::now() >= deadline {
                return Err(last.unwrap_or_else(|| self.no_join_string(&path).into()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(None)
    }

    /// Runs this node; on nodes 0 and 1, beside a standby of the coordinator, which ends with the job. If it has taken over, this
    /// machine stays until the job ends, and returns the report.
    fn beside_standby(
        &self,
        here: Option<IpAddr>,
        control: &Control,
        node: impl FnOnce() -> Result<Outcome, JobError>,
    ) -> Result<Option<Report>, JobError> {
        let Some(here) = here.filter(|_| self.launch_context.node <= 1) else { return node().map(|_| None) };
        let model = check(self.config)?;
        // Nodes read its address where it publishes it.
        let how = Serve {
            listen: SocketAddr::new(here, 0),
            advertise: vec![],
            n_machines: 1024,
            token_lifetime: JOIN_LIFETIME,
            is_beside_node: true,
        };
        let has_left = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let standing_by = Builder::new().name("standby".into()).spawn_scoped(scope, || {
                let is_over = || has_left.load(Ordering::Acquire);
                let coordinated = serve(self.config, &model, &how, None, control, &is_over, &mut |event| {
                    if let CoordinatorEvent::Event(event) = event {
                        tracing::info!("{}", sentence(&event));
                    }
                });
                coordinated.status.unwrap_or_else(|error| {
                    tracing::warn!(%error, "the standby of the coordinator has ended");
                    None
                })
            });
            let standing_by = standing_by
                .inspect_err(|error| tracing::warn!(%error, "cannot start a standby of the coordinator"))
                .ok();
            let ended = node();
            has_left.store(true, Ordering::Release);
            control.bell.ring();
            let status =
                standing_by.and_then(|standby| standby.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            let outcome = ended?;
            match (status, outcome.report) {
                (None, _) => Ok(None),
                (Some(_), Some(report)) => Ok(Some(report)),
                (Some(status), None) => report_of(self.config, &status).map(Some),
            }
        })
    }

    fn no_join_string(&self, path: &Path) -> ControlPlaneError {
        let head = self.launch_context.head.clone();
        ControlPlaneError::NoJoinString { path: path.to_owned(), patience: self.patience, head }
    }
}

/// Where node 0 listens, and how others find it.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    listen: SocketAddr,
    /// Its addresses for nodes and operators.
    addresses: Vec<Address>,
    /// The address at which other ranks reach its ranks, if it differs.
    reached: Option<IpAddr>,
    /// What the user should know.
    note: Option<String>,
}

impl Head {
    /// Node 0 needs no name of its own: the others read its addresses in the join string.
    ///
    /// # Errors
    /// When its name has no address, and it has no route on which others could reach it.
    fn of(head: &str, port: u16, outward: impl Fn(SocketAddr) -> Option<IpAddr>) -> Result<Head, ControlPlaneError> {
        let named = Address { host: head.to_owned(), port };
        let at = |ip: IpAddr| Address::from(SocketAddr::new(ip, port));
        let (unknown, everywhere) = match listen_at(head, port, &outward) {
            Ok((listen, reached)) => {
                // Other machines cannot reach this one as `localhost`.
                let first = reached.filter(|_| head == LOCALHOST).map(at);
                return Ok(Head { listen, addresses: first.into_iter().chain([named]).collect(), reached, note: None });
            }
            Err(unknown) => (unknown, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)),
        };
        let Some(reached) = outward(everywhere) else { return Err(unknown) };
        let note =
            format!("{unknown}; this node is node 0 and listens at all its addresses, and others find it at {reached}");
        Ok(Head { listen: everywhere, addresses: vec![at(reached)], reached: Some(reached), note: Some(note) })
    }
}

/// The address on which node 0 listens, and the address at which other ranks reach its ranks if it differs.
fn listen_at(
    head: &str,
    port: u16,
    outward: impl FnOnce(SocketAddr) -> Option<IpAddr>,
) -> Result<(SocketAddr, Option<IpAddr>), ControlPlaneError> {
    let found = (head, port).to_socket_addrs().map(|mut addresses| addresses.next());
    let found = found.map_err(|source| ControlPlaneError::Resolve { head: head.into(), source })?;
    let address = found.ok_or_else(|| ControlPlaneError::NoHeadAddress { head: head.into() })?;
    if !address.ip().is_loopback() || head.parse::<IpAddr>().is_ok() {
        return Ok((address, None));
    }
    // Some machines resolve their own name to a loopback address, which other machines cannot reach; Kubeflow calls the first one
    // `localhost`. Without a route there are no other machines.
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let any = SocketAddr::new(any, port);
    Ok(match outward(any) {
        None if head == LOCALHOST => (address, None),
        reached => (any, reached),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_name_without_an_address_is_named_in_the_error() {
        let error = Head::of("no such host", 1, |_| None).unwrap_err().to_string();

        assert!(error.starts_with("cannot resolve node 0, `no such host`: "), "{error}");
        assert_eq!(listen_at("127.0.0.1", 7, |_| None).unwrap(), ("127.0.0.1:7".parse().unwrap(), None));
    }

    #[test]
    fn node_0_whose_name_has_no_address_is_found_at_its_route() {
        let route = IpAddr::from([10, 1, 2, 3]);

        let head = Head::of("no such host", 7, |_| Some(route)).unwrap();

        assert_eq!((head.listen, head.reached), ("0.0.0.0:7".parse().unwrap(), Some(route)));
        assert_eq!(head.addresses, ["10.1.2.3:7".parse::<Address>().unwrap()]);
        assert!(head.note.unwrap().contains("others find it at 10.1.2.3"));
    }

    #[test]
    fn machine_that_is_called_localhost_is_reached_at_its_route_if_it_has_one() {
        let route = IpAddr::from([10, 1, 2, 3]);

        let (listens, reached) = listen_at("localhost", 7, |_| Some(route)).unwrap();
        let (alone, nowhere) = listen_at("localhost", 7, |_| None).unwrap();

        assert_eq!((listens.ip().is_unspecified(), listens.port(), reached), (true, 7, Some(route)));
        assert!(alone.ip().is_loopback() && nowhere.is_none());
    }
}
