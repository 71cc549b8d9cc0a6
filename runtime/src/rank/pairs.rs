//! The pairs of members that exchange messages in a world. Every member derives them locally from the plan.

use crate::train::trainer::catching_up::Follower;
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::{CatchUp, WorldPlan};
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::mesh::Mesh;
use std::collections::{BTreeMap, BTreeSet};

/// Pairs of members that exchange state while the world heals, or gradients while it trains.
pub(crate) fn pairs(world_plan: &WorldPlan) -> BTreeSet<[u32; 2]> {
    let numbers: BTreeMap<Worker, u32> = world_plan.members().zip(0..).collect();
    let mut pairs = BTreeSet::new();
    let mut add = |a: u32, b: u32| {
        if a != b {
            pairs.insert([a.min(b), a.max(b)]);
        }
    };
    let catching_up = world_plan.catching_up.iter().map(|catch_up| &catch_up.transfers);
    for (to, transfers) in world_plan.transfers.iter().chain(catching_up).enumerate() {
        for transfer in transfers {
            let sender = transfer.source.sender(transfer.shard);
            if let Some(from) = sender.and_then(|(worker, _)| numbers.get(&worker)) {
                add(*from, to as u32);
            }
        }
    }
    for (rank, held) in world_plan.holds.iter().enumerate() {
        held[1..].iter().for_each(|shard| add(owner(&world_plan.mesh, *shard) as u32, rank as u32));
    }
    for (catch_up, to) in world_plan.catching_up.iter().zip(world_plan.assignments.len() as u32..) {
        gradient_senders(world_plan, catch_up).into_iter().for_each(|gradient_sender| add(gradient_sender, to));
    }
    pairs
}

/// The ranks that send gradients to a catching-up member: for each of its shards, its own first, the first rank that trains
/// the shard.
pub(crate) fn gradient_senders(world_plan: &WorldPlan, catch_up: &CatchUp) -> Vec<u32> {
    catch_up.holds.iter().map(|shard| owner(&world_plan.mesh, *shard) as u32).collect()
}

/// The catching-up members that receive the gradients of a rank.
pub(crate) fn followers(world_plan: &WorldPlan, rank: usize) -> Vec<Follower> {
    let mut followers = Vec::new();
    for (catch_up, member) in world_plan.catching_up.iter().zip(world_plan.assignments.len() as u32..) {
        let of_rank = gradient_senders(world_plan, catch_up)
            .into_iter()
            .enumerate()
            .filter(|(_, gradient_sender)| *gradient_sender as usize == rank);
        followers.extend(of_rank.map(|(i, _)| Follower { member, leads: i == 0 }));
    }
    followers
}

/// Ranks that hold a shadow of this rank's shard and receive its gradients.
pub(crate) fn shadow_holders(world_plan: &WorldPlan, rank: usize) -> Vec<u32> {
    let shard = world_plan.holds[rank][0];
    if owner(&world_plan.mesh, shard) != rank {
        return Vec::new();
    }
    let holds_it = |held: &Vec<phalanx_strategies::elastic::shadow::Shard>| held[1..].contains(&shard);
    let holders = world_plan.holds.iter().enumerate().filter(|(_, held)| holds_it(held));
    holders.map(|(holder, _)| holder as u32).collect()
}

/// The rank whose gradients update the shadows of this shard: the first rank that trains it.
pub(crate) fn owner(mesh: &Mesh, shard: Shard) -> usize {
    let trains = |rank: &usize| Shard::of(mesh, *rank) == shard;
    (0..mesh.size()).find(trains).expect("every shard of a world is trained by some rank")
}
