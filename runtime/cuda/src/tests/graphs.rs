//! Steps that run as CUDA graphs.

use super::step::{Trainer, shared};
use super::{BorrowedGpu, over_nccl};
use crate::error::CudaError;
use crate::gpu::{Event, Gpu, Stream};
use crate::graph::Graph;
use crate::ring::GpuMemory;
use crate::shared::Shared;
use phalanx_collective::local::LocalWorld;
use phalanx_device::ExecError;
use phalanx_device::groups::{Groups, group_keys, groups_of_world};
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use std::sync::Arc;
use std::time::Duration;

/// Loss and weights after each of some steps.
type History = Vec<(f64, Vec<Vec<u32>>)>;

const N_STEPS: u64 = 4;

/// Trains one rank; returns what it saw, and the number of graphs.
fn train_alone(gpu: &Arc<Gpu>, graphs: bool) -> (History, usize) {
    let mut trainer = Trainer::new(gpu, MeshRank::default(), graphs);
    let mut groups = Groups::none();
    let mut step = |step| {
        // A step whose instructions are timed is eager.
        let timings = &mut Vec::new();
        let loss = trainer.compute(&mut groups, step, (step == 3).then_some(&mut *timings)).unwrap();
        assert_eq!(timings.len(), if step == 3 { trainer.c.phases.apply } else { 0 });
        trainer.update(&mut groups).unwrap();
        (loss, trainer.weights())
    };
    let history = (1..=N_STEPS).map(&mut step).collect();
    (history, trainer.machine.n_graphs(&trainer.c))
}

#[test]
fn steps_that_run_as_graphs_have_the_bits_of_eager_steps() {
    let gpu = BorrowedGpu::take();

    let (eager, as_graphs) = (train_alone(&gpu.0, false), train_alone(&gpu.0, true));

    // The phase that computes gradients; the updates are too few launches.
    assert_eq!((eager.1, as_graphs.1), (0, 1));
    assert!(eager.0 == as_graphs.0, "the bits differ");
}

#[test]
fn machine_whose_captures_are_refused_goes_on_without_graphs() {
    let gpu = BorrowedGpu::take();
    let expected = train_alone(&gpu.0, false);
    // The stream that the machine takes is capturing already, in the mode without restrictions for the thread.
    let stream = gpu.0.take_stream().unwrap();
    let driver = gpu.0.libraries.driver;
    // SAFETY: the stream is alive.
    assert_eq!(unsafe { (driver.cuStreamBeginCapture_v2)(stream.0, 2) }, 0);
    gpu.0.return_stream(stream);

    let found = train_alone(&gpu.0, true);

    assert!(found == expected, "{} graphs, or other bits", found.1);
    // Other tests take this stream; the refused captures have invalidated its own.
    // SAFETY: as above.
    assert_eq!(unsafe { (driver.cuStreamEndCapture)(stream.0, &mut std::ptr::null_mut()) }, 901);
}

#[test]
fn refused_capture_names_the_call_and_leaves_the_stream_to_the_next_one() {
    let borrowed = BorrowedGpu::take();
    let gpu = &borrowed.0;
    gpu.bind().unwrap();
    let memory = gpu.allocate(64).unwrap();
    let [stream, other] = [0, 1].map(|_| gpu.take_stream().unwrap());
    // SAFETY: memory of this test alone.
    let zero = |stream| unsafe { gpu.zero(memory.address, 64, stream) };
    let capture = |then: &dyn Fn(Stream) -> Result<(), CudaError>| {
        Graph::capture(gpu, stream, |stream| zero(stream).and_then(|()| then(stream)))
    };

    let waits = capture(&|stream| {
        // SAFETY: the stream is alive.
        gpu.check("cuStreamSynchronize", unsafe { (gpu.libraries.driver.cuStreamSynchronize)(stream.0) })
    });
    let forks = capture(&|stream| {
        let event = Event::for_order(gpu)?;
        event.record(stream)?;
        event.hold(other)?;
        zero(other)
    });
    let allocates = capture(&|_| gpu.allocate(64).map(drop));
    let ends = capture(&|_| Ok(()));

    let found = [waits, forks, allocates].map(|outcome| outcome.map(drop).map_err(|e| (e.call, e.code)));
    assert_eq!(found, [Err(("cuStreamSynchronize", 900)), Err(("cuStreamEndCapture", 904)), Err(("cuMemAlloc", 900))]);
    // SAFETY: as above.
    unsafe { ends.unwrap().launch(gpu.compute) }.unwrap();
    let mut bytes = [1u8; 64];
    // SAFETY: as above.
    unsafe { gpu.read(memory.address, &mut bytes) }.unwrap();
    assert_eq!(bytes, [0; 64]);
}

/// Ranks that share a model, their groups over NCCL.
const MESH: Mesh = Mesh { dp_shard: 2, ..Mesh::ONE };

/// One generation of a world of two ranks in this process.
struct TwoRanks {
    local: Arc<LocalWorld>,
    groups: Vec<(phalanx_device::groups::GroupKey, Vec<u32>)>,
}

impl TwoRanks {
    fn new(trainer: &Trainer, generation: u64) -> TwoRanks {
        let groups = groups_of_world(&MESH, &group_keys(&trainer.c.program));
        let members = groups.iter().map(|(_, members)| members.clone()).collect();
        let id = WorldId { job: 1, generation, incarnation: 1 };
        TwoRanks { local: LocalWorld::new(World::new(id, 2, members).unwrap()), groups }
    }

    /// The groups of a rank; all ranks connect at once.
    fn connect(&self, gpu: &Arc<Gpu>, rank: usize) -> Groups {
        let host = |i| Box::new(self.local.communicator(i, rank as u32).unwrap());
        let mesh_rank = MeshRank { mesh: MESH, rank };
        Groups::connect(&mesh_rank, &self.groups, |i| Ok(over_nccl(gpu, host(i)))).unwrap()
    }
}

/// Both ranks, each with a GPU of its own.
fn pair(graphs: bool) -> [(BorrowedGpu, Trainer); 2] {
    [0, 1].map(|rank| {
        let gpu = BorrowedGpu::take();
        let trainer = Trainer::new(&gpu.0, MeshRank { mesh: MESH, rank }, graphs);
        (gpu, trainer)
    })
}

/// Runs steps on both ranks of a new world; returns what each saw. In the step `aborted`, a thread aborts the world after this
/// time, and rank 1 does not take part.
fn train(
    ranks: &mut [(BorrowedGpu, Trainer); 2],
    generation: u64,
    steps: std::ops::RangeInclusive<u64>,
    aborted: Option<(u64, Duration)>,
) -> [Result<History, ExecError>; 2] {
    let world = &TwoRanks::new(&ranks[0].1, generation);
    let run = |rank: usize, (gpu, trainer): &mut (BorrowedGpu, Trainer)| {
        let mut groups = world.connect(&gpu.0, rank);
        let mut history = History::new();
        for step in steps.clone() {
            if let Some((_, after)) = aborted.filter(|(aborted, _)| rank == 1 && step == *aborted) {
                std::thread::sleep(after);
                world.local.abort("a rank was lost");
                groups.abort("a rank was lost");
                return Ok(history);
            }
            let loss = trainer.compute(&mut groups, step, None)?;
            trainer.update(&mut groups)?;
            history.push((loss, trainer.weights()));
        }
        Ok(history)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let [first, second] = ranks;
        let threads = [scope.spawn(move || run(0, first)), scope.spawn(move || run(1, second))];
        threads.map(|thread| thread.join().unwrap())
    })
}

#[test]
fn graphs_between_collectives_have_the_bits_of_eager_steps() {
    let run = |graphs: bool| {
        let mut ranks = pair(graphs);
        let histories = train(&mut ranks, 1, 1..=N_STEPS, None).map(Result::unwrap);
        let n_graphs = ranks.map(|(_, mut trainer)| trainer.machine.n_graphs(&trainer.c));
        (histories, n_graphs)
    };

    let (eager, as_graphs) = (run(false), run(true));

    assert_eq!(eager.1, [0, 0]);
    assert!(as_graphs.1.iter().all(|n| *n >= 4), "{:?}", as_graphs.1);
    assert!(eager.0 == as_graphs.0, "the bits differ");
}

/// The world ends while a rank captures the commands of its second step, launches them, or waits for its peer.
#[test]
fn rank_whose_world_is_aborted_under_capture_trains_on_in_the_next_world() {
    let expected = train(&mut pair(true), 1, 1..=N_STEPS, None).map(Result::unwrap);
    for (trial, after) in (0..6).map(|i| (i, Duration::from_micros(700 * i))) {
        let mut ranks = pair(true);
        let generation = 10 + 2 * trial;

        let [survivor, _] = train(&mut ranks, generation, 1..=N_STEPS, Some((2, after)));
        let next = train(&mut ranks, generation + 1, 2..=N_STEPS, None);

        assert!(matches!(survivor, Err(ExecError::Collective(_))), "trial {trial}: {survivor:?}");
        for (rank, (found, expected)) in next.into_iter().zip(&expected).enumerate() {
            assert!(found.unwrap() == expected[1..], "trial {trial}: rank {rank} has other bits");
        }
    }
}

/// The software GPU starts kernels in order; it refuses launches with attributes that it does not know.
#[test]
fn kernels_that_may_start_early_have_the_bits_of_those_in_order() {
    let gpu = BorrowedGpu::take();
    let steps = |launches_early| {
        let shared = shared(&Arc::new(GpuMemory::new(gpu.0.clone())));
        let shared = Shared { launches_early, ..Arc::into_inner(shared).unwrap() };
        let mut trainer = Trainer::of(&Arc::new(shared), MeshRank::default(), true).with_first_weights();
        let mut groups = Groups::none();
        for step in 1..=3 {
            trainer.compute(&mut groups, step, None).unwrap();
            trainer.update(&mut groups).unwrap();
        }
        trainer.weights()
    };

    assert_eq!(steps(true), steps(false));
}
