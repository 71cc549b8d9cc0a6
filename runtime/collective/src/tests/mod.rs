//! Tests that run against every implementation of the trait.

mod agreement;
pub mod definitions;
mod failures;

use std::collections::BTreeMap;

use super::hierarchical::collective::HierarchicalRank;
use super::hierarchical::placement::Placement;
use super::local::LocalWorld;
use super::shm::world::ShmWorld;
use super::tcp::collective::TcpRank;
use super::tcp::connect::TcpConfig;
use super::tcp::tests::listeners;
use phalanx_device::shared_memory::Arena;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_device::{Collective, CollectiveError, RawBuffer};

const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

/// A rank of a test: its groups by index, and memory for operands.
pub struct Rank {
    pub rank: u32,
    pub groups: BTreeMap<usize, Box<dyn Collective>>,
    pub memory: Memory,
}

impl Rank {
    pub fn group(&mut self, group: usize) -> &mut dyn Collective {
        &mut **self.groups.get_mut(&group).expect("a group of this rank")
    }
}

/// Memory for operands that lives as long as the test's rank.
#[derive(Default)]
pub struct Memory {
    heap: Vec<Vec<u64>>,
    /// The preferred source of memory, with the number of bytes taken.
    arena: Option<(Arena, usize)>,
}

impl Memory {
    /// `bytes` bytes, aligned for every element type.
    pub fn alloc(&mut self, bytes: usize) -> RawBuffer {
        if let Some((arena, used)) = &mut self.arena
            && *used + bytes <= arena.len()
        {
            let start = arena.base().wrapping_add(*used);
            *used += bytes.next_multiple_of(64);
            return RawBuffer::new(start, bytes);
        }
        self.heap.push(vec![0; bytes.div_ceil(8)]);
        let words = self.heap.last_mut().expect("just pushed");
        RawBuffer::new(words.as_mut_ptr().cast(), bytes)
    }
}

/// The code that every rank of a test runs.
pub type Body<'a> = &'a (dyn Fn(&mut Rank) + Sync);

/// Runs a body as every rank of a world.
type Run = fn(&World, Body);

/// Every implementation, with its name.
const IMPLEMENTATIONS: [(&str, Run); 4] =
    [("local", with_local), ("shm, staged", with_shm_staged), ("shm, in arenas", with_shm_arenas), ("tcp", with_tcp)];

/// All implementations, including the hierarchical one, whose sums have another order.
fn with_failures() -> impl Iterator<Item = (&'static str, Run)> {
    IMPLEMENTATIONS.into_iter().chain([("hierarchical", with_pairs as Run)])
}

/// Runs `body` as every rank, over every implementation whose sums are in order of position.
fn with_all(world: &World, body: Body) {
    for (name, run) in IMPLEMENTATIONS {
        println!("implementation {name}");
        run(world, body);
    }
}

fn with_local(world: &World, body: Body) {
    let local = LocalWorld::new(world.clone());
    let join = |rank: u32| -> Result<Rank, CollectiveError> {
        let groups = groups_of(world, rank).map(|group| {
            let communicator: Box<dyn Collective> = Box::new(local.communicator(group, rank)?);
            Ok((group, communicator))
        });
        Ok(Rank { rank, groups: groups.collect::<Result<_, CollectiveError>>()?, memory: Memory::default() })
    };
    as_threads(world.n_ranks(), &join, body);
}

fn with_shm_staged(world: &World, body: Body) {
    with_shm(world, 0, body);
}

fn with_shm_arenas(world: &World, body: Body) {
    with_shm(world, 32 << 20, body);
}

/// Ranks are threads with their own mappings. Operands lie in arenas of `arena_bytes` until these are full.
fn with_shm(world: &World, arena_bytes: u64, body: Body) {
    let arenas = vec![arena_bytes; world.n_ranks() as usize];
    let shm = ShmWorld::create(world, &arenas, 8 << 20).unwrap();
    as_threads(world.n_ranks(), &|rank| shm_rank(&shm.mapped_again()?, world, rank), body);
}

/// A rank of a world in shared memory, with all its groups.
fn shm_rank(shm: &ShmWorld, world: &World, rank: u32) -> Result<Rank, CollectiveError> {
    let joined = shm.join(rank)?;
    let groups = groups_of(world, rank).map(|group| {
        let communicator: Box<dyn Collective> = Box::new(joined.communicator(group)?);
        Ok((group, communicator))
    });
    let groups = groups.collect::<Result<_, CollectiveError>>()?;
    #[allow(unsafe_code)] // Clones of an arena name the same memory.
    // SAFETY: `Memory` hands out disjoint pieces of the arena, once each.
    let arena = unsafe { joined.arena() };
    Ok(Rank { rank, groups, memory: Memory { heap: Vec::new(), arena: Some((arena, 0)) } })
}

fn with_tcp(world: &World, body: Body) {
    let (listeners, addresses) = listeners(world.n_ranks());
    let config = TcpConfig::default();
    let join = |rank: u32| -> Result<Rank, CollectiveError> {
        let joined = TcpRank::join(world, rank, &listeners[rank as usize], &addresses, &config)?;
        let groups = groups_of(world, rank).map(|group| {
            let communicator: Box<dyn Collective> = Box::new(joined.communicator(group)?);
            Ok((group, communicator))
        });
        Ok(Rank { rank, groups: groups.collect::<Result<_, CollectiveError>>()?, memory: Memory::default() })
    };
    as_threads(world.n_ranks(), &join, body);
}

/// Runs `body` on simulated machines, each a shared-memory world of its own, connected over TCP.
pub fn with_machines(world: &World, machine_of: &[u32], body: Body) {
    let placement = Placement::new(world.clone(), machine_of.to_vec()).unwrap();
    let machines: BTreeMap<u32, ShmWorld> = machine_of
        .iter()
        .map(|machine| {
            let arenas = vec![8 << 20; placement.ranks_of(*machine).len()];
            (*machine, ShmWorld::create(&placement.machine_world(*machine).unwrap(), &arenas, 8 << 20).unwrap())
        })
        .collect();
    let (listeners, addresses) = listeners(world.n_ranks());
    let config = TcpConfig::default();
    let join = |rank: u32| -> Result<Rank, CollectiveError> {
        let shm = machines[&machine_of[rank as usize]].mapped_again()?;
        let listener = &listeners[rank as usize];
        let joined = HierarchicalRank::join(&placement, rank, &shm, listener, &addresses, &config)?;
        let groups = groups_of(world, rank).map(|group| Ok((group, joined.communicator(group)?)));
        let groups = groups.collect::<Result<_, CollectiveError>>()?;
        #[allow(unsafe_code)] // As above.
        // SAFETY: as in `shm_rank`.
        let arena = unsafe { joined.arena() };
        Ok(Rank { rank, groups, memory: Memory { heap: Vec::new(), arena: Some((arena, 0)) } })
    };
    as_threads(world.n_ranks(), &join, body);
}

/// Two ranks on each machine.
fn with_pairs(world: &World, body: Body) {
    with_machines(world, &(0..world.n_ranks()).map(|rank| rank / 2).collect::<Vec<_>>(), body);
}

/// The groups of a rank.
fn groups_of(world: &World, rank: u32) -> impl Iterator<Item = usize> {
    (0..world.groups().len()).filter(move |group| world.membership(*group, rank).is_ok())
}

/// Runs `body` in a thread per rank, on the rank that `join` returns, once all ranks have joined: a rank that is still joining
/// would otherwise fail there when another's body has already aborted the world.
fn as_threads(n_ranks: u32, join: &(dyn Fn(u32) -> Result<Rank, CollectiveError> + Sync), body: Body) {
    let all_joined = std::sync::Barrier::new(n_ranks as usize);
    let run = |rank| {
        let joined = join(rank);
        all_joined.wait();
        body(&mut joined.unwrap());
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..n_ranks).map(|rank| scope.spawn(move || run(rank))).collect();
        // Join all threads before a panic is resumed.
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        outcomes.into_iter().for_each(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
}
