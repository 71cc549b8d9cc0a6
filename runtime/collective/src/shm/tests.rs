//! Tests of shared memory only: processes, arenas, aborts and observation from outside.
#![allow(unsafe_code)] // Asynchronous operations take raw memory.

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::passing::{receive_world, send_world};
use super::world::{ShmRank, ShmWorld};
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{
    Collective, CollectiveError, Element, Operand, Operation, OperationKind, Progress, RawBuffer, SliceOperations,
};

const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };
const SOCKET_ENV: &str = "PHALANX_COLLECTIVE_TEST_SOCKET";
const RANK_ENV: &str = "PHALANX_COLLECTIVE_TEST_RANK";
const SIZE_ENV: &str = "PHALANX_COLLECTIVE_TEST_SIZE";
const TASK_ENV: &str = "PHALANX_COLLECTIVE_TEST_TASK";
const STAGING_BYTES: u64 = 4 << 20;

fn world_of(size: u32) -> ShmWorld {
    let world = World::of_one_group(ID, size).unwrap();
    ShmWorld::create(&world, &vec![1 << 20; size as usize], STAGING_BYTES).unwrap()
}

/// The main function of a process started by a test: runs the task in its environment. Returns at once in an ordinary
/// test run.
#[test]
fn rank_process() {
    let Ok(path) = std::env::var(SOCKET_ENV) else { return };
    let [rank, size]: [u32; 2] = [RANK_ENV, SIZE_ENV].map(|key| std::env::var(key).unwrap().parse().unwrap());
    let expected = World::of_one_group(ID, size).unwrap();
    let shm = receive_world(&UnixStream::connect(path).unwrap(), &expected, None, &[]).unwrap();
    let joined = shm.join(rank).unwrap();
    let mut group = joined.communicator(0).unwrap();
    match std::env::var(TASK_ENV).unwrap().as_str() {
        "sums" => (0..50).for_each(|round| check_sum(&joined, &mut group, round)),
        "barriers" => {
            let error = std::iter::repeat_with(|| group.barrier()).find_map(Result::err).unwrap();
            assert_eq!(error, CollectiveError::aborted("rank 1 died"));
        }
        other => panic!("no task {other}"),
    }
}

/// One sum in the arena, over several tensors.
fn check_sum(joined: &ShmRank, group: &mut dyn Collective, round: u32) {
    // SAFETY: the arena holds the operands below only, and each operation on them is finished before the next begins.
    let arena = unsafe { joined.arena() };
    let n = [1000, 60_000][round as usize % 2];
    let operands: Vec<Operand> = (0..3)
        .map(|i| {
            let buffer = RawBuffer::new(arena.base().wrapping_add(i * 256 * 1024), 4 * n);
            // SAFETY: the three pieces lie in the arena, do not overlap, and no operation uses them.
            unsafe { std::slice::from_raw_parts_mut(buffer.start().cast::<f32>(), n) }
                .fill((group.position() + 1 + i as u32 + round) as f32);
            Operand::in_place(buffer, f32::TYPE, n)
        })
        .collect();

    let operation = Operation { kind: OperationKind::AllReduce, sequence: round, unit: 1 };
    // SAFETY: the arena outlives the operation and is not touched meanwhile.
    let ticket = unsafe { group.start(&operation, &operands) }.unwrap();
    group.finish(ticket).unwrap();

    for (i, operand) in operands.iter().enumerate() {
        let expected: u32 = (0..group.size()).map(|position| position + 1 + i as u32 + round).sum();
        // SAFETY: the operation is finished.
        let values = unsafe { std::slice::from_raw_parts(operand.recv.start().cast::<f32>(), n) };
        assert!(values.iter().all(|x| *x == expected as f32), "round {round}, tensor {i}");
    }
}

/// Starts a process per rank that runs `task`, and passes the world to each over a socket.
fn start_processes(shm: &ShmWorld, task: &str) -> Vec<Child> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let size = shm.control().world().n_ranks();
    (0..size)
        .map(|rank| {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "shm::tests::rank_process", "--nocapture"])
                .env(SOCKET_ENV, &path)
                .env(RANK_ENV, rank.to_string())
                .env(SIZE_ENV, size.to_string())
                .env(TASK_ENV, task)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            send_world(&listener.accept().unwrap().0, shm, Some(child.id())).unwrap();
            child
        })
        .collect()
}

#[test]
fn processes_sum_tensors_in_their_arenas() {
    for size in 1..5 {
        let shm = world_of(size);

        let children = start_processes(&shm, "sums");

        for mut child in children {
            assert!(child.wait().unwrap().success(), "a rank of {size} failed");
        }
        for rank in 0..size {
            assert_eq!(shm.control().progress(rank).unwrap(), Progress { entered: 50, finished: 50 });
        }
    }
}

// SHM-GROUP-4
#[test]
fn no_rank_writes_peer_memory_once_the_world_is_aborted_and_no_rank_is_marked_as_writing() {
    const N: usize = 2 << 20;
    for _ in 0..20 {
        let world = World::of_one_group(ID, 2).unwrap();
        let shm = ShmWorld::create(&world, &[4 * N as u64; 2], STAGING_BYTES).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let joined = shm.join(rank).unwrap();
                scope.spawn(move || {
                    let mut group = joined.communicator(0).unwrap();
                    let operation = Operation { kind: OperationKind::AllReduce, sequence: 0, unit: 1 };
                    // SAFETY: the arena holds the operand only.
                    let arena = unsafe { joined.arena() };
                    let operand = Operand::in_place(RawBuffer::new(arena.base(), 4 * N), f32::TYPE, N);
                    // SAFETY: the arena outlives the operations, and no thread reads their results.
                    let start = |group: &mut dyn Collective| unsafe { group.start(&operation, &[operand]) };
                    while start(&mut group).and_then(|ticket| group.finish(ticket)).is_ok() {}
                });
            }
            let wait_for_mark = |writes| {
                while shm.control().writes(0).unwrap() != writes {
                    assert!(Instant::now() < deadline, "the write mark of rank 0 never becomes {writes}");
                    std::hint::spin_loop();
                }
            };
            wait_for_mark(true);
            shm.control().abort("the next world begins");
            wait_for_mark(false);
            // Rank 0 sums the first half of the tensors, rank 1 the second half.
            let memory = shm.arena_of(1).unwrap();
            assert!(memory.len() >= STAGING_BYTES as usize + 4 * N);
            // SAFETY: the bytes lie in the memory, and no thread writes them.
            let bytes = unsafe { std::slice::from_raw_parts_mut(memory.base().add(STAGING_BYTES as usize), 2 * N) };
            bytes.fill(7);
            std::thread::sleep(Duration::from_millis(2));
            assert!(bytes.iter().all(|byte| *byte == 7), "rank 0 wrote without a mark");
        });
    }
}

#[test]
fn abort_releases_ranks_that_wait_for_a_killed_rank() {
    let shm = world_of(3);
    let mut children = start_processes(&shm, "barriers");
    while shm.control().progress(1).unwrap().finished < 100 {
        std::thread::yield_now();
    }

    children[1].kill().unwrap();
    children[1].wait().unwrap();
    shm.control().abort("rank 1 died");

    assert!(children[0].wait().unwrap().success());
    assert!(children[2].wait().unwrap().success());
}

#[test]
fn world_is_sent_only_to_the_expected_process() {
    let shm = world_of(1);
    let (here, there) = UnixStream::pair().unwrap();

    let refused = send_world(&here, &shm, Some(u32::MAX)).unwrap_err();
    send_world(&here, &shm, Some(std::process::id())).unwrap();
    let received = receive_world(&there, shm.control().world(), Some(std::process::id()), &[]);

    let found = std::process::id();
    assert_eq!(refused, CollectiveError::Untrusted { what: "process", expected: u32::MAX, found });
    assert!(received.is_ok());
}

#[test]
fn world_of_another_generation_is_refused() {
    let shm = world_of(2);
    let (here, there) = UnixStream::pair().unwrap();
    let later = WorldId { generation: 9, ..ID };

    send_world(&here, &shm, None).unwrap();
    let error = receive_world(&there, &World::of_one_group(later, 2).unwrap(), None, &[]).unwrap_err();

    assert_eq!(error, CollectiveError::Stale { expected: later, found: ID });
}

#[test]
fn rank_is_taken_once() {
    let shm = world_of(2);
    let _first = shm.join(1).unwrap();

    assert_eq!(shm.join(1).unwrap_err(), CollectiveError::RankTaken { rank: 1 });
    assert_eq!(shm.join(2).unwrap_err(), CollectiveError::NoSuchRank { rank: 2, size: 2 });
}

#[test]
fn supervisor_reads_the_operation_for_which_a_rank_waits() {
    let shm = world_of(2);
    let mut group = shm.join(0).unwrap().communicator(0).unwrap();

    let waiting = std::thread::scope(|scope| {
        let waiter = scope.spawn(move || group.all_reduce(&mut [1.0f32; 10]));
        let waiting = loop {
            if let Some(waiting) = shm.control().waiting(0).unwrap() {
                break waiting;
            }
            std::thread::yield_now();
        };
        shm.control().abort("test over");
        waiter.join().unwrap().unwrap_err();
        waiting
    });

    assert!(waiting.to_string().starts_with("group 0: #0 all_reduce of 10 elements"), "{waiting}");
    assert_eq!(shm.control().waiting(0), Ok(None));
    assert_eq!(shm.control().progress(0), Ok(Progress { entered: 1, finished: 0 }));
}

#[test]
fn abort_releases_a_sleeping_waiter_within_milliseconds() {
    // On a loaded machine a woken thread may wait for a core: the shortest of ten delays measures the wake-up.
    let shortest = (0..10).map(|_| delay_of_release()).min().unwrap();
    println!("shortest of ten delays between abort and release: {shortest:?}");

    // Far below the 50 ms after which a sleeper polls without a wake-up.
    assert!(shortest < Duration::from_millis(5), "{shortest:?}");
}

/// Aborts a world while a rank sleeps in a barrier, and returns how long its release took.
fn delay_of_release() -> Duration {
    let shm = world_of(2);
    let mut group = shm.join(0).unwrap().communicator(0).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(move || {
            group.barrier().unwrap_err();
            Instant::now()
        });
        while shm.control().waiting(0).unwrap().is_none() {
            std::thread::yield_now();
        }
        let raised = Instant::now();
        shm.control().abort("node lost");
        waiter.join().unwrap().saturating_duration_since(raised)
    })
}

#[test]
fn operation_too_large_for_staging_is_refused_and_the_world_continues() {
    let shm = world_of(1);
    let mut group = shm.join(0).unwrap().communicator(0).unwrap();
    let n = STAGING_BYTES as usize;

    let error = group.all_gather(&vec![1.0f32; n], &mut vec![0.0; n], 1).unwrap_err();

    assert!(matches!(error, CollectiveError::StagingFull { .. }), "{error}");
    group.all_reduce(&mut vec![1.0f32; 100_000]).unwrap();
}

#[test]
fn operation_beyond_the_in_flight_limit_is_refused_and_the_world_continues() {
    let shm = world_of(2);
    let mut group = shm.join(0).unwrap().communicator(0).unwrap();
    let barrier = Operation { kind: OperationKind::Barrier, sequence: 0, unit: 1 };
    // SAFETY: a barrier has no operands.
    let mut start = || unsafe { group.start(&barrier, &[]) };

    let started = std::iter::repeat_with(&mut start).take(64).collect::<Result<Vec<_>, _>>().unwrap();
    let error = start().unwrap_err();

    assert_eq!((started.len(), error), (64, CollectiveError::TooManyInFlight { max: 64 }));
    assert_eq!(shm.control().aborted(), None);
}

#[test]
fn vote_completes_everywhere_despite_an_abort() {
    let shm = world_of(2);
    let [mut first, mut second] = [0, 1].map(|rank| shm.join(rank).unwrap().communicator(0).unwrap());
    let vote = Operation { kind: OperationKind::AllReduce, sequence: 0, unit: 1 };
    let mut votes = [[1.0f64], [2.0]];
    let [a, b] = votes.each_mut().map(|vote| Operand::in_place(RawBuffer::of_mut(vote), f64::TYPE, 1));
    // SAFETY: the votes outlive the operations and are not touched before those are finished.
    let (of_first, of_second) = unsafe { (first.start(&vote, &[a]).unwrap(), second.start(&vote, &[b]).unwrap()) };

    first.finish(of_first).unwrap();
    first.abort("vote failed");

    second.finish(of_second).unwrap();
    assert_eq!(votes, [[3.0]; 2]);
    assert!(matches!(second.barrier(), Err(CollectiveError::Aborted { .. })), "an aborted world starts no operation");
}
