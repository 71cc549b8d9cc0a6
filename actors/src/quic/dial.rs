//! Connects to the first address that answers. Several coordinators may be configured; one is alive.

use super::frame::Code;
use super::{QuicError, transport};
use crate::trust::join::Address;
use crate::trust::tls;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{
    ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, TokioRuntime, TransportConfig,
    TransportErrorCode,
};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;

/// Sockets of outgoing connections, one for each kind of target. They accept no connections.
#[derive(Clone, Default)]
pub(super) struct Sockets(Arc<Mutex<BTreeMap<SocketAddr, Endpoint>>>);

impl Sockets {
    fn towards(&self, target: SocketAddr) -> Result<Endpoint, QuicError> {
        let address = transport::any_towards(target);
        let mut endpoints = self.0.lock().expect("no holder of this lock panics");
        if let Some(endpoint) = endpoints.get(&address) {
            return Ok(endpoint.clone());
        }
        let socket = transport::bind(address)?;
        let endpoint = Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(TokioRuntime))
            .map_err(|err| QuicError::Bind { address, kind: err.kind() })?;
        endpoints.insert(address, endpoint.clone());
        Ok(endpoint)
    }

    /// Closes all connections. Waits at most `patience` per socket for the acknowledgements.
    pub(super) async fn close(&self, patience: Duration) {
        let endpoints = std::mem::take(&mut *self.0.lock().expect("no holder of this lock panics"));
        for endpoint in endpoints.values() {
            endpoint.close((Code::Done as u32).into(), b"the member is closing");
            let _ = tokio::time::timeout(patience, endpoint.wait_idle()).await;
        }
    }
}

/// QUIC over one of our TLS configurations.
pub(super) fn client(tls: rustls::ClientConfig, transport: Arc<TransportConfig>) -> ClientConfig {
    let crypto = QuicClientConfig::try_from(tls).expect("the provider has the cipher suite of QUIC's first packets");
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(transport);
    config
}

/// Tries all addresses at once and returns the first connection.
///
/// # Errors
/// When no address answers within `patience`. A refusal takes precedence over other failures.
pub(super) async fn dial(
    sockets: &Sockets,
    addresses: &[Address],
    config: &ClientConfig,
    patience: Duration,
) -> Result<Connection, QuicError> {
    let mut attempts = JoinSet::new();
    for address in addresses {
        attempts.spawn(attempt(sockets.clone(), address.clone(), config.clone()));
    }
    let mut silence = "no answer".to_owned();
    let mut refusal = None;
    let first = async {
        while let Some(outcome) = attempts.join_next().await {
            match outcome.expect("attempts do not panic") {
                Ok(connection) => return Some(connection),
                Err(err @ (QuicError::Refused(_) | QuicError::RefusedForGood(_) | QuicError::Expired(_))) => {
                    refusal = Some(err);
                }
                Err(err) => silence = err.to_string(),
            }
        }
        None
    };
    if let Ok(Some(connection)) = tokio::time::timeout(patience, first).await {
        return Ok(connection);
    }
    if let Some(refusal) = refusal {
        return Err(refusal);
    }
    let addresses: Vec<String> = addresses.iter().map(Address::to_string).collect();
    Err(QuicError::Unreachable { addresses: addresses.join(","), why: silence })
}

/// Tries one address. A host name may resolve to several IP addresses, which are tried in turn.
async fn attempt(sockets: Sockets, address: Address, config: ClientConfig) -> Result<Connection, QuicError> {
    let found = tokio::net::lookup_host((address.host.as_str(), address.port)).await;
    let targets = found.map_err(|err| QuicError::Lost(format!("{address}: {err}")))?;
    let mut failure = QuicError::Lost(format!("{address} resolves to no IP address"));
    for target in targets {
        match connect(&sockets, target, config.clone()).await {
            Ok(connection) => return Ok(connection),
            Err(err) => failure = err,
        }
    }
    Err(failure)
}

async fn connect(sockets: &Sockets, target: SocketAddr, config: ClientConfig) -> Result<Connection, QuicError> {
    let connecting = sockets.towards(target)?.connect_with(config, target, tls::SERVER_NAME);
    let connecting = connecting.map_err(|err| QuicError::Lost(err.to_string()))?;
    let connection = connecting.await.map_err(failure)?;
    confirmed(&connection).await.map_err(failure)?;
    Ok(connection)
}

/// Waits until the server confirms the handshake. In TLS 1.3 a client completes its part before the server has checked
/// its certificate. quinn has no event for the confirmation, so this polls; the confirmation takes one round trip.
async fn confirmed(connection: &Connection) -> Result<(), ConnectionError> {
    while connection.stats().frame_rx.handshake_done == 0 {
        tokio::select! {
            err = connection.closed() => return Err(err),
            () = tokio::time::sleep(Duration::from_millis(1)) => {}
        }
    }
    Ok(())
}

/// The error of a closed connection for a member: rejected, or lost and to be retried.
pub(super) fn failure(err: ConnectionError) -> QuicError {
    /// TLS alerts (RFC 9001 §4.8).
    const CRYPTO_ERRORS: std::ops::Range<u64> = 0x100..0x200;
    match err {
        ConnectionError::ApplicationClosed(close) => {
            let why = String::from_utf8_lossy(&close.reason).into_owned();
            let is = |code: Code| close.error_code == (code as u32).into();
            if is(Code::Done) {
                QuicError::Lost(why)
            } else if is(Code::Displaced) || is(Code::Foreign) {
                QuicError::RefusedForGood(why)
            } else if is(Code::Expired) {
                QuicError::Expired(why)
            } else {
                QuicError::Refused(why)
            }
        }
        ConnectionError::ConnectionClosed(close) if CRYPTO_ERRORS.contains(&u64::from(close.error_code)) => {
            QuicError::Refused(close.to_string())
        }
        // A coordinator that does not lead drops the handshakes of nodes, and QUIC conceals reasons before the end of a handshake.
        ConnectionError::ConnectionClosed(close) if close.error_code == TransportErrorCode::APPLICATION_ERROR => {
            QuicError::Lost("the coordinator there is closing, or does not lead the job".to_owned())
        }
        other => QuicError::Lost(other.to_string()),
    }
}
