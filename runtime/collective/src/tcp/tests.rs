//! Tests of TCP only: peers that die or leave, unauthenticated connections.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::collective::TcpRank;
use super::connect::TcpConfig;
use super::listener::Listener;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{CollectiveError, SliceOperations};

const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

/// A listener per rank, with their addresses.
pub(crate) fn listeners(n_ranks: u32) -> (Vec<Listener>, Vec<SocketAddr>) {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let listeners: Vec<Listener> = (0..n_ranks).map(|_| Listener::bind(any, b"secret").unwrap()).collect();
    let addresses = listeners.iter().map(Listener::local_addr).collect();
    (listeners, addresses)
}

/// Both ranks of a world of two.
fn two_ranks() -> [TcpRank; 2] {
    let world = World::of_one_group(ID, 2).unwrap();
    let (listeners, addresses) = listeners(2);
    let config = TcpConfig::default();
    let join = |rank: u32| TcpRank::join(&world, rank, &listeners[rank as usize], &addresses, &config).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        [join(0), other.join().unwrap()]
    })
}

#[test]
fn waiting_for_a_departed_rank_fails() {
    let [here, there] = two_ranks();
    let mut group = here.communicator(0).unwrap();

    drop(there);
    let error = group.barrier().unwrap_err();

    assert_eq!(error, CollectiveError::aborted("rank 0 waits for rank 1, which has left"));
}

#[test]
fn rank_may_leave_once_its_own_part_is_done() {
    for round in 0..20 {
        let [here, there] = two_ranks();
        let n = [10, 300_000][round % 2];

        let sender = std::thread::spawn(move || there.communicator(0).unwrap().send(&vec![round as f32; n], 0));
        let mut received = vec![0.0f32; n];
        here.communicator(0).unwrap().recv(&mut received, 1).unwrap();

        assert!(received.iter().all(|x| *x == round as f32));
        sender.join().unwrap().unwrap();
    }
}

#[test]
fn abort_reaches_a_sleeping_peer_within_milliseconds() {
    let shortest = (0..10).map(|_| delay_of_release()).min().unwrap();
    println!("shortest of ten delays between abort and release of a peer: {shortest:?}");

    assert!(shortest < Duration::from_millis(25), "{shortest:?}");
}

fn delay_of_release() -> Duration {
    let [here, there] = two_ranks();
    let mut group = here.communicator(0).unwrap();
    let waiter = std::thread::spawn(move || (group.barrier().unwrap_err(), Instant::now()));
    // Usually long enough for the waiter to sleep; only the measured delay depends on it.
    std::thread::park_timeout(Duration::from_millis(5));

    let raised = Instant::now();
    there.abort("node lost");
    let (error, released) = waiter.join().unwrap();

    assert_eq!(error, CollectiveError::aborted("node lost"));
    released.saturating_duration_since(raised)
}

#[test]
fn ranks_connect_although_a_stranger_holds_a_connection() {
    let world = World::of_one_group(ID, 2).unwrap();
    let (listeners, addresses) = listeners(2);
    let config = TcpConfig::default();
    let mut stranger = TcpStream::connect(addresses[0]).unwrap();
    stranger.write_all(&[1; 500]).unwrap();

    let join = |rank: u32| TcpRank::join(&world, rank, &listeners[rank as usize], &addresses, &config);
    let joined = std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        [join(0), other.join().unwrap()]
    });

    assert!(joined.iter().all(Result::is_ok), "{joined:?}");
}

/// The address of a listener that passes the bytes of its connections on to `to`, and from there back, but flips one bit in byte
/// `flipped` of those of each connection to `to`.
fn line_that_flips_a_bit(to: SocketAddr, flipped: usize) -> SocketAddr {
    let line = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = line.local_addr().unwrap();
    std::thread::spawn(move || {
        for near in line.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(to).unwrap());
            let back = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || pass_on(near, far, Some(flipped)));
            std::thread::spawn(move || pass_on(back.0, back.1, None));
        }
    });
    address
}

/// Passes bytes on until one end closes.
fn pass_on(mut from: TcpStream, mut to: TcpStream, flipped: Option<usize>) {
    let (mut bytes, mut n_passed) = ([0; 4096], 0);
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        if let Some(at) = flipped.and_then(|at| at.checked_sub(n_passed)).filter(|at| *at < n) {
            bytes[at] ^= 0x10;
        }
        n_passed += n;
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

// FRAME-1
#[test]
fn bit_that_flips_on_the_wire_ends_the_world_and_reaches_no_sum() {
    // In the announcement, in a header and in the middle of a tensor.
    for flipped in [200, 262_350, 400_000] {
        let world = World::of_one_group(ID, 2).unwrap();
        let (listeners, mut addresses) = listeners(2);
        addresses[0] = line_that_flips_a_bit(addresses[0], flipped);
        let config = TcpConfig { sockets_min: 1, ..TcpConfig::default() };
        let sum = |rank: u32| {
            let joined = TcpRank::join(&world, rank, &listeners[rank as usize], &addresses, &config).unwrap();
            let mut tensor = vec![1.0f32; 600_000];
            (joined.communicator(0).unwrap().all_reduce(&mut tensor), joined)
        };

        let outcomes = std::thread::scope(|scope| {
            let other = scope.spawn(|| sum(1));
            [sum(0).0, other.join().unwrap().0]
        });

        let damaged = "rank 0: what arrived from rank 1 is not what it sent: the checksum of a frame differs";
        let [here, there] = outcomes.map(|outcome| outcome.unwrap_err().to_string());
        assert!(here.contains(damaged) && there.contains(damaged), "byte {flipped}: {here}; {there}");
    }
}
