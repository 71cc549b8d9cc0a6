//! Chooses the mesh after a change, and the rank assignment.
//!
//! Invariants:
//! - `MESH-CHOICE-1` The mesh is the wanted one if there are enough members for it. Otherwise `pp`, `cp` and `tp` are
//!   those of the wanted mesh, or those of the last world while the wanted ones would leave more members without a
//!   rank; no `dp` axis is larger than in the larger of the two meshes, or smaller than the policy allows.
//! - `MESH-CHOICE-2` The global batch can be divided: evenly, or along the tree of reproducible runs, which takes
//!   uneven shares.
//! - `MESH-CHOICE-3` As many members of the last world as possible keep their state: a member keeps its coordinate if
//!   the mesh still has it. A member that has caught up gets its rank before any other candidate.
//!
//! The mesh with the most ranks is chosen; among equal ones the one with the wanted `pp`, `cp` and `tp`, then the one
//! that keeps `dp_shard`, because no state moves. The sender of a request checks beforehand whether the model can be cut
//! that way.

use super::identity::{Incarnation, Worker};
use super::message::{CatchUp, WorldPlan};
use super::quorum::Blocked;
use super::recovery::{TRANSFERS_MAX, n_transfers};
use super::shadow::{Cut, Shard};
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;

/// The user's choices and limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The mesh of a full world.
    pub wanted: Mesh,
    /// Fewest replicas.
    pub dp_replicate_min: usize,
    /// Fewest shards; a rank must have memory for its part.
    pub dp_shard_min: usize,
    /// How long to wait for replacements before a smaller world is formed.
    pub replace_patience: Duration,
    /// Microbatches of a step, the same for every world size.
    pub n_microbatches: usize,
    /// Whether ranks may have one microbatch more than others.
    pub uneven: bool,
    /// Whether stragglers and stuck members are replaced; otherwise the others wait for them.
    pub evict_stragglers: bool,
    /// Whether to keep a second copy of state that only one node or process has; see [`super::shadow`].
    pub shadows: bool,
    /// More crashes in a row than this, without a step committed between them, end the job (default
    /// [`INCIDENTS_MAX`]).
    pub incidents_max: u32,
    /// Whether all devices must be of one model, because the results of models differ.
    pub one_model: bool,
    /// Bytes of all weights and optimizer state that updates change.
    pub state_bytes: u64,
    /// A newcomer with more missing bytes of state than this catches up while the others train, if they can; see
    /// [`super::catch_up`].
    pub rest_bytes_max: u64,
}

/// The previous world.
#[derive(Clone, Copy, Debug)]
pub struct Last<'a> {
    /// Its shape.
    pub mesh: Mesh,
    /// The previous rank assignment.
    pub assignments: &'a [Worker],
    /// Members that were catching up.
    pub catching_up: &'a [CatchUp],
}

impl<'a> From<&'a WorldPlan> for Last<'a> {
    fn from(world_plan: &'a WorldPlan) -> Last<'a> {
        Last { mesh: world_plan.mesh, assignments: &world_plan.assignments, catching_up: &world_plan.catching_up }
    }
}

/// Default of [`Policy::incidents_max`].
pub const INCIDENTS_MAX: u32 = 5;

/// Why a requested mesh is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ResizeError {
    /// The state needs more transfers than a world plan may list.
    #[error(
        "the change from {have} to {found} needs {n_transfers} transfers, expected at most {TRANSFERS_MAX}; \
         resize to a mesh between the two first, or restart from a checkpoint"
    )]
    TooManyPieces {
        /// The mesh wanted so far.
        have: Mesh,
        /// The requested one.
        found: Mesh,
        /// Number of transfers.
        n_transfers: usize,
    },
    /// The policy does not allow it.
    #[error(
        "expected at least {dp_replicate_min} replicas and {dp_shard_min} shards, and data ranks that divide \
         {n_microbatches} microbatches; found {found}"
    )]
    NotAllowed {
        /// Fewest replicas.
        dp_replicate_min: usize,
        /// Fewest shards.
        dp_shard_min: usize,
        /// Microbatches of a step.
        n_microbatches: usize,
        /// The requested one.
        found: Mesh,
    },
}

/// The worker of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The shape.
    pub mesh: Mesh,
    /// The worker of each rank, by position.
    pub assignments: Vec<Worker>,
}

impl Policy {
    /// The policy of a world that only saves its state: any number of copies and shards will do, at once.
    #[must_use]
    pub fn of_last_save(self) -> Policy {
        Policy { dp_replicate_min: 1, dp_shard_min: 1, replace_patience: Duration::ZERO, ..self }
    }

    /// The largest mesh for `n` members (`MESH-CHOICE-1`, `MESH-CHOICE-2`).
    pub fn largest(&self, n_members: usize, last: Option<Mesh>) -> Option<Mesh> {
        let fits = |mesh: &Mesh| mesh.size() <= n_members && self.divides(mesh);
        if fits(&self.wanted) {
            return Some(self.wanted);
        }
        let allowed = self.bounds(last).into_iter().flat_map(|bound| self.within(bound)).filter(fits);
        let is_as_wanted =
            |mesh: &Mesh| (mesh.pp, mesh.cp, mesh.tp) == (self.wanted.pp, self.wanted.cp, self.wanted.tp);
        let keeps = |mesh: &Mesh| last.is_some_and(|last| last.dp_shard == mesh.dp_shard);
        allowed.max_by_key(|mesh| (mesh.size(), is_as_wanted(mesh), keeps(mesh), mesh.dp_shard))
    }

    /// Number of ranks of the smallest mesh.
    pub fn smallest(&self, last: Option<Mesh>) -> usize {
        let (dp_replicate, dp_shard) = (self.dp_replicate_min, self.dp_shard_min);
        let sizes = self.bounds(last).into_iter().map(|bound| Mesh { dp_replicate, dp_shard, ..bound }.size());
        sizes.min().expect("the wanted mesh is always a bound")
    }

    /// The wanted mesh, and the last world's cut, which the job may keep until the wanted mesh can be formed.
    fn bounds(&self, last: Option<Mesh>) -> Vec<Mesh> {
        let wanted = self.wanted;
        let others = last.filter(|last| (last.pp, last.cp, last.tp) != (wanted.pp, wanted.cp, wanted.tp));
        let other = others.map(|last| Mesh {
            dp_replicate: last.dp_replicate.max(wanted.dp_replicate),
            dp_shard: last.dp_shard.max(wanted.dp_shard),
            ..last
        });
        std::iter::once(wanted).chain(other).collect()
    }

    fn within(&self, bound: Mesh) -> impl Iterator<Item = Mesh> {
        let (shards, replicas) = (self.dp_shard_min..=bound.dp_shard, self.dp_replicate_min..=bound.dp_replicate);
        shards.flat_map(move |dp_shard| {
            replicas.clone().map(move |dp_replicate| Mesh { dp_replicate, dp_shard, ..bound })
        })
    }

    /// Checks that a mesh can replace the wanted one.
    ///
    /// # Errors
    /// Why the mesh is rejected.
    pub fn check_resize(&self, found: Mesh) -> Result<(), ResizeError> {
        let Policy { wanted: have, dp_replicate_min, dp_shard_min, n_microbatches, .. } = *self;
        let large_enough = found.dp_replicate >= dp_replicate_min && found.dp_shard >= dp_shard_min;
        if found.checked_size().is_none() || !large_enough || !self.divides(&found) {
            return Err(ResizeError::NotAllowed { dp_replicate_min, dp_shard_min, n_microbatches, found });
        }
        // The time to count grows with the number of pieces.
        let n_transfers = if found.size() > TRANSFERS_MAX { found.size() } else { n_transfers(&have, &found) };
        if Cut::of(&have) != Cut::of(&found) && n_transfers > TRANSFERS_MAX {
            return Err(ResizeError::TooManyPieces { have, found, n_transfers });
        }
        Ok(())
    }

    fn divides(&self, mesh: &Mesh) -> bool {
        let n = mesh.data_ranks();
        n <= self.n_microbatches && (self.uneven || self.n_microbatches.is_multiple_of(n))
    }

    /// Whether a world of fewer replicas than wanted may train.
    pub fn allows(&self, mesh: &Mesh) -> bool {
        mesh.dp_replicate >= self.dp_replicate_min.max(1) && mesh.dp_shard >= self.dp_shard_min && self.divides(mesh)
    }

    /// Chooses a mesh and its ranks. All `members` can take a rank; `waited` is the time waited for replacements so far.
    ///
    /// # Errors
    /// Why there is no world yet.
    pub fn choose(
        &self,
        last: Option<Last<'_>>,
        members: &BTreeSet<Worker>,
        waited: Duration,
    ) -> Result<Choice, Blocked> {
        let have = members.len();
        let before = last.map(|last| last.mesh);
        let mesh = self.largest(have, before).ok_or_else(|| Blocked::TooFew { have, need: self.smallest(before) })?;
        let shrinks = before.is_none_or(|before| mesh.size() < before.size());
        if mesh != self.wanted && shrinks && waited < self.replace_patience {
            let remaining = self.replace_patience - waited;
            return Err(Blocked::Replacements { have, want: self.wanted.size(), remaining });
        }
        Ok(Choice { mesh, assignments: assignments(mesh, last, members) })
    }
}

/// `MESH-CHOICE-3`
fn assignments(mesh: Mesh, last: Option<Last<'_>>, members: &BTreeSet<Worker>) -> Vec<Worker> {
    let mut assignments: Vec<Option<Worker>> = vec![None; mesh.size()];
    let mut free = members.clone();
    if let Some(Last { mesh: last_mesh, assignments: last_assignments, catching_up }) = last {
        for (rank, worker) in last_assignments.iter().enumerate() {
            let at = last_mesh.coord(rank);
            let inside = crate::mesh::Axis::ALL.into_iter().all(|axis| at.on(axis) < mesh.axis(axis));
            if inside && free.remove(worker) {
                assignments[mesh.rank(at)] = Some(*worker);
            }
        }
        // In the order of their ranks, so that the remaining members take the ranks for which they caught up.
        for catch_up in catching_up {
            let is_its =
                |rank: &usize| assignments[*rank].is_none() && catch_up.holds.first() == Some(&Shard::of(&mesh, *rank));
            if let Some(rank) = (0..mesh.size()).find(is_its).filter(|_| free.remove(&catch_up.worker)) {
                assignments[rank] = Some(catch_up.worker);
            }
        }
        // A process restarted in the same slot is nearest to the neighbouring ranks.
        for (rank, worker) in last_assignments.iter().enumerate() {
            let at = last_mesh.coord(rank);
            let inside = crate::mesh::Axis::ALL.into_iter().all(|axis| at.on(axis) < mesh.axis(axis));
            let first = Worker { incarnation: Incarnation(0), ..*worker };
            let successor = free.range(first..).next().filter(|other| other.member == worker.member).copied();
            if let (true, Some(successor)) = (inside && assignments[mesh.rank(at)].is_none(), successor) {
                free.remove(&successor);
                assignments[mesh.rank(at)] = Some(successor);
            }
        }
    }
    let mut free = free.into_iter();
    assignments
        .into_iter()
        .map(|assignment| assignment.or_else(|| free.next()).expect("the mesh is no larger than the members"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{MemberId, NodeId};
    use proptest::prelude::*;

    fn worker(slot: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(0), slot }, incarnation: Incarnation(1) }
    }

    fn members(slots: impl IntoIterator<Item = u32>) -> BTreeSet<Worker> {
        slots.into_iter().map(worker).collect()
    }

    fn policy(dp_replicate: usize, dp_shard: usize, tp: usize) -> Policy {
        Policy {
            wanted: Mesh { dp_replicate, dp_shard, tp, ..Mesh::ONE },
            dp_replicate_min: 1,
            dp_shard_min: 1,
            replace_patience: Duration::from_secs(1),
            n_microbatches: 12,
            uneven: true,
            evict_stragglers: true,
            shadows: true,
            incidents_max: INCIDENTS_MAX,
            one_model: false,
            state_bytes: 0,
            rest_bytes_max: 0,
        }
    }

    fn before(mesh: Mesh, assignments: &[Worker]) -> Option<Last<'_>> {
        Some(Last { mesh, assignments, catching_up: &[] })
    }

    const LONG: Duration = Duration::from_secs(9);

    // MESH-CHOICE-3
    #[test]
    fn caught_up_member_takes_its_rank_even_if_another_died_catching_up() {
        let (wanted, now) = (policy(3, 2, 1), Mesh { dp_shard: 2, ..Mesh::ONE });
        let assignments = [worker(10), worker(11)];
        let catches_up = |(rank, slot): (usize, u32)| CatchUp {
            worker: worker(slot),
            mesh: wanted.wanted,
            rank,
            holds: vec![Shard::of(&wanted.wanted, rank)],
            transfers: vec![],
        };
        let catching_up: Vec<CatchUp> = [(2, 9), (3, 8), (4, 7), (5, 6)].into_iter().map(catches_up).collect();
        let last = Some(Last { mesh: now, assignments: &assignments, catching_up: &catching_up });

        let all = wanted.choose(last, &members(6..12), LONG).unwrap();
        let without_one = wanted.choose(last, &members([6, 7, 8, 10, 11]), LONG).unwrap();

        assert_eq!(all.assignments, [10, 11, 9, 8, 7, 6].map(worker));
        assert_eq!(without_one.mesh, Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE });
        assert_eq!(without_one.assignments, [10, 11, 7, 8].map(worker));
    }

    #[test]
    fn spare_takes_the_rank_of_a_dead_worker_at_once() {
        let policy = policy(2, 2, 1);
        let last: Vec<Worker> = (0..4).map(worker).collect();

        let choice = policy.choose(before(policy.wanted, &last), &members([0, 2, 3, 9]), Duration::ZERO).unwrap();

        assert_eq!(
            choice,
            Choice { mesh: policy.wanted, assignments: vec![worker(0), worker(9), worker(2), worker(3)] }
        );
    }

    #[test]
    fn world_without_a_spare_waits_and_then_shrinks() {
        let policy = policy(1, 4, 1);
        let last: Vec<Worker> = (0..4).map(worker).collect();
        let left = members([0, 2, 3]);

        let wait = policy.choose(before(policy.wanted, &last), &left, Duration::ZERO).unwrap_err();
        let choice = policy.choose(before(policy.wanted, &last), &left, LONG).unwrap();

        assert_eq!(wait, Blocked::Replacements { have: 3, want: 4, remaining: Duration::from_secs(1) });
        assert_eq!(choice.mesh.dp_shard, 3);
        assert_eq!(choice.assignments, [worker(0), worker(3), worker(2)]);
    }

    #[test]
    fn smaller_world_drops_replicas_rather_than_shards() {
        let policy = policy(2, 2, 1);

        assert_eq!(policy.largest(3, Some(policy.wanted)).unwrap(), Mesh { dp_shard: 2, ..Mesh::ONE });
    }

    #[test]
    fn even_batch_rejects_worlds_that_do_not_divide_it() {
        let policy = Policy { uneven: false, n_microbatches: 8, ..policy(1, 8, 2) };

        assert_eq!(policy.largest(15, None).unwrap().dp_shard, 4);
    }

    #[test]
    fn resize_rejects_impossible_meshes_and_accepts_any_other() {
        let policy = Policy { dp_shard_min: 2, ..policy(1, 4, 2) };
        let wanted = policy.wanted;

        for mesh in [Mesh { dp_shard: 3, ..wanted }, Mesh { tp: 1, pp: 2, ..wanted }, Mesh { cp: 2, ..wanted }] {
            assert_eq!(policy.check_resize(mesh), Ok(()), "{mesh}");
        }
        let absurd = Mesh { pp: usize::MAX, tp: 2, ..wanted };
        // Modulo 2^64, it has 4 ranks along the data axes and 8 in total.
        let wraps = Mesh { dp_replicate: (1 << 62) + 1, ..wanted };
        let few = Mesh { dp_shard: 1, ..wanted };
        for mesh in [few, Mesh { dp_shard: 13, ..wanted }, Mesh { tp: 0, ..wanted }, absurd, wraps] {
            let refused = policy.check_resize(mesh);
            assert!(matches!(refused, Err(ResizeError::NotAllowed { .. })), "{refused:?}");
        }
    }

    #[test]
    fn resize_that_needs_too_many_transfers_is_rejected() {
        let policy = Policy { n_microbatches: 10_000, ..policy(1, 400, 1) };

        let refused = policy.check_resize(Mesh { pp: 1, tp: 4, dp_shard: 100, ..policy.wanted });

        let n_transfers = 160_000;
        let (have, found) = (policy.wanted, Mesh { tp: 4, dp_shard: 100, ..policy.wanted });
        assert_eq!(refused, Err(ResizeError::TooManyPieces { have, found, n_transfers }));
        assert_eq!(policy.check_resize(Mesh { pp: 4, dp_shard: 100, ..policy.wanted }), Ok(()));
    }

    #[test]
    fn last_cut_is_kept_while_the_wanted_cut_would_use_fewer_members() {
        let wanted = Mesh { pp: 4, dp_shard: 2, ..Mesh::ONE };
        let last = Mesh { dp_shard: 3, tp: 2, ..Mesh::ONE };
        let policy = Policy { wanted, ..policy(1, 1, 1) };

        let largest = |n| policy.largest(n, Some(last));

        assert_eq!(largest(3), Some(Mesh { dp_shard: 1, tp: 2, ..Mesh::ONE }));
        assert_eq!(largest(4), Some(Mesh { pp: 4, ..Mesh::ONE }), "among equal sizes the wanted cut");
        assert_eq!(largest(7), Some(last));
        assert_eq!(largest(8), Some(wanted));
        assert_eq!(largest(1), None);
        assert_eq!(policy.choose(before(last, &[]), &members(0..1), LONG), Err(Blocked::TooFew { have: 1, need: 2 }));
        let smaller = Policy { wanted: Mesh { pp: 2, ..Mesh::ONE }, ..policy };
        assert_eq!(smaller.largest(7, Some(last)), Some(smaller.wanted), "the wanted mesh may have fewer ranks");
    }

    #[test]
    fn too_few_members_for_the_smallest_mesh_is_reported() {
        let policy = Policy { dp_shard_min: 2, ..policy(1, 4, 2) };

        let err = policy.choose(None, &members(0..3), LONG).unwrap_err();

        assert_eq!(err, Blocked::TooFew { have: 3, need: 4 });
    }

    proptest! {
        // MESH-CHOICE-1, MESH-CHOICE-2, MESH-CHOICE-3
        #[test]
        fn assigned_members_are_distinct_and_survivors_keep_their_ranks(
            dp_replicate in 1usize..4, dp_shard in 1usize..4, tp in 1usize..3, uneven: bool, lost: u32,
        ) {
            let policy = Policy { uneven, ..policy(dp_replicate, dp_shard, tp) };
            let last: Vec<Worker> = (0..policy.wanted.size() as u32).map(worker).collect();
            let left: BTreeSet<Worker> = last.iter().copied().filter(|w| lost >> w.member.slot & 1 == 0).collect();

            let Ok(choice) = policy.choose(before(policy.wanted, &last), &left, LONG) else {
                prop_assert!(left.len() < tp);
                return Ok(());
            };

            let distinct: BTreeSet<Worker> = choice.assignments.iter().copied().collect();
            prop_assert_eq!(distinct.len(), choice.mesh.size());
            prop_assert!(distinct.is_subset(&left));
            prop_assert_eq!(choice.mesh.tp, tp);
            prop_assert!(uneven || policy.n_microbatches.is_multiple_of(choice.mesh.data_ranks()));
            for (rank, assignment) in choice.assignments.iter().enumerate() {
                let owner = last[policy.wanted.rank(choice.mesh.coord(rank))];
                prop_assert!(*assignment == owner || !left.contains(&owner));
            }
        }
    }
}
