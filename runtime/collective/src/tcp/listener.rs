//! The listening socket of a rank: it authenticates connections at any time, also while the rank trains, and keeps them until
//! the rank joins their world.
//!
//! One thread accepts connections and advances all handshakes, without waiting for any of them. Strangers cannot delay a peer:
//! the thread leaves nothing in the backlog, ends each handshake after `HANDSHAKE_MAX`, and drops the oldest unproven connection
//! when more than `UNPROVEN_MAX` are open.
#![allow(unsafe_code)] // Only libc waits for several sockets.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::handshake::{Hello, Incoming, JOINED, WAITING, key_of};
use crate::engine::lock;
use phalanx_device::CollectiveError;
use phalanx_device::world::World;

/// Longest duration of a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(2);
/// Most connections without proof.
const UNPROVEN_MAX: usize = 256;
/// Most connections that wait until the rank joins their world.
const PROVEN_MAX: usize = 16 * 1024;
/// Most connections that are accepted before handshakes advance again.
const BATCH: usize = 64;
/// Time between the bytes that tell a waiting peer that this process is alive.
pub(super) const ALIVE_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for a wake-up, after which [`Listener::take`] looks whether its world is aborted.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// See the [module](self). The socket closes when the listener is dropped.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    key: [u8; 32],
    shared: Arc<Shared>,
    /// Its end ends the thread.
    _alive: UnixStream,
}

#[derive(Debug, Default)]
struct Shared {
    proven: Mutex<VecDeque<Proven>>,
    arrived: Condvar,
    /// Hosts of the last world. Connections of other hosts make room first.
    hosts: Mutex<BTreeSet<IpAddr>>,
}

/// A connection of a peer.
#[derive(Debug)]
struct Proven {
    hello: Hello,
    socket: TcpStream,
}

impl Listener {
    /// Listens at `address` for peers that have the secret.
    ///
    /// # Errors
    /// When the address is taken or not this machine's, or a thread is refused.
    pub fn bind(address: SocketAddr, secret: &[u8]) -> std::io::Result<Listener> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let (address, key, shared) = (listener.local_addr()?, key_of(secret), Arc::<Shared>::default());
        let (alive, ends) = UnixStream::pair()?;
        let door =
            Door { listener, ends, key, shared: shared.clone(), unproven: VecDeque::new(), told: Instant::now() };
        std::thread::Builder::new().name("listener".into()).spawn(move || door.serve())?;
        Ok(Listener { address, key, shared, _alive: alive })
    }

    /// Its address.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn key(&self) -> &[u8; 32] {
        &self.key
    }

    /// Declares the hosts of the world that the rank joins.
    pub(super) fn expect(&self, addresses: &[SocketAddr]) {
        *lock(&self.shared.hosts) = addresses.iter().map(SocketAddr::ip).collect();
    }

    /// Waits for the expected connections to rank `own` of `world`, by peer and number, until `has_ended` is an error.
    /// Connections of earlier generations are closed.
    ///
    /// # Errors
    /// That of `has_ended`; [`CollectiveError::Unreachable`] with the first missing peer at the deadline.
    pub(super) fn take(
        &self,
        world: &World,
        own: u32,
        expected: &BTreeSet<(u32, u32)>,
        deadline: Instant,
        has_ended: impl Fn() -> Result<(), CollectiveError>,
    ) -> Result<BTreeMap<(u32, u32), TcpStream>, CollectiveError> {
        let is_expected = |hello: &Hello| {
            let connection = hello.connection;
            hello.check(world, own).is_ok() && expected.contains(&(connection.from, connection.socket))
        };
        let mut taken: BTreeMap<(u32, u32), TcpStream> = BTreeMap::new();
        let mut proven = lock(&self.shared.proven);
        loop {
            for Proven { hello, socket } in std::mem::take(&mut *proven) {
                let is_of_this = hello.world == world.id();
                if is_of_this && is_expected(&hello) {
                    if tell(&socket, JOINED) {
                        taken.insert((hello.connection.from, hello.connection.socket), socket);
                    }
                } else if !is_of_this && hello.world.generation >= world.id().generation {
                    proven.push_back(Proven { hello, socket });
                }
            }
            if taken.len() == expected.len() {
                return Ok(taken);
            }
            has_ended()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing = expected.iter().find(|connection| !taken.contains_key(connection));
                let missing = missing.map_or(own, |(peer, _)| *peer);
                return Err(CollectiveError::Unreachable { rank: world.name_of(missing), address: self.address });
            }
            let waited = self.shared.arrived.wait_timeout(proven, LOOK_EVERY.min(left));
            proven = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }
}

/// The thread of a listener.
struct Door {
    listener: TcpListener,
    /// Hangs up when the listener is dropped.
    ends: UnixStream,
    key: [u8; 32],
    shared: Arc<Shared>,
    /// Connections without proof, from the oldest on.
    unproven: VecDeque<Unproven>,
    /// When the proven connections were last told that this process is alive.
    told: Instant,
}

struct Unproven {
    incoming: Incoming,
    host: IpAddr,
    since: Instant,
}

impl Door {
    fn serve(mut self) {
        while !self.wait() {
            self.accept();
            self.advance();
            if self.told.elapsed() >= ALIVE_EVERY {
                self.told = Instant::now();
                lock(&self.shared.proven).retain(|proven| tell(&proven.socket, WAITING));
            }
        }
    }

    /// Waits for anything to do; returns whether the listener is dropped.
    fn wait(&self) -> bool {
        let watched = |fd: RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let own = [self.ends.as_raw_fd(), self.listener.as_raw_fd()].into_iter();
        let all = own.chain(self.unproven.iter().map(|unproven| unproven.incoming.socket.as_raw_fd()));
        let mut all: Vec<libc::pollfd> = all.map(watched).collect();
        let is_idle = self.unproven.is_empty() && lock(&self.shared.proven).is_empty();
        let timeout = if is_idle { -1 } else { ALIVE_EVERY.as_millis() as i32 };
        // SAFETY: the array is ours, of the given length. A failure is as a timeout.
        unsafe { libc::poll(all.as_mut_ptr(), all.len() as libc::nfds_t, timeout) };
        all[0].revents != 0
    }

    fn accept(&mut self) {
        for _ in 0..BATCH {
            match self.listener.accept() {
                Ok((socket, from)) => {
                    if self.unproven.len() == UNPROVEN_MAX {
                        self.make_room();
                    }
                    if socket.set_nonblocking(true).is_ok() {
                        let (incoming, host) = (Incoming::new(socket), from.ip());
                        self.unproven.push_back(Unproven { incoming, host, since: Instant::now() });
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // The connection is gone already.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(_) => {
                    // The process has too many files; the connection stays in the backlog.
                    self.make_room();
                    std::thread::sleep(LOOK_EVERY);
                    return;
                }
            }
        }
    }

    /// Drops the oldest connection without proof, if any; that of a host outside the world first.
    fn make_room(&mut self) {
        let hosts = lock(&self.shared.hosts);
        let oldest = self.unproven.iter().position(|unproven| !hosts.contains(&unproven.host));
        self.unproven.remove(oldest.unwrap_or(0));
    }

    fn advance(&mut self) {
        let now = Instant::now();
        for mut unproven in std::mem::take(&mut self.unproven) {
            match unproven.incoming.advance(&self.key) {
                Ok(Some(hello)) => self.keep(Proven { hello, socket: unproven.incoming.socket }),
                Ok(None) if now.duration_since(unproven.since) < HANDSHAKE_MAX => self.unproven.push_back(unproven),
                Ok(None) | Err(_) => {}
            }
        }
    }

    /// Keeps a connection of a peer; it replaces an earlier attempt.
    fn keep(&self, new: Proven) {
        let mut proven = lock(&self.shared.proven);
        proven.retain(|old| (old.hello.world, old.hello.connection) != (new.hello.world, new.hello.connection));
        if proven.len() == PROVEN_MAX {
            proven.pop_front();
        }
        proven.push_back(new);
        self.shared.arrived.notify_all();
    }
}

/// Sends a byte to a connecting end that waits; returns whether it is still there.
fn tell(mut socket: &TcpStream, byte: u8) -> bool {
    // A waiting peer sends nothing, so anything to read is its end.
    let is_open = socket.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    is_open && socket.write(&[byte]).is_ok()
}

#[cfg(test)]
mod tests {
    use super::super::collective::TcpRank;
    use super::super::connect::TcpConfig;
    use super::*;
    use phalanx_device::world_id::WorldId;
    use std::sync::atomic::{AtomicBool, Ordering};

    const SECRET: &[u8] = b"secret";

    fn world(generation: u64) -> World {
        World::of_one_group(WorldId { job: 1, generation, incarnation: 0 }, 2).unwrap()
    }

    fn listeners() -> ([Listener; 2], [SocketAddr; 2]) {
        let listeners = [(); 2].map(|()| Listener::bind("127.0.0.1:0".parse().unwrap(), SECRET).unwrap());
        let addresses = [listeners[0].local_addr(), listeners[1].local_addr()];
        (listeners, addresses)
    }

    /// Both ranks join the world; returns the time that they took.
    fn joined(generation: u64, listeners: &[Listener; 2], addresses: &[SocketAddr; 2]) -> Duration {
        let (world, config, begin) = (world(generation), TcpConfig::default(), Instant::now());
        let join = |rank: u32| TcpRank::join(&world, rank, &listeners[rank as usize], addresses, &config).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| join(1));
            drop([join(0), other.join().unwrap()]);
        });
        begin.elapsed()
    }

    #[test]
    fn silent_and_dripping_strangers_do_not_delay_a_world() {
        let (listeners, addresses) = listeners();
        let undisturbed = joined(1, &listeners, &addresses);
        // More than the unproven connections that a listener keeps, and than a backlog of 128.
        let strangers: Vec<TcpStream> = (0..600).map(|i| TcpStream::connect(addresses[i % 2]).unwrap()).collect();
        let ends = AtomicBool::new(false);

        let slowest = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    strangers.iter().for_each(|mut stranger| drop(stranger.write(b"x")));
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let times = (2..12).map(|generation| joined(generation, &listeners, &addresses));
            let slowest = times.max().unwrap();
            ends.store(true, Ordering::Relaxed);
            slowest
        });

        println!("undisturbed {undisturbed:?}, slowest of ten with strangers {slowest:?}");
        assert!(slowest < undisturbed + Duration::from_millis(400), "{slowest:?} beside {undisturbed:?}");
    }

    #[test]
    fn stranger_that_drips_bytes_is_dropped_at_the_deadline_of_its_handshake() {
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), SECRET).unwrap();
        let mut stranger = TcpStream::connect(listener.local_addr()).unwrap();
        stranger.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let begin = Instant::now();

        let is_open = |stranger: &mut TcpStream| {
            let read = std::io::Read::read(stranger, &mut [0]);
            read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        };
        while stranger.write(b"x").is_ok() && is_open(&mut stranger) {
            assert!(begin.elapsed() < 4 * HANDSHAKE_MAX, "the stranger is still connected");
        }

        assert!(begin.elapsed() >= HANDSHAKE_MAX - Duration::from_millis(100), "{:?}", begin.elapsed());
    }

    #[test]
    fn peer_that_connects_before_this_rank_knows_the_world_waits_for_it() {
        let (listeners, addresses) = listeners();
        let (world, config) = (world(7), TcpConfig::default());
        let is_joined = AtomicBool::new(false);

        std::thread::scope(|scope| {
            let early = scope.spawn(|| {
                let rank = TcpRank::join(&world, 1, &listeners[1], &addresses, &config);
                is_joined.store(true, Ordering::Release);
                rank
            });
            while lock(&listeners[0].shared.proven).is_empty() {
                std::thread::yield_now();
            }
            // Longer than the silence that a connecting end tolerates: the listener tells that it is alive.
            std::thread::sleep(Duration::from_millis(700));
            assert!(!is_joined.load(Ordering::Acquire), "the other rank has not joined");

            TcpRank::join(&world, 0, &listeners[0], &addresses, &config).unwrap();
            early.join().unwrap().unwrap();
        });
    }

    #[test]
    fn connections_of_an_earlier_generation_are_closed_when_a_later_one_is_joined() {
        let (listeners, addresses) = listeners();
        let (old, config) = (world(3), TcpConfig { join_max: Duration::from_millis(300), ..TcpConfig::default() });

        let stale = std::thread::scope(|scope| {
            let early = scope.spawn(|| TcpRank::join(&old, 1, &listeners[1], &addresses, &config).map(drop));
            early.join().unwrap()
        });
        joined(4, &listeners, &addresses);

        assert!(matches!(stale, Err(CollectiveError::Unreachable { rank: 0, .. })), "{stale:?}");
        assert!(lock(&listeners[0].shared.proven).is_empty());
    }
}
