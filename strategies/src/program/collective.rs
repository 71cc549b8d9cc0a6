//! Collectives: the joint operations of the members of a mesh group.

use crate::mesh::Group;
use std::fmt;
use std::ops::Range;

/// What a collective does with its buffers. Positions are positions in the group.
///
/// A collective works on any number of buffers at once: a bucket of gradients is reduced in one operation without a copy
/// into one buffer. Sums run over the members in order, so that their bits do not depend on timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Sum over the group, result everywhere.
    AllReduce,
    /// Sum over the group, each member keeps its part; see [`Collective::part`].
    ReduceScatter,
    /// The parts of all members, everywhere. A member whose operand and result are one buffer has its part in place.
    AllGather,
    /// Transpose of parts between members: part `j` of the operand of `i` becomes part `i` of the result of `j`.
    AllToAll,
    /// Copy from one member to all.
    Broadcast {
        /// The source rank.
        root: u32,
    },
    /// To one member.
    Send {
        /// The receiving rank.
        to: u32,
        /// Messages between two members keep their order within a channel only.
        channel: u32,
    },
    /// From one member.
    Recv {
        /// The sending rank.
        from: u32,
        /// The channel of the matching send.
        channel: u32,
    },
    /// Every member sends to the member `by` positions further around the ring.
    Shift {
        /// Positions; negative ones go back.
        by: i32,
    },
}

/// A collective of a mesh group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// What it does.
    pub kind: CollectiveKind,
    /// The ranks that take part.
    pub group: Group,
    /// Position in its [`Stream`], from 0 in each step; [`crate::passes::overlap`] numbers them.
    pub sequence: u32,
    /// Parts consist of whole runs of this many elements.
    pub unit: usize,
}

/// Collectives that run in order: those of a group, or the messages of one channel between two of its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stream {
    /// The group.
    pub group: Group,
    /// For messages: the other member, whether this rank sends, and the channel.
    pub peer: Option<(u32, bool, u32)>,
}

impl Collective {
    /// A collective whose parts may begin at any element, not yet numbered.
    pub const fn new(kind: CollectiveKind, group: Group) -> Collective {
        Collective { kind, group, sequence: 0, unit: 1 }
    }

    /// Whether it is a message between two members.
    pub const fn is_message(&self) -> bool {
        matches!(self.kind, CollectiveKind::Send { .. } | CollectiveKind::Recv { .. })
    }

    /// The stream in which it is numbered.
    pub const fn stream(&self) -> Stream {
        let peer = match self.kind {
            CollectiveKind::Send { to, channel } => Some((to, true, channel)),
            CollectiveKind::Recv { from, channel } => Some((from, false, channel)),
            _ => None,
        };
        Stream { group: self.group, peer }
    }

    /// Elements of a buffer of `n` that the member at `position` of a group of `size` has as its part.
    pub fn part(&self, n: usize, size: usize, position: usize) -> Range<usize> {
        part(n, self.unit, size, position)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.kind {
            CollectiveKind::AllReduce => "all_reduce".into(),
            CollectiveKind::ReduceScatter => "reduce_scatter".into(),
            CollectiveKind::AllGather => "all_gather".into(),
            CollectiveKind::AllToAll => "all_to_all".into(),
            CollectiveKind::Broadcast { root } => format!("broadcast from {root}"),
            CollectiveKind::Send { to, channel } => format!("send to {to} by channel {channel}"),
            CollectiveKind::Recv { from, channel } => format!("recv from {from} by channel {channel}"),
            CollectiveKind::Shift { by } => format!("shift by {by}"),
        };
        write!(f, "{name} #{} on {}", self.sequence, self.group)
    }
}

/// Cuts `n` elements among `size` members as evenly as runs of `unit` elements permit.
///
/// # Panics
/// If `unit` or `size` is 0.
pub fn part(n: usize, unit: usize, size: usize, position: usize) -> Range<usize> {
    let n_units = n.div_ceil(unit);
    let at = |i: usize| (i * n_units / size * unit).min(n);
    at(position)..at(position + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_tile_the_whole_and_begin_at_units(n in 0usize..500, unit in 1usize..20, size in 1usize..9) {
            let parts: Vec<_> = (0..size).map(|i| part(n, unit, size, i)).collect();

            prop_assert_eq!(parts[0].start, 0);
            prop_assert_eq!(parts[size - 1].end, n);
            for pair in parts.windows(2) {
                prop_assert_eq!(pair[0].end, pair[1].start);
                prop_assert!(pair[1].start == n || pair[1].start % unit == 0);
            }
            let units = parts.iter().map(|p| p.len().div_ceil(unit));
            prop_assert!(units.clone().max().unwrap() - units.min().unwrap() <= 1);
        }
    }
}
