//! The operations against sums written out, over threads and over real processes.

use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::passing::{receive_segment, send_segment};
use super::segment::Segment;
use super::shm::ShmCollective;
use super::{Collective, CollectiveError, GroupId, Progress};

const GROUP: GroupId = GroupId { job: 1, generation: 2, incarnation: 3 };
const SOCKET_ENV: &str = "PHALANX_COLLECTIVE_TEST_SOCKET";
const RANK_ENV: &str = "PHALANX_COLLECTIVE_TEST_RANK";
const TASK_ENV: &str = "PHALANX_COLLECTIVE_TEST_TASK";

/// Runs `body` as every rank of a group of threads, each with a mapping of its own, and returns what they returned.
fn with_threads<T: Send>(size: u32, body: impl Fn(ShmCollective) -> T + Sync) -> Vec<T> {
    let segment = Segment::create(GROUP, size, 1 << 20).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let (segment, body) = (&segment, &body);
                scope.spawn(move || {
                    let fd = segment.fd().try_clone_to_owned().unwrap();
                    let own = Arc::new(Segment::attach(fd, GROUP).unwrap());
                    body(ShmCollective::join(own, rank).unwrap())
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Values that no two ranks or positions share and whose sums round, so that the order of summation shows.
fn values(rank: u32, len: usize, salt: u32) -> Vec<f32> {
    (0..len as u32)
        .map(|i| {
            let x = (i ^ salt).wrapping_mul(0x9e37_79b9).wrapping_add(rank.wrapping_mul(0x85eb_ca6b));
            (x ^ (x >> 15)) as f32 / 65_536.0 - 20_000.0
        })
        .collect()
}

/// Sum over ranks in order of rank.
fn sum(size: u32, len: usize, salt: u32) -> Vec<f32> {
    let mut total = values(0, len, salt);
    for rank in 1..size {
        total.iter_mut().zip(values(rank, len, salt)).for_each(|(t, x)| *t += x);
    }
    total
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Every operation once; panics at the first result that differs in a bit from its definition.
fn check_all_operations(group: &mut impl Collective, len: usize, salt: u32) {
    let (rank, size) = (group.rank(), group.size());
    let mut reduced = values(rank, len, salt);
    group.all_reduce(&mut reduced).unwrap();
    assert_eq!(bits(&reduced), bits(&sum(size, len, salt)), "all_reduce");

    let mut part = vec![0.0; len];
    group.reduce_scatter(&values(rank, len * size as usize, salt), &mut part).unwrap();
    let whole = sum(size, len * size as usize, salt);
    assert_eq!(bits(&part), bits(&whole[rank as usize * len..][..len]), "reduce_scatter");

    let mut gathered = vec![0.0; len * size as usize];
    group.all_gather(&values(rank, len, salt), &mut gathered).unwrap();
    let concatenated: Vec<f32> = (0..size).flat_map(|peer| values(peer, len, salt)).collect();
    assert_eq!(bits(&gathered), bits(&concatenated), "all_gather");

    let root = salt % size;
    let mut copied = values(rank, len, salt);
    group.broadcast(&mut copied, root).unwrap();
    assert_eq!(bits(&copied), bits(&values(root, len, salt)), "broadcast");
    group.barrier().unwrap();
}

fn check_shared(group: &mut ShmCollective, len: usize, salt: u32) {
    let mut tensor = group.alloc(len).unwrap();
    tensor.copy_from_slice(&values(group.rank(), len, salt));
    group.all_reduce_shared(&mut tensor).unwrap();
    assert_eq!(bits(&tensor), bits(&sum(group.size(), len, salt)), "all_reduce_shared");
}

/// Lengths around every boundary: nothing, one, odd, the flat limit, the staging size, several chunks.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), 2..100usize, 2040..2060usize, 65_530..65_540usize, 131_000..200_000usize]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn operations_over_threads_equal_their_definitions(
        size in 1..6u32, lens in prop::collection::vec(lengths(), 1..4), salt in any::<u32>()
    ) {
        with_threads(size, |mut group| {
            for len in &lens {
                check_all_operations(&mut group, *len, salt);
                check_shared(&mut group, len / 4, salt);
            }
        });
    }
}

/// What a process started by a test does: the task in its environment. Returns at once in an ordinary test run.
#[test]
fn rank_process() {
    let Ok(path) = std::env::var(SOCKET_ENV) else { return };
    let rank: u32 = std::env::var(RANK_ENV).unwrap().parse().unwrap();
    let task = std::env::var(TASK_ENV).unwrap();
    let socket = UnixStream::connect(path).unwrap();
    let segment = Arc::new(receive_segment(&socket, GROUP).unwrap());
    let mut group = ShmCollective::join(segment, rank).unwrap();
    match task.as_str() {
        "operations" => {
            for (i, len) in [0, 1, 77, 2048, 2049, 70_001, 200_003].into_iter().enumerate() {
                check_all_operations(&mut group, len, i as u32);
                check_shared(&mut group, len / 2, i as u32);
            }
        }
        "barriers" => {
            let error = std::iter::repeat_with(|| group.barrier()).find_map(Result::err).unwrap();
            assert_eq!(error, CollectiveError::Aborted { reason: "rank 1 died".to_owned() });
        }
        other => panic!("no task {other}"),
    }
}

/// Starts a group of processes with `task`, each given the segment over a socket.
fn start_processes(segment: &Segment, task: &str) -> Vec<Child> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    (0..segment.size())
        .map(|rank| {
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "collective::tests::rank_process", "--nocapture"])
                .env(SOCKET_ENV, &path)
                .env(RANK_ENV, rank.to_string())
                .env(TASK_ENV, task)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            send_segment(&listener.accept().unwrap().0, segment).unwrap();
            child
        })
        .collect()
}

#[test]
fn operations_over_processes_equal_their_definitions() {
    for size in 1..6 {
        let segment = Segment::create(GROUP, size, 1 << 20).unwrap();

        let children = start_processes(&segment, "operations");

        for mut child in children {
            assert!(child.wait().unwrap().success(), "a rank of {size} failed");
        }
        let n_operations = 7 * 6;
        for rank in 0..size {
            let expected = Progress { entered: n_operations, finished: n_operations };
            assert_eq!(segment.progress(rank).unwrap(), expected);
        }
    }
}

#[test]
fn a_killed_rank_does_not_hang_the_others_once_the_group_is_aborted() {
    let segment = Segment::create(GROUP, 3, 0).unwrap();
    let mut children = start_processes(&segment, "barriers");
    while segment.progress(1).unwrap().finished < 100 {
        std::thread::yield_now();
    }

    children[1].kill().unwrap();
    children[1].wait().unwrap();
    segment.abort("rank 1 died");

    assert!(children[0].wait().unwrap().success());
    assert!(children[2].wait().unwrap().success());
}

#[test]
fn ranks_that_disagree_about_the_kind_all_name_both_sides() {
    let errors = with_threads(3, |mut group| {
        let mut values = vec![1.0; 10];
        if group.rank() == 1 { group.broadcast(&mut values, 0) } else { group.all_reduce(&mut values) }.unwrap_err()
    });

    assert_all_name(&errors, "#1 AllReduce of 10 F32", "rank 1 issued #1 Broadcast { root: 0 } of 10 F32");
}

#[test]
fn ranks_that_disagree_about_the_size_all_name_both_sides() {
    let errors = with_threads(2, |mut group| group.all_reduce(&mut vec![1.0; 10 + group.rank() as usize]).unwrap_err());

    assert_all_name(&errors, "rank 0 issued #1 AllReduce of 10 F32", "rank 1 issued #1 AllReduce of 11 F32");
}

fn assert_all_name(errors: &[CollectiveError], one: &str, other: &str) {
    for error in errors {
        let text = error.to_string();
        assert!(text.contains(one) && text.contains(other), "{text}");
    }
}

#[test]
fn a_tensor_whose_operation_failed_is_empty() {
    let lens = with_threads(2, |mut group| {
        let mut tensor = group.alloc(10 + group.rank() as usize).unwrap();
        group.all_reduce_shared(&mut tensor).unwrap_err();
        tensor.len()
    });

    assert_eq!(lens, [0, 0]);
}

#[test]
fn a_rank_that_panics_aborts_its_group() {
    let segment = Arc::new(Segment::create(GROUP, 2, 0).unwrap());
    let mut waiter = ShmCollective::join(segment.clone(), 0).unwrap();
    let leaver = ShmCollective::join(segment, 1).unwrap();

    let panicked = std::thread::spawn(move || {
        let _leaver = leaver;
        panic!("on purpose");
    });

    let reason = "rank 1 panicked".to_owned();
    assert_eq!(waiter.barrier().unwrap_err(), CollectiveError::Aborted { reason });
    assert!(panicked.join().is_err());
}

#[test]
fn arguments_that_do_not_fit_fail_every_rank() {
    let errors = with_threads(2, |mut group| match group.rank() {
        0 => group.all_gather(&[1.0, 2.0], &mut [0.0; 3]).unwrap_err(),
        _ => group.all_gather(&[1.0, 2.0], &mut [0.0; 4]).unwrap_err(),
    });

    assert_eq!(errors[0], CollectiveError::Length { operation: "all_gather", expected: 4, found: 3 });
    let reason = "rank 0: all_gather: expected 4 elements, found 3".to_owned();
    assert_eq!(errors[1], CollectiveError::Aborted { reason });
}

#[test]
fn abort_releases_a_sleeping_waiter_within_milliseconds_and_fails_later_calls() {
    // On a loaded machine a thread that was woken may wait for a core: the shortest of a few delays is the wake-up's.
    let shortest = (0..10).map(|_| delay_of_release()).min().unwrap();

    // Below the 50 ms after which a sleeper looks by itself: the wake-up did it.
    assert!(shortest < Duration::from_millis(25), "{shortest:?}");
}

/// Aborts a group while a rank sleeps in a barrier; checks what the rank is told, and returns how long that took.
fn delay_of_release() -> Duration {
    let segment = Arc::new(Segment::create(GROUP, 2, 0).unwrap());
    let mut group = ShmCollective::join(segment.clone(), 0).unwrap();
    let expected = CollectiveError::Aborted { reason: "node lost".to_owned() };

    let (error, later, delay) = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let error = group.barrier().unwrap_err();
            (error, Instant::now(), group.all_reduce(&mut [1.0]).unwrap_err())
        });
        while segment.progress(0).unwrap().entered == 0 {
            std::thread::yield_now();
        }
        let raised = Instant::now();
        segment.abort("node lost");
        let (error, released, later) = waiter.join().unwrap();
        (error, later, released.saturating_duration_since(raised))
    });

    assert_eq!((error, later), (expected.clone(), expected));
    delay
}

#[test]
fn a_segment_of_another_generation_is_refused() {
    let segment = Segment::create(GROUP, 2, 0).unwrap();
    let expected = GroupId { generation: 9, ..GROUP };

    let error = Segment::attach(segment.fd().try_clone_to_owned().unwrap(), expected).unwrap_err();

    assert_eq!(error, CollectiveError::Stale { expected, found: GROUP });
}

#[test]
fn a_file_that_can_shrink_is_refused() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 21).unwrap();

    let error = Segment::attach(file.into(), GROUP).unwrap_err();

    assert!(
        matches!(error, CollectiveError::System { .. } | CollectiveError::Invalid { field: "seals", .. }),
        "{error}"
    );
}

#[test]
fn a_rank_is_taken_once() {
    let segment = Arc::new(Segment::create(GROUP, 2, 0).unwrap());
    let _first = ShmCollective::join(segment.clone(), 1).unwrap();

    assert_eq!(ShmCollective::join(segment.clone(), 1).unwrap_err(), CollectiveError::RankTaken { rank: 1 });
    assert_eq!(ShmCollective::join(segment, 2).unwrap_err(), CollectiveError::NoSuchRank { rank: 2, size: 2 });
}
