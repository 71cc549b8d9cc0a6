//! All-reduce between processes of this machine: `cargo bench -p phalanx --bench collective -- RANKS BYTES [BYTES ...]`.
//!
//! Prints one line per size and way: ranks, bytes, median microseconds at rank 0. `shared`: the tensor lies in the
//! segment; `slice`: it is staged through it. The counterpart is `tests/peers/gloo_allreduce.py`.
//! Not a criterion benchmark: the ranks are processes, which have to agree on the number of calls beforehand.

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use phalanx::collective::passing::{receive_segment, send_segment};
use phalanx::collective::segment::Segment;
use phalanx::collective::shm::ShmCollective;
use phalanx::collective::{Collective, CollectiveError, GroupId};

const GROUP: GroupId = GroupId { job: 1, generation: 1, incarnation: 1 };
const SOCKET_ENV: &str = "PHALANX_COLLECTIVE_BENCH_SOCKET";

fn main() -> anyhow::Result<()> {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|arg| arg.parse().ok()).collect();
    let (size, sizes) = match numbers.split_first() {
        Some((size, sizes)) if !sizes.is_empty() => (*size as u32, sizes.to_vec()),
        _ => (2, vec![1 << 10, 64 << 20]),
    };
    if let Ok(path) = std::env::var(SOCKET_ENV) {
        // In a rank's process the first number is its rank.
        let segment = receive_segment(&UnixStream::connect(path)?, GROUP)?;
        return Ok(run_rank(ShmCollective::join(Arc::new(segment), size)?, &sizes)?);
    }
    let arena_bytes = sizes.iter().map(|bytes| bytes.next_multiple_of(64)).sum();
    let segment = Arc::new(Segment::create(GROUP, size, arena_bytes)?);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path)?;
    let mut children = Vec::new();
    for rank in 1..size {
        let args = std::iter::once(u64::from(rank)).chain(sizes.iter().copied()).map(|x| x.to_string());
        children.push(Command::new(std::env::current_exe()?).args(args).env(SOCKET_ENV, &path).spawn()?);
        send_segment(&listener.accept()?.0, &segment)?;
    }
    run_rank(ShmCollective::join(segment, 0)?, &sizes)?;
    for mut child in children {
        anyhow::ensure!(child.wait()?.success(), "a rank failed");
    }
    Ok(())
}

fn run_rank(mut group: ShmCollective, sizes: &[u64]) -> Result<(), CollectiveError> {
    for bytes in sizes {
        let len = *bytes as usize / 4;
        let n_calls = if *bytes > 1 << 20 { 10 } else { 5000 };
        let mut tensor = group.alloc(len)?;
        tensor.fill(0.0);
        let shared = median_of(n_calls, || group.all_reduce_shared(&mut tensor))?;
        let mut values = vec![0.0; len];
        let slice = median_of(n_calls, || group.all_reduce(&mut values))?;
        if group.rank() == 0 {
            println!("shared {} {bytes} {:.2}", group.size(), shared.as_secs_f64() * 1e6);
            println!("slice {} {bytes} {:.2}", group.size(), slice.as_secs_f64() * 1e6);
        }
    }
    Ok(())
}

/// Median time of a call, after three that are not counted.
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
