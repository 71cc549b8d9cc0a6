//! What a rank process has before its first word, so that nobody waits for it later: memory for the seat that it will probably
//! have, and in it what is never updated.

use crate::error::JobError;
use crate::rank::seat_memory::{Lasting, SeatMemory};
use crate::rank::words::Begin;
use crate::rank::world_plan::alone;
use crate::train::links::STAGING_BYTES;
use crate::train::plan::ModelPlan;
use crate::train::programs::Programs;
use crate::train::weights;
use phalanx_collective::shm::passing::receive_world;
use phalanx_device::Machine;
use phalanx_device::shared_memory::{Arena, SharedMemory};
use phalanx_storage::hf::source::TensorSource;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::Place;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// See the [module](self).
pub(crate) struct Warm {
    pub(crate) machine: Box<dyn Machine>,
    /// Of which seat.
    memory: SeatMemory,
    /// What of it is shared.
    shared: Arena,
    /// Whether what is never updated is there.
    pub(crate) is_filled: bool,
}

impl Warm {
    /// Takes the memory that the node lends this process; the mappings of that are the other value.
    ///
    /// # Errors
    /// When there is not enough memory, or the model's files cannot be read.
    pub(crate) fn new(
        begin: &Begin,
        passage: &UnixStream,
        model: &ModelPlan,
        evaluates: bool,
        seed: u64,
    ) -> Result<(Warm, Vec<Arc<SharedMemory>>), JobError> {
        let (mesh, rank) = begin.seat;
        let programs = Programs::compile(model, Place { mesh, rank }, evaluates)?;
        let world = receive_world(passage, &alone(begin.job, begin.worker)?, None, &[])?;
        for arena in world.arenas() {
            arena.populate(usize::try_from(STAGING_BYTES.saturating_add(begin.seat_bytes)).unwrap_or(usize::MAX));
        }
        let member = world.join(0)?;
        #[allow(unsafe_code)] // Clones of an arena name the same memory.
        // SAFETY: the machine made here is the only one in this memory until the device takes it over or drops it.
        let shared = unsafe { member.arena() };
        let mut machine = model.device.warm(&programs.all(), &shared)?;
        let c = &programs.train;
        let mut frozen = c.program.params.iter().filter(|param| !param.trainable);
        let is_filled = frozen.all(|param| machine.has(c, param.value));
        if is_filled {
            let source = model.weights.as_deref().map(TensorSource::open).transpose()?;
            let is_frozen = |param: &phalanx_strategies::program::Param| !param.trainable;
            weights::initialise_some(&mut *machine, c, model.model.known(), seed, source.as_ref(), is_frozen)?;
        }
        let memory = SeatMemory::new(mesh, rank, &[Shard::of(&mesh, rank)], Arc::new(Lasting::of(&programs)));
        Ok((Warm { machine, memory, shared, is_filled }, world.arenas().to_vec()))
    }

    /// Whether it is for this seat, in this memory.
    pub(crate) fn is_for(&self, seat: &SeatMemory, shared: &Arena) -> bool {
        self.shared.is_same(shared) && self.memory.may_become(seat)
    }
}
