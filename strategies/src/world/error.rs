//! What can be wrong with a world, told so that a person finds the line at fault.

use super::{Collective, Post, Rank};
use std::fmt;

/// The members of a group, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupName(pub Vec<Rank>);

/// One member's view of a place in a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// The member.
    pub rank: Rank,
    /// What it starts there; nothing, if it starts fewer.
    pub post: Option<Post>,
}

/// Two members that do different things at the same place of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Whose stream.
    pub group: GroupName,
    /// Place in the stream.
    pub sequence: u32,
    /// One member; of a transfer, the sender.
    pub left: Side,
    /// Another.
    pub right: Side,
}

/// A rank that waits for another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The waiting rank.
    pub rank: Rank,
    /// Where in its trace.
    pub step: usize,
    /// For the end of what.
    pub collective: Collective,
    /// Of which group.
    pub group: GroupName,
    /// The ranks that have not started it.
    pub waits_for: Rank,
}

/// Why a world does not work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorldError {
    /// A group names a rank that does not exist.
    #[error("{group} names rank {rank}, but the world has {world_size} ranks")]
    UnknownRank {
        /// The group.
        group: GroupName,
        /// The rank.
        rank: Rank,
        /// Ranks there are.
        world_size: usize,
    },
    /// A rank binds a group of others, or a group twice.
    #[error("rank {rank} binds {group}, in which it has {found} positions instead of one")]
    Membership {
        /// The rank.
        rank: Rank,
        /// The group.
        group: GroupName,
        /// Positions found: 0, or more than 1; twice bound counts twice.
        found: usize,
    },
    /// A trace names a group that its rank does not bind.
    #[error(
        "rank {rank}, step {step}: {collective} is on group slot {slot}, but the rank binds {n_groups}",
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
    /// A transfer with oneself, or a member that the group does not have.
    #[error("rank {rank}, step {step}: {collective} names no other member of {group}")]
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
    #[error("rank {rank}, step {step}: {collective} is the start of #{expected} on its stream")]
    Sequence {
        /// The rank.
        rank: Rank,
        /// Position in its trace.
        step: usize,
        /// The collective.
        collective: Collective,
        /// Number that would be next.
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
    /// Members of a group do different things.
    #[error("{0}")]
    Differ(Box<Difference>),
    /// Ranks that wait for each other in a circle.
    #[error("deadlock: {}", chain(.cycle))]
    Deadlock {
        /// Each waits for the next, the last for the first.
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

fn chain(cycle: &[Wait]) -> String {
    cycle.iter().map(Wait::to_string).collect::<Vec<_>>().join("; ")
}
