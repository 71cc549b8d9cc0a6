//! Handshake: both ends prove that they have the job's secret before any data is accepted.
//!
//! The connecting end sends its identity and a nonce; the accepting end answers with its own nonce and a keyed hash of
//! the whole exchange; the connecting end answers with its own hash. The secret itself is never sent, and a recorded
//! exchange cannot be replayed. Afterwards frames are neither encrypted nor authenticated: the network is trusted not
//! to rewrite connections.
//!
//! Source: the challenge and response of Needham and Schroeder 1978 with keyed hashes (BLAKE3's keyed mode).
#![allow(unsafe_code)] // A system call gets random numbers from the kernel.

use std::io::{Read, Write};
use std::net::TcpStream;

use phalanx_device::CollectiveError;
use phalanx_device::world::World;

const MAGIC: u64 = 0x5048_4c58_5443_5031;
const HELLO_BYTES: usize = 8 * 8 + NONCE_BYTES;
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
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

/// Handshake of the accepting end: checks the identity of the connecting end, and proves its own.
///
/// # Errors
/// [`CollectiveError::Unauthenticated`] if the other end's proof is wrong; [`CollectiveError::Stale`] or
/// [`CollectiveError::Invalid`] if it belongs to another world; [`CollectiveError::System`] if it disconnects.
pub(super) fn accept(
    mut socket: &TcpStream,
    key: &[u8; 32],
    world: &World,
    own: u32,
) -> Result<Connection, CollectiveError> {
    let mut hello = [0; HELLO_BYTES];
    io("read", socket.read_exact(&mut hello))?;
    let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
    let nonce = nonce()?;
    answer[..NONCE_BYTES].copy_from_slice(&nonce);
    answer[NONCE_BYTES..].copy_from_slice(prove(key, b"accept", &hello, &nonce).as_bytes());
    io("write", socket.write_all(&answer))?;
    let mut proof = [0; PROOF_BYTES];
    io("read", socket.read_exact(&mut proof))?;
    check(&proof, prove(key, b"connect", &hello, &nonce))?;
    // Only an authenticated hello is read.
    let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| hello[8 * i + b]));
    let id = world.id();
    let found = phalanx_device::world::WorldId { job: word(1), generation: word(2), incarnation: word(3) };
    let expect = |field, expected: u64, found: u64| {
        if expected == found { Ok(()) } else { Err(CollectiveError::Invalid { field, expected, found }) }
    };
    expect("magic", MAGIC, word(0))?;
    if found != id {
        return Err(CollectiveError::Stale { expected: id, found });
    }
    expect("digest of ranks and groups", world.digest(), word(4))?;
    expect("accepting rank", own.into(), word(6))?;
    let narrow = |i| u32::try_from(word(i)).unwrap_or(u32::MAX);
    Ok(Connection { from: narrow(5), to: own, socket: narrow(7) })
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
    use phalanx_device::world::WorldId;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };
    const CONNECTION: Connection = Connection { from: 1, to: 0, socket: 2 };

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
            let accepted = accept(&listener.accept().unwrap().0, &key_of(secrets[1]), &worlds[1], 0);
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
            let accepting = scope.spawn(|| accept(&listener.accept().unwrap().0, &key_of(b"secret"), &world, 0));
            stranger.write_all(&[7; HELLO_BYTES]).unwrap();
            let mut answer = [0; NONCE_BYTES + PROOF_BYTES];
            stranger.read_exact(&mut answer).unwrap();
            stranger.write_all(&answer[NONCE_BYTES..]).unwrap();
            accepting.join().unwrap()
        });

        assert_eq!(accepted, Err(CollectiveError::Unauthenticated));
    }
}
