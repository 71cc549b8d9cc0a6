//! The rank of a world as an instance: one that stays, or a new one, which takes over what it can of earlier memory.

use crate::devices;
use crate::error::JobError;
use crate::rank::arena_contents::{ArenaContents, Lasting};
use crate::rank::device::Device;
use crate::rank::instance::RankInstance;
use crate::rank::pairs::owner;
use crate::train::programs::Programs;
use crate::train::shadow::Shadow;
use crate::train::team::Team;
use crate::train::trainer::Trainer;
use phalanx_device::Backing;
use phalanx_device::shared_memory::Arena;
use phalanx_strategies::elastic::message::WorldPlan;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::{Mesh, MeshRank};
use std::collections::BTreeSet;
use std::sync::Arc;

impl<'a> Device<'a> {
    /// The instance of a rank with these shards.
    pub(crate) fn instance(
        &mut self,
        world_plan: &WorldPlan,
        shards: &[Shard],
        team: Team,
    ) -> Result<RankInstance<'a>, JobError> {
        let MeshRank { mesh, rank } = team.mesh_rank;
        let is_same = |instance: &RankInstance<'_>| {
            instance.memory.is_of(mesh, rank, shards) && instance.trainer.is_in(team.memory())
        };
        let mut instance = match self.instances.iter().position(is_same) {
            Some(at) => {
                let mut instance = self.instances.remove(at);
                instance.trainer.rejoin(team);
                instance
            }
            None => self.new_instance(world_plan, shards, team)?,
        };
        (instance.generation, instance.n_saves) = (world_plan.generation, world_plan.n_saves);
        instance.disputed = world_plan.disputed.clone();
        Ok(instance)
    }

    /// The instance of a new rank. It may take over the memory and the contents of an earlier rank.
    fn new_instance(
        &mut self,
        world_plan: &WorldPlan,
        shards: &[Shard],
        team: Team,
    ) -> Result<RankInstance<'a>, JobError> {
        let MeshRank { mesh, rank } = team.mesh_rank;
        let programs = Arc::new(Programs::compile(self.model, MeshRank { mesh, rank }, self.evaluates)?);
        let memory = ArenaContents::new(mesh, rank, shards, Arc::new(Lasting::of(&programs)));
        let becomes_it =
            |instance: &RankInstance<'_>| instance.memory.may_become(&memory) && instance.trainer.is_in(team.memory());
        let before = self.instances.iter().position(becomes_it);
        let arena = team.memory().expect("ranks of elastic worlds share memory").clone();
        let shadows = self.shadows(mesh, &shards[1..], &arena, &programs)?;
        let mut settled = self.instances.last().and_then(|last| last.trainer.settled().cloned());
        let (mut has, mut is_filled, mut state, mut machine) = (BTreeSet::new(), false, None, None);
        let before = before.map(|at| self.instances.remove(at));
        let warm = self.warm.take().filter(|warm| before.is_none() && warm.is_for(&memory, &arena));
        if let Some(before) = before {
            (has, is_filled) = (before.has, before.is_filled);
            let (of_before, at, metrics) = before.trainer.into_parts();
            (machine, state, settled) = (Some(of_before), Some(at), metrics);
        } else if let Some(warm) = warm {
            (is_filled, machine) = (warm.is_filled, Some(warm.machine));
        }
        let is_new = machine.is_none();
        let folder = self.config.output.folder();
        let offload_dir = Some(folder.as_path());
        // Takes over memory before it allocates more: a device need not have room for both.
        let machine = programs.machine(machine, &Backing { shared: Some(&arena), offload_dir })?;
        let (run, sampler) = (self.run, self.sampler);
        let trainer = Trainer::new(self.model, run, programs, machine, sampler, team, self.peak_flops)?;
        let mut trainer = trainer.with_shadows(shadows).with_settled(settled);
        trainer.state = state.unwrap_or(trainer.state);
        if is_new {
            // The arena may be that of a rank in an earlier world (`RECYCLED-ARENAS-1`).
            self.instances.retain(|instance| !instance.trainer.is_in(Some(&arena)));
            #[allow(unsafe_code)] // Other processes may have mapped the memory.
            // SAFETY: the machines in the arena were dropped in the line above, the new machine holds no references,
            // and this device starts no operation before it has its rank.
            unsafe { arena.clear() }?;
        }
        let (generation, n_saves) = (world_plan.generation, world_plan.n_saves);
        let (from_disk, disputed) = (false, Vec::new());
        Ok(RankInstance { memory, has, generation, n_saves, is_filled, from_disk, disputed, trainer })
    }

    /// Shadows of these shards, behind the memory of the rank's own programs.
    fn shadows(&self, mesh: Mesh, shards: &[Shard], memory: &Arena, own: &Programs) -> Result<Vec<Shadow>, JobError> {
        // Shadows live in host memory and are updated by the processor: they take nothing from a GPU.
        let device = &*devices::host();
        let mut first = own.shared_bytes();
        let mut shadows = Vec::new();
        for shard in shards {
            let of = owner(&mesh, *shard);
            let step = Programs::compile(self.model, MeshRank { mesh, rank: of }, false)?.train;
            let shadow = Shadow::new(device, *shard, of as u32, &step, memory, first)?;
            first += device.shadow_bytes(&[&shadow.compiled]);
            shadows.push(shadow);
        }
        Ok(shadows)
    }
}
