//! Ranks that are processes, over NCCL with a host communicator over TCP: one of them dies.

use super::{BorrowedGpu, ID, libnccl};
use crate::nccl::{Choice, connect};
use phalanx_collective::tcp::collective::TcpRank;
use phalanx_collective::tcp::connect::TcpConfig;
use phalanx_collective::tcp::listener::Listener;
use phalanx_device::world::World;
use phalanx_device::{
    Collective, CollectiveError, ElementType, Operand, Operation, OperationKind, Progress, RawBuffer,
};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any delay of a busy machine.
const LONG: Duration = Duration::from_secs(120);
const RANK: &str = "PHALANX_TEST_RANK";
const FOLDER: &str = "PHALANX_TEST_FOLDER";

/// Written by the rank that survives.
const HAS_RESULTS: &str = "has-results";

/// Waits for a value.
fn until<T>(otherwise: &str, value: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = value() {
            return value;
        }
        assert!(start.elapsed() < LONG, "{otherwise}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The address that a rank has written, when it is there.
fn address(folder: &Path, rank: u32) -> SocketAddr {
    let file = folder.join(rank.to_string());
    until("the other rank has not written its address", || std::fs::read_to_string(&file).ok()?.parse().ok())
}

/// The host communicator of one of two processes.
fn host(rank: u32, folder: &Path) -> Box<dyn Collective> {
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap(), b"secret").unwrap();
    let unfinished = folder.join(format!("{rank}.unfinished"));
    std::fs::write(&unfinished, listener.local_addr().to_string()).unwrap();
    std::fs::rename(unfinished, folder.join(rank.to_string())).unwrap();
    let addresses = [0, 1].map(|rank| address(folder, rank));
    let world = World::of_one_group(ID, 2).unwrap();
    let joined = TcpRank::join(&world, rank, &listener, &addresses, &TcpConfig::default()).unwrap();
    let group = Box::new(joined.communicator(0).unwrap());
    // The rank would leave its world when it is dropped.
    std::mem::forget(joined);
    group
}

fn run(rank: u32, folder: &Path) {
    let gpu = BorrowedGpu::take();
    let mut group = connect(&gpu.0, || Ok(libnccl()), host(rank, folder), Choice::Nccl).unwrap();
    let memory = gpu.0.allocate(4).unwrap();
    // SAFETY: memory of this GPU.
    unsafe { gpu.0.write(memory.address, bytemuck::bytes_of(&1.0f32)) }.unwrap();
    let buffer = RawBuffer::on_device(memory.address as usize, 4, gpu.0.ordinal);
    let operand = Operand::in_place(buffer, ElementType::F32, 1);
    let sum = |group: &mut Box<dyn Collective>| {
        let operation = Operation { kind: OperationKind::AllReduce, sequence: 0, unit: 1 };
        // SAFETY: the memory lives until the process ends.
        let ticket = unsafe { group.start(&operation, &[operand]) }?;
        group.finish(ticket)
    };
    for _ in 0..3 {
        sum(&mut group).unwrap();
    }
    let mut result = [0.0f32];
    // SAFETY: as above.
    unsafe { gpu.0.read(memory.address, bytemuck::cast_slice_mut(&mut result)) }.unwrap();
    assert_eq!(result, [8.0]);
    if rank == 1 {
        // A member that still is in an earlier sum would lose it.
        until("the other rank has not its results", || folder.join(HAS_RESULTS).exists().then_some(()));
        std::process::abort();
    }
    std::fs::write(folder.join(HAS_RESULTS), "").unwrap();

    let outcome = sum(&mut group);

    assert!(matches!(outcome, Err(CollectiveError::Aborted { .. })), "{outcome:?}");
    let control = group.control();
    // If the peer's death is known before the collective starts, the stream never enters it.
    let is_free = |progress: &Progress| progress.entered >= 3 && progress.entered == progress.finished;
    until("the communicator's stream is not free", || control.device_progress().filter(is_free));
}

#[test]
fn rank_whose_peer_process_dies_gets_an_error_and_a_free_stream() {
    if let (Ok(rank), Ok(folder)) = (std::env::var(RANK), std::env::var(FOLDER)) {
        return run(rank.parse().unwrap(), Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: u32| -> Child {
        let test = "tests::processes::rank_whose_peer_process_dies_gets_an_error_and_a_free_stream";
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact", "--nocapture"]).env(RANK, rank.to_string()).env(FOLDER, folder.path());
        // As if each process ran on a machine of its own: both have device 0.
        command.env("NCCL_HOSTID", rank.to_string()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };

    let outputs = [0, 1].map(start).map(|child| child.wait_with_output().unwrap());

    let text = outputs
        .each_ref()
        .map(|o| String::from_utf8_lossy(&o.stdout).into_owned() + &String::from_utf8_lossy(&o.stderr));
    assert!(outputs[0].status.success() && text[0].contains("1 passed"), "{}", text[0]);
    assert!(!outputs[1].status.success() && !text[1].contains("panicked"), "{}", text[1]);
}
