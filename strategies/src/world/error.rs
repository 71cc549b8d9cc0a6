//! Faults of a world, with the details that a person needs to find the faulty line.

use super::{Collective, Post, Rank};
use std::fmt;

/// The members of a group, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupName(pub Vec<Rank>);

/// One member's view of a position in a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The member.
    pub rank: Rank,
    /// The collective that it starts there; `None` if it starts fewer.
    pub post: Option<Post>,
}

/// Two members that start different collectives at the same position of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Group of the stream.
    pub group: GroupName,
    /// Position in the stream.
    pub sequence: u32,
    /// One member; for a transfer, the sender.
    pub left: Side,
    /// The other member.
    pub right: Side,
}

/// A rank that waits for another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The waiting rank.
    pub rank: Rank,
    /// Position in its trace.
    pub step: usize,
    /// The awaited collective.
    pub collective: Collective,
    /// Group of the collective.
    pub group: GroupName,
    /// A rank that has not started it.
    pub waits_for: Rank,
}

/// Why a world is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorldError {
    /// A group names a rank that does not exist.
    #[error("{group} names rank {rank}, but the world has {world_size} ranks")]
    UnknownRank {
        /// The group.
        group: GroupName,
        /// The rank.
        rank: Rank,
        /// Number of ranks.
        world_size: usize,
    },
    /// A rank binds a group of other ranks, or a group twice.
    #[error("rank {rank} binds {group} and has {found} positions in it, expected 1")]
    Membership {
        /// The rank.
        rank: Rank,
        /// The group.
        group: GroupName,
        /// Positions found: 0, or more than 1; a group bound twice counts twice.
        found: usize,
    },
    /// A trace names a group that its rank does not bind.
    #[error(
        "rank {rank}, step {step}: {collective} is on group slot {slot}, expected a slot below {n_groups}",
        slot = .collective.group.0
    )]
    UnboundGroup {
        /// The rank.
        rank: Rank,
        /// Position in its trace.
        step: usize,
        /// The collective.
        collective: Collective,
        /// Groups that the rank binds.
        n_groups: usize,
    },
    /// A transfer of a rank with itself, or with a member that the group does not have.
    #[error("rank {rank}, step {step}: {collective} must name another member of {group}")]
    NoSuchPeer {
        /// The rank.
        rank: Rank,
        /// Position in its trace.
        step: usize,
        /// The collective.
        collective: Collective,
        /// Its group.
        group: GroupName,
    },
    /// A number is skipped or used twice.
    #[error("rank {rank}, step {step}: starts {collective}, expected #{expected} on its stream")]
    Sequence {
        /// The rank.
        rank: Rank,
        /// Position in its trace.
        step: usize,
        /// The collective.
        collective: Collective,
        /// The next number.
        expected: u32,
    },
    /// An await without a start before it, or a second one.
    #[error("rank {rank}, step {step}: awaits {collective}, which is not in flight")]
    NotInFlight {
        /// The rank.
        rank: Rank,
        /// Position in its trace.
        step: usize,
        /// The collective.
        collective: Collective,
    },
    /// A start without an await.
    #[error("rank {rank}, step {step}: starts {collective} and never awaits it")]
    NeverAwaited {
        /// The rank.
        rank: Rank,
        /// Position of the start in its trace.
        step: usize,
        /// The collective.
        collective: Collective,
    },
    /// Members of a group start different collectives.
    #[error("{0}")]
    Differ(Box<Difference>),
    /// Ranks that wait for each other in a cycle.
    #[error("deadlock: {}", chain(.cycle))]
    Deadlock {
        /// Each rank waits for the next, the last one for the first.
        cycle: Vec<Wait>,
    },
    /// Ranks that start collectives in orders that contradict each other.
    #[error("no common order of starts: {}", orders(.cycle))]
    LaunchOrder {
        /// Each rank starts its collective before the one of the rank in front of it, the first before that of the last.
        cycle: Vec<Wait>,
    },
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let ranks: Vec<String> = self.0.iter().take(SHOWN).map(Rank::to_string).collect();
        let more = if self.0.len() > SHOWN { format!(", … {} in all", self.0.len()) } else { String::new() };
        write!(f, "group [{}{more}]", ranks.join(", "))
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.post {
            Some(post) => write!(f, "rank {} has {post}", self.rank),
            None => write!(f, "rank {} has nothing", self.rank),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, collective #{}: {}, but {}", self.group, self.sequence, self.left, self.right)
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wait { rank, step, collective, group, waits_for } = self;
        write!(f, "rank {rank} at step {step} awaits {collective} of {group}, which rank {waits_for} has not started")
    }
}

fn orders(cycle: &[Wait]) -> String {
    let earlier = cycle.iter().cycle().skip(1);
    let order = |(later, earlier): (&Wait, &Wait)| {
        let Wait { rank, step, collective, group, .. } = earlier;
        format!(
            "rank {rank} at step {step} starts {collective} of {group} before {} of {}, which rank {} starts at step {}",
            later.collective, later.group, later.rank, later.step
        )
    };
    cycle.iter().zip(earlier).map(order).collect::<Vec<_>>().join("; ")
}

fn chain(cycle: &[Wait]) -> String {
    cycle.iter().map(Wait::to_string).collect::<Vec<_>>().join("; ")
}
