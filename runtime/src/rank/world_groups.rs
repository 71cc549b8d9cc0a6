//! Derives a world's groups, placement on machines and shard owners from its plan.

use super::pairs::pairs;
use crate::train::team::TeamPlan;
use phalanx_collective::hierarchical::placement::Placement;
use phalanx_device::CollectiveError;
use phalanx_device::world::World;
use phalanx_device::world_id::WorldId;
use phalanx_strategies::elastic::identity::{JobId, Worker};
use phalanx_strategies::elastic::message::WorldPlan;

/// The groups of a world, including those of members without a rank.
pub(crate) fn team_plan_of(plan: &TeamPlan, world_plan: &WorldPlan) -> TeamPlan {
    let n_others = world_plan.catching_up.len() + world_plan.guests.len();
    plan.with_pairs(n_others as u32, pairs(world_plan))
}

/// The placement of members on machines.
pub(crate) fn placement(plan: &TeamPlan, id: WorldId, world_plan: &WorldPlan) -> Result<Placement, CollectiveError> {
    Placement::new(plan.world(id)?, world_plan.members().map(|worker| worker.member.node.0).collect())
}

/// The world of a process before its first join.
pub(crate) fn alone(job: JobId, worker: Worker) -> Result<World, CollectiveError> {
    World::of_one_group(WorldId { job: job.0, generation: 0, incarnation: worker.incarnation.0 }, 1)
}
