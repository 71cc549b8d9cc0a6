//! Settings of a listener.

use crate::trust::place::Place;
use crate::trust::validity::Validity;
use phalanx_strategies::elastic::identity::JobId;
use phalanx_strategies::elastic::timing::Timing;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Settings of a listener.
#[derive(Clone, Debug)]
pub struct ListenerConfig {
    /// Place of the authority, the register and the operator's credential. Only one coordinator at a time may use it.
    pub place: Place,
    /// The job.
    pub job: JobId,
    /// The address to listen on. Default: a free port of loopback, which no other machine can reach.
    pub listen: SocketAddr,
    /// All timeouts.
    pub timing: Timing,
    /// Lifetime of certificates. Default: 24 h.
    pub lifetime: Duration,
    /// Job information that a node receives with its certificate.
    pub bootstrap: Vec<u8>,
    /// Whether machines may join, and nodes renew their certificates. Default: yes.
    pub admits: bool,
    /// How many events may wait. A full queue drops heartbeats and delays all other events. Default: 4,096.
    pub n_events_max: usize,
}

impl ListenerConfig {
    /// Default settings.
    pub fn new(place: impl Into<Place>, job: JobId) -> ListenerConfig {
        ListenerConfig {
            place: place.into(),
            job,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            timing: Timing::default(),
            lifetime: Validity::LIFETIME,
            bootstrap: Vec::new(),
            admits: true,
            n_events_max: 4096,
        }
    }
}
