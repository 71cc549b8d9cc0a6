//! Assigns the parts of a checkpoint to their writers, and decides when it is complete.
//!
//! Invariants:
//! - `SNAPSHOT-1` Each shard of a world is written by one rank; replicas share the work.
//! - `SNAPSHOT-2` A checkpoint is complete when all shards of one step, written in one generation, are durable.
//! - `SNAPSHOT-3` A checkpoint that is incomplete when its generation ends never becomes complete.

use super::checkpoint::{Checkpoint, Part};
use super::identity::{Generation, Step};
use super::message::WorldPlan;
use super::shadow::Shard;
use std::collections::{BTreeMap, BTreeSet};

/// The shard that a rank writes, if it writes one (`SNAPSHOT-1`).
pub fn writes(world_plan: &WorldPlan, rank: usize) -> Option<Shard> {
    let shard = world_plan.holds[rank][0];
    let replica = world_plan.mesh.coord(rank).on(crate::mesh::Axis::DpReplicate);
    (shard.part as usize % world_plan.mesh.dp_replicate == replica).then_some(shard)
}

/// Checkpoints with some, but not all, parts durable.
#[derive(Clone, Debug, Default)]
pub struct Manifests {
    generation: Generation,
    shards: BTreeSet<Shard>,
    missing: BTreeMap<Step, BTreeSet<Shard>>,
}

/// Largest number of checkpoints in progress; a further one abandons the oldest.
const OPEN_MAX: usize = 4;

impl Manifests {
    /// Begins a generation and abandons incomplete checkpoints (`SNAPSHOT-3`).
    pub fn begin(&mut self, world_plan: &WorldPlan) {
        let shards = (0..world_plan.assignments.len()).filter_map(|rank| writes(world_plan, rank)).collect();
        *self = Manifests { generation: world_plan.generation, shards, missing: BTreeMap::new() };
    }

    /// Ends the generation (`SNAPSHOT-3`).
    pub fn abandon(&mut self) {
        *self = Manifests::default();
    }

    /// Records a durable part. Returns the checkpoint if it is complete now (`SNAPSHOT-2`).
    pub fn handle_part(&mut self, part: Part) -> Option<Checkpoint> {
        if part.of.generation != self.generation || !self.shards.contains(&part.shard) {
            return None;
        }
        let missing = self.missing.entry(part.of.step).or_insert_with(|| self.shards.clone());
        let complete = missing.remove(&part.shard) && missing.is_empty();
        if self.missing.len() > OPEN_MAX {
            self.missing.pop_first();
        }
        complete.then_some(part.of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::Worker;
    use crate::elastic::shadow::place;
    use crate::mesh::Mesh;

    fn world_plan(generation: u64, mesh: Mesh) -> WorldPlan {
        let assignments = vec![Worker::default(); mesh.size()];
        let holds = place(&mesh, &assignments, true);
        WorldPlan {
            generation: Generation(generation),
            mesh,
            addresses: vec![None; assignments.len()],
            assignments,
            catching_up: vec![],
            guests: vec![],
            base: Default::default(),
            voted_in: Generation(0),
            transfers: vec![vec![]; holds.len()],
            holds,
            n_saves: 0,
            rests: false,
            disputed: vec![],
        }
    }

    fn part(generation: u64, step: u64, shard: Shard) -> Part {
        Part { of: Checkpoint { generation: Generation(generation), step: Step(step) }, shard }
    }

    // SNAPSHOT-1
    #[test]
    fn each_shard_has_one_writer_and_replicas_share_the_work() {
        let world_plan = world_plan(1, Mesh { dp_replicate: 2, dp_shard: 4, tp: 2, ..Mesh::ONE });

        let written: Vec<(usize, Shard)> =
            (0..16).filter_map(|rank| Some((rank, writes(&world_plan, rank)?))).collect();

        let distinct: BTreeSet<Shard> = written.iter().map(|(_, shard)| *shard).collect();
        assert_eq!((written.len(), distinct.len()), (8, 8));
        assert_eq!(written.iter().filter(|(rank, _)| *rank < 8).count(), 4);
    }

    // SNAPSHOT-2
    #[test]
    fn checkpoint_completes_once_when_all_its_parts_are_durable() {
        let world_plan = world_plan(3, Mesh { dp_shard: 2, ..Mesh::ONE });
        let (a, b) = (world_plan.holds[0][0], world_plan.holds[1][0]);
        let mut manifests = Manifests::default();
        manifests.begin(&world_plan);

        assert_eq!(manifests.handle_part(part(3, 10, a)), None);
        assert_eq!(manifests.handle_part(part(3, 20, b)), None);
        assert_eq!(manifests.handle_part(part(3, 10, b)).unwrap().step, Step(10));
        assert_eq!(manifests.handle_part(part(3, 10, b)), None);
    }

    // SNAPSHOT-3
    #[test]
    fn parts_of_another_generation_do_not_count() {
        let old = world_plan(3, Mesh { dp_shard: 2, ..Mesh::ONE });
        let (a, b) = (old.holds[0][0], old.holds[1][0]);
        let mut manifests = Manifests::default();
        manifests.begin(&old);
        manifests.handle_part(part(3, 10, a));
        manifests.begin(&world_plan(4, old.mesh));

        assert_eq!(manifests.handle_part(part(3, 10, b)), None);
        assert_eq!(manifests.handle_part(part(4, 10, b)), None);
    }
}
