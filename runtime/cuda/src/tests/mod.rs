//! Tests of the communicators of device operands, on the software GPU. Definitions and agreement are those of the host's
//! communicators; each rank is a thread with streams of its own.

#[path = "../../../collective/src/tests/agreement.rs"]
mod agreement;
#[path = "../../../collective/src/tests/definitions.rs"]
pub mod definitions;
mod graphs;
mod machine;
mod nccl;
mod on_device;
mod processes;
mod products;
mod ring;
mod split;
mod staged;
pub mod step;

use crate::gpu::Gpu;
use crate::library::{Nccl, Search};
use crate::nccl::{Choice, connect};
use crate::staged::Staged;
use on_device::OnDevice;
use phalanx_collective::local::LocalWorld;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{Collective, RawBuffer};
use phalanx_softgpu::Installation;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock};

const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

/// A rank of a test: its groups by index, and memory for operands. The groups move operands in host memory to the device
/// and results back.
struct Rank {
    rank: u32,
    groups: BTreeMap<usize, Box<dyn Collective>>,
    memory: Memory,
}

impl Rank {
    fn group(&mut self, group: usize) -> &mut dyn Collective {
        &mut **self.groups.get_mut(&group).expect("a group of this rank")
    }
}

/// Host memory for operands that lives as long as the test's rank.
#[derive(Default)]
struct Memory {
    heap: Vec<Vec<u64>>,
}

impl Memory {
    /// `bytes` bytes, aligned for every element type.
    fn alloc(&mut self, bytes: usize) -> RawBuffer {
        self.heap.push(vec![0; bytes.div_ceil(8)]);
        let words = self.heap.last_mut().expect("just pushed");
        RawBuffer::new(words.as_mut_ptr().cast(), bytes)
    }
}

/// The code that every rank of a test runs.
type Body<'a> = &'a (dyn Fn(&mut Rank) + Sync);

/// Makes the communicator of device operands from a host communicator.
type Plane = fn(&Arc<Gpu>, Box<dyn Collective>) -> Box<dyn Collective>;

/// The communicators of device operands, by name.
const PLANES: [(&str, Plane); 2] =
    [("staged", |gpu, host| Box::new(Staged::new(gpu.clone(), host))), ("nccl", over_nccl)];

/// Connects over NCCL.
fn over_nccl(gpu: &Arc<Gpu>, host: Box<dyn Collective>) -> Box<dyn Collective> {
    connect(gpu, || Ok(libnccl()), host, Choice::Nccl).unwrap()
}

/// NCCL of the software GPU.
fn libnccl() -> &'static Nccl {
    static NCCL: OnceLock<&Nccl> = OnceLock::new();
    NCCL.get_or_init(|| Nccl::find(&search()).unwrap())
}

fn search() -> Search {
    Search::only(vec![Installation::new().unwrap().dir().to_owned()])
}

/// Runs `body` as every rank, over every communicator of device operands.
fn with_all(world: &World, body: Body) {
    for (name, plane) in PLANES {
        println!("implementation {name}");
        with_local(world, plane, body);
        with_shm(world, plane, body);
    }
}

/// Over the communicators of threads.
fn with_local(world: &World, plane: Plane, body: Body) {
    let local = LocalWorld::new(world.clone());
    let connect = |rank, group| Box::new(local.communicator(group, rank).unwrap()) as Box<dyn Collective>;
    as_threads(world, plane, &|rank| Box::new(move |group| connect(rank, group)), body);
}

/// Over the communicators of processes, in threads with their own mappings.
fn with_shm(world: &World, plane: Plane, body: Body) {
    let shm = ShmWorld::create(world, &vec![0; world.n_ranks() as usize], 8 << 20).unwrap();
    let connect = |rank| {
        let joined = shm.mapped_again().unwrap().join(rank).unwrap();
        let connect = move |group| Box::new(joined.communicator(group).unwrap()) as Box<dyn Collective>;
        Box::new(connect) as Connect<'_>
    };
    as_threads(world, plane, &connect, body);
}

/// Makes the host communicator of a group.
type Connect<'a> = Box<dyn Fn(usize) -> Box<dyn Collective> + 'a>;

/// Runs `body` in a thread per rank.
fn as_threads<'a>(world: &World, plane: Plane, connect: &(dyn Fn(u32) -> Connect<'a> + Sync), body: Body) {
    let run = |rank: u32| {
        let (gpu, connect) = (BorrowedGpu::take(), connect(rank));
        let groups = (0..world.groups().len()).filter(|group| world.membership(*group, rank).is_ok());
        let groups = groups.map(|group| {
            let on_device = OnDevice::new(gpu.0.clone(), plane(&gpu.0, connect(group)));
            (group, Box::new(on_device) as Box<dyn Collective>)
        });
        let mut rank = Rank { rank, groups: groups.collect(), memory: Memory::default() };
        body(&mut rank);
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..world.n_ranks()).map(|rank| scope.spawn(move || run(rank))).collect();
        // Join all threads before a panic is resumed.
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        outcomes.into_iter().for_each(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
}

/// A GPU that no other rank of this process uses meanwhile: streams are never destroyed, so tests reuse them.
struct BorrowedGpu(Arc<Gpu>);

static IDLE: Mutex<Vec<Arc<Gpu>>> = Mutex::new(Vec::new());

impl BorrowedGpu {
    fn take() -> BorrowedGpu {
        let idle = IDLE.lock().unwrap().pop();
        BorrowedGpu(idle.unwrap_or_else(|| Arc::new(Gpu::open(&search(), new_device()).unwrap())))
    }
}

/// The number of a device that no other rank has: NCCL refuses ranks that share one.
fn new_device() -> u32 {
    static DEVICES: AtomicU32 = AtomicU32::new(0);
    static SET: Once = Once::new();
    SET.call_once(|| {
        set("SOFTGPU_DEVICES", "64");
        set("SOFTGPU_HOLD_US", &hold_us());
    });
    DEVICES.fetch_add(1, Ordering::Relaxed)
}

/// How long the software GPU of this process holds work back: less than usual, since many small operations follow each other.
fn hold_us() -> String {
    std::env::var("SOFTGPU_HOLD_US").unwrap_or_else(|_| "200".to_owned())
}

/// Changes a setting of the software GPU of this process.
fn set(name: &str, value: &str) {
    Installation::new().unwrap().set(name, value).unwrap();
}

impl Drop for BorrowedGpu {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            IDLE.lock().unwrap().push(self.0.clone());
        }
    }
}
