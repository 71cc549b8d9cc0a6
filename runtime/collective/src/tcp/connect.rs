//! The connections of a rank: it connects to lower ranks and accepts connections of higher ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use socket2::SockRef;

use super::handshake::{self, Connection, JOINED};
use super::listener::Listener;
use crate::shm::control::Control;
use phalanx_device::CollectiveError;
use phalanx_device::world::World;

/// How the ranks of a world connect.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Least connections for tensors of a rank, over all its peers and besides one for announcements with each. The same at all
    /// ranks. Default 2: one connection cannot keep two cores busy, and with several peers the connections of a pair only take turns.
    pub sockets_min: u32,
    /// Longest time that data may stay unacknowledged before a connection counts as lost. Default 5 s.
    pub unacknowledged_max: Duration,
    /// Longest time without any answer from a peer's machine before it counts as unreachable. Default 5 s.
    pub unanswered_max: Duration,
    /// Longest time for making all connections: peers may be busy. Default 30 s.
    pub join_max: Duration,
    /// Damages a bit of the next frame of a tensor; for tests of faults. Default: off.
    pub damages_next: Arc<AtomicBool>,
}

impl Default for TcpConfig {
    fn default() -> TcpConfig {
        let (unanswered_max, join_max) = (Duration::from_secs(5), Duration::from_secs(30));
        let (sockets_min, damages_next) = (2, Arc::default());
        TcpConfig { sockets_min, unacknowledged_max: unanswered_max, unanswered_max, join_max, damages_next }
    }
}

const RETRY_AFTER: Duration = Duration::from_millis(5);
/// Longest wait for an answer before the next attempt: the peer may be busy, stopped or dead.
const ANSWER_MAX: Duration = Duration::from_millis(500);
/// Time between looks whether the world of a waiting connection is aborted.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Most connections for tensors between two ranks.
const SOCKETS_MAX: u32 = 16;

/// The connections to each peer, in order of their numbers.
pub(super) type Sockets = BTreeMap<u32, Vec<TcpStream>>;

/// The ranks that share a group with `rank`.
pub(super) fn peers_of(world: &World, rank: u32) -> BTreeSet<u32> {
    let groups = world.groups().iter().filter(|group| group.contains(&rank));
    groups.flatten().copied().filter(|peer| *peer != rank).collect()
}

/// The number of connections between two ranks: one for announcements, and as many for tensors as the rank with fewer peers needs.
fn n_sockets(world: &World, a: u32, b: u32, config: &TcpConfig) -> u32 {
    let of = |rank| config.sockets_min.div_ceil(peers_of(world, rank).len() as u32);
    1 + of(a).max(of(b))
}

/// Makes all connections of `rank`; `listener` listens at the rank's own address.
///
/// # Errors
/// [`CollectiveError::Shape`] if the number of addresses differs from the number of ranks;
/// [`CollectiveError::Unreachable`] if a connection is not made in time; [`CollectiveError::Unauthenticated`] if a
/// lower rank fails to prove that it has the secret; [`CollectiveError::Aborted`] if `control` is aborted.
pub(super) fn connect_all(
    world: &World,
    rank: u32,
    listener: &Listener,
    addresses: &[SocketAddr],
    config: &TcpConfig,
    control: Option<&Control>,
) -> Result<Sockets, CollectiveError> {
    let shape = |field, expected: String, found| Err(CollectiveError::Shape { field, expected, found });
    if addresses.len() != world.n_ranks() as usize {
        return shape("number of addresses", world.n_ranks().to_string(), addresses.len() as u64);
    }
    if config.sockets_min == 0 || config.sockets_min > SOCKETS_MAX {
        return shape("least sockets of a rank", format!("1 to {SOCKETS_MAX}"), config.sockets_min.into());
    }
    listener.expect(addresses);
    let peers = peers_of(world, rank);
    let connections = |peer: u32| (0..n_sockets(world, rank, peer, config)).map(move |socket| (peer, socket));
    let connecting = Connecting {
        world,
        key: listener.key(),
        unanswered_max: config.unanswered_max,
        deadline: Instant::now() + config.join_max,
        control,
    };
    let (accepted, connected) = std::thread::scope(|scope| {
        let (above, connecting) = (peers.range(rank + 1..).copied().flat_map(connections).collect(), &connecting);
        let accepting = scope.spawn(move || listener.take(world, rank, &above, connecting.deadline, || check(control)));
        let connected = peers.range(..rank).map(|peer| {
            let sockets = connections(*peer)
                .map(|(to, socket)| connecting.connect(addresses[to as usize], Connection { from: rank, to, socket }));
            Ok((*peer, sockets.collect::<Result<Vec<_>, _>>()?))
        });
        let connected: Result<Vec<_>, CollectiveError> = connected.collect();
        (accepting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), connected)
    });
    let mut sockets = Sockets::new();
    for ((peer, _), socket) in accepted? {
        sockets.entry(peer).or_default().push(socket);
    }
    sockets.extend(connected?);
    for socket in sockets.values().flatten() {
        configure(socket, config)?;
    }
    Ok(sockets)
}

/// The connecting ends of a rank.
struct Connecting<'a> {
    world: &'a World,
    key: &'a [u8; 32],
    unanswered_max: Duration,
    deadline: Instant,
    control: Option<&'a Control>,
}

impl Connecting<'_> {
    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Connects to a peer; retries, because the peer may not listen yet.
    fn connect(&self, address: SocketAddr, connection: Connection) -> Result<TcpStream, CollectiveError> {
        let rank = self.world.name_of(connection.to);
        let mut answered = Instant::now();
        loop {
            check(self.control)?;
            let left = self.left();
            if left.is_zero() || answered.elapsed() >= self.unanswered_max {
                return Err(CollectiveError::Unreachable { rank, address });
            }
            if let Ok(socket) = TcpStream::connect_timeout(&address, left.min(ANSWER_MAX)) {
                // The peer's machine answers even if the peer itself is busy.
                answered = Instant::now();
                set_timeouts(&socket, Some(left.min(ANSWER_MAX)))?;
                match handshake::connect(&socket, self.key, self.world, connection) {
                    Ok(()) if self.is_joined(&socket, &mut answered)? => return Ok(socket),
                    // The peer closed the connection: it rejects this end, or another process will take its address.
                    Ok(()) | Err(CollectiveError::System { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            std::thread::sleep(RETRY_AFTER.min(left));
        }
    }

    /// Waits until the peer joins the world; returns false if the connection ends or falls silent before.
    fn is_joined(&self, mut socket: &TcpStream, answered: &mut Instant) -> Result<bool, CollectiveError> {
        set_timeouts(socket, Some(LOOK_EVERY))?;
        loop {
            check(self.control)?;
            let mut byte = [0];
            match socket.read(&mut byte) {
                Ok(1) if byte[0] == JOINED => return Ok(true),
                Ok(1) => *answered = Instant::now(),
                Ok(_) => return Ok(false),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Ok(false),
            }
            if self.left().is_zero() || answered.elapsed() >= self.unanswered_max / 2 {
                return Ok(false);
            }
        }
    }
}

fn check(control: Option<&Control>) -> Result<(), CollectiveError> {
    control.and_then(Control::aborted).map_or(Ok(()), Err)
}

fn set_timeouts(socket: &TcpStream, timeout: Option<Duration>) -> Result<(), CollectiveError> {
    let set = socket.set_read_timeout(timeout).and_then(|()| socket.set_write_timeout(timeout));
    set.map_err(|error| CollectiveError::io("setsockopt(SO_RCVTIMEO)", &error))
}

/// Sends small frames at once, and detects a peer that does not acknowledge.
fn configure(socket: &TcpStream, config: &TcpConfig) -> Result<(), CollectiveError> {
    set_timeouts(socket, None)?;
    socket.set_nonblocking(false).map_err(|error| CollectiveError::io("fcntl(O_NONBLOCK)", &error))?;
    socket.set_nodelay(true).map_err(|error| CollectiveError::io("setsockopt(TCP_NODELAY)", &error))?;
    let set = SockRef::from(socket).set_tcp_user_timeout(Some(config.unacknowledged_max));
    set.map_err(|error| CollectiveError::io("setsockopt(TCP_USER_TIMEOUT)", &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_device::world_id::WorldId;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    #[test]
    fn join_timeout_names_the_missing_peer() {
        let world = World::of_one_group(ID, 2).unwrap();
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), b"secret").unwrap();
        let address = listener.local_addr();
        let config = TcpConfig { join_max: Duration::from_millis(50), ..TcpConfig::default() };

        let error = connect_all(&world, 0, &listener, &[address, address], &config, None).unwrap_err();

        assert_eq!(error, CollectiveError::Unreachable { rank: 1, address });
    }

    #[test]
    fn ranks_without_a_common_group_do_not_connect() {
        let world = World::new(ID, 4, vec![vec![0, 1], vec![3, 0]]).unwrap();

        assert_eq!(peers_of(&world, 0), BTreeSet::from([1, 3]));
        assert_eq!(peers_of(&world, 2), BTreeSet::new());
    }

    #[test]
    fn both_ends_open_as_many_connections_as_the_rank_with_fewer_peers_needs() {
        let world = World::new(ID, 4, vec![vec![0, 1], vec![0, 2], vec![0, 3], vec![1, 2]]).unwrap();
        let config = TcpConfig::default();

        // Rank 3 has one peer, which has two more.
        let pairs = [(0, 3, 3), (3, 0, 3), (0, 1, 2), (2, 1, 2)];
        assert_eq!(pairs.map(|(a, b, _)| n_sockets(&world, a, b, &config)), pairs.map(|(_, _, n)| n));
    }
}
