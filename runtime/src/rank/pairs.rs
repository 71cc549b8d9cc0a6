//! Which members of a world have messages for each other: both ends, and whoever makes the world, derive it alone.

use crate::rank::world_plan::owner;
use crate::train::trainer::learning::Follower;
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::{Formation, Learner};
use std::collections::{BTreeMap, BTreeSet};

/// Members between whom state travels while the world heals, or gradients while it trains.
pub(crate) fn pairs(formation: &Formation) -> BTreeSet<[u32; 2]> {
    let numbers: BTreeMap<Worker, u32> = formation.members().zip(0..).collect();
    let mut pairs = BTreeSet::new();
    let mut add = |a: u32, b: u32| {
        if a != b {
            pairs.insert([a.min(b), a.max(b)]);
        }
    };
    let learning = formation.learners.iter().map(|learner| &learner.transfers);
    for (to, transfers) in formation.transfers.iter().chain(learning).enumerate() {
        for transfer in transfers {
            let sender = transfer.source.sender(transfer.shard);
            if let Some(from) = sender.and_then(|(worker, _)| numbers.get(&worker)) {
                add(*from, to as u32);
            }
        }
    }
    for (rank, held) in formation.holds.iter().enumerate() {
        held[1..].iter().for_each(|shard| add(owner(&formation.mesh, *shard) as u32, rank as u32));
    }
    for (learner, to) in formation.learners.iter().zip(formation.seats.len() as u32..) {
        tutors(formation, learner).into_iter().for_each(|tutor| add(tutor, to));
    }
    pairs
}

/// The ranks whose gradients one that learns gets: for each of its shards, its own first, the first that trains it.
pub(crate) fn tutors(formation: &Formation, learner: &Learner) -> Vec<u32> {
    learner.holds.iter().map(|shard| owner(&formation.mesh, *shard) as u32).collect()
}

/// Those that learn from the gradients of a rank.
pub(crate) fn followers(formation: &Formation, rank: usize) -> Vec<Follower> {
    let mut followers = Vec::new();
    for (learner, member) in formation.learners.iter().zip(formation.seats.len() as u32..) {
        let of_rank = tutors(formation, learner).into_iter().enumerate().filter(|(_, tutor)| *tutor as usize == rank);
        followers.extend(of_rank.map(|(i, _)| Follower { member, leads: i == 0 }));
    }
    followers
}

/// Ranks that hold a shadow of what this one trains, and get its gradients.
pub(crate) fn heirs(formation: &Formation, rank: usize) -> Vec<u32> {
    let shard = formation.holds[rank][0];
    if owner(&formation.mesh, shard) != rank {
        return Vec::new();
    }
    let holds_it = |held: &Vec<phalanx_strategies::elastic::shadow::Shard>| held[1..].contains(&shard);
    let holders = formation.holds.iter().enumerate().filter(|(_, held)| holds_it(held));
    holders.map(|(holder, _)| holder as u32).collect()
}
