//! Finds a cycle of waiting ranks once no rank can advance.

use super::error::{GroupName, Wait};
use super::projection::{Projection, Stream};
use super::symmetry::Classes;
use super::{Collective, GroupId, GroupSlot, Rank, Step, WorldTraces};

/// A cycle of ranks in which each rank waits for the next one. `reached` is the current step of each class of ranks; the members
/// of every group agree on their collectives (`WORLD-3`).
pub(super) fn cycle(
    world: &WorldTraces,
    projections: &[Projection],
    classes: &Classes,
    reached: &[usize],
) -> Vec<Wait> {
    let standing = Standing { world, projections, classes, reached };
    let stuck = |rank: &&Rank| standing.awaited(**rank).is_some();
    let mut path: Vec<Wait> = Vec::new();
    let mut next = classes.ranks.iter().find(stuck).copied();
    while let Some(rank) = next {
        if let Some(first) = path.iter().position(|wait| wait.rank == rank) {
            return path.split_off(first);
        }
        let wait = standing.wait(rank);
        next = wait.as_ref().map(|wait| wait.waits_for);
        path.extend(wait);
    }
    path
}

struct Standing<'a> {
    world: &'a WorldTraces,
    projections: &'a [Projection],
    classes: &'a Classes,
    reached: &'a [usize],
}

impl Standing<'_> {
    fn step(&self, rank: Rank) -> usize {
        self.reached[self.classes.of_rank[rank.0 as usize] as usize]
    }

    /// The collective that a rank awaits; `None` if it has finished.
    fn awaited(&self, rank: Rank) -> Option<Collective> {
        match self.world.steps(self.world.binding(rank).trace).get(self.step(rank)) {
            Some(Step::Await(collective)) => Some(*collective),
            _ => None,
        }
    }

    fn wait(&self, rank: Rank) -> Option<Wait> {
        let collective = self.awaited(rank)?;
        let group = self.world.binding(rank).groups[collective.group.0 as usize];
        let members = self.world.members(group);
        let own = members.iter().position(|r| *r == rank)? as u32;
        // The other members' stream of the collective.
        let (others, stream) = match Stream::of(collective.kind) {
            Stream::All => (members, Stream::All),
            Stream::To(to, channel) => (&members[to as usize..=to as usize], Stream::From(own, channel)),
            Stream::From(from, channel) => (&members[from as usize..=from as usize], Stream::To(own, channel)),
        };
        let late = others.iter().find(|r| !self.has_started(**r, group, stream, collective.sequence));
        let waits_for = *late?;
        Some(Wait { rank, step: self.step(rank), collective, group: GroupName(members.to_vec()), waits_for })
    }

    fn has_started(&self, rank: Rank, group: GroupId, stream: Stream, sequence: u32) -> bool {
        let binding = self.world.binding(rank);
        let slot = binding.groups.iter().position(|g| *g == group).map(|slot| GroupSlot(slot as u32));
        let posted = slot
            .and_then(|slot| self.projections[binding.trace.0 as usize].stream(slot, stream).get(sequence as usize));
        posted.is_some_and(|p| p.start < self.step(rank))
    }
}
