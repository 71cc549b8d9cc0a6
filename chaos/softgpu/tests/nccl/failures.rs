//! What does not end, what ends it, and what is refused.

use super::api::{
    Config, F32, IN_PROGRESS, P, SUM, Thread, UniqueId, alone, api, join, ok, passes, processes, state, text,
    unique_id, until,
};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);

/// Communicators of two ranks in this process, each with the rank's thread.
fn pair(id: UniqueId) -> [(Thread, P); 2] {
    let other = std::thread::spawn(move || {
        let thread = Thread::new(0);
        (thread.stream as usize, join(id, 2, 1) as usize)
    });
    let thread = Thread::new(0);
    let comm = join(id, 2, 0);
    let (stream, other) = other.join().unwrap();
    [(thread, comm), (Thread { stream: stream as P }, other as P)]
}

/// Calls `ncclCommAbort` in another thread; tells when it has returned.
fn abort(comm: P) -> Receiver<()> {
    let (comm, (done, is_done)) = (comm as usize, channel());
    std::thread::spawn(move || {
        ok!(ncclCommAbort(comm as P));
        done.send(()).unwrap();
    });
    is_done
}

#[test]
fn communicator_that_does_not_block_is_in_progress_until_its_peer_comes() {
    passes("failures::communicator_that_does_not_block_is_in_progress_until_its_peer_comes", &[], || {
        let (id, config, mut comm) = (unique_id(), Config::new(0), std::ptr::null_mut());
        let thread = Thread::new(0);
        let at = thread.put(&[1.0]);

        // SAFETY: valid arguments.
        let begun = unsafe { (api().ncclCommInitRankConfig)(&raw mut comm, 2, id, 0, &raw const config) };
        assert_eq!(begun, IN_PROGRESS);
        std::thread::sleep(SHORT);
        assert_eq!(state(comm), IN_PROGRESS);
        // SAFETY: as above.
        assert_eq!(unsafe { (api().ncclAllReduce)(at, at, 1, F32, SUM, comm, thread.stream) }, 4, "used too early");
        let peer = join(id, 2, 1);
        assert!(until(LONG, || state(comm) == 0));

        // The first launch is late, and `ncclInProgress` until then.
        // SAFETY: as above.
        assert_eq!(unsafe { (api().ncclAllReduce)(at, at, 1, F32, SUM, comm, thread.stream) }, IN_PROGRESS);
        assert!(until(LONG, || state(comm) == 0));
        let other = Thread::new(0);
        let theirs = other.put(&[2.0]);
        ok!(ncclAllReduce(theirs, theirs, 1, F32, SUM, peer, other.stream));
        assert_eq!(thread.get(at, 1), [3.0]);
    });
}

#[test]
fn group_of_inits_needs_no_threads() {
    passes("failures::group_of_inits_needs_no_threads", &[], || {
        let (id, mut comms) = (unique_id(), [std::ptr::null_mut(); 2]);
        Thread::new(0);
        ok!(ncclGroupStart());
        ok!(ncclCommInitRank(&raw mut comms[0], 2, id, 0));
        ok!(ncclCommInitRank(&raw mut comms[1], 2, id, 1));
        ok!(ncclGroupEnd());
        assert_eq!(comms.map(state), [0, 0]);
    });
}

#[test]
fn dead_peer_is_not_noticed_and_abort_frees_the_stream() {
    let ran = processes("failures::dead_peer_is_not_noticed_and_abort_frees_the_stream", 2, &[], |rank, ids| {
        let thread = Thread::new(0);
        let comm = join(ids[0], 2, rank);
        if rank == 1 {
            std::process::abort();
        }
        let at = thread.put(&[1.0]);
        ok!(ncclAllReduce(at, at, 1, F32, SUM, comm, thread.stream));
        assert!(!thread.is_idle_within(Duration::from_millis(500)));
        assert_eq!(state(comm), 0);

        ok!(ncclCommAbort(comm));

        assert!(thread.is_idle_within(LONG));
        // SAFETY: the handle is invalid, and refused.
        assert_eq!(unsafe { (api().ncclCommAbort)(comm) }, 4);
    });

    if let Some(outputs) = ran {
        assert!(outputs[0].status.success(), "{}", text(&outputs[0]));
        assert!(!outputs[1].status.success());
    }
}

#[test]
fn abort_ends_operations_at_once_but_returns_when_graphs_are_destroyed() {
    passes("failures::abort_ends_operations_at_once_but_returns_when_graphs_are_destroyed", &[], || {
        let [(thread, comm), _] = pair(unique_id());
        let at = thread.put(&[1.0]);
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        ok!(cuStreamBeginCapture_v2(thread.stream, 2));
        ok!(ncclAllReduce(at, at, 1, F32, SUM, comm, thread.stream));
        ok!(cuStreamEndCapture(thread.stream, &raw mut graph));
        ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        ok!(cuGraphLaunch(exec, thread.stream));
        assert!(!thread.is_idle_within(SHORT));

        let aborted = abort(comm);

        assert!(thread.is_idle_within(LONG), "the stream ends");
        assert!(aborted.recv_timeout(SHORT).is_err(), "the graphs exist");
        ok!(cuGraphDestroy(graph));
        assert!(aborted.recv_timeout(SHORT).is_err(), "one exists");
        ok!(cuGraphExecDestroy(exec));
        assert!(aborted.recv_timeout(LONG).is_ok());
    });
}

#[test]
fn abort_waits_for_another_hanging_communicator_unless_both_are_in_one_group() {
    passes("failures::abort_waits_for_another_hanging_communicator_unless_both_are_in_one_group", &[], || {
        let hanging = || {
            let [(thread, comm), _] = pair(unique_id());
            let at = thread.put(&[1.0]);
            ok!(ncclAllReduce(at, at, 1, F32, SUM, comm, thread.stream));
            (thread, comm)
        };
        let (a, b) = (hanging(), hanging());

        let first = abort(a.1);
        assert!(a.0.is_idle_within(LONG), "its own stream ends");
        assert!(first.recv_timeout(SHORT).is_err(), "the other one hangs");
        let second = abort(b.1);
        assert!(first.recv_timeout(LONG).is_ok() && second.recv_timeout(LONG).is_ok());

        let (a, b) = (hanging(), hanging());
        ok!(ncclGroupStart());
        ok!(ncclCommAbort(a.1));
        ok!(ncclCommAbort(b.1));
        ok!(ncclGroupEnd());
        assert!(a.0.is_idle_within(LONG) && b.0.is_idle_within(LONG));
    });
}

#[test]
fn revoke_ends_what_is_under_way_and_refuses_what_comes() {
    passes("failures::revoke_ends_what_is_under_way_and_refuses_what_comes", &[], || {
        let [(thread, comm), _] = pair(unique_id());
        let at = thread.put(&[1.0]);
        ok!(ncclAllReduce(at, at, 1, F32, SUM, comm, thread.stream));
        assert!(!thread.is_idle_within(SHORT));

        ok!(ncclCommRevoke(comm, 0));

        assert!(thread.is_idle_within(LONG));
        assert_eq!(state(comm), 0);
        // SAFETY: refused.
        assert_eq!(unsafe { (api().ncclAllReduce)(at, at, 1, F32, SUM, comm, thread.stream) }, 5);
        ok!(ncclCommDestroy(comm));
    });
}

/// A communicator that does not block and whose peer never comes.
fn connecting() -> P {
    let (config, mut comm) = (Config::new(0), std::ptr::null_mut());
    Thread::new(0);
    // SAFETY: valid arguments.
    let begun = unsafe { (api().ncclCommInitRankConfig)(&raw mut comm, 2, unique_id(), 0, &raw const config) };
    assert_eq!(begun, IN_PROGRESS);
    comm
}

#[test]
fn abort_of_a_pending_job_frees_it_once() {
    passes("failures::abort_of_a_pending_job_frees_it_once", &[], || ok!(ncclCommAbort(connecting())));
}

#[test]
fn abort_after_a_revoke_of_a_pending_job_uses_freed_memory() {
    let ran = alone("failures::abort_after_a_revoke_of_a_pending_job_uses_freed_memory", &[], || {
        let comm = connecting();
        // SAFETY: valid arguments.
        unsafe { (api().ncclCommRevoke)(comm, 0) };
        // SAFETY: the process ends here, where NCCL would read freed memory.
        unsafe { (api().ncclCommAbort)(comm) };
    });

    if let Some(output) = ran {
        assert_eq!(output.status.code(), Some(88), "{}", text(&output));
        assert!(text(&output).contains("use after free"), "{}", text(&output));
    }
}

#[test]
fn revoke_after_a_look_that_found_success_frees_nothing_twice() {
    passes("failures::revoke_after_a_look_that_found_success_frees_nothing_twice", &[], || {
        let (id, config, mut comm) = (unique_id(), Config::new(0), std::ptr::null_mut());
        Thread::new(0);
        // SAFETY: valid arguments.
        unsafe { (api().ncclCommInitRankConfig)(&raw mut comm, 2, id, 0, &raw const config) };
        join(id, 2, 1);
        assert!(until(LONG, || state(comm) == 0));

        ok!(ncclCommRevoke(comm, 0));
        ok!(ncclCommAbort(comm));
    });
}

#[test]
fn finalized_communicator_is_in_progress_until_its_peer_finalizes() {
    passes("failures::finalized_communicator_is_in_progress_until_its_peer_finalizes", &[], || {
        let id = unique_id();
        let [(_, comm), (_, peer)] = pair(id);
        let finalize = std::thread::spawn({
            let comm = comm as usize;
            move || ok!(ncclCommFinalize(comm as P))
        });
        std::thread::sleep(SHORT);
        assert!(!finalize.is_finished());
        ok!(ncclCommFinalize(peer));
        finalize.join().unwrap();
        ok!(ncclCommDestroy(comm));
        ok!(ncclCommDestroy(peer));
    });
}

#[test]
fn different_operations_fail_both_devices_and_name_both_ranks() {
    let test = "failures::different_operations_fail_both_devices_and_name_both_ranks";
    let ran = processes(test, 2, &[], |rank, ids| {
        let thread = Thread::new(0);
        let (comm, at) = (join(ids[0], 2, rank), thread.put(&[1.0; 8]));
        if rank == 0 {
            ok!(ncclAllReduce(at, at, 8, F32, SUM, comm, thread.stream));
        } else {
            ok!(ncclAllGather(at, at, 4, F32, comm, thread.stream));
        }
        // SAFETY: the stream is alive.
        assert_eq!(unsafe { (api().cuStreamSynchronize)(thread.stream) }, 719);
    });

    for output in ran.into_iter().flatten() {
        let text = text(&output);
        assert!(output.status.success(), "{text}");
        for part in ["rank 0 issued AllReduce of 8 f32", "rank 1 issued AllGather of 4 f32"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[test]
fn messages_of_different_lengths_fail_both_devices() {
    let ran = processes("failures::messages_of_different_lengths_fail_both_devices", 2, &[], |rank, ids| {
        let thread = Thread::new(0);
        let (comm, at) = (join(ids[0], 2, rank), thread.put(&[1.0; 8]));
        if rank == 0 {
            ok!(ncclSend(at, 8, F32, 1, comm, thread.stream));
        } else {
            ok!(ncclRecv(at, 7, F32, 0, comm, thread.stream));
        }
        // SAFETY: the stream is alive.
        assert_eq!(unsafe { (api().cuStreamSynchronize)(thread.stream) }, 719);
    });

    assert!(ran.into_iter().flatten().all(|output| output.status.success()));
}

/// Two ranks launch an operation in each of two communicators, rank 1 in the other order. Whether both get results.
fn swapped(test: &str, settings: &[(&str, &str)], is_swapped: bool) -> Option<(bool, String)> {
    let outputs = processes(test, 2, settings, |rank, ids| {
        let threads = [Thread::new(0), Thread::new(0)];
        let comms = [join(ids[0], 2, rank), join(ids[1], 2, rank)];
        let at = threads.each_ref().map(|thread| thread.put(&[1.0; 4]));
        let order = if is_swapped && rank == 1 { [1, 0] } else { [0, 1] };
        for i in order {
            ok!(ncclAllReduce(at[i], at[i], 4, F32, SUM, comms[i], threads[i].stream));
        }
        for (i, thread) in threads.iter().enumerate() {
            assert_eq!(thread.get(at[i], 4), [2.0; 4]);
        }
    })?;
    let all = outputs.iter().all(|output| output.status.success());
    Some((all, outputs.iter().map(text).collect()))
}

const STRICT: [(&str, &str); 2] = [("SOFTGPU_NCCL_ORDER", "1"), ("NCCL_LAUNCH_ORDER_IMPLICIT", "1")];

#[test]
fn devices_that_run_one_operation_at_a_time_report_swapped_orders() {
    let test = "failures::devices_that_run_one_operation_at_a_time_report_swapped_orders";
    if let Some((passed, text)) = swapped(test, &STRICT, true) {
        assert!(!passed && text.contains("operations in different orders"), "{text}");
    }
}

#[test]
fn equal_orders_pass_on_devices_that_run_operations_in_order_of_launch() {
    let test = "failures::equal_orders_pass_on_devices_that_run_operations_in_order_of_launch";
    if let Some((passed, text)) = swapped(test, &STRICT, false) {
        assert!(passed, "{text}");
    }
}

#[test]
fn swapped_orders_pass_where_devices_run_operations_at_once() {
    let test = "failures::swapped_orders_pass_where_devices_run_operations_at_once";
    if let Some((passed, text)) = swapped(test, &[], true) {
        assert!(passed, "{text}");
    }
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    let test = "failures::two_ranks_on_one_device_are_refused";
    let ran = alone(test, &[("NCCL_MULTI_RANK_GPU_ENABLE", "0")], || {
        let (id, mut comms) = (unique_id(), [std::ptr::null_mut(); 2]);
        Thread::new(0);
        ok!(ncclGroupStart());
        ok!(ncclCommInitRank(&raw mut comms[0], 2, id, 0));
        ok!(ncclCommInitRank(&raw mut comms[1], 2, id, 1));
        // SAFETY: valid arguments.
        assert_eq!(unsafe { (api().ncclGroupEnd)() }, 5);
    });

    if let Some(output) = ran {
        let text = text(&output);
        assert!(output.status.success() && text.contains("rank 0 and rank 1 both on device 0"), "{text}");
    }
}

#[test]
fn communicator_without_memory_for_its_buffers_fails_when_it_is_initialised() {
    let settings = [("SOFTGPU_NCCL_ALLOC_FAIL", "1")];
    passes("failures::communicator_without_memory_for_its_buffers_fails_when_it_is_initialised", &settings, || {
        let (id, mut comm) = (unique_id(), std::ptr::null_mut());
        Thread::new(0);

        // SAFETY: valid arguments.
        assert_eq!(unsafe { (api().ncclCommInitRank)(&raw mut comm, 1, id, 0) }, 1);

        assert_eq!(state(comm), 1);
        ok!(ncclCommAbort(comm));
    });
}

#[test]
fn communicator_without_memory_for_its_peers_fails_with_its_first_operation() {
    let settings = [("SOFTGPU_NCCL_ALLOC_FAIL", "3")];
    passes("failures::communicator_without_memory_for_its_peers_fails_with_its_first_operation", &settings, || {
        let [(thread, comm), _] = pair(unique_id());
        let at = thread.put(&[1.0]);

        // SAFETY: valid arguments.
        assert_eq!(unsafe { (api().ncclAllReduce)(at, at, 1, F32, SUM, comm, thread.stream) }, 1);

        assert_eq!(state(comm), 1);
    });
}

#[test]
fn planted_failure_of_the_network_is_reported_once_it_is_launched() {
    let settings = [("SOFTGPU_NCCL_FAULT", "2")];
    passes("failures::planted_failure_of_the_network_is_reported_once_it_is_launched", &settings, || {
        let [(thread, comm), _] = pair(unique_id());
        let at = thread.put(&[1.0]);
        ok!(ncclAllReduce(at, at, 1, F32, SUM, comm, thread.stream));
        assert_eq!(state(comm), 0);
        // SAFETY: valid arguments.
        unsafe { (api().ncclAllReduce)(at, at, 1, F32, SUM, comm, thread.stream) };
        assert_eq!(state(comm), 6);
    });
}
