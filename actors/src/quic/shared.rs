//! What the connections of a listener share.

use crate::quic::batch::Batch;
use crate::quic::complaint::Complaints;
use crate::quic::frame::Code;
use crate::quic::listener_config::ListenerConfig;
use crate::quic::{frame, transport};
use crate::transport::Inbound;
use crate::trust::authority::Authority;
use crate::trust::credential::{Applicant, Grant};
use crate::trust::name::Role;
use crate::trust::register::Register;
use crate::trust::validity::Validity;
use crate::trust::{TrustError, tls};
use crate::wire;
use crate::wire::WireError;
use bytes::Bytes;
use phalanx_strategies::elastic::identity::{Incarnation, NodeId};
use phalanx_strategies::elastic::message::DesiredState;
use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Connection, ServerConfig};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;
use tokio::sync::{mpsc, watch};

/// Why a node is not served.
pub(super) const NOT_LEADING: &str = "this coordinator does not lead the job";

/// State shared by the tasks of the side.
pub(super) struct Shared {
    pub(super) config: ListenerConfig,
    pub(super) authority: Authority,
    pub(super) register: Mutex<Register>,
    pub(super) nodes: Mutex<BTreeMap<NodeId, Connected>>,
    pub(super) complaints: Complaints,
    pub(super) inbound: mpsc::Sender<Inbound>,
    pub(super) batch: Batch,
    /// Whether the coordinator may lead. Read and written while `nodes` is locked, so that no node stays (`TP-5`).
    pub(super) leads: AtomicBool,
    pub(super) encoded: Mutex<Option<(DesiredState, Bytes)>>,
}

/// A connected node.
pub(super) struct Connected {
    pub(super) boot: Incarnation,
    pub(super) connection: Connection,
    /// The newest desired state that has not been sent (`QUIC-5`).
    pub(super) desired_state: watch::Sender<Option<Bytes>>,
}

impl Shared {
    pub(super) fn register(&self) -> MutexGuard<'_, Register> {
        self.register.lock().expect("no holder of this lock panics")
    }

    /// Whether the coordinator may lead.
    pub(super) fn leads(&self) -> bool {
        self.leads.load(Ordering::Acquire)
    }

    pub(super) fn nodes(&self) -> MutexGuard<'_, BTreeMap<NodeId, Connected>> {
        self.nodes.lock().expect("no holder of this lock panics")
    }

    /// Issues a certificate that is valid from now on.
    pub(super) fn grant(&self, public_key: &[u8], role: Role) -> Result<Grant, TrustError> {
        let validity = Validity::starting(SystemTime::now(), self.config.lifetime);
        let certificate = self.authority.issue(public_key, role, validity)?;
        let (certificate, authority) = (certificate.to_vec(), self.authority.certificate().to_vec());
        Ok(Grant { certificate, authority, bootstrap: self.config.bootstrap.clone() })
    }

    /// Encodes a desired state once for all its nodes: most nodes get the same one, and its world plan may be long.
    pub(super) fn encode(&self, desired_state: &DesiredState) -> Result<Bytes, WireError> {
        let mut encoded = self.encoded.lock().expect("no holder of this lock panics");
        if let Some((last, frame)) = &*encoded
            && is_same(last, desired_state)
        {
            return Ok(frame.clone());
        }
        let frame = Bytes::from(wire::encode(desired_state)?);
        *encoded = Some((desired_state.clone(), frame.clone()));
        Ok(frame)
    }

    /// The server's configuration, with a new key and certificate of the coordinator.
    pub(super) fn server_config(&self) -> Result<ServerConfig, TrustError> {
        let validity = Validity::starting(SystemTime::now(), self.config.lifetime);
        let tls = tls::coordinator(&self.authority, &self.authority.credential(Role::Coordinator, validity)?)?;
        let crypto =
            QuicServerConfig::try_from(tls).expect("the provider has the cipher suite of QUIC's first packets");
        let mut config = ServerConfig::with_crypto(Arc::new(crypto));
        config
            .transport_config(transport::coordinator(&self.config.timing))
            .migration(false)
            .max_incoming(HANDSHAKES_MAX)
            .incoming_buffer_size(HANDSHAKE_BUFFER_BYTES / 64)
            .incoming_buffer_size_total(HANDSHAKE_BUFFER_BYTES);
        Ok(config)
    }

    /// Writes the operator's credential, for processes that can read the directory. Its key never changes, so that key and
    /// certificate match at any moment.
    pub(super) fn write_operator(&self) -> Result<(), TrustError> {
        let applicant = Applicant::open(&self.config.place, OPERATOR)?;
        let grant = self.grant(&applicant.public_key(), Role::Operator)?;
        applicant.granted(grant)?.save(&self.config.place, OPERATOR)
    }
}

/// Closes the connection of a rejected peer with a reason, and logs the rejection.
pub(super) fn refuse(shared: &Shared, connection: &Connection, code: Code, log: &dyn fmt::Display, why: &str) {
    shared.complaints.refused(connection.remote_address(), log);
    frame::close(connection, code, why);
}

/// The name of the operator's credential in the coordinator's directory.
pub const OPERATOR: &str = "operator";

/// Most unauthenticated connections; further ones are rejected.
pub(super) const HANDSHAKES_MAX: usize = 1024;

/// Most buffered bytes of all unauthenticated connections.
pub(super) const HANDSHAKE_BUFFER_BYTES: u64 = 4 << 20;

/// Compares world plans by pointer: comparing their contents would cost as much as encoding one.
pub(super) fn is_same(a: &DesiredState, b: &DesiredState) -> bool {
    let world_plan = match (&a.world_plan, &b.world_plan) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    };
    let is_same_for_all = (a.job, a.id, a.requests) == (b.job, b.id, b.requests);
    world_plan && is_same_for_all && a.evict == b.evict && (a.release, &a.refused) == (b.release, &b.refused)
}
