//! Failures of the communicator over NCCL.

use super::{BorrowedGpu, ID, libnccl, set};
use crate::gpu::DeviceMemory;
use crate::nccl::{Choice, connect};
use phalanx_collective::local::LocalWorld;
use phalanx_device::communicator::Behind;
use phalanx_device::world::World;
use phalanx_device::{
    Collective, CollectiveControl, CollectiveError, ElementType, Operand, Operation, OperationKind, Progress,
    RawBuffer, SliceOperations, Stream, Ticket,
};
use phalanx_softgpu::Installation;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(100);
const N: usize = 1000;

/// One rank of a test: its communicators, and memory on its GPU. Dropped in this order.
struct Rank {
    groups: Vec<Box<dyn Collective>>,
    memory: DeviceMemory,
    gpu: BorrowedGpu,
}

impl Rank {
    /// An operand of `n` elements that is its own result.
    fn operand(&self, n: usize) -> Operand {
        let buffer = RawBuffer::on_device(self.memory.address as usize, 4 * n, self.gpu.0.ordinal);
        Operand::in_place(buffer, ElementType::F32, n)
    }

    fn start(&mut self, group: usize, kind: OperationKind, n: usize) -> Result<Ticket, CollectiveError> {
        let operand = self.operand(n);
        let operand = match kind {
            OperationKind::Send { .. } => Operand { recv: RawBuffer::EMPTY, ..operand },
            OperationKind::Recv { .. } => Operand { send: RawBuffer::EMPTY, ..operand },
            _ => operand,
        };
        // SAFETY: the memory outlives the communicators.
        unsafe { self.groups[group].start(&Operation { kind, sequence: 0, unit: 1 }, &[operand]) }
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        self.groups[0].control()
    }

    /// Whether everything on the compute stream is done within a time.
    fn is_idle_within(&self, time: Duration) -> bool {
        let end = crate::gpu::Event::for_order(&self.gpu.0).unwrap();
        end.record(self.gpu.0.compute).unwrap();
        until(time, || !matches!(end.is_reached(), Ok(false)))
    }
}

/// Waits for a condition; whether it came in time.
fn until(time: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() > time {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// A host communicator that waits for nobody once it is told so: its member runs ahead of its peers.
struct Hasty {
    inner: Box<dyn Collective>,
    is_hasty: Arc<AtomicBool>,
}

impl Collective for Hasty {
    fn position(&self) -> u32 {
        self.inner.position()
    }

    fn size(&self) -> u32 {
        self.inner.size()
    }

    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.start(operation, operands) }
    }

    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        if self.is_hasty.load(Ordering::Relaxed) { Ok(()) } else { self.inner.finish(ticket) }
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        self.inner.control()
    }
}

/// Two ranks with `n_groups` groups of both.
fn pair(n_groups: usize) -> [Rank; 2] {
    hasty_pair(n_groups, &Arc::default())
}

/// Two ranks that wait for nobody on the host once `is_hasty`.
fn hasty_pair(n_groups: usize, is_hasty: &Arc<AtomicBool>) -> [Rank; 2] {
    let local = LocalWorld::new(World::new(ID, 2, vec![vec![0, 1]; n_groups]).unwrap());
    let rank = |rank: u32| {
        let gpu = BorrowedGpu::take();
        let member = |group| {
            let inner = Box::new(local.communicator(group, rank).unwrap());
            Box::new(Hasty { inner, is_hasty: is_hasty.clone() }) as Box<dyn Collective>
        };
        let connected = |group| connect(&gpu.0, || Ok(libnccl()), member(group), Choice::Nccl).unwrap();
        let groups = (0..n_groups).map(connected).collect();
        let memory = gpu.0.allocate(4 * N).unwrap();
        // SAFETY: just allocated.
        unsafe { gpu.0.write(memory.address, bytemuck::cast_slice(&[1.0f32; N])) }.unwrap();
        Rank { groups, memory, gpu }
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        [0, 1].map(|i| scope.spawn(move || rank(i))).map(|thread| thread.join().unwrap())
    })
}

/// Runs a test again in a process with other settings. None in that process.
fn again(test: &str, settings: &[(&str, &str)]) -> Option<(Output, String)> {
    const CHILD: &str = "PHALANX_TEST_CHILD";
    if std::env::var(CHILD).is_ok() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&format!("tests::nccl::{test}"), "--exact", "--nocapture"]).env(CHILD, "1");
    let output = command.envs(settings.iter().copied()).output().unwrap();
    let text = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat();
    assert!(text.contains("running 1 test"), "{text}");
    Some((output, text))
}

const SUM: OperationKind = OperationKind::AllReduce;

#[test]
fn abort_by_the_control_end_frees_the_compute_stream_from_a_peer_that_never_comes() {
    let [mut rank, dead] = pair(1);
    std::mem::forget(dead);
    let control = rank.control();
    let ticket = rank.start(0, SUM, N).unwrap();
    // The compute stream waits for the sum, as after a finish.
    let held = rank.gpu.0.clone();
    assert!(until(LONG, || control.device_progress() == Some(Progress { entered: 1, finished: 0 })));
    let Behind { stream, positions, .. } = control.behind().remove(0);
    assert_eq!((stream, positions), (Stream::Group, vec![1]));
    assert_eq!(control.check(), Ok(()), "a dead peer is not noticed");

    std::thread::scope(|scope| {
        let finish = scope.spawn(|| rank.groups[0].finish(ticket));
        std::thread::sleep(SHORT);
        assert!(!finish.is_finished());
        control.abort("the peer is lost");
        assert_eq!(finish.join().unwrap(), Err(CollectiveError::aborted("the peer is lost")));
    });

    assert!(until(LONG, || control.device_progress() == Some(Progress { entered: 1, finished: 1 })));
    assert_eq!(rank.start(0, SUM, N).unwrap_err(), CollectiveError::aborted("the peer is lost"));
    held.synchronize().unwrap();
}

#[test]
fn message_to_a_peer_that_dies_after_its_announcement_leaves_the_stream_to_an_abort() {
    let is_hasty = Arc::default();
    let [mut rank, mut dead] = hasty_pair(2, &is_hasty);
    is_hasty.store(true, Ordering::Relaxed);
    // The peer has started both, but its GPU never comes to the message: its sum in the other group comes first.
    let sum = dead.start(1, SUM, N).unwrap();
    dead.groups[1].finish(sum).unwrap();
    let _ = dead.start(0, OperationKind::Recv { from: 0 }, N).unwrap();
    let ticket = rank.start(0, OperationKind::Send { to: 1 }, N).unwrap();
    let control = rank.control();

    rank.groups[0].finish(ticket).unwrap();
    assert!(!rank.is_idle_within(SHORT));
    assert_eq!(control.behind(), []);
    control.abort("the peer is lost");

    assert!(rank.is_idle_within(LONG));
    assert_eq!(rank.start(0, SUM, N).unwrap_err(), CollectiveError::aborted("the peer is lost"));
    dead.groups[1].control().abort("this rank ends");
    dead.groups.clear();
    assert!(dead.is_idle_within(LONG));
}

/// Checks the errors of two ranks that issue different operations. In a process of its own, whose GPUs begin late: the
/// software GPU would fail too, for the same reason, and either error may come first.
fn check_errors(test: &str, operations: [(OperationKind, usize); 2], names: [&str; 2]) {
    if let Some((output, text)) = again(test, &[("SOFTGPU_HOLD_US", "5000000")]) {
        assert!(output.status.success(), "{text}");
        return;
    }
    let errors = std::thread::scope(|scope| {
        let run = |mut rank: Rank, (kind, n)| {
            let outcome = rank.start(0, kind, n).and_then(|ticket| rank.groups[0].finish(ticket));
            std::mem::forget(rank);
            outcome.unwrap_err().to_string()
        };
        let start = |(rank, operation)| scope.spawn(move || run(rank, operation));
        let threads: Vec<_> = pair(1).into_iter().zip(operations).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<String>>()
    });
    for error in &errors {
        assert!(names.iter().all(|name| error.contains(name)), "{errors:?}");
    }
}

#[test]
fn different_operations_fail_and_name_both_ranks() {
    let names = ["rank 0 issued #0 all_reduce", "rank 1 issued #0 all_gather"];
    let operations = [(SUM, N), (OperationKind::AllGather, N)];
    check_errors("different_operations_fail_and_name_both_ranks", operations, names);
}

#[test]
fn operations_on_different_lengths_fail_and_name_both_ranks() {
    let names = ["rank 0 issued #0 all_reduce", "rank 1 issued #0 all_reduce"];
    check_errors("operations_on_different_lengths_fail_and_name_both_ranks", [(SUM, N), (SUM, N / 2)], names);
}

#[test]
fn connecting_ends_with_the_host_communicator() {
    let local = LocalWorld::new(World::of_one_group(ID, 2).unwrap());
    let gpu = BorrowedGpu::take();
    let host = Box::new(local.communicator(0, 0).unwrap());

    let outcome = std::thread::scope(|scope| {
        let connecting = scope.spawn(|| connect(&gpu.0, || Ok(libnccl()), host, Choice::Nccl).map(|_| ()));
        std::thread::sleep(SHORT);
        assert!(!connecting.is_finished());
        local.abort("the peer is lost");
        connecting.join().unwrap()
    });

    assert_eq!(outcome, Err(CollectiveError::aborted("the peer is lost")));
}

#[test]
fn ranks_that_share_a_gpu_stage_in_host_memory_unless_nccl_is_required() {
    let outcomes = [Choice::BestOfAny, Choice::Nccl].map(|choice| {
        let local = LocalWorld::new(World::of_one_group(ID, 2).unwrap());
        let gpu = BorrowedGpu::take();
        let connect = |rank| {
            let host = Box::new(local.communicator(0, rank).unwrap());
            let mut group = connect(&gpu.0, || Ok(libnccl()), host, choice)?;
            let mut values = [1.0f32];
            group.all_reduce(&mut values)?;
            Ok::<f32, CollectiveError>(values[0])
        };
        std::thread::scope(|scope| {
            let connect = &connect;
            [0, 1].map(|rank| scope.spawn(move || connect(rank))).map(|thread| thread.join().unwrap())
        })
    });

    assert_eq!(outcomes[0], [Ok(2.0), Ok(2.0)]);
    for outcome in &outcomes[1] {
        let text = outcome.as_ref().unwrap_err().to_string();
        assert!(text.contains("positions 0 and 1 share a GPU"), "{text}");
    }
}

#[test]
fn ranks_that_share_a_gpu_do_not_load_nccl() {
    let local = LocalWorld::new(World::of_one_group(ID, 2).unwrap());
    let gpu = BorrowedGpu::take();
    let sum = |rank| {
        let host = Box::new(local.communicator(0, rank).unwrap());
        let mut group = connect(&gpu.0, || panic!("NCCL is loaded"), host, Choice::Best).unwrap();
        let mut values = [1.0f32];
        group.all_reduce(&mut values).unwrap();
        values[0]
    };

    let sums = std::thread::scope(|scope| {
        let sum = &sum;
        [0, 1].map(|rank| scope.spawn(move || sum(rank))).map(|thread| thread.join().unwrap())
    });

    assert_eq!(sums, [2.0, 2.0]);
}

/// Ranks on two GPUs; the first two ranks share one. NCCL before 2.30 refuses only these two.
#[test]
fn ranks_that_share_gpus_unevenly_stage_in_host_memory() {
    let local = LocalWorld::new(World::of_one_group(ID, 3).unwrap());
    let gpus = [BorrowedGpu::take(), BorrowedGpu::take()];
    let sum = |rank: u32| {
        let host = Box::new(local.communicator(0, rank).unwrap());
        // One member suffices for NCCL to be tried.
        let choice = if rank == 2 { Choice::BestOfAny } else { Choice::Best };
        let mut group = connect(&gpus[rank as usize / 2].0, || Ok(libnccl()), host, choice).unwrap();
        let mut values = [1.0f32];
        group.all_reduce(&mut values).unwrap();
        values[0]
    };

    let sums = std::thread::scope(|scope| {
        let sum = &sum;
        [0, 1, 2].map(|rank| scope.spawn(move || sum(rank))).map(|thread| thread.join().unwrap())
    });

    assert_eq!(sums, [3.0; 3]);
}

#[test]
fn member_without_nccl_makes_all_members_stage_in_host_memory() {
    let local = LocalWorld::new(World::of_one_group(ID, 2).unwrap());
    let sum = |rank: u32| {
        let gpu = BorrowedGpu::take();
        let host = Box::new(local.communicator(0, rank).unwrap());
        let missing = crate::LibraryError::Missing { library: "NCCL", names: String::new(), searched: Vec::new() };
        let library = || if rank == 0 { Ok(libnccl()) } else { Err(missing) };
        let mut group = connect(&gpu.0, library, host, Choice::Best).unwrap();
        let mut values = [1.0f32];
        group.all_reduce(&mut values).unwrap();
        values[0]
    };

    let sums = std::thread::scope(|scope| {
        let sum = &sum;
        [0, 1].map(|rank| scope.spawn(move || sum(rank))).map(|thread| thread.join().unwrap())
    });

    assert_eq!(sums, [2.0, 2.0]);
}

#[test]
fn member_that_leaves_with_an_operation_in_flight_releases_its_peer_and_its_own_stream() {
    let [mut rank, mut peer] = pair(1);
    let _ = rank.start(0, SUM, N).unwrap();

    rank.groups.clear();

    assert!(matches!(peer.groups[0].barrier(), Err(CollectiveError::Aborted { .. })));
    assert!(rank.is_idle_within(LONG));
}

#[test]
fn start_in_which_nccl_fails_returns_the_failure() {
    let test = "start_in_which_nccl_fails_returns_the_failure";
    if let Some((output, text)) = again(test, &[("SOFTGPU_NCCL_FAULT", "1")]) {
        return assert!(output.status.success(), "{text}");
    }
    let [mut rank, _peer] = pair(1);

    let started = rank.start(0, SUM, N);

    assert!(matches!(&started, Err(CollectiveError::Library { call: "NCCL", .. })), "{started:?}");
}

#[test]
fn failure_that_nccl_notices_between_operations_is_reported_by_the_control_end() {
    let test = "failure_that_nccl_notices_between_operations_is_reported_by_the_control_end";
    if let Some((output, text)) = again(test, &[("SOFTGPU_NCCL_FAIL", "0")]) {
        return assert!(output.status.success(), "{text}");
    }
    let [rank, _peer] = pair(1);
    let control = rank.control();
    assert_eq!(control.check(), Ok(()));

    set("SOFTGPU_NCCL_FAIL", "1");
    let failure = control.check();

    assert!(matches!(&failure, Err(CollectiveError::Library { call: "NCCL", .. })), "{failure:?}");
}

/// Starts sums in each of two groups, in turns, at the second rank in the other order if `is_swapped`.
fn sums_in_two_groups(is_swapped: bool, n_rounds: usize) {
    let ranks = pair(2);
    std::thread::scope(|scope| {
        for (i, mut rank) in ranks.into_iter().enumerate() {
            scope.spawn(move || {
                let order = if is_swapped && i == 1 { [1, 0] } else { [0, 1] };
                let groups = std::iter::repeat_n(order, n_rounds).flatten();
                let tickets: Vec<_> = groups.map(|group| (group, rank.start(group, SUM, N / 2).unwrap())).collect();
                for (group, ticket) in tickets {
                    rank.groups[group].finish(ticket).unwrap();
                }
                rank.gpu.0.synchronize().unwrap();
            });
        }
    });
}

const ONE_AT_A_TIME: [(&str, &str); 2] = [("SOFTGPU_NCCL_ORDER", "1"), ("NCCL_LAUNCH_ORDER_IMPLICIT", "1")];

#[test]
fn equal_orders_of_starts_pass_on_gpus_that_run_one_operation_at_a_time() {
    let test = "equal_orders_of_starts_pass_on_gpus_that_run_one_operation_at_a_time";
    match again(test, &ONE_AT_A_TIME) {
        Some((output, text)) => assert!(output.status.success(), "{text}"),
        None => sums_in_two_groups(false, 1),
    }
}

/// NCCL 2.18 does not know the variable.
#[test]
fn equal_orders_of_starts_pass_with_an_nccl_that_keeps_no_order() {
    let test = "equal_orders_of_starts_pass_with_an_nccl_that_keeps_no_order";
    let settings = [&ONE_AT_A_TIME[..], &[("SOFTGPU_NCCL_VERSION", "21805")]].concat();
    for seed in ["1", "2", "3", "4"] {
        match again(test, &[&settings[..], &[("SOFTGPU_SEED", seed)]].concat()) {
            Some((output, text)) => assert!(output.status.success(), "{text}"),
            // Several, so that a GPU has operations of both groups to choose from.
            None => return sums_in_two_groups(false, 20),
        }
    }
}

#[test]
fn streams_of_collectives_have_the_highest_priority() {
    // Streams that another thread has returned: this thread has never used the GPU.
    let elsewhere = std::thread::spawn(|| {
        let gpu = BorrowedGpu::take();
        gpu.0.return_urgent_stream(gpu.0.take_urgent_stream().unwrap());
        gpu.0.return_stream(gpu.0.take_stream().unwrap());
        gpu
    });
    let gpu = elsewhere.join().unwrap();
    let priority = |stream: crate::gpu::Stream| {
        let mut priority = 0;
        let path = Installation::new().unwrap().library("libcuda.so.1");
        // SAFETY: the library is loaded; the function has this signature.
        unsafe {
            let library = libloading::os::unix::Library::new(path).unwrap();
            let get = library
                .get::<unsafe extern "C" fn(cudarc::driver::sys::CUstream, *mut i32) -> u32>(b"cuStreamGetPriority");
            assert_eq!(get.unwrap()(stream.0, &raw mut priority), 0);
        }
        priority
    };

    let [of_collectives, of_copies] = [gpu.0.take_urgent_stream().unwrap(), gpu.0.take_stream().unwrap()].map(priority);

    assert_eq!((of_collectives, of_copies), (-5, 0));
}

#[test]
fn progress_is_told_where_streams_have_no_writes_of_words() {
    let test = "progress_is_told_where_streams_have_no_writes_of_words";
    if let Some((output, text)) = again(test, &[("SOFTGPU_STREAM_WRITES", "0")]) {
        return assert!(output.status.success(), "{text}");
    }
    let sum = |mut rank: Rank| {
        let ticket = rank.start(0, SUM, N).unwrap();
        rank.groups[0].finish(ticket).unwrap();
        rank.gpu.0.mark().unwrap();

        assert!(until(LONG, || rank.control().device_progress() == Some(Progress { entered: 1, finished: 1 })));
        assert!(until(LONG, || !rank.gpu.0.activity().is_busy));
    };
    std::thread::scope(|scope| {
        let threads = pair(1).map(|rank| scope.spawn(|| sum(rank)));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn swapped_orders_of_starts_are_found_on_gpus_that_run_one_operation_at_a_time() {
    let test = "swapped_orders_of_starts_are_found_on_gpus_that_run_one_operation_at_a_time";
    match again(test, &ONE_AT_A_TIME) {
        Some((output, text)) => {
            assert!(!output.status.success() && text.contains("operations in different orders"), "{text}");
        }
        None => sums_in_two_groups(true, 1),
    }
}
