//! Members that catch up while the others train, so that the world does not wait for their state.
//!
//! A newcomer that misses much state would delay the whole world while the state is transferred. If whole replicas can
//! train without it, it *catches up* instead: it is a member without a rank and without a vote. Between two updates it
//! receives the next part of the state; in each step it receives the reduced gradients, as a shadow does, and applies
//! the update to the part it has, which is possible because updates are elementwise. The received part therefore stays
//! at the senders' version. Once the state is complete, the next world gives the member its rank, and no state moves.
//!
//! Invariants:
//! - `CATCH-UP-1` The members that train meanwhile have their complete state. They are all the whole replicas of the
//!   chosen mesh.
//! - `CATCH-UP-2` A catching-up member prepares for a rank of that mesh and receives that rank's state only; each of
//!   its senders trains, and keeps the requested state as long as the world lasts.
//! - `CATCH-UP-3` A catching-up member reports no state before it is complete ([`super::member`]).
//! - `CATCH-UP-4` Small state is fetched while the world is paused, because two world changes would take longer. State
//!   that the new mesh cuts differently is, too, even if it is large: the training members would need memory for a
//!   second shard meanwhile, and each member receives at most one of n parts and its shadows (24 bytes per parameter
//!   for 1/n of the parameters with Adam), while sharded training transfers 12 bytes per parameter for (n-1)/n of them
//!   in each step.
//! - `CATCH-UP-5` Catching up must not leave the only copy of a shard on one node ([`super::shadow`]), unless that node
//!   lost no member and another node did. The state of catching-up members does not count as a copy. Otherwise all
//!   state is fetched while the world is paused.
//!
//! Source: Ongaro 2014, Consensus: Bridging Theory and Practice, §4.2.1 (new servers catch up before they have a vote).

use super::identity::{NodeId, Worker};
use super::mesh_choice::{Choice, Policy};
use super::message::CatchUp;
use super::recovery;
use super::shadow::{Cut, Shard, place};
use crate::mesh::{Axis, Mesh};
use std::collections::{BTreeMap, BTreeSet};

/// A world in which some members train and others catch up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatchUpPlan {
    /// The members that train.
    pub choice: Choice,
    /// The shards that each of them holds.
    pub holds: Vec<Vec<Shard>>,
    /// The members that catch up.
    pub catching_up: Vec<CatchUp>,
}

/// Upper bound of the bytes that a member of a mesh fetches.
fn bytes_of_rank(policy: &Policy, mesh: &Mesh) -> u64 {
    let Cut { n_stages, n_tensors, n_parts } = Cut::of(mesh);
    let n_pieces = [n_stages, n_tensors, n_parts].map(u64::from).iter().product::<u64>().max(1);
    policy.state_bytes.div_ceil(n_pieces)
}

fn nodes_of(holders: &BTreeMap<Worker, &[Shard]>) -> BTreeMap<Shard, BTreeSet<NodeId>> {
    let mut nodes: BTreeMap<Shard, BTreeSet<NodeId>> = BTreeMap::new();
    for (worker, shards) in holders {
        for shard in *shards {
            nodes.entry(*shard).or_default().insert(worker.member.node);
        }
    }
    nodes
}

/// Splits a choice into training and catching-up members, if some miss too much state for the others to wait.
/// `holders` are the workers that have the base state, `faulted` the nodes that have lost a member.
pub fn catch_up_plan(
    policy: &Policy,
    choice: &Choice,
    holders: &BTreeMap<Worker, &[Shard]>,
    faulted: &BTreeSet<NodeId>,
) -> Option<CatchUpPlan> {
    let Choice { mesh, assignments } = choice;
    let has = |worker: &Worker, shard: &Shard| holders.get(worker).is_some_and(|held| held.contains(shard));
    let is_ready = |rank: usize| has(&assignments[rank], &Shard::of(mesh, rank));
    // CATCH-UP-4
    if bytes_of_rank(policy, mesh) <= policy.rest_bytes_max || (0..assignments.len()).all(is_ready) {
        return None;
    }
    // CATCH-UP-1
    let replica = |rank: &usize| mesh.coord(*rank).on(Axis::DpReplicate);
    let is_whole = |of: &usize| (0..assignments.len()).filter(|rank| replica(rank) == *of).all(is_ready);
    let (whole, others): (Vec<usize>, Vec<usize>) = (0..mesh.dp_replicate).partition(is_whole);
    let now = Mesh { dp_replicate: whole.len(), ..*mesh };
    if !policy.allows(&now) {
        return None;
    }
    // Whole replicas come first, so that their ranks stay the same when the others join.
    let order: Vec<usize> = whole.into_iter().chain(others).collect();
    let assignment = |mesh: &Mesh, rank: usize| {
        let at = mesh.coord(rank);
        assignments[choice.mesh.rank(at.with(Axis::DpReplicate, order[at.on(Axis::DpReplicate)]))]
    };
    let trains: Vec<Worker> = (0..now.size()).map(|rank| assignment(&now, rank)).collect();
    let mut holds = place(&now, &trains, policy.shadows);
    for (worker, held) in trains.iter().zip(&mut holds) {
        held.retain(|shard| has(worker, shard));
    }
    let later: Vec<Worker> = (0..mesh.size()).map(|rank| assignment(mesh, rank)).collect();
    let kept: BTreeMap<Worker, &[Shard]> = trains.iter().copied().zip(holds.iter().map(|held| &held[..])).collect();
    // CATCH-UP-5
    let (before, after) = (nodes_of(holders), nodes_of(&kept));
    let is_safe = |(shard, had): (&Shard, &BTreeSet<NodeId>)| {
        let Some(has) = after.get(shard) else { return false };
        has.len() >= had.len().min(2) || (!faulted.is_empty() && !has.is_subset(faulted))
    };
    if !before.iter().all(is_safe) {
        return None;
    }
    // CATCH-UP-2
    let mut catching_up: Vec<CatchUp> = Vec::new();
    for (rank, (worker, holds)) in later.iter().zip(place(mesh, &later, policy.shadows)).enumerate() {
        if !kept.contains_key(worker) {
            catching_up.push(CatchUp { worker: *worker, mesh: *mesh, rank, holds, transfers: vec![] });
        }
    }
    let is_incomplete = |catch_up: &&mut CatchUp| !catch_up.holds.iter().all(|shard| has(&catch_up.worker, shard));
    let incomplete: Vec<&mut CatchUp> = catching_up.iter_mut().filter(is_incomplete).collect();
    let needs = incomplete.iter().map(|catch_up| (catch_up.worker, catch_up.holds.clone()));
    let (workers, needs): (Vec<Worker>, Vec<Vec<Shard>>) = needs.unzip();
    // Planned together, to spread the load over the senders.
    for (catch_up, transfers) in incomplete.into_iter().zip(recovery::plan(&workers, &needs, &kept).ok()?) {
        catch_up.transfers = transfers;
    }
    Some(CatchUpPlan { choice: Choice { mesh: now, assignments: trains }, holds, catching_up })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::identity::{Incarnation, MemberId};
    use crate::elastic::mesh_choice::INCIDENTS_MAX;
    use crate::elastic::recovery::Source;
    use proptest::prelude::*;
    use std::time::Duration;

    fn worker(i: u32) -> Worker {
        Worker { member: MemberId { node: NodeId(i / 2), slot: i % 2 }, incarnation: Incarnation(1) }
    }

    fn policy(wanted: Mesh, rest_bytes_max: u64) -> Policy {
        Policy {
            wanted,
            dp_replicate_min: 1,
            dp_shard_min: 1,
            replace_patience: Duration::from_secs(1),
            n_microbatches: 12,
            uneven: true,
            evict_stragglers: true,
            shadows: true,
            incidents_max: INCIDENTS_MAX,
            one_model: false,
            state_bytes: 1_000,
            rest_bytes_max,
        }
    }

    /// The ranks of a mesh, and the shards of all ranks but those in `new`.
    fn world(mesh: Mesh, new: &[u32]) -> (Choice, BTreeMap<Worker, Vec<Shard>>) {
        let assignments: Vec<Worker> = (0..mesh.size() as u32).map(worker).collect();
        let old = (0..mesh.size()).filter(|rank| !new.contains(&(*rank as u32)));
        let held = old.map(|rank| (assignments[rank], vec![Shard::of(&mesh, rank)])).collect();
        (Choice { mesh, assignments }, held)
    }

    fn borrowed(held: &BTreeMap<Worker, Vec<Shard>>) -> BTreeMap<Worker, &[Shard]> {
        held.iter().map(|(worker, shards)| (*worker, &shards[..])).collect()
    }

    /// A lost node, without surviving members.
    fn gone() -> BTreeSet<NodeId> {
        BTreeSet::from([NodeId(99)])
    }

    #[test]
    fn newcomer_catches_up_from_the_training_replica_and_its_neighbour_keeps_its_state() {
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };
        let (choice, held) = world(mesh, &[1]);

        let catch_up_plan = catch_up_plan(&policy(mesh, 0), &choice, &borrowed(&held), &gone()).unwrap();

        // Rank 1 belongs to the first replica, so the second replica trains and becomes the first.
        assert_eq!(
            catch_up_plan.choice,
            Choice { mesh: Mesh { dp_replicate: 1, ..mesh }, assignments: vec![worker(2), worker(3)] }
        );
        let catches_up = |i: usize| {
            let CatchUp { worker, rank, transfers, .. } = &catch_up_plan.catching_up[i];
            (*worker, *rank, transfers.iter().map(|transfer| transfer.source).collect::<Vec<_>>())
        };
        assert_eq!(catches_up(0), (worker(0), 2, vec![]));
        assert_eq!(catches_up(1), (worker(1), 3, vec![Source::Replica(worker(3))]));
    }

    // RECOVERY-2
    #[test]
    fn training_members_send_equal_amounts_to_catching_up_members() {
        let mesh = Mesh { dp_replicate: 9, ..Mesh::ONE };
        let (choice, held) = world(mesh, &[1, 4, 7]);

        let catch_up_plan = catch_up_plan(&policy(mesh, 0), &choice, &borrowed(&held), &gone()).unwrap();

        let mut n_sent: BTreeMap<Worker, usize> = BTreeMap::new();
        for transfer in catch_up_plan.catching_up.iter().flat_map(|catch_up| &catch_up.transfers) {
            *n_sent.entry(transfer.source.sender(transfer.shard).unwrap().0).or_default() += 1;
        }
        assert_eq!(n_sent.into_values().collect::<Vec<_>>(), [2; 6]);
    }

    // CATCH-UP-5
    #[test]
    fn catch_up_is_rejected_when_one_more_node_failure_would_lose_the_only_copy() {
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };
        let choice = Choice { mesh, assignments: [0, 1, 4, 2].map(worker).to_vec() };
        let [first, second] = [0, 1].map(|rank| Shard::of(&mesh, rank));
        let held = [(worker(0), vec![first]), (worker(1), vec![second]), (worker(2), vec![second])].into();
        let catches_up_after = |lost: &[u32]| {
            let faulted = lost.iter().copied().map(NodeId).collect();
            catch_up_plan(&policy(mesh, 0), &choice, &borrowed(&held), &faulted).is_some()
        };

        // Workers 0 and 1 train, both on node 0. Worker 2's state does not count as a copy while it catches up.
        assert!(catches_up_after(&[1]), "node 1 lost a member, node 0 did not");
        assert!(!catches_up_after(&[0]));
        assert!(!catches_up_after(&[]), "no node has lost a member yet");
    }

    // CATCH-UP-4
    #[test]
    fn small_state_and_state_without_a_whole_replica_are_fetched_while_paused() {
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };
        let (choice, held) = world(mesh, &[1]);

        assert_eq!(catch_up_plan(&policy(mesh, 500), &choice, &borrowed(&held), &gone()), None);
        assert!(catch_up_plan(&policy(mesh, 499), &choice, &borrowed(&held), &gone()).is_some());
        let (choice, held) = world(mesh, &[1, 2]);
        assert_eq!(catch_up_plan(&policy(mesh, 0), &choice, &borrowed(&held), &gone()), None);
        let (choice, held) = world(mesh, &[]);
        assert_eq!(catch_up_plan(&policy(mesh, 0), &choice, &borrowed(&held), &gone()), None);
        let two = Policy { dp_replicate_min: 2, ..policy(mesh, 0) };
        let (choice, held) = world(mesh, &[1]);
        assert_eq!(catch_up_plan(&two, &choice, &borrowed(&held), &gone()), None);
    }

    proptest! {
        // CATCH-UP-1, CATCH-UP-2
        #[test]
        fn training_members_are_complete_and_send_the_missing_state(
            dp_replicate in 1usize..5, dp_shard in 1usize..4, tp in 1usize..3, new in prop::collection::vec(0u32..24, 1..6),
        ) {
            let mesh = Mesh { dp_replicate, dp_shard, tp, ..Mesh::ONE };
            let (choice, held) = world(mesh, &new);
            let holders = borrowed(&held);
            let n_whole = (0..dp_replicate).filter(|replica| {
                let of = |rank: &usize| mesh.coord(*rank).on(Axis::DpReplicate) == *replica;
                (0..mesh.size()).filter(of).all(|rank| held.contains_key(&choice.assignments[rank]))
            });
            let n_whole = n_whole.count();

            let catch_up_plan = catch_up_plan(&policy(mesh, 0), &choice, &holders, &gone());

            prop_assert_eq!(catch_up_plan.is_some(), n_whole > 0 && n_whole < dp_replicate);
            let Some(CatchUpPlan { choice: now, holds, catching_up }) = catch_up_plan else { return Ok(()) };
            prop_assert_eq!(now.mesh, Mesh { dp_replicate: n_whole, ..mesh });
            for (rank, (worker, held)) in now.assignments.iter().zip(&holds).enumerate() {
                prop_assert_eq!(held[0], Shard::of(&now.mesh, rank));
                prop_assert!(held.iter().all(|shard| holders[worker].contains(shard)));
            }
            for catch_up in &catching_up {
                prop_assert_eq!(catch_up.holds[0], Shard::of(&mesh, catch_up.rank));
                prop_assert!(catch_up.rank >= now.assignments.len() || tp * dp_shard > 1);
                let own = holders.get(&catch_up.worker).copied().unwrap_or_default();
                let has_all = catch_up.holds.iter().all(|shard| own.contains(shard));
                prop_assert!(!has_all || catch_up.transfers.is_empty());
                for shard in catch_up.holds.iter().filter(|_| !has_all) {
                    let sent = catch_up.transfers.iter().filter(|transfer| transfer.shard == *shard);
                    let senders: Vec<Worker> = sent.filter_map(|t| Some(t.source.sender(*shard)?.0)).collect();
                    prop_assert!(!senders.is_empty());
                    for sender in senders {
                        let rank = now.assignments.iter().position(|assignment| *assignment == sender);
                        prop_assert!(rank.is_some_and(|rank| holds[rank].contains(shard)));
                    }
                }
            }
            // Every member has a rank later, and the training members keep their coordinates.
            let all: BTreeSet<Worker> = now.assignments.iter().copied().chain(catching_up.iter().map(|l| l.worker)).collect();
            prop_assert_eq!(all, choice.assignments.iter().copied().collect::<BTreeSet<_>>());
            let taken: BTreeSet<usize> = catching_up.iter().map(|catch_up| catch_up.rank).collect();
            for (rank, _) in now.assignments.iter().enumerate() {
                prop_assert!(!taken.contains(&mesh.rank(now.mesh.coord(rank))));
            }
        }
    }
}
