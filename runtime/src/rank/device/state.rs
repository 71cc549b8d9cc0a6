//! The state of a rank when a world begins: from its own memory, from other members, or from disk.

use crate::error::JobError;
use crate::events::Event;
use crate::rank::device::Device;
use crate::rank::heal::{Healing, HeldRanges, HeldState};
use crate::rank::instance::RankInstance;
use crate::train::links::Links;
use crate::train::saving::Saving;
use crate::train::weights;
use phalanx_device::Machine;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::checkpoint::Checkpoint;
use phalanx_strategies::elastic::identity::{Generation, Step};
use phalanx_strategies::elastic::message::WorldPlan;
use phalanx_strategies::elastic::recovery::{Source, Transfer, shared};
use phalanx_strategies::elastic::shadow::Shard;

impl<'a> Device<'a> {
    pub(super) fn heal(
        &self,
        world_plan: &WorldPlan,
        rank: usize,
        instance: &mut RankInstance<'a>,
        links: &mut Links,
    ) -> Result<Vec<(u32, HeldRanges)>, JobError> {
        self.fill_frozen(instance)?;
        let own = &world_plan.transfers[rank];
        if let Some(Source::Disk(checkpoint)) = own.first().map(|transfer| transfer.source) {
            // RECOVERY-1: all members read from disk, and no transfers take place.
            return self.restore(instance, checkpoint).map(|()| Vec::new());
        }
        let me = world_plan.member_of(self.worker).expect("a worker with a rank is a member");
        let (state, has) = (instance.trainer.state, instance.has.clone());
        let mut healing = Healing::default();
        for (shard, room) in instance.spans_mut() {
            if has.contains(&shard) {
                healing.holds(shard, HeldState { compiled: room.compiled, machine: room.machine }, state);
            } else {
                healing.missing(shard, room);
            }
        }
        self.register_held(&mut healing);
        for (to, transfers) in (0..).zip(&world_plan.transfers) {
            if to as usize != rank {
                let asked = self.answer(&healing, links, to, transfers)?;
                asked.into_iter().for_each(|ranges| healing.gives(to, ranges));
                continue;
            }
            for group in shared(transfers) {
                let (members, held) = senders(world_plan, group);
                let shard = group[0].shard;
                if members == [me] { healing.find(held[0], shard) } else { healing.ask(links, &members, shard)? }
            }
        }
        let is_elsewhere = |shard: &&Shard| !has.contains(shard) && own.iter().all(|t| t.shard != **shard);
        world_plan.holds[rank].iter().filter(is_elsewhere).for_each(|shard| healing.find(*shard, *shard));
        let mut catch_up_transfers = Vec::new();
        for (to, catch_up) in (world_plan.assignments.len() as u32..).zip(&world_plan.catching_up) {
            for held in self.sends(&catch_up.transfers) {
                catch_up_transfers.push((to, healing.answer_later(links, to, held)?));
            }
        }
        let came = healing.carry_out(links)?;
        instance.trainer.state = came.unwrap_or(state);
        Ok(catch_up_transfers)
    }

    /// Agrees with a member on the transfers to it.
    pub(super) fn answer(
        &self,
        healing: &Healing<'_>,
        links: &mut Links,
        to: u32,
        transfers: &[Transfer],
    ) -> Result<Vec<HeldRanges>, JobError> {
        self.sends(transfers).map(|held| healing.answer(links, to, held)).collect()
    }

    /// The held shards that this member sends for these transfers.
    pub(super) fn sends(&self, transfers: &[Transfer]) -> impl Iterator<Item = Shard> {
        let senders = transfers.iter().filter_map(|transfer| transfer.source.sender(transfer.shard));
        senders.filter(|(worker, _)| *worker == self.worker).map(|(_, held)| held)
    }

    /// Registers the state that this member held before.
    pub(crate) fn register_held<'s>(&'s self, healing: &mut Healing<'s>) {
        for instance in self.instances.iter().rev() {
            instance
                .held_states()
                .for_each(|(shard, held_state)| healing.holds(shard, held_state, instance.trainer.state));
        }
    }

    /// Loads the frozen tensors from the model's source, unless they are loaded. Constant tables are always written, because
    /// their location differs between ranks.
    pub(crate) fn fill_frozen(&self, instance: &mut RankInstance<'a>) -> Result<(), JobError> {
        let (c, machine) = instance.trainer.memory_mut();
        if instance.is_filled {
            weights::fill_constants(machine, c, self.model.model.known());
            return Ok(());
        }
        self.initialise(c, machine, |param| !param.trainable)?;
        instance.is_filled = true;
        Ok(())
    }

    fn initialise(
        &self,
        c: &Compiled,
        machine: &mut dyn Machine,
        wanted: impl Fn(&phalanx_strategies::program::Param) -> bool,
    ) -> Result<(), JobError> {
        let first = self.model.first_values(self.config.output.seed)?;
        let wanted = |param: &phalanx_strategies::program::Param| {
            self.progress_counter.tick();
            wanted(param)
        };
        Ok(weights::initialise(machine, c, &first, wanted)?)
    }

    fn restore(&self, instance: &mut RankInstance<'a>, checkpoint: Checkpoint) -> Result<(), JobError> {
        let saving = self.saving(instance.generation);
        if instance.memory.rank == 0 {
            saving.seal_earlier()?;
        }
        if checkpoint.step == Step(0) {
            let (c, machine) = instance.trainer.memory_mut();
            self.initialise(c, machine, |_| true)?;
            for shadow in instance.trainer.shadows_mut() {
                self.initialise(&shadow.compiled, &mut *shadow.machine, |_| true)?;
            }
            return Ok(());
        }
        let step = checkpoint.step.0;
        let path = match self.start_from.as_ref().filter(|(first, _)| *first == step) {
            Some((_, path)) => path.clone(),
            None => saving.path_of(step, checkpoint.generation.0)?,
        };
        let changed = instance.trainer.restore(&saving, &path)?;
        if !changed.is_empty() && instance.memory.rank == 0 {
            self.tell(instance, Event::Note(format!("changed since the checkpoint was saved: {}", changed.join(", "))));
        }
        for shadow in instance.trainer.shadows_mut() {
            saving.restore_updated(&path, &mut *shadow.machine, &shadow.compiled)?;
        }
        Ok(())
    }

    pub(super) fn saving(&self, generation: Generation) -> Saving {
        Saving::new(self.config, self.extras.clone())
            .with_progress_counter(self.progress_counter.clone())
            .of_world(generation.0, self.recorded.clone())
    }
}

/// The senders of these transfers, by position in the world, and the shards that they hold.
pub(crate) fn senders(world_plan: &WorldPlan, transfers: &[Transfer]) -> (Vec<u32>, Vec<Shard>) {
    let senders = transfers.iter().filter_map(|transfer| transfer.source.sender(transfer.shard));
    let member = |worker| world_plan.member_of(worker).expect("a sender is a member");
    senders.map(|(worker, held)| (member(worker), held)).unzip()
}
