//! Where a coordinator listens, and the address at which it was reached last.

use crate::config::JobConfig;
use crate::control_place::{ADDRESS, CONTROL, ControlPlace};
use crate::error::JobError;
use phalanx_actors::trust::join::Address;
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

/// Settings of a coordinator.
#[derive(Clone, Debug)]
pub(crate) struct Serve {
    pub(crate) listen: SocketAddr,
    /// Advertised addresses, if they differ from `listen`; port 0 means the listening port.
    pub(crate) advertise: Vec<Address>,
    /// Number of machines that may join with one join string, and its lifetime.
    pub(crate) n_machines: u32,
    pub(crate) token_lifetime: Duration,
    /// Whether this is the standby of a node in this process. It takes over after a request to stop, too: if the active
    /// coordinator dies of what stops the job, nothing else saves the state of the nodes.
    pub(crate) is_beside_node: bool,
}

/// File in the control folder of this machine with the port of the last coordinator.
pub(super) const PORT: &str = "port";

/// The address with the port of the last coordinator on this machine, unless it has one of its own.
pub(super) fn last_address(config: &JobConfig, at: SocketAddr) -> SocketAddr {
    let path = config.output.folder().join(CONTROL).join(PORT);
    let before = fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u16>().ok());
    before.filter(|_| at.port() == 0).map_or(at, |port| SocketAddr::new(at.ip(), port))
}

pub(super) fn write_address(place: &ControlPlace, addresses: &[Address]) -> Result<(), JobError> {
    let text: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    place.settle()?;
    place.write(ADDRESS, &text.join(","))
}
