//! The world that a formation describes: its groups, its placement on machines, and who owns which shard.

use super::pairs::pairs;
use crate::train::team::TeamPlan;
use phalanx_collective::hierarchical::placement::Placement;
use phalanx_device::CollectiveError;
use phalanx_device::world::{World, WorldId};
use phalanx_strategies::elastic::identity::{JobId, Worker};
use phalanx_strategies::elastic::message::Formation;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::Mesh;

/// The groups of a world, those of members beside its ranks included.
pub(crate) fn world_plan(plan: &TeamPlan, formation: &Formation) -> TeamPlan {
    let n_others = formation.learners.len() + formation.guests.len();
    plan.with_pairs(n_others as u32, pairs(formation))
}

/// Which member is on which machine.
pub(crate) fn placement(plan: &TeamPlan, id: WorldId, formation: &Formation) -> Result<Placement, CollectiveError> {
    Placement::new(plan.world(id)?, formation.members().map(|worker| worker.member.node.0).collect())
}

/// The rank whose gradients keep a shadow of this shard up to date: the first that trains it.
pub(crate) fn owner(mesh: &Mesh, shard: Shard) -> usize {
    let trains = |rank: &usize| Shard::of(mesh, *rank) == shard;
    (0..mesh.size()).find(trains).expect("every shard of a world is trained by some rank")
}

/// The world of a process that is in none yet.
pub(crate) fn alone(job: JobId, worker: Worker) -> Result<World, CollectiveError> {
    World::of_one_group(WorldId { job: job.0, generation: 0, incarnation: worker.incarnation.0 }, 1)
}
