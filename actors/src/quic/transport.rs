//! Parameters of QUIC, all derived from [`Timing`], and the sockets beneath.

use super::QuicError;
use phalanx_strategies::elastic::timing::Timing;
use quinn::{AckFrequencyConfig, EndpointConfig, IdleTimeout, TransportConfig, VarInt};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

/// Messages of one direction that are under way at once; the next one waits, and may be replaced meanwhile (`QUIC-5`).
const MESSAGES_MAX: u32 = 4;
/// Requests of one operator at once.
const REQUESTS_MAX: u32 = 8;
/// Some ten heartbeats; older ones are dropped.
const DATAGRAM_BUFFER_BYTES: usize = 16 << 10;
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
/// Heartbeats of 1,000 nodes for more than a second, as the kernel counts them, if the system allows so much.
const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// What QUIC assumes of networks of which nothing is known (RFC 9002, §6.2.2).
const INITIAL_RTT_MAX: Duration = Duration::from_millis(333);

/// What both sides have in common.
fn common(timing: &Timing) -> TransportConfig {
    let mut at_once = AckFrequencyConfig::default();
    at_once.ack_eliciting_threshold(0_u32.into());
    let mut config = TransportConfig::default();
    let idle = IdleTimeout::try_from(timing.detection_time).unwrap_or_else(|_| VarInt::MAX.into());
    config
        .max_idle_timeout(Some(idle))
        // The first retransmission of a handshake comes after three of these. The default, a third of a second, is
        // for the open internet; a coordinator that restarts is to be found sooner.
        .initial_rtt((timing.detection_time / 20).min(INITIAL_RTT_MAX))
        // Packets stay small enough for any network; messages are small, so larger ones would gain nothing. Beyond
        // 6,550 bytes segmentation offload would hang.
        .mtu_discovery_config(None)
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(CONNECTION_WINDOW_BYTES.into())
        .send_window(CONNECTION_WINDOW_BYTES.into())
        .datagram_send_buffer_size(DATAGRAM_BUFFER_BYTES)
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_BYTES))
        .max_concurrent_uni_streams(MESSAGES_MAX.into())
        // Acknowledged at once, while the connection is at hand; later would be another turn, for each heartbeat.
        .ack_frequency_config(Some(at_once))
        .allow_spin(false);
    config
}

/// Of a coordinator. It does not ask for heartbeats: nodes give them, or are dead.
pub(super) fn coordinator(timing: &Timing) -> Arc<TransportConfig> {
    let mut config = common(timing);
    config.max_concurrent_bidi_streams(REQUESTS_MAX.into());
    Arc::new(config)
}

/// Of a node or an operator.
pub(super) fn member(timing: &Timing) -> Arc<TransportConfig> {
    let mut config = common(timing);
    // Heartbeats and their acknowledgements keep the connection alive; this is for when there are none. Twice the
    // interval, so that it is not sent besides each of them.
    config.keep_alive_interval(Some(timing.heartbeat * 2));
    config.max_concurrent_bidi_streams(0_u32.into());
    Arc::new(config)
}

/// Of a coordinator's endpoint. With the same secret after a restart it tells the peers of its predecessor at once that
/// their connections are gone; else they would wait for the whole detection time.
pub(super) fn coordinator_endpoint(secret: [u8; 32]) -> EndpointConfig {
    let reset_key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &secret);
    let cid_key = u64::from_le_bytes(
        ring::hmac::sign(&reset_key, b"connection ids").as_ref()[..8].try_into().expect("eight bytes"),
    );
    let mut config = EndpointConfig::new(Arc::new(reset_key));
    config.cid_generator(move || Box::new(quinn_proto::HashedConnectionIdGenerator::from_key(cid_key)));
    // The interval limits how fast a stranger can make us send; a thousand nodes are to be told within a second.
    config.min_reset_interval(Duration::from_millis(1));
    config
}

/// A socket for an address of ours.
///
/// # Errors
/// When the address is not ours, or taken.
pub(super) fn bind(address: SocketAddr) -> Result<UdpSocket, QuicError> {
    let socket = UdpSocket::bind(address).map_err(|err| QuicError::Bind { address, kind: err.kind() })?;
    let options = socket2::SockRef::from(&socket);
    // The system may allow less; it then gives what it allows, which is what there is.
    let _ = options.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    let _ = options.set_send_buffer_size(SOCKET_BUFFER_BYTES);
    Ok(socket)
}

/// An address of ours from which another one can be reached. Its endpoint accepts no connections.
pub(super) fn any_towards(target: SocketAddr) -> SocketAddr {
    match target {
        SocketAddr::V4(v4) if v4.ip().is_loopback() => (Ipv4Addr::LOCALHOST, 0).into(),
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(v6) if v6.ip().is_loopback() => (Ipv6Addr::LOCALHOST, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}
