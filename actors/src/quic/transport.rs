//! QUIC parameters, all derived from [`Timing`], and UDP sockets.

use super::QuicError;
use phalanx_strategies::elastic::timing::Timing;
use quinn::{AckFrequencyConfig, EndpointConfig, IdleTimeout, TransportConfig, VarInt};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

/// Messages in flight per direction. The next one waits, and a newer one may replace it (`QUIC-5`).
const MESSAGES_MAX: u32 = 4;
/// Requests of one operator at once.
const REQUESTS_MAX: u32 = 8;
/// About ten heartbeats; older ones are dropped.
const DATAGRAM_BUFFER_BYTES: usize = 16 << 10;
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
/// Heartbeats of 1,000 nodes for more than a second, by the kernel's accounting. The system may allow less.
const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// QUIC's initial round-trip time (RFC 9002, §6.2.2).
const INITIAL_RTT_MAX: Duration = Duration::from_millis(333);

/// Parameters of both sides.
fn common(timing: &Timing) -> TransportConfig {
    let mut at_once = AckFrequencyConfig::default();
    at_once.ack_eliciting_threshold(0_u32.into());
    let mut config = TransportConfig::default();
    let idle = IdleTimeout::try_from(timing.detection_time).unwrap_or_else(|_| VarInt::MAX.into());
    config
        .max_idle_timeout(Some(idle))
        // A handshake is first retransmitted after three of these. The default, a third of a second, suits the open
        // internet; nodes must find a restarted coordinator sooner.
        .initial_rtt((timing.detection_time / 20).min(INITIAL_RTT_MAX))
        // Small packets fit any network, and larger ones gain nothing for small messages. Beyond 6,550 bytes
        // segmentation offload would hang.
        .mtu_discovery_config(None)
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(CONNECTION_WINDOW_BYTES.into())
        .send_window(CONNECTION_WINDOW_BYTES.into())
        .datagram_send_buffer_size(DATAGRAM_BUFFER_BYTES)
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_BYTES))
        .max_concurrent_uni_streams(MESSAGES_MAX.into())
        // A delayed acknowledgement would cost another wake-up per heartbeat.
        .ack_frequency_config(Some(at_once))
        .allow_spin(false);
    config
}

/// Parameters of a coordinator. No keep-alive: nodes send heartbeats, or are dead.
pub(super) fn coordinator(timing: &Timing) -> Arc<TransportConfig> {
    let mut config = common(timing);
    config.max_concurrent_bidi_streams(REQUESTS_MAX.into());
    Arc::new(config)
}

/// Parameters of a node or an operator.
pub(super) fn member(timing: &Timing) -> Arc<TransportConfig> {
    let mut config = common(timing);
    // Keeps a connection without heartbeats alive. Twice the heartbeat interval, so that heartbeats suppress it.
    config.keep_alive_interval(Some(timing.heartbeat * 2));
    config.max_concurrent_bidi_streams(0_u32.into());
    Arc::new(config)
}

/// Configuration of a coordinator's endpoint. A restarted coordinator with the same secret resets its predecessor's
/// connections at once; otherwise the peers would wait for the detection time.
pub(super) fn coordinator_endpoint(secret: [u8; 32]) -> EndpointConfig {
    let reset_key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &secret);
    let cid_key = u64::from_le_bytes(
        ring::hmac::sign(&reset_key, b"connection ids").as_ref()[..8].try_into().expect("eight bytes"),
    );
    let mut config = EndpointConfig::new(Arc::new(reset_key));
    config.cid_generator(move || Box::new(quinn_proto::HashedConnectionIdGenerator::from_key(cid_key)));
    // Limits the packets that an unknown peer can provoke, and still resets a thousand nodes within a second.
    config.min_reset_interval(Duration::from_millis(1));
    config
}

/// Binds a socket to a local address.
///
/// # Errors
/// When the address is not local, or in use.
pub(super) fn bind(address: SocketAddr) -> Result<UdpSocket, QuicError> {
    let socket = UdpSocket::bind(address).map_err(|err| QuicError::Bind { address, kind: err.kind() })?;
    let options = socket2::SockRef::from(&socket);
    // Best effort: the system may cap the buffers.
    let _ = options.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    let _ = options.set_send_buffer_size(SOCKET_BUFFER_BYTES);
    Ok(socket)
}

/// The local address for connections to a target. Its endpoint accepts no connections.
pub(super) fn any_towards(target: SocketAddr) -> SocketAddr {
    match target {
        SocketAddr::V4(v4) if v4.ip().is_loopback() => (Ipv4Addr::LOCALHOST, 0).into(),
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(v6) if v6.ip().is_loopback() => (Ipv6Addr::LOCALHOST, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}
