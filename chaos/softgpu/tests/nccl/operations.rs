//! Operations give the results of their definitions.

use super::api::{F32, P, SUM, Thread, UniqueId, api, join, ok, passes, processes, text, unique_id};

/// Element `i` of rank `rank`; sums of a few are exact.
fn element(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 1009) % 4001) as f32
}

fn elements(rank: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| element(rank, i)).collect()
}

fn sum(size: usize, i: usize) -> f32 {
    (0..size).map(|rank| element(rank, i)).sum()
}

/// Every kind once, with `n` elements a rank.
fn check_all(thread: &Thread, comm: P, (rank, size): (usize, usize), n: usize) {
    let s = thread.stream;
    let out = |len: usize| thread.put(&vec![-1.0; len]);
    let (own, wide) = (thread.put(&elements(rank, n)), thread.put(&elements(rank, n * size)));
    let (a, b, c, d) = (out(n), out(n), out(n * size), out(n * size));
    let root = size - 1;

    ok!(ncclAllReduce(own, a, n, F32, SUM, comm, s));
    assert_eq!(thread.get(a, n), (0..n).map(|i| sum(size, i)).collect::<Vec<_>>(), "AllReduce");
    ok!(ncclReduceScatter(wide, b, n, F32, SUM, comm, s));
    assert_eq!(thread.get(b, n), (0..n).map(|i| sum(size, rank * n + i)).collect::<Vec<_>>(), "ReduceScatter");
    ok!(ncclAllGather(own, c, n, F32, comm, s));
    assert_eq!(thread.get(c, n * size), (0..size).flat_map(|r| elements(r, n)).collect::<Vec<_>>(), "AllGather");
    ok!(ncclAlltoAll(wide, d, n, F32, comm, s));
    let parts = (0..size).flat_map(|r| (0..n).map(move |i| element(r, rank * n + i)));
    assert_eq!(thread.get(d, n * size), parts.collect::<Vec<_>>(), "AlltoAll");
    ok!(ncclBroadcast(own, a, n, F32, root as i32, comm, s));
    assert_eq!(thread.get(a, n), elements(root, n), "Broadcast");
    ok!(ncclReduce(own, b, n, F32, 2, root as i32, comm, s));
    let largest = |i: usize| (0..size).map(|r| element(r, i)).fold(f32::MIN, f32::max);
    if rank == root {
        assert_eq!(thread.get(b, n), (0..n).map(largest).collect::<Vec<_>>(), "Reduce, maximum");
    }
    check_ring(thread, comm, (rank, size), n);
}

/// Sends to the next rank and to itself, in one group.
fn check_ring(thread: &Thread, comm: P, (rank, size): (usize, usize), n: usize) {
    let s = thread.stream;
    let (next, before) = (((rank + 1) % size) as i32, ((rank + size - 1) % size) as i32);
    let own = thread.put(&elements(rank, n));
    let (from_before, again, from_self) =
        (thread.put(&vec![-1.0; n]), thread.put(&vec![-1.0; n]), thread.put(&vec![-1.0; n]));
    ok!(ncclGroupStart());
    ok!(ncclSend(own, n, F32, next, comm, s));
    ok!(ncclSend(own, n / 2, F32, next, comm, s));
    ok!(ncclRecv(from_before, n, F32, before, comm, s));
    ok!(ncclRecv(again, n / 2, F32, before, comm, s));
    ok!(ncclSend(own, n, F32, rank as i32, comm, s));
    ok!(ncclRecv(from_self, n, F32, rank as i32, comm, s));
    ok!(ncclGroupEnd());
    assert_eq!(thread.get(from_before, n), elements(before as usize, n), "from the rank before");
    assert_eq!(thread.get(again, n / 2), elements(before as usize, n / 2), "its second message");
    assert_eq!(thread.get(from_self, n), elements(rank, n), "from itself");
}

/// Lengths around a chunk, and none.
const LENGTHS: [usize; 5] = [0, 1, 1000, 65_536, 200_001];

#[test]
fn operations_between_processes_equal_their_definitions() {
    let ran = processes("operations::operations_between_processes_equal_their_definitions", 3, &[], |rank, ids| {
        let thread = Thread::new(0);
        let comm = join(ids[0], 3, rank);
        for n in LENGTHS {
            check_all(&thread, comm, (rank, 3), n);
        }
        ok!(ncclCommDestroy(comm));
    });

    for output in ran.into_iter().flatten() {
        assert!(output.status.success(), "{}", text(&output));
    }
}

/// Runs `body` as ranks that are threads of this process.
fn threads(n: usize, body: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..n).map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn ranks_may_be_threads_with_several_communicators_in_use_at_once() {
    passes("operations::ranks_may_be_threads_with_several_communicators_in_use_at_once", &[], || {
        let ids: Vec<UniqueId> = (0..3).map(|_| unique_id()).collect();
        threads(4, |rank| {
            let thread = Thread::new(0);
            let (all, pair) = (join(ids[0], 4, rank), join(ids[1 + rank / 2], 2, rank % 2));
            let (a, b) = (thread.put(&[rank as f32]), thread.put(&[rank as f32]));
            let other = Thread::new(0);

            for _ in 0..20 {
                ok!(ncclAllReduce(a, a, 1, F32, 4, all, thread.stream));
                ok!(ncclAllReduce(b, b, 1, F32, 4, pair, other.stream));
            }

            assert_eq!(thread.get(a, 1), [1.5]);
            assert_eq!(other.get(b, 1), [if rank < 2 { 0.5 } else { 2.5 }]);
        });
    });
}

#[test]
fn captured_operations_run_at_each_launch_of_their_graph() {
    passes("operations::captured_operations_run_at_each_launch_of_their_graph", &[], || {
        let id = unique_id();
        threads(2, |rank| {
            let thread = Thread::new(0);
            let (comm, at) = (join(id, 2, rank), thread.put(&[1.0, 2.0]));
            let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());

            ok!(cuStreamBeginCapture_v2(thread.stream, 2));
            ok!(ncclAllReduce(at, at, 2, F32, SUM, comm, thread.stream));
            ok!(cuStreamEndCapture(thread.stream, &raw mut graph));
            ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
            for _ in 0..3 {
                ok!(cuGraphLaunch(exec, thread.stream));
            }

            assert_eq!(thread.get(at, 2), [8.0, 16.0]);
            ok!(cuGraphExecDestroy(exec));
            ok!(cuGraphDestroy(graph));
            ok!(ncclCommDestroy(comm));
        });
    });
}
