//! Joins a world: with a rank, as a guest that only sends state, or beside the ranks, to catch up.

use crate::error::JobError;
use crate::rank::beside::catch_up_transfers;
use crate::rank::device::Device;
use crate::rank::heal::Healing;
use crate::rank::mesh_groups::owned;
use crate::rank::pairs::{followers, shadow_holders};
use crate::rank::world_groups::{placement, team_plan_of};
use crate::train::team::{JoinedWorld, Site, TeamPlan};
use crate::train::trainer::catching_up::OutgoingCatchUp;
use phalanx_actors::rank::DeviceEvent;
use phalanx_collective::hierarchical::placement::Placement;
use phalanx_collective::shm::passing::receive_world;
use phalanx_collective::shm::world::ShmWorld;
use phalanx_device::CollectiveError;
use phalanx_device::shared_memory::SharedMemory;
use phalanx_device::world_id::WorldId;
use phalanx_strategies::elastic::message::WorldPlan;
use phalanx_strategies::mesh::Mesh;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

impl<'a> Device<'a> {
    pub(super) fn join(&mut self, world_plan: &WorldPlan) -> Result<(), JobError> {
        let member = world_plan.member_of(self.worker).expect("a member only joins worlds that it belongs to");
        let plan = team_plan_of(self.team_plan(world_plan.mesh)?, world_plan);
        let id = WorldId { job: self.job.0, generation: world_plan.generation.0, incarnation: 0 };
        let placement = placement(&plan, id, world_plan)?;
        let shm = self.receive(&placement)?;
        let control = shm.control().clone();
        let abort = Box::new(move |reason: &str| control.abort(reason));
        self.rank.tell(DeviceEvent::Connects(world_plan.generation, abort));
        let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let addresses: Vec<SocketAddr> = world_plan.addresses.iter().map(|a| a.unwrap_or(nowhere)).collect();
        let site = Site { listener: &self.listener, addresses: &addresses, config: &self.tcp };
        let mut joined = plan.join_at(&placement, &shm, member, &site, &*self.model.device)?;
        self.device_watch.join(&joined.connected);
        let groups = owned(std::mem::take(&mut joined.connected));
        self.rank.tell(DeviceEvent::Connected(world_plan.generation, groups));
        match (world_plan.rank_of(self.worker), world_plan.catch_up(self.worker)) {
            (Some(rank), _) => self.take_rank(world_plan, rank, joined),
            (None, Some(catch_up)) => self.join_beside(world_plan, catch_up, joined),
            (None, None) => self.help(world_plan, joined),
        }
    }

    /// Serves the state requests of other members, as a guest.
    fn help(&mut self, world_plan: &WorldPlan, joined: JoinedWorld) -> Result<(), JobError> {
        let mut links = joined.links.with_progress_counter(self.progress_counter.clone());
        let mut healing = Healing::default();
        self.register_held(&mut healing);
        for (to, transfers) in (0..).zip(&world_plan.transfers) {
            let asked = self.answer(&healing, &mut links, to, transfers)?;
            asked.into_iter().for_each(|ranges| healing.gives(to, ranges));
        }
        healing.carry_out(&mut links).map(|_| ())
    }

    /// Joins with a rank, with state from the planned sources.
    fn take_rank(&mut self, world_plan: &WorldPlan, rank: usize, joined: JoinedWorld) -> Result<(), JobError> {
        let JoinedWorld { team, links, .. } = joined;
        let mut links = links.with_progress_counter(self.progress_counter.clone());
        let progress_counter = self.progress_counter.of_world(world_plan.generation.0);
        let team = team.expect("a rank has a team").with_progress_counter(progress_counter);
        let shards = &world_plan.holds[rank];
        let begin = Instant::now();
        let mut instance = self.instance(world_plan, shards, team)?;
        instance.from_disk = world_plan.base.lineage == world_plan.generation;
        // State that is transferred again counts as missing until all of it has arrived.
        for transfer in &world_plan.transfers[rank] {
            instance.has.remove(&transfer.shard);
        }
        if world_plan.transfers[rank].iter().any(|transfer| transfer.source.sender(transfer.shard).is_some()) {
            self.memory.note_received();
        }
        let (set_up, in_place) = (begin.elapsed(), instance.has.len());
        let healed = self.heal(world_plan, rank, &mut instance, &mut links);
        tracing::debug!(worker = %self.worker, in_place, ?set_up, healed = ?begin.elapsed(), "joined with a rank");
        let asked = match healed {
            Ok(asked) => asked,
            Err(error) => {
                // Other members may need the earlier contents until the world runs.
                self.instances.extend((in_place > 0).then_some(instance));
                return Err(error);
            }
        };
        instance.completed();
        let catch_up_transfers = catch_up_transfers(&instance, &mut links, asked);
        let outgoing_catch_up = OutgoingCatchUp { catch_up_transfers, followers: followers(world_plan, rank) };
        instance.trainer.link(links, shadow_holders(world_plan, rank), outgoing_catch_up);
        self.instances.push(instance);
        self.rank.tell(DeviceEvent::Healed(world_plan.generation));
        Ok(())
    }

    pub(super) fn team_plan(&mut self, mesh: Mesh) -> Result<&TeamPlan, JobError> {
        if !self.plans.contains_key(&mesh) {
            let plan = TeamPlan::new(self.model, mesh, self.evaluates)?;
            self.plans.insert(mesh, plan);
        }
        Ok(&self.plans[&mesh])
    }

    /// Receives the memory of the world, which the node sends before the desired state. Skips the memory of worlds that ended
    /// before this rank joined them.
    fn receive(&mut self, placement: &Placement) -> Result<ShmWorld, CollectiveError> {
        let expected = placement.machine_world(self.worker.member.node.0)?;
        let spare = self.spare.iter().map(|(_, memory)| memory);
        let known: Vec<Arc<SharedMemory>> = self.memories.iter().chain(spare).cloned().collect();
        loop {
            match receive_world(&self.fd_channel, &expected, None, &known) {
                Err(CollectiveError::Stale { expected, found }) if found.generation < expected.generation => {}
                received => {
                    let world = received?;
                    self.memories = world.arenas().to_vec();
                    return Ok(world);
                }
            }
        }
    }
}
