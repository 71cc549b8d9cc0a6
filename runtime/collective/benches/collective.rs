//! All-reduce between processes of this machine: `cargo bench -p phalanx-collective --bench collective -- RANKS BYTES [BYTES ...]`.
//!
//! Prints one line per size and path: ranks, bytes, median microseconds at rank 0. `shared`: the tensor lies in the
//! rank's arena and is replaced by the sum; `slice`: the tensor lies elsewhere and is staged; `tcp`: over loopback,
//! with ranks as threads of this process. The counterpart is `tests/peers/gloo_allreduce.py`. The last line is the time
//! from an abort to the return of a rank that sleeps in a barrier: median and longest of 200, in microseconds. Not a
//! criterion benchmark: the ranks are processes, which must agree on the number of calls in advance.
#![allow(unsafe_code)] // Tensors in an arena are raw memory.

use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::{Duration, Instant};

use phalanx_collective::shm::passing::{receive_world, send_world};
use phalanx_collective::shm::world::{ShmRank, ShmWorld};
use phalanx_collective::tcp::collective::TcpRank;
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_collective::tcp::listener::Listener;
use phalanx_device::huge_pages;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{
    Collective, CollectiveError, Element, Operand, Operation, OperationKind, RawBuffer, SliceOperations,
};

const ID: WorldId = WorldId { job: 1, generation: 1, incarnation: 1 };
const SOCKET_ENV: &str = "PHALANX_COLLECTIVE_BENCH_SOCKET";
const RANK_ENV: &str = "PHALANX_COLLECTIVE_BENCH_RANK";
const STAGING_BYTES: u64 = 16 << 20;

fn main() -> anyhow::Result<()> {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let (size, sizes) = match numbers.split_first() {
        Some((size, sizes)) if !sizes.is_empty() => (*size as u32, sizes.to_vec()),
        _ => (2, vec![1 << 10, 64 << 20]),
    };
    let world = World::of_one_group(ID, size)?;
    if let Ok(path) = std::env::var(SOCKET_ENV) {
        let shm = receive_world(&UnixStream::connect(path)?, &world, None, &[])?;
        return Ok(run_rank(&shm.join(std::env::var(RANK_ENV)?.parse()?)?, &sizes)?);
    }
    let arena_bytes = sizes.iter().max().copied().unwrap_or(0);
    let shm = ShmWorld::create(&world, &vec![arena_bytes; size as usize], STAGING_BYTES)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path)?;
    let mut children = Vec::new();
    for rank in 1..size {
        let args = numbers.iter().map(u64::to_string);
        let mut command = Command::new(std::env::current_exe()?);
        let child = command.args(args).env(SOCKET_ENV, &path).env(RANK_ENV, rank.to_string()).spawn()?;
        send_world(&listener.accept()?.0, &shm, Some(child.id()))?;
        children.push(child);
    }
    run_rank(&shm.join(0)?, &sizes)?;
    let outcomes = children.into_iter().map(|mut child| child.wait());
    anyhow::ensure!(outcomes.collect::<Result<Vec<_>, _>>()?.iter().all(|status| status.success()), "a rank failed");
    run_tcp(&world, &sizes)?;
    let mut delays = (0..200).map(|_| delay_of_release()).collect::<Result<Vec<_>, _>>()?;
    delays.sort_unstable();
    println!("abort {:.1} {:.1}", delays[100].as_secs_f64() * 1e6, delays[199].as_secs_f64() * 1e6);
    Ok(())
}

/// All ranks as threads that are connected over loopback.
fn run_tcp(world: &World, sizes: &[u64]) -> anyhow::Result<()> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let listeners = (0..world.n_ranks()).map(|_| Listener::bind(any, b"benchmark")).collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<SocketAddr> = listeners.iter().map(Listener::local_addr).collect();
    let config = TcpConfig::default();
    std::thread::scope(|scope| {
        let ranks = (0..).zip(&listeners).map(|(rank, listener)| {
            let (addresses, config) = (&addresses, &config);
            scope.spawn(move || -> Result<(), CollectiveError> {
                let mut group = TcpRank::join(world, rank, listener, addresses, config)?.communicator(0)?;
                for bytes in sizes {
                    let len = *bytes as usize / 4;
                    // As the regions that hold tensors of programs.
                    let mut values: Vec<f32> = Vec::with_capacity(len);
                    huge_pages::request(values.spare_capacity_mut());
                    values.resize(len, 0.0);
                    let operand = Operand::in_place(RawBuffer::of_mut(&mut values), f32::TYPE, len);
                    let time = median_of(n_calls(*bytes).min(1000), || sum(&mut group, operand))?;
                    if rank == 0 {
                        println!("tcp {} {bytes} {:.2}", group.size(), time.as_secs_f64() * 1e6);
                    }
                }
                Ok(())
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    })?;
    Ok(())
}

/// Aborts a world while a rank sleeps in a barrier.
fn delay_of_release() -> Result<Duration, CollectiveError> {
    let shm = ShmWorld::create(&World::of_one_group(ID, 2)?, &[0, 0], 0)?;
    let mut group = shm.join(0)?.communicator(0)?;
    std::thread::scope(|scope| {
        let waiter = scope.spawn(move || (group.barrier(), Instant::now()));
        while shm.control().waiting(0)?.is_none() {
            std::thread::yield_now();
        }
        // The rank is about to sleep; after this pause it sleeps.
        std::thread::sleep(Duration::from_millis(1));
        let raised = Instant::now();
        shm.control().abort("benchmark");
        let (outcome, released) = waiter.join().expect("no rank panics");
        assert!(outcome.is_err(), "an abort ends a barrier");
        Ok(released.saturating_duration_since(raised))
    })
}

fn n_calls(bytes: u64) -> usize {
    if bytes > 1 << 20 { 10 } else { 5000 }
}

/// One sum in place, in memory that no other thread touches meanwhile.
fn sum(group: &mut dyn Collective, operand: Operand) -> Result<(), CollectiveError> {
    let operation = Operation { kind: OperationKind::AllReduce, sequence: 0, unit: 1 };
    // SAFETY: callers name memory that outlives the call.
    let ticket = unsafe { group.start(&operation, &[operand]) }?;
    group.finish(ticket)
}

fn run_rank(joined: &ShmRank, sizes: &[u64]) -> Result<(), CollectiveError> {
    let mut group = joined.communicator(0)?;
    for bytes in sizes {
        let len = *bytes as usize / 4;
        // SAFETY: the arena holds the tensor only.
        let arena = unsafe { joined.arena() };
        let tensor = RawBuffer::new(arena.base(), 4 * len);
        let operand = Operand::in_place(tensor, f32::TYPE, len);
        let shared = median_of(n_calls(*bytes), || sum(&mut group, operand))?;
        let mut values = vec![0.0f32; len];
        let slice = median_of(n_calls(*bytes), || group.all_reduce(&mut values))?;
        if group.position() == 0 {
            println!("shared {} {bytes} {:.2}", group.size(), shared.as_secs_f64() * 1e6);
            println!("slice {} {bytes} {:.2}", group.size(), slice.as_secs_f64() * 1e6);
        }
    }
    Ok(())
}

/// Median time of a call, after three warm-up calls.
fn median_of(
    n_calls: usize,
    mut call: impl FnMut() -> Result<(), CollectiveError>,
) -> Result<Duration, CollectiveError> {
    for _ in 0..3 {
        call()?;
    }
    let mut times = Vec::with_capacity(n_calls);
    for _ in 0..n_calls {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[n_calls / 2])
}
