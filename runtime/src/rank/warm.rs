//! What a rank process prepares before its first status report, so that the world does not wait for it later: the arena of
//! its probable rank, filled with the frozen weights. A GPU's buffers wait for the rank, since a spare may share the GPU; its
//! context and kernels are prepared.

use crate::error::JobError;
use crate::rank::arena_contents::{ArenaContents, Lasting};
use crate::rank::rank_messages::Begin;
use crate::rank::world_groups::alone;
use crate::train::links::STAGING_BYTES;
use crate::train::plan::ModelPlan;
use crate::train::programs::Programs;
use crate::train::weights;
use phalanx_collective::shm::passing::receive_world;
use phalanx_device::Machine;
use phalanx_device::shared_memory::{Arena, SharedMemory};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::MeshRank;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

pub(crate) struct Warm {
    /// Without buffers if they are not prepared.
    pub(crate) machine: Box<dyn Machine>,
    /// The prepared rank.
    memory: ArenaContents,
    /// The shared part.
    shared: Arena,
    /// Whether the frozen weights are loaded.
    pub(crate) is_filled: bool,
}

impl Warm {
    /// Prepares the memory that the node gives to this process, and returns its mappings.
    ///
    /// # Errors
    /// When there is not enough memory, or the model's files cannot be read.
    pub(crate) fn new(
        begin: &Begin,
        fd_channel: &UnixStream,
        model: &ModelPlan,
        evaluates: bool,
        seed: u64,
    ) -> Result<(Warm, Vec<Arc<SharedMemory>>), JobError> {
        let (mesh, rank) = begin.assignment;
        let programs = Programs::compile(model, MeshRank { mesh, rank }, evaluates)?;
        let world = receive_world(fd_channel, &alone(begin.job, begin.worker)?, None, &[])?;
        for arena in world.arenas() {
            arena.populate(usize::try_from(STAGING_BYTES.saturating_add(begin.arena_bytes)).unwrap_or(usize::MAX));
        }
        let member = world.join(0)?;
        #[allow(unsafe_code)] // Clones of an arena name the same memory.
        // SAFETY: the machine made here is the only one in this memory until the device takes it over or drops it.
        let shared = unsafe { member.arena() };
        let mut machine = model.device.warm(&programs.all(), &shared)?;
        let c = &programs.train;
        let mut frozen = c.program.params.iter().filter(|param| !param.trainable);
        let has_buffers = machine.allocated_bytes() > 0;
        let is_filled = has_buffers && frozen.all(|param| machine.has(c, param.value));
        if is_filled {
            let is_frozen = |param: &phalanx_strategies::program::Param| !param.trainable;
            weights::initialise(&mut *machine, c, &model.first_values(seed)?, is_frozen)?;
        }
        let memory = ArenaContents::new(mesh, rank, &[Shard::of(&mesh, rank)], Arc::new(Lasting::of(&programs)));
        Ok((Warm { machine, memory, shared, is_filled }, world.arenas().to_vec()))
    }

    /// Whether the memory was prepared for this rank, in this arena.
    pub(crate) fn is_for(&self, assignment: &ArenaContents, shared: &Arena) -> bool {
        self.shared.is_same(shared) && self.memory.may_become(assignment)
    }
}
