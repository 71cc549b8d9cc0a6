//! Which members of a world have messages for each other: both ends, and whoever makes the world, derive it alone.

use super::device::owner;
use phalanx_strategies::elastic::identity::Worker;
use phalanx_strategies::elastic::message::Formation;
use std::collections::{BTreeMap, BTreeSet};

/// Members between whom state travels while the world heals, or gradients while it trains.
pub(super) fn pairs(formation: &Formation) -> BTreeSet<[u32; 2]> {
    let members = formation.seats.iter().chain(&formation.guests);
    let numbers: BTreeMap<Worker, u32> = members.copied().zip(0..).collect();
    let mut pairs = BTreeSet::new();
    let mut add = |a: u32, b: u32| {
        if a != b {
            pairs.insert([a.min(b), a.max(b)]);
        }
    };
    for (rank, transfers) in formation.transfers.iter().enumerate() {
        for transfer in transfers {
            let sender = transfer.source.sender(transfer.shard);
            if let Some(from) = sender.and_then(|(worker, _)| numbers.get(&worker)) {
                add(*from, rank as u32);
            }
        }
    }
    for (rank, held) in formation.holds.iter().enumerate() {
        held[1..].iter().for_each(|shard| add(owner(formation, *shard) as u32, rank as u32));
    }
    pairs
}

/// Ranks that hold a shadow of what this one trains, and get its gradients.
pub(super) fn heirs(formation: &Formation, rank: usize) -> Vec<u32> {
    let shard = formation.holds[rank][0];
    if owner(formation, shard) != rank {
        return Vec::new();
    }
    let holds_it = |held: &Vec<phalanx_strategies::elastic::shadow::Shard>| held[1..].contains(&shard);
    let holders = formation.holds.iter().enumerate().filter(|(_, held)| holds_it(held));
    holders.map(|(holder, _)| holder as u32).collect()
}
