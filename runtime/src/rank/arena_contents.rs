//! Contents of a rank's arena, and which other rank can reuse them in place.
//!
//! A survivor with the same shard in the next world keeps its arena for any mesh: the location of persistent tensors depends
//! only on the shard, and everything else is scratch. Nothing is copied, and no memory is first-touched while others wait.

use crate::train::programs::Programs;
use crate::train::weights::{Tensor, lasting};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::Mesh;
use phalanx_strategies::passes::memory::BufferLocation;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) struct ArenaContents {
    pub(crate) mesh: Mesh,
    pub(crate) rank: usize,
    /// The rank's own shard, then its shadows.
    pub(crate) shards: Vec<Shard>,
    lasting: Arc<Lasting>,
}

/// Tensors of a rank that persist across steps.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lasting {
    tensors: Vec<(Tensor, BufferLocation, bool)>,
    /// Bytes of each region, and whether it is shared.
    regions: [(usize, bool); 3],
}

impl Lasting {
    pub(crate) fn of(programs: &Programs) -> Lasting {
        Lasting { tensors: lasting(&programs.train), regions: programs.device.lasting_regions(&programs.all()) }
    }
}

impl ArenaContents {
    pub(crate) fn new(mesh: Mesh, rank: usize, shards: &[Shard], lasting: Arc<Lasting>) -> ArenaContents {
        ArenaContents { mesh, rank, shards: shards.to_vec(), lasting }
    }

    /// Whether the contents are those of this rank.
    pub(crate) fn is_of(&self, mesh: Mesh, rank: usize, shards: &[Shard]) -> bool {
        (self.mesh, self.rank, &self.shards[..]) == (mesh, rank, shards)
    }

    /// Whether the next rank can reuse this arena with its contents. Shadows are stored behind the scratch area, whose length
    /// depends on the mesh, and peers may need them until the next world runs.
    pub(crate) fn may_become(&self, next: &ArenaContents) -> bool {
        let is_alone = self.shards.len() == 1 && self.shards[0] == next.shards[0];
        self.is_of(next.mesh, next.rank, &next.shards) || is_alone && self.lasting == next.lasting
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::devices;
    use crate::rank::heal::tests::{assert_filled, compiled, fill};
    use phalanx_collective::shm::world::ShmWorld;
    use phalanx_device::world::World;
    use phalanx_device::world_id::WorldId;
    use phalanx_device::{Backing, Machine};

    fn programs(mesh: Mesh, rank: usize) -> Programs {
        Programs { train: compiled(mesh, rank), eval: None, reference: None, n_params: (1, 1), device: devices::host() }
    }

    /// The memory of a rank that holds its own shard and the shards of `others`.
    pub(crate) fn memory(mesh: Mesh, rank: usize, others: &[usize]) -> ArenaContents {
        let shards: Vec<Shard> = std::iter::once(&rank).chain(others).map(|rank| Shard::of(&mesh, *rank)).collect();
        ArenaContents::new(mesh, rank, &shards, Arc::new(Lasting::of(&programs(mesh, rank))))
    }

    fn replicas(n: usize) -> Mesh {
        Mesh { dp_replicate: n, dp_shard: 2, ..Mesh::ONE }
    }

    #[test]
    fn member_with_the_same_shard_keeps_its_arena_for_any_number_of_replicas() {
        for (from, to) in [(3, 2), (2, 1), (1, 2), (1, 3)] {
            let (before, next) = (memory(replicas(from), 1, &[]), memory(replicas(to), 1, &[]));

            assert!(before.may_become(&next), "{from} to {to} replicas");
        }
        let with_shadow = memory(replicas(1), 1, &[0]);
        assert!(memory(replicas(2), 1, &[]).may_become(&with_shadow), "a new shadow is placed behind the contents");
    }

    #[test]
    fn member_with_another_shard_or_shadows_does_not_keep_its_arena() {
        let alone = memory(replicas(2), 1, &[]);

        assert!(!alone.may_become(&memory(replicas(2), 0, &[])));
        assert!(!alone.may_become(&memory(Mesh { dp_shard: 3, ..Mesh::ONE }, 1, &[])));
        assert!(
            !memory(replicas(1), 1, &[0]).may_become(&alone),
            "peers may need the shadow until the next world runs"
        );
        assert!(memory(replicas(1), 1, &[0]).may_become(&memory(replicas(1), 1, &[0])), "it is the same rank");
    }

    #[test]
    fn persistent_tensors_stay_in_place_for_the_next_mesh() {
        let (two, alone) = (programs(replicas(2), 1), programs(replicas(1), 1));
        let bytes = two.shared_bytes().max(alone.shared_bytes()) as u64;
        let id = WorldId { job: 1, generation: 1, incarnation: 1 };
        let world = ShmWorld::create(&World::of_one_group(id, 1).unwrap(), &[bytes], 4096).unwrap();
        let member = world.join(0).unwrap();
        #[allow(unsafe_code)] // Clones of an arena name the same memory.
        // SAFETY: the second machine below takes over the memory from the first.
        let arena = unsafe { member.arena() };
        let backing = Backing { shared: Some(&arena), offload_dir: None };
        let mut machine = two.device.machine(&two.all(), &backing).unwrap();
        fill(&mut *machine, &two.train);
        let at = |machine: &dyn Machine, c: &phalanx_strategies::compile::Compiled| {
            let first = crate::train::weights::updated_state(c).remove(0);
            machine.place(c, first.value)
        };
        let was_at = at(&*machine, &two.train);

        let machine = machine.succeed(&alone.all(), &backing).unwrap();

        assert_filled(&*machine, &alone.train);
        assert_eq!(at(&*machine, &alone.train), was_at);
    }
}
