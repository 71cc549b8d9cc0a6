//! Classes of indistinguishable ranks.
//!
//! Ranks are of one class if they run the same trace on groups of the same class; groups are of one class if their
//! members, in order, are of the same classes on nodes in the same pattern. The coarsest such partition is found by
//! refinement: begin with the traces, split by the groups until nothing splits. All ranks of a class do the same at
//! the same time, so a run needs one rank of each class. Source: colour refinement, Weisfeiler and Leman 1968; partition
//! refinement, Paige and Tarjan 1987 (SIAM J. Comput. 16).

use super::projection::Projection;
use super::{GroupId, GroupSlot, Rank, TraceId, WorldTraces};
use std::collections::BTreeMap;

/// The partition.
#[derive(Debug)]
pub(super) struct Classes {
    /// Class of each rank.
    pub of_rank: Vec<u32>,
    /// First rank of each class.
    pub ranks: Vec<Rank>,
    /// First group of each class.
    pub groups: Vec<GroupId>,
}

pub(super) fn classes(world: &WorldTraces, projections: &[Projection], node: &dyn Fn(u32) -> u32) -> Classes {
    let mut of_rank = number(world.ranks.iter().map(|b| b.trace));
    let patterns = number(world.groups.iter().map(|members| node_pattern(members, node)));
    let slots = slots(world);
    let positions = positions(world, projections, &slots);
    loop {
        let group_key = |group: usize| {
            let members = world.groups[group].iter().zip(&slots[group]);
            let members: Vec<(u32, u32)> = members.map(|(rank, slot)| (of_rank[rank.0 as usize], *slot)).collect();
            (patterns[group], members)
        };
        let of_group = number((0..world.groups.len()).map(group_key));
        let rank_key = |rank: usize| {
            let groups = world.ranks[rank].groups.iter().map(|g| of_group[g.0 as usize]);
            (of_rank[rank], groups.collect::<Vec<u32>>(), &positions[rank])
        };
        let finer = number((0..world.size()).map(rank_key));
        // A finer partition has more classes; with an equal number it is the same one.
        if n_classes(&finer) == n_classes(&of_rank) {
            let ranks = firsts(&of_rank).into_iter().map(|i| Rank(i as u32)).collect();
            let groups = firsts(&of_group).into_iter().map(|i| GroupId(i as u32)).collect();
            return Classes { of_rank, ranks, groups };
        }
        of_rank = finer;
    }
}

/// Equal keys have equal numbers; numbers count first occurrences.
fn number<K: Ord>(keys: impl Iterator<Item = K>) -> Vec<u32> {
    let mut numbers: BTreeMap<K, u32> = BTreeMap::new();
    keys.map(|key| {
        let next = numbers.len() as u32;
        *numbers.entry(key).or_insert(next)
    })
    .collect()
}

fn n_classes(numbers: &[u32]) -> u32 {
    numbers.iter().max().map_or(0, |last| last + 1)
}

/// Index of the first of each class; `numbers` count first occurrences.
fn firsts(numbers: &[u32]) -> Vec<usize> {
    let mut firsts = Vec::new();
    for (i, class) in numbers.iter().enumerate() {
        if *class as usize == firsts.len() {
            firsts.push(i);
        }
    }
    firsts
}

/// The nodes of a group's members, renamed in order of occurrence.
fn node_pattern(members: &[Rank], node: &dyn Fn(u32) -> u32) -> Vec<u32> {
    number(members.iter().map(|rank| node(rank.0)))
}

/// The slot of each member of each group for that group.
fn slots(world: &WorldTraces) -> Vec<Vec<u32>> {
    let mut by_rank: Vec<BTreeMap<Rank, u32>> = vec![BTreeMap::new(); world.groups.len()];
    for (rank, binding) in world.ranks.iter().enumerate() {
        for (slot, group) in binding.groups.iter().enumerate() {
            by_rank[group.0 as usize].insert(Rank(rank as u32), slot as u32);
        }
    }
    let of = |(members, slots): (&Vec<Rank>, &BTreeMap<Rank, u32>)| {
        members.iter().map(|rank| slots.get(rank).copied().unwrap_or(u32::MAX)).collect()
    };
    world.groups.iter().zip(&by_rank).map(of).collect()
}

/// What distinguishes each rank besides its trace and its groups' classes: its positions in the groups where it has
/// transfers, which name members by position; and the rank itself, if it shares a group with a rank of its own trace
/// that has another slot for the group. Such groups overlap around a ring, where one collective of a class would stand
/// for two of each rank.
fn positions(world: &WorldTraces, projections: &[Projection], slots: &[Vec<u32>]) -> Vec<Vec<(u32, usize)>> {
    let mut positions = vec![Vec::new(); world.size()];
    for (members, slots) in world.groups.iter().zip(slots) {
        let mut slot_of: BTreeMap<TraceId, u32> = BTreeMap::new();
        let known_as = members.iter().zip(slots).map(|(rank, slot)| (world.binding(*rank).trace, *slot));
        let is_used = |(trace, slot): &(TraceId, u32)| {
            projections[trace.0 as usize].streams_of(GroupSlot(*slot)).next().is_some()
        };
        let mut used = known_as.clone().filter(is_used);
        let overlaps = used.any(|(trace, slot)| *slot_of.entry(trace).or_insert(slot) != slot);
        for (position, (trace, slot)) in known_as.enumerate() {
            let rank = members[position].0 as usize;
            if overlaps {
                positions[rank].push((u32::MAX, rank));
            }
            if projections[trace.0 as usize].has_transfers(GroupSlot(slot)) {
                positions[rank].push((slot, position));
            }
        }
    }
    positions.iter_mut().for_each(|p| p.sort_unstable());
    positions
}
