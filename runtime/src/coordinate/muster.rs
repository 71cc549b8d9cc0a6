//! Machines that a cluster has started with the same command find each other: the first one leads and leaves the join
//! string in the job's folder, which all of them share, in a file that only its owner can read; the others wait for it.

use crate::config::JobConfig;
use crate::control::Control;
use crate::coordinate::head::{Here, lead};
use crate::coordinate::serve::{CONTROL, Serve};
use crate::error::{JobError, unusable};
use crate::events::{Event, Report};
use crate::launch::environment::Place;
use crate::node::join::{JoinAs, Leave, enter, join};
use crate::train::fit::check;
use phalanx_actors::trust::file;
use phalanx_actors::trust::join::{Address, JoinString};
use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// This machine among those of its launch.
pub(crate) struct Muster<'a> {
    pub(crate) config: &'a JobConfig,
    pub(crate) place: &'a Place,
    pub(crate) program: PathBuf,
    /// Rank processes of this machine.
    pub(crate) n_slots: u32,
    /// How long the first machine is waited for.
    pub(crate) patience: Duration,
}

/// How often it is looked for the join string.
const LOOK: Duration = Duration::from_millis(100);
/// A cluster that takes a job's machines away tells all of them at about the same time. Then the first one ends the job,
/// saved, and nobody needs the state of the others.
const TOGETHER: Duration = Duration::from_secs(2);
/// How long other machines may join: as long as any allocation lasts.
const JOIN_LIFETIME: Duration = Duration::from_secs(60 * 24 * 3600);

impl Muster<'_> {
    /// Takes part until the job is over, or this machine has left it; the first machine reports how it ended. A stop that is
    /// asked of the first machine ends the job, saved; one that is asked of another drains that one.
    pub(crate) fn run(
        self,
        control: &Control,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Option<Report>, JobError> {
        let path = self.join_path();
        if self.place.node > 0 {
            return self.follow(&path, control, on_event).map(|()| None);
        }
        // Of a launch before this one.
        let _ = std::fs::remove_file(&path);
        let report = self.lead(&path, control, on_event);
        let _ = std::fs::remove_file(&path);
        report.map(Some)
    }

    /// Where the join string of this launch lies.
    fn join_path(&self) -> PathBuf {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
        let launch: String = self.place.launch.chars().map(|letter| if plain(letter) { letter } else { '_' }).collect();
        self.config.output.output_dir.join(CONTROL).join(format!("join.{launch}"))
    }

    fn lead(
        &self,
        path: &Path,
        control: &Control,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<Report, JobError> {
        let model = check(self.config)?;
        let (listen, advertise) = listen_at(&self.place.head, self.place.port.unwrap_or(0))?;
        let how = Serve {
            listen,
            advertise: vec![Address { host: self.place.head.clone(), port: listen.port() }],
            n_machines: 1024,
            token_lifetime: JOIN_LIFETIME,
        };
        let here = Here { program: self.program.clone(), n_slots: self.n_slots, advertise };
        let mut written = Ok(());
        let mut tell = |string: &str| {
            written = file::write(path, string.as_bytes());
            if written.is_err() {
                control.stop();
            }
        };
        let report = lead(self.config, &model, &how, here, control, &mut tell, on_event);
        written.map_err(unusable)?;
        report
    }

    fn follow(
        &self,
        path: &Path,
        control: &Control,
        on_event: &mut (dyn FnMut(&Event) + Send),
    ) -> Result<(), JobError> {
        let Place { node, head, launch, .. } = self.place;
        let dir = self.config.output.output_dir.join(CONTROL).join(format!("node-{node}.{launch}"));
        let deadline = Instant::now() + self.patience;
        let mut last = None;
        if !path.exists() {
            on_event(&Event::Note(format!("node {node} waits for {}, which node 0 on {head} writes", path.display())));
        }
        while !control.stops() {
            // One that is not good any more is of an earlier launch; this one's will come.
            let found = file::read(path).map_err(unusable)?;
            let entered = found.map(|text| {
                let string: JoinString = String::from_utf8_lossy(&text).parse().map_err(unusable)?;
                Ok((enter(&string, &dir)?, string))
            });
            match entered {
                Some(Ok((credential, join_string))) => {
                    let (program, n_slots) = (self.program.clone(), self.n_slots);
                    let how = JoinAs { join: join_string, credential, dir, n_slots, advertise: None, program };
                    let asked = Cell::new(None);
                    let leaves = || leaves(control, &asked);
                    return join(how, &leaves, on_event).map(drop);
                }
                Some(Err(error)) => last = Some(error),
                None => {}
            }
            if Instant::now() >= deadline {
                return Err(last.unwrap_or_else(|| self.nobody_leads(path)));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    fn nobody_leads(&self, path: &Path) -> JobError {
        unusable(format!(
            "{} has not come in {} s: node 0 on {} does not coordinate, or output_dir is not shared with it",
            path.display(),
            self.patience.as_secs(),
            self.place.head
        ))
    }
}

/// Whether this machine, which is not the first, is to go.
fn leaves(control: &Control, asked: &Cell<Option<Instant>>) -> Leave {
    if !control.stops() {
        return Leave::Stay;
    }
    let since = asked.get().unwrap_or_else(Instant::now);
    asked.set(Some(since));
    if since.elapsed() < TOGETHER { Leave::Stay } else { Leave::Drain }
}

/// Where the first machine listens, and where ranks of others reach its own if that is another address.
fn listen_at(head: &str, port: u16) -> Result<(SocketAddr, Option<IpAddr>), JobError> {
    let found = (head, port).to_socket_addrs().map(|mut addresses| addresses.next());
    let found = found.map_err(|error| unusable(format!("node 0, `{head}`, has no address: {error}")))?;
    let address = found.ok_or_else(|| unusable(format!("node 0, `{head}`, has no address")))?;
    let is_meant = head == "localhost" || head.parse::<IpAddr>().is_ok();
    if !address.ip().is_loopback() || is_meant {
        return Ok((address, None));
    }
    // Some machines know their own name as a loopback address, at which nobody else reaches them.
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    Ok((SocketAddr::new(any, port), outward()))
}

/// The address of this machine on its way out. No packet is sent: the address is one that is kept for documentation.
fn outward() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_is_told_to_go_waits_whether_the_job_ends() {
        let (control, asked) = (Control::default(), Cell::new(None));

        let before = leaves(&control, &asked);
        control.stop();
        let at_first = leaves(&control, &asked);
        asked.set(Instant::now().checked_sub(TOGETHER));
        let later = leaves(&control, &asked);

        assert_eq!((before, at_first, later), (Leave::Stay, Leave::Stay, Leave::Drain));
    }

    #[test]
    fn a_name_without_an_address_is_named() {
        let error = listen_at("no such host", 1).unwrap_err().to_string();

        assert!(error.starts_with("node 0, `no such host`, has no address"), "{error}");
        assert_eq!(listen_at("127.0.0.1", 7).unwrap(), ("127.0.0.1:7".parse().unwrap(), None));
    }
}
