//! Who catches up while the others train, so that nobody waits for its state.
//!
//! A newcomer that lacks much would keep the whole world waiting for as long as its state travels. If replicas of the model
//! train without it, it is a *learner* instead: a member without a seat and without a vote. Between two updates, while
//! nothing changes, it is sent the next pieces of the state; with each step it gets the reduced gradients, as a shadow does,
//! and updates what it has, since updates are made element by element. So what has come stays as new as the state of those
//! that sent it. When all has come, the world makes room for one in which the learner has its seat, and nothing moves.
//!
//! Invariants:
//! - `E-1` Those that train meanwhile have all that they train, so that nobody waits for state. They are whole replicas, as
//!   many as there are, of the mesh that was chosen.
//! - `E-2` Who learns takes a seat of that mesh and no other state than its seat asks for; each of its sources trains, and
//!   keeps what it is asked for as long as the world lasts.
//! - `E-3` A learner has no state in the eyes of others before all has come ([`super::member`]).
//! - `E-4` What can be fetched in no time is fetched at rest: two changes of the world would cost more. So is all state when
//!   the mesh cuts it in another way, though it is more: those that train would have to hold a second part of it meanwhile,
//!   and each gets at most a part of n and its shadows (24 bytes of 1/n of the parameters with Adam), where sharded training
//!   passes 12 bytes of (n-1)/n of them in each step.
//! - `E-5` That some learn leaves no node with the only copy of anything ([`super::shadow`]), unless nobody of it was lost and
//!   somebody of another one was: a node that fails once more takes nothing with it. What learners have is not
//!   counted: most have nothing yet. Else all is fetched at rest.
//!
//! Source: Ongaro 2014, Consensus: Bridging Theory and Practice, §4.2.1 (new servers catch up before they have a vote).

use super::identity::{NodeId, Worker};
use super::mesh_choice::{Choice, Policy};
use super::message::Learner;
use super::recovery;
use super::shadow::{Cut, Shard, place};
use crate::mesh::{Axis, Mesh};
use std::collections::{BTreeMap, BTreeSet};

/// A world in which some train and others learn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Course {
    /// Who trains.
    pub choice: Choice,
    /// What each of them holds; all of that it has.
    pub holds: Vec<Vec<Shard>>,
    /// Who learns.
    pub learners: Vec<Learner>,
}

/// Most bytes that a member of a mesh may have to fetch.
fn bytes_of_seat(policy: &Policy, mesh: &Mesh) -> u64 {
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

/// How the members of a choice begin, if some of them lack so much that the others should not wait for it. `holders` are the
/// workers that have the state from which the world begins, `shaken` the nodes of which somebody was lost.
pub fn course(
    policy: &Policy,
    choice: &Choice,
    holders: &BTreeMap<Worker, &[Shard]>,
    shaken: &BTreeSet<NodeId>,
) -> Option<Course> {
    let Choice { mesh, seats } = choice;
    let has = |worker: &Worker, shard: &Shard| holders.get(worker).is_some_and(|held| held.contains(shard));
    let is_ready = |rank: usize| has(&seats[rank], &Shard::of(mesh, rank));
    // E-4
    if bytes_of_seat(policy, mesh) <= policy.rest_bytes_max || (0..seats.len()).all(is_ready) {
        return None;
    }
    // E-1
    let replica = |rank: &usize| mesh.coord(*rank).on(Axis::DpReplicate);
    let is_whole = |of: &usize| (0..seats.len()).filter(|rank| replica(rank) == *of).all(is_ready);
    let (whole, others): (Vec<usize>, Vec<usize>) = (0..mesh.dp_replicate).partition(is_whole);
    let now = Mesh { dp_replicate: whole.len(), ..*mesh };
    if !policy.allows(&now) {
        return None;
    }
    // Whole replicas come first, so that they stay where they are when the others join them.
    let order: Vec<usize> = whole.into_iter().chain(others).collect();
    let seat = |mesh: &Mesh, rank: usize| {
        let at = mesh.coord(rank);
        seats[choice.mesh.rank(at.with(Axis::DpReplicate, order[at.on(Axis::DpReplicate)]))]
    };
    let trains: Vec<Worker> = (0..now.size()).map(|rank| seat(&now, rank)).collect();
    let mut holds = place(&now, &trains, policy.shadows);
    for (worker, held) in trains.iter().zip(&mut holds) {
        held.retain(|shard| has(worker, shard));
    }
    let later: Vec<Worker> = (0..mesh.size()).map(|rank| seat(mesh, rank)).collect();
    let kept: BTreeMap<Worker, &[Shard]> = trains.iter().copied().zip(holds.iter().map(|held| &held[..])).collect();
    // E-5
    let (before, after) = (nodes_of(holders), nodes_of(&kept));
    let is_safe = |(shard, had): (&Shard, &BTreeSet<NodeId>)| {
        let Some(has) = after.get(shard) else { return false };
        has.len() >= had.len().min(2) || (!shaken.is_empty() && !has.is_subset(shaken))
    };
    if !before.iter().all(is_safe) {
        return None;
    }
    // E-2
    let mut learners: Vec<Learner> = Vec::new();
    for (rank, (worker, holds)) in later.iter().zip(place(mesh, &later, policy.shadows)).enumerate() {
        if !kept.contains_key(worker) {
            learners.push(Learner { worker: *worker, mesh: *mesh, rank, holds, transfers: vec![] });
        }
    }
    let lacks = |learner: &&mut Learner| !learner.holds.iter().all(|shard| has(&learner.worker, shard));
    let lacking: Vec<&mut Learner> = learners.iter_mut().filter(lacks).collect();
    let needs = lacking.iter().map(|learner| (learner.worker, learner.holds.clone()));
    let (workers, needs): (Vec<Worker>, Vec<Vec<Shard>>) = needs.unzip();
    // Planned together, so that they do not all ask the same ones.
    for (learner, transfers) in lacking.into_iter().zip(recovery::plan(&workers, &needs, &kept).ok()?) {
        learner.transfers = transfers;
    }
    Some(Course { choice: Choice { mesh: now, seats: trains }, holds, learners })
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
            state_bytes: 1_000,
            rest_bytes_max,
        }
    }

    /// The seats of a mesh, and what those of them have that are not among `new`.
    fn world(mesh: Mesh, new: &[u32]) -> (Choice, BTreeMap<Worker, Vec<Shard>>) {
        let seats: Vec<Worker> = (0..mesh.size() as u32).map(worker).collect();
        let old = (0..mesh.size()).filter(|rank| !new.contains(&(*rank as u32)));
        let held = old.map(|rank| (seats[rank], vec![Shard::of(&mesh, rank)])).collect();
        (Choice { mesh, seats }, held)
    }

    fn borrowed(held: &BTreeMap<Worker, Vec<Shard>>) -> BTreeMap<Worker, &[Shard]> {
        held.iter().map(|(worker, shards)| (*worker, &shards[..])).collect()
    }

    /// Who was lost was of a node where nobody is any more.
    fn gone() -> BTreeSet<NodeId> {
        BTreeSet::from([NodeId(99)])
    }

    #[test]
    fn a_newcomer_learns_from_the_replica_that_trains_and_its_neighbour_keeps_what_it_has() {
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };
        let (choice, held) = world(mesh, &[1]);

        let course = course(&policy(mesh, 0), &choice, &borrowed(&held), &gone()).unwrap();

        // Rank 1 is of the first replica, so the second one trains, in the first place.
        assert_eq!(course.choice, Choice { mesh: Mesh { dp_replicate: 1, ..mesh }, seats: vec![worker(2), worker(3)] });
        let learns = |i: usize| {
            let Learner { worker, rank, transfers, .. } = &course.learners[i];
            (*worker, *rank, transfers.iter().map(|transfer| transfer.source).collect::<Vec<_>>())
        };
        assert_eq!(learns(0), (worker(0), 2, vec![]));
        assert_eq!(learns(1), (worker(1), 3, vec![Source::Replica(worker(3))]));
    }

    //
    #[test]
    fn those_who_train_send_equally_much_to_all_who_learn() {
        let mesh = Mesh { dp_replicate: 9, ..Mesh::ONE };
        let (choice, held) = world(mesh, &[1, 4, 7]);

        let course = course(&policy(mesh, 0), &choice, &borrowed(&held), &gone()).unwrap();

        let mut n_sent: BTreeMap<Worker, usize> = BTreeMap::new();
        for transfer in course.learners.iter().flat_map(|learner| &learner.transfers) {
            *n_sent.entry(transfer.source.sender(transfer.shard).unwrap().0).or_default() += 1;
        }
        assert_eq!(n_sent.into_values().collect::<Vec<_>>(), [2; 6]);
    }

    // E-5
    #[test]
    fn nobody_learns_where_a_node_that_fails_once_more_would_take_the_only_copy_with_it() {
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };
        let choice = Choice { mesh, seats: [0, 1, 4, 2].map(worker).to_vec() };
        let [first, second] = [0, 1].map(|rank| Shard::of(&mesh, rank));
        let held = [(worker(0), vec![first]), (worker(1), vec![second]), (worker(2), vec![second])].into();
        let learns_after = |lost: &[u32]| {
            let shaken = lost.iter().copied().map(NodeId).collect();
            course(&policy(mesh, 0), &choice, &borrowed(&held), &shaken).is_some()
        };

        // Workers 0 and 1 train, both on node 0. What worker 2 has is no copy while it learns.
        assert!(learns_after(&[1]), "node 0 would be another one");
        assert!(!learns_after(&[0]));
        assert!(!learns_after(&[]), "it would be the first one");
    }

    // E-4
    #[test]
    fn what_is_small_is_fetched_at_rest_and_so_is_what_no_replica_is_whole_without() {
        let mesh = Mesh { dp_replicate: 2, dp_shard: 2, ..Mesh::ONE };
        let (choice, held) = world(mesh, &[1]);

        assert_eq!(course(&policy(mesh, 500), &choice, &borrowed(&held), &gone()), None);
        assert!(course(&policy(mesh, 499), &choice, &borrowed(&held), &gone()).is_some());
        let (choice, held) = world(mesh, &[1, 2]);
        assert_eq!(course(&policy(mesh, 0), &choice, &borrowed(&held), &gone()), None);
        let (choice, held) = world(mesh, &[]);
        assert_eq!(course(&policy(mesh, 0), &choice, &borrowed(&held), &gone()), None);
        let two = Policy { dp_replicate_min: 2, ..policy(mesh, 0) };
        let (choice, held) = world(mesh, &[1]);
        assert_eq!(course(&two, &choice, &borrowed(&held), &gone()), None);
    }

    proptest! {
        // E-1, E-2
        #[test]
        fn who_trains_lacks_nothing_and_who_learns_gets_what_it_lacks_from_them(
            dp_replicate in 1usize..5, dp_shard in 1usize..4, tp in 1usize..3, new in prop::collection::vec(0u32..24, 1..6),
        ) {
            let mesh = Mesh { dp_replicate, dp_shard, tp, ..Mesh::ONE };
            let (choice, held) = world(mesh, &new);
            let holders = borrowed(&held);
            let n_whole = (0..dp_replicate).filter(|replica| {
                let of = |rank: &usize| mesh.coord(*rank).on(Axis::DpReplicate) == *replica;
                (0..mesh.size()).filter(of).all(|rank| held.contains_key(&choice.seats[rank]))
            });
            let n_whole = n_whole.count();

            let course = course(&policy(mesh, 0), &choice, &holders, &gone());

            prop_assert_eq!(course.is_some(), n_whole > 0 && n_whole < dp_replicate);
            let Some(Course { choice: now, holds, learners }) = course else { return Ok(()) };
            prop_assert_eq!(now.mesh, Mesh { dp_replicate: n_whole, ..mesh });
            for (rank, (worker, held)) in now.seats.iter().zip(&holds).enumerate() {
                prop_assert_eq!(held[0], Shard::of(&now.mesh, rank));
                prop_assert!(held.iter().all(|shard| holders[worker].contains(shard)));
            }
            for learner in &learners {
                prop_assert_eq!(learner.holds[0], Shard::of(&mesh, learner.rank));
                prop_assert!(learner.rank >= now.seats.len() || tp * dp_shard > 1);
                let own = holders.get(&learner.worker).copied().unwrap_or_default();
                let has_all = learner.holds.iter().all(|shard| own.contains(shard));
                prop_assert!(!has_all || learner.transfers.is_empty());
                for shard in learner.holds.iter().filter(|_| !has_all) {
                    let sent = learner.transfers.iter().filter(|transfer| transfer.shard == *shard);
                    let senders: Vec<Worker> = sent.filter_map(|t| Some(t.source.sender(*shard)?.0)).collect();
                    prop_assert!(!senders.is_empty());
                    for sender in senders {
                        let rank = now.seats.iter().position(|seat| *seat == sender);
                        prop_assert!(rank.is_some_and(|rank| holds[rank].contains(shard)));
                    }
                }
            }
            // Everybody has a seat later, and nobody who trains another coordinate.
            let all: BTreeSet<Worker> = now.seats.iter().copied().chain(learners.iter().map(|l| l.worker)).collect();
            prop_assert_eq!(all, choice.seats.iter().copied().collect::<BTreeSet<_>>());
            let taken: BTreeSet<usize> = learners.iter().map(|learner| learner.rank).collect();
            for (rank, _) in now.seats.iter().enumerate() {
                prop_assert!(!taken.contains(&mesh.rank(now.mesh.coord(rank))));
            }
        }
    }
}
