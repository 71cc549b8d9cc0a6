//! Handshake: both ends prove that they have the job's secret before any data is accepted.
//!
//! The connecting end sends its identity and a nonce; the accepting end answers with its own nonce and a keyed hash of
//! the whole exchange; the connecting end answers with its own hash. The secret itself is never sent, and a recorded
//! exchange cannot be replayed. The accepting end then sends a byte now and then until its rank joins the world of the
//! connection, and [`JOINED`] when it does. Afterwards frames are neither encrypted nor authenticated: the network is
//! trusted not to rewrite connections.
//!
//! The accepting end never waits: it advances a handshake by the bytes that have arrived.
//!
//! Source: the challenge and response of Needham and Schroeder 1978 with keyed hashes (BLAKE3's keyed mode).
#![allow(unsafe_code)] // A system call gets random numbers from the kernel.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use phalanx_device::CollectiveError;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;

const MAGIC: u64 = 0x5048_4c58_5443_5033;
const HELLO_BYTES: usize = 8 * 8 + NONCE_BYTES;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
/// Sent while the rank of the accepting end has not joined the world.
pub(super) const WAITING: u8 = 0;
/// Sent when it joins: the connection belongs to the world.
pub(super) const JOINED: u8 = 1;
const KEY_CONTEXT: &str = "phalanx 2026 collective over TCP";

/// Identifies a connection of two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connection {
    /// The connecting rank.
    pub from: u32,
    /// The accepting rank.
    pub to: u32,
    /// 0 for announcements, others for tensors.
    pub socket: u32,
}

/// Derives the key of a secret.
pub(super) fn key_of(secret: &[u8]) -> [u8; 32] {
    blake3::derive_key(KEY_CONTEXT, secret)
}

/// Handshake of the connecting end: sends its identity and proves it.
///
/// # Errors
/// [`CollectiveError::Unauthenticated`] if the other end's proof is wrong; [`CollectiveError::System`] if the other end
/// disconnects, as it does when it rejects this end.
pub(super) fn connect(
    mut socket: &TcpStream,
    key: &[u8; 32],
    world: &World,
    connection: Connection,
) -> Result<(), CollectiveError> {
    let mut hello = [0; HELLO_BYTES];
    let id = world.id();
    let Connection { from, to, socket: number } = connection;
    let words = [MAGIC, id.job, id.generation, id.incarnation, world.digest(), from.into(), to.into(), number.into()];
    for (bytes, word) in hello.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    hello[64..].copy_from_slice(&nonce()?);
    io("write", socket.write_all(&hello))?;
    let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
    io("read", socket.read_exact(&mut answer))?;
    let (theirs, proof) = answer.split_at(NONCE_BYTES);
    check(proof, prove(key, b"accept", &hello, theirs))?;
    io("write", socket.write_all(prove(key, b"connect", &hello, theirs).as_bytes()))?;
    Ok(())
}

/// What a connecting end declares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    magic: u64,
    /// The world to which the connection belongs.
    pub world: WorldId,
    digest: u64,
    /// The connection.
    pub connection: Connection,
}

impl Hello {
    fn decode(bytes: &[u8; HELLO_BYTES]) -> Hello {
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| bytes[8 * i + b]));
        let narrow = |i| u32::try_from(word(i)).unwrap_or(u32::MAX);
        Hello {
            magic: word(0),
            world: WorldId { job: word(1), generation: word(2), incarnation: word(3) },
            digest: word(4),
            connection: Connection { from: narrow(5), to: narrow(6), socket: narrow(7) },
        }
    }

    /// Checks that the connection is one to rank `own` of `world`.
    ///
    /// # Errors
    /// [`CollectiveError::Stale`] or [`CollectiveError::Invalid`] if it belongs to another world or rank.
    pub(super) fn check(&self, world: &World, own: u32) -> Result<(), CollectiveError> {
        let expect = |field, expected: u64, found: u64| {
            if expected == found { Ok(()) } else { Err(CollectiveError::Invalid { field, expected, found }) }
        };
        expect("magic", MAGIC, self.magic)?;
        if self.world != world.id() {
            return Err(CollectiveError::Stale { expected: world.id(), found: self.world });
        }
        expect("digest of ranks and groups", world.digest(), self.digest)?;
        expect("accepting rank", own.into(), self.connection.to.into())
    }
}

/// A handshake of the accepting end, over a socket that does not block.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) socket: TcpStream,
    /// The hello, then the proof.
    received: [u8; HELLO_BYTES + PROOF_BYTES],
    n_received: usize,
    /// Sent in the answer.
    nonce: [u8; NONCE_BYTES],
}

impl Incoming {
    pub(super) fn new(socket: TcpStream) -> Incoming {
        let received = [0; HELLO_BYTES + PROOF_BYTES];
        Incoming { socket, received, n_received: 0, nonce: [0; NONCE_BYTES] }
    }

    /// Takes what has arrived; returns what the connecting end declares once it has proven that it has the key.
    ///
    /// # Errors
    /// [`CollectiveError::Unauthenticated`] if the proof is wrong; [`CollectiveError::System`] if the other end disconnects.
    /// The connection is useless then.
    pub(super) fn advance(&mut self, key: &[u8; 32]) -> Result<Option<Hello>, CollectiveError> {
        loop {
            // The proof depends on the answer, so nothing may follow a hello before it.
            let end = if self.n_received < HELLO_BYTES { HELLO_BYTES } else { HELLO_BYTES + PROOF_BYTES };
            match self.socket.read(&mut self.received[self.n_received..end]) {
                Ok(0) => return Err(CollectiveError::io("read", &ErrorKind::UnexpectedEof.into())),
                Ok(n) => self.n_received += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(CollectiveError::io("read", &error)),
            }
            if self.n_received == HELLO_BYTES {
                self.answer(key)?;
            } else if self.n_received == HELLO_BYTES + PROOF_BYTES {
                let (hello, proof) = self.hello();
                check(proof, prove(key, b"connect", hello, &self.nonce))?;
                // Only an authenticated hello is read.
                return Ok(Some(Hello::decode(hello)));
            }
        }
    }

    fn hello(&self) -> (&[u8; HELLO_BYTES], &[u8]) {
        self.received.split_first_chunk().expect("a hello and a proof")
    }

    /// Sends the answer, which fits into the buffer of a new socket.
    fn answer(&mut self, key: &[u8; 32]) -> Result<(), CollectiveError> {
        self.nonce = nonce()?;
        let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
        answer[..NONCE_BYTES].copy_from_slice(&self.nonce);
        answer[NONCE_BYTES..].copy_from_slice(prove(key, b"accept", self.hello().0, &self.nonce).as_bytes());
        io("write", self.socket.write_all(&answer))
    }
}

/// One side's keyed hash of the exchange.
fn prove(key: &[u8; 32], side: &[u8], hello: &[u8], nonce: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&[side.len() as u8]).update(side).update(hello).update(nonce);
    hasher.finalize()
}

fn check(found: &[u8], expected: blake3::Hash) -> Result<(), CollectiveError> {
    // Hashes compare in constant time.
    let found: [u8; PROOF_BYTES] = found.try_into().expect("callers pass `PROOF_BYTES` bytes");
    if expected == blake3::Hash::from_bytes(found) { Ok(()) } else { Err(CollectiveError::Unauthenticated) }
}

/// Random bytes from the kernel.
fn nonce() -> Result<[u8; NONCE_BYTES], CollectiveError> {
    let mut bytes = [0u8; NONCE_BYTES];
    // SAFETY: the buffer is ours, of the given length. Requests of up to 256 bytes are not interrupted.
    let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if n == NONCE_BYTES as isize { Ok(bytes) } else { Err(CollectiveError::last_os("getrandom")) }
}

fn io(call: &'static str, outcome: std::io::Result<()>) -> Result<(), CollectiveError> {
    outcome.map_err(|error| CollectiveError::io(call, &error))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };
    const CONNECTION: Connection = Connection { from: 1, to: 0, socket: 2 };

    /// The outcome of a handshake at the accepting end.
    fn accept(socket: TcpStream, key: &[u8; 32], world: &World) -> Result<Connection, CollectiveError> {
        socket.set_nonblocking(true).unwrap();
        let mut incoming = Incoming::new(socket);
        loop {
            if let Some(hello) = incoming.advance(key)? {
                return hello.check(world, 0).map(|()| hello.connection);
            }
            std::thread::yield_now();
        }
    }

    /// Runs a handshake; returns the outcomes of the connecting and the accepting end.
    fn both(
        secrets: [&[u8]; 2],
        ids: [WorldId; 2],
    ) -> (Result<(), CollectiveError>, Result<Connection, CollectiveError>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let worlds = ids.map(|id| World::of_one_group(id, 2).unwrap());
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                let socket = TcpStream::connect(address).unwrap();
                connect(&socket, &key_of(secrets[0]), &worlds[0], CONNECTION)
            });
            let accepted = accept(listener.accept().unwrap().0, &key_of(secrets[1]), &worlds[1]);
            (connecting.join().unwrap(), accepted)
        })
    }

    #[test]
    fn ends_with_the_same_secret_accept_each_other() {
        assert_eq!(both([b"secret", b"secret"], [ID, ID]), (Ok(()), Ok(CONNECTION)));
    }

    #[test]
    fn ends_with_different_secrets_refuse_each_other() {
        let (connecting, accepting) = both([b"secret", b"guess"], [ID, ID]);

        assert_eq!(connecting, Err(CollectiveError::Unauthenticated));
        assert!(accepting.is_err());
    }

    #[test]
    fn end_of_another_generation_is_refused() {
        let found = WorldId { generation: 1, ..ID };

        let (_, accepting) = both([b"secret", b"secret"], [found, ID]);

        assert_eq!(accepting, Err(CollectiveError::Stale { expected: ID, found }));
    }

    #[test]
    fn end_that_only_replays_the_received_proof_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let world = World::of_one_group(ID, 2).unwrap();

        let accepted = std::thread::scope(|scope| {
            let accepting = scope.spawn(|| accept(listener.accept().unwrap().0, &key_of(b"secret"), &world));
            stranger.write_all(&[7; HELLO_BYTES]).unwrap();
            let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
            stranger.read_exact(&mut answer).unwrap();
            stranger.write_all(&answer[NONCE_BYTES..]).unwrap();
            accepting.join().unwrap()
        });

        assert_eq!(accepted, Err(CollectiveError::Unauthenticated));
    }
}
