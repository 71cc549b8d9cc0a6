//! `WORLD-3`: each trace by itself, then the members of each group against each other.
//!
//! Groups whose members have the same traces in the same order are equal and checked once.

use super::error::{Difference, GroupName, Side, WorldError};
use super::projection::{Fault, Posted, Projection, Stream, post};
use super::{GroupId, GroupSlot, Kind, Post, Rank, TraceId, WorldTraces};
use std::collections::{BTreeMap, BTreeSet};

/// The projections of all traces.
pub(super) fn traces(world: &WorldTraces) -> Result<Vec<Projection>, WorldError> {
    let mut first_rank: BTreeMap<TraceId, Rank> = BTreeMap::new();
    for (rank, binding) in world.ranks.iter().enumerate() {
        first_rank.entry(binding.trace).or_insert(Rank(rank as u32));
    }
    let named = |trace: usize, fault: Fault| {
        let rank = first_rank.get(&TraceId(trace as u32)).copied().unwrap_or(Rank(0));
        match fault {
            Fault::Sequence { step, collective, expected } => WorldError::Sequence { rank, step, collective, expected },
            Fault::NotInFlight { step, collective } => WorldError::NotInFlight { rank, step, collective },
            Fault::NeverAwaited { step, collective } => WorldError::NeverAwaited { rank, step, collective },
        }
    };
    let all = world.traces.iter().enumerate();
    all.map(|(trace, steps)| Projection::of(steps).map_err(|fault| named(trace, fault))).collect()
}

/// A member of a group: its trace and its slot for the group; `None` if it does not bind the group.
type Member = Option<(TraceId, GroupSlot)>;

/// Checks memberships, peers, and that the members of every group agree.
pub(super) fn groups(world: &WorldTraces, projections: &[Projection]) -> Result<(), WorldError> {
    let known = known_as(world)?;
    for (rank, binding) in world.ranks.iter().enumerate() {
        let n_groups = binding.groups.len();
        let last = projections[binding.trace.0 as usize].streams.last_key_value();
        if let Some((_, posted)) = last.filter(|((slot, _), _)| slot.0 as usize >= n_groups) {
            let (rank, step) = (Rank(rank as u32), posted[0].start);
            let collective = post(world.steps(binding.trace), &posted[0]).collective;
            return Err(WorldError::UnboundGroup { rank, step, collective, n_groups });
        }
    }
    let mut seen: BTreeSet<Vec<Member>> = BTreeSet::new();
    for (group, known) in known.into_iter().enumerate() {
        let check = Check { world, projections, group: GroupId(group as u32), known };
        if !seen.contains(&check.known) {
            check.peers()?;
            check.collectives()?;
            check.transfers()?;
            seen.insert(check.known);
        }
    }
    Ok(())
}

/// The members of each group, in the order of their positions.
fn known_as(world: &WorldTraces) -> Result<Vec<Vec<Member>>, WorldError> {
    let name = |group: usize| GroupName(world.groups[group].clone());
    let mut positions: BTreeMap<(u32, Rank), usize> = BTreeMap::new();
    for (group, members) in world.groups.iter().enumerate() {
        for (position, rank) in members.iter().enumerate() {
            if rank.0 as usize >= world.size() {
                return Err(WorldError::UnknownRank { group: name(group), rank: *rank, world_size: world.size() });
            }
            if positions.insert((group as u32, *rank), position).is_some() {
                let found = members.iter().filter(|r| *r == rank).count();
                return Err(WorldError::Membership { rank: *rank, group: name(group), found });
            }
        }
    }
    let mut known: Vec<Vec<Member>> = world.groups.iter().map(|members| vec![None; members.len()]).collect();
    for (rank, binding) in world.ranks.iter().enumerate() {
        let rank = Rank(rank as u32);
        for (slot, group) in binding.groups.iter().enumerate() {
            let error = |found| WorldError::Membership { rank, group: name(group.0 as usize), found };
            let position = positions.get(&(group.0, rank)).ok_or_else(|| error(0))?;
            let member = &mut known[group.0 as usize][*position];
            if member.replace((binding.trace, GroupSlot(slot as u32))).is_some() {
                return Err(error(2));
            }
        }
    }
    Ok(known)
}

struct Check<'a> {
    world: &'a WorldTraces,
    projections: &'a [Projection],
    group: GroupId,
    known: Vec<Member>,
}

impl<'a> Check<'a> {
    /// Checks that every member that a transfer or a broadcast names exists.
    fn peers(&self) -> Result<(), WorldError> {
        let size = self.known.len() as u32;
        for (position, member) in self.known.iter().enumerate() {
            let Some((trace, slot)) = *member else { continue };
            let steps = self.world.steps(trace);
            for posted in self.projections[trace.0 as usize].streams_of(slot).flat_map(|(_, posted)| posted) {
                let collective = post(steps, posted).collective;
                let fits = match collective.kind {
                    Kind::Broadcast { root } => root < size,
                    Kind::Send { to: peer, .. } | Kind::Recv { from: peer, .. } => {
                        peer < size && peer as usize != position
                    }
                    _ => true,
                };
                if !fits {
                    let (rank, group) = (self.rank(position), self.name());
                    return Err(WorldError::NoSuchPeer { rank, step: posted.start, collective, group });
                }
            }
        }
        Ok(())
    }

    /// Checks that all members have the same collectives of the whole group.
    fn collectives(&self) -> Result<(), WorldError> {
        let mut seen = BTreeSet::from([self.known.first().copied().flatten()]);
        for position in 1..self.known.len() {
            if seen.insert(self.known[position]) {
                self.compare((0, Stream::All), (position, Stream::All), |a, b| a.collective.kind == b.collective.kind)?;
            }
        }
        Ok(())
    }

    /// Checks that every send has its receive.
    fn transfers(&self) -> Result<(), WorldError> {
        for (position, member) in self.known.iter().enumerate() {
            let Some((trace, slot)) = *member else { continue };
            for (stream, _) in self.projections[trace.0 as usize].streams_of(slot) {
                let own = position as u32;
                match stream {
                    Stream::All => {}
                    Stream::To(to, channel) => {
                        self.compare((position, stream), (to as usize, Stream::From(own, channel)), |_, _| true)?;
                    }
                    Stream::From(from, channel) => {
                        self.compare((from as usize, Stream::To(own, channel)), (position, stream), |_, _| true)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks that two members have equal collectives on a stream that they share; `kinds` compares their kinds.
    fn compare(
        &self,
        left: (usize, Stream),
        right: (usize, Stream),
        kinds: impl Fn(&Post, &Post) -> bool,
    ) -> Result<(), WorldError> {
        let (a, b) = (self.posted(left), self.posted(right));
        for number in 0..a.1.len().max(b.1.len()) {
            let at = |(trace, posted): (Option<TraceId>, &[Posted])| {
                trace.and_then(|t| posted.get(number).map(|p| post(self.world.steps(t), p)))
            };
            let (x, y) = (at(a), at(b));
            let same =
                |x: &Post, y: &Post| kinds(x, y) && x.collective.unit == y.collective.unit && x.tensors == y.tensors;
            if !x.zip(y).is_some_and(|(x, y)| same(x, y)) {
                let side =
                    |position: usize, post: Option<&Post>| Side { rank: self.rank(position), post: post.cloned() };
                let (left, right) = (side(left.0, x), side(right.0, y));
                let group = self.name();
                return Err(WorldError::Differ(Box::new(Difference { group, sequence: number as u32, left, right })));
            }
        }
        Ok(())
    }

    fn posted(&self, (position, stream): (usize, Stream)) -> (Option<TraceId>, &'a [Posted]) {
        match self.known[position] {
            Some((trace, slot)) => (Some(trace), self.projections[trace.0 as usize].stream(slot, stream)),
            None => (None, &[]),
        }
    }

    fn rank(&self, position: usize) -> Rank {
        self.world.members(self.group)[position]
    }

    fn name(&self) -> GroupName {
        GroupName(self.world.members(self.group).to_vec())
    }
}
