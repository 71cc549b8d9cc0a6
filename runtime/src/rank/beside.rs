//! Catching up on the device: a member prepares for a future rank while the world trains, and training ranks send it state.
#![allow(unsafe_code)] // Catch-up transfers use the memory of a rank, which outlives them.

use crate::error::JobError;
use crate::rank::device::Device;
use crate::rank::device::state::senders;
use crate::rank::heal::{Healing, HeldRanges};
use crate::rank::instance::RankInstance;
use crate::rank::pairs::gradient_senders;
use crate::rank::port::Membership;
use crate::train::catch_up_transfer::CatchUpTransfer;
use crate::train::links::Links;
use crate::train::team::{JoinedWorld, Team};
use crate::train::trainer::catching_up::IncomingCatchUp;
use phalanx_actors::rank::DeviceEvent;
use phalanx_actors::step_log::StepWriter;
use phalanx_device::span::Span;
use phalanx_strategies::elastic::message::{CatchUp, WorldPlan};
use phalanx_strategies::elastic::recovery::shared;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::MeshRank;
use std::collections::BTreeMap;
use std::time::Instant;

impl<'a> Device<'a> {
    /// Prepares the arena of the future rank, and agrees with the training members on the transfers.
    pub(crate) fn join_beside(
        &mut self,
        world_plan: &WorldPlan,
        catch_up: &CatchUp,
        joined: JoinedWorld,
    ) -> Result<(), JobError> {
        let JoinedWorld { links, memory, .. } = joined;
        let mut links = links.with_progress_counter(self.progress_counter.clone());
        let mesh_rank = MeshRank { mesh: catch_up.mesh, rank: catch_up.rank };
        let team = Team::beside(mesh_rank, memory).with_progress_counter(self.progress_counter.clone());
        let begin = Instant::now();
        let mut instance = self.instance(world_plan, &catch_up.holds, team)?;
        self.memory.note_received();
        let (set_up, in_place) = (begin.elapsed(), instance.has.len());
        let agreed = self.agree(world_plan, catch_up, &mut instance, &mut links);
        tracing::debug!(worker = %self.worker, in_place, ?set_up, agreed = ?begin.elapsed(), "joined to catch up");
        let catch_up_transfers = match agreed {
            Ok(catch_up_transfers) => catch_up_transfers,
            Err(error) => {
                // Other members may need the earlier contents until the world runs.
                self.instances.extend((in_place > 0).then_some(instance));
                return Err(error);
            }
        };
        instance.trainer.start_catch_up(
            links,
            IncomingCatchUp { catch_up_transfers, gradient_senders: gradient_senders(world_plan, catch_up) },
        );
        self.instances.push(instance);
        self.rank.tell(DeviceEvent::JoinedBeside(world_plan.generation));
        Ok(())
    }

    /// Agrees on the catch-up transfers to a rank. State that is available locally is copied at once.
    fn agree(
        &self,
        world_plan: &WorldPlan,
        catch_up: &CatchUp,
        instance: &mut RankInstance<'a>,
        links: &mut Links,
    ) -> Result<Vec<CatchUpTransfer>, JobError> {
        self.fill_frozen(instance)?;
        let (has, comes) = (instance.has.clone(), !catch_up.transfers.is_empty());
        let mut healing = Healing::default();
        for (shard, room) in instance.spans_mut() {
            if comes || !has.contains(&shard) {
                healing.missing(shard, room);
            }
        }
        self.register_held(&mut healing);
        if !comes {
            // This member holds all state, though perhaps in the memory of another rank.
            let is_elsewhere = |shard: &&Shard| !has.contains(shard);
            catch_up.holds.iter().filter(is_elsewhere).for_each(|shard| healing.find(*shard, *shard));
            let found = healing.carry_out(links)?;
            instance.trainer.state = found.unwrap_or(instance.trainer.state);
            instance.completed();
            return Ok(Vec::new());
        }
        for group in shared(&catch_up.transfers) {
            let (members, _) = senders(world_plan, group);
            healing.ask(links, &members, group[0].shard)?;
        }
        let (runs, state) = healing.catch_up_transfers()?;
        // SAFETY: as in [`catch_up_transfers`]; nothing else reads or writes the state of a member while it catches up.
        let catch_up_transfers =
            runs.into_iter().map(|(from, runs)| unsafe { links.catch_up_transfer(from, false, runs) }).collect();
        instance.trainer.state = state.unwrap_or(instance.trainer.state);
        Ok(catch_up_transfers)
    }

    /// Catches up until the world ends.
    pub(crate) fn receive_catch_up(&mut self, steps: StepWriter) -> Result<(), JobError> {
        self.give_up_before(steps.generation());
        let mut member = Membership { steps, rank: self.rank.clone() };
        let Some(instance) = self.instances.last_mut() else { return Ok(()) };
        if !instance.trainer.is_whole() {
            instance.has.clear();
        }
        let caught_up = instance.trainer.receive_catch_up(&mut member);
        if instance.trainer.is_whole() {
            instance.completed();
        }
        caught_up
    }
}

/// The catch-up transfers that a rank has agreed to send, one per receiver.
pub(crate) fn catch_up_transfers(
    instance: &RankInstance<'_>,
    links: &mut Links,
    asked: Vec<(u32, HeldRanges)>,
) -> Vec<CatchUpTransfer> {
    let mut runs: BTreeMap<u32, Vec<Span>> = BTreeMap::new();
    for (to, ranges) in asked {
        let held = instance.held_states().find(|(shard, _)| *shard == ranges.held);
        let (_, held_state) = held.expect("peers only ask for shards held in this world");
        runs.entry(to).or_default().extend(ranges.runs(&held_state));
    }
    // SAFETY: the rank keeps its arena while it is in this world, and its transfers end with that. A step does not
    // change state before its apply phase, and pages are not sent during that phase.
    runs.into_iter().map(|(to, runs)| unsafe { links.catch_up_transfer(to, true, runs) }).collect()
}
