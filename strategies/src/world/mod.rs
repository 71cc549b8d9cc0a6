//! All ranks together: whether their collectives match, whether they deadlock, and how long a step takes.
//!
//! A [`Step`] trace describes a rank: how long it computes, and which collectives it starts and awaits. Ranks that do
//! the same share one trace, which names a group by its index among the groups that the rank binds; so four thousand
//! ranks need only a handful of traces and a table.
//!
//! - [`WorldTraces::verify`] checks every trace by itself, then every group, then runs all ranks to see whether they
//!   finish.
//! - [`WorldTraces::simulate`] runs them with durations and returns the [`Timeline`] of [`Span`]s; [`chrome`] writes it for a trace
//!   viewer.
//!
//! Semantics, the same for the host and for GPUs:
//! - `WORLD-1` a start never blocks; a collective begins once all of its members have started it, a transfer once both
//!   have.
//! - `WORLD-2` an await blocks until the collective has ended.
//! - `WORLD-3` on each stream (a group's collectives; its transfers from one member to another by one channel) members
//!   have the same descriptors in the same order, numbered from 0, and every start is awaited once.
//! - `WORLD-4` the starts of all ranks, over all groups, have a common order. Then communicators that run their operations
//!   in the order of their starts cannot deadlock, in whatever way they share a device. Hosts do not need it.
//!
//! A run simulates *classes* of indistinguishable ranks (file `symmetry`), not single ranks.
//!
//! Deliberately absent: whether buffers are accessed between start and await, which [`crate::verify`] checks for each
//! rank.

mod check;
pub mod chrome;
mod deadlock;
mod error;
mod launches;
mod projection;
mod run;
mod span;
mod symmetry;
mod timeline;

pub use error::{Difference, GroupName, Side, Wait, WorldError};
pub use run::{Links, Mover};
pub use span::{Span, What};
pub use timeline::{RankTimes, Timeline};

use crate::program::DType;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// Position in the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

/// A trace of a [`WorldTraces`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TraceId(u32);

/// A group of a [`WorldTraces`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(u32);

/// A group as a trace names it: its index among the groups that the rank binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupSlot(pub u32);

/// What a collective does. Members are named by their position in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Sum over the group, result everywhere.
    AllReduce,
    /// Sum over the group, each member keeps its part.
    ReduceScatter,
    /// Parts of all members, everywhere.
    AllGather,
    /// Transpose of parts between members.
    AllToAll,
    /// Copy from one member to all.
    Broadcast {
        /// The member that has the data.
        root: u32,
    },
    /// To the member `by` positions further, from the one `by` positions before, around the group.
    Shift {
        /// Distance.
        by: i32,
    },
    /// To one member.
    Send {
        /// Receiver.
        to: u32,
        /// Transfers of different channels may pass each other.
        channel: u32,
    },
    /// From one member.
    Recv {
        /// Sender.
        from: u32,
        /// Channel of the send.
        channel: u32,
    },
}

/// Identity of a collective on the rank that takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Collective {
    /// What it does.
    pub kind: Kind,
    /// The group.
    pub group: GroupSlot,
    /// Number on its stream, from 0 in each step.
    pub sequence: u32,
    /// Elements that stay together when a whole is cut in parts.
    pub unit: u64,
}

/// One buffer of a collective: the whole, even if a member holds a part, so that members agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tensor {
    /// Elements of the whole.
    pub n_elements: u64,
    /// Element type.
    pub dtype: DType,
}

/// The start of a collective.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Post {
    /// The collective.
    pub collective: Collective,
    /// Its buffers.
    pub tensors: Vec<Tensor>,
}

/// What a rank does next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Computes.
    Compute {
        /// Name for people.
        name: &'static str,
        /// Microbatch it works on, if any.
        microbatch: Option<u32>,
        /// Duration.
        cost: Duration,
    },
    /// Starts a collective.
    Start(Post),
    /// Waits for its end.
    Await(Collective),
}

/// The traces of all ranks.
#[derive(Clone, Debug, Default)]
pub struct WorldTraces {
    traces: Vec<Vec<Step>>,
    groups: Vec<Vec<Rank>>,
    ranks: Vec<Binding>,
    /// Traces by hash, to find equal ones without a second copy of the long traces.
    trace_ids: BTreeMap<u64, Vec<TraceId>>,
    group_ids: BTreeMap<u64, Vec<GroupId>>,
}

/// The trace and the groups of a rank.
#[derive(Clone, Debug)]
struct Binding {
    trace: TraceId,
    groups: Vec<GroupId>,
}

impl WorldTraces {
    /// A world without ranks.
    pub fn new() -> WorldTraces {
        WorldTraces::default()
    }

    /// Adds a trace; equal ones have one id.
    pub fn trace(&mut self, steps: Vec<Step>) -> TraceId {
        let alike = self.trace_ids.entry(hash(&steps)).or_default();
        if let Some(id) = alike.iter().find(|id| self.traces[id.0 as usize] == steps) {
            return *id;
        }
        let id = TraceId(self.traces.len() as u32);
        alike.push(id);
        self.traces.push(steps);
        id
    }

    /// Adds a group of ranks, given in the order of their positions; equal ones have one id.
    pub fn group(&mut self, members: Vec<Rank>) -> GroupId {
        let alike = self.group_ids.entry(hash(&members)).or_default();
        if let Some(id) = alike.iter().find(|id| self.groups[id.0 as usize] == members) {
            return *id;
        }
        let id = GroupId(self.groups.len() as u32);
        alike.push(id);
        self.groups.push(members);
        id
    }

    /// Adds a group that counts its own collectives, though another may have the same members.
    pub fn separate_group(&mut self, members: Vec<Rank>) -> GroupId {
        self.groups.push(members);
        GroupId(self.groups.len() as u32 - 1)
    }

    /// Adds the next rank: its trace, and the groups that [`GroupSlot`] counts.
    pub fn rank(&mut self, trace: TraceId, groups: Vec<GroupId>) -> Rank {
        self.ranks.push(Binding { trace, groups });
        Rank(self.ranks.len() as u32 - 1)
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Number of different traces.
    pub fn n_traces(&self) -> usize {
        self.traces.len()
    }

    /// Checks that the collectives of all ranks match (`WORLD-3`) and that all ranks finish.
    ///
    /// # Errors
    /// The first fault found, by rank in the traces, then by group, then the deadlock.
    pub fn verify(&self) -> Result<(), WorldError> {
        let nowhere = |_| 0;
        let at_once = |_: &Post, _: &[u32]| Duration::ZERO;
        self.simulate(&Links { mover: Mover::Links, node: &nowhere, duration: &at_once }, false).map(|_| ())
    }

    /// Checks that the starts of all ranks have a common order (`WORLD-4`), in a world that [`WorldTraces::verify`] accepts.
    ///
    /// # Errors
    /// [`WorldError::LaunchOrder`].
    pub fn verify_launches(&self) -> Result<(), WorldError> {
        launches::verify(self)
    }

    /// Checks as [`WorldTraces::verify`] and returns the times. `spans` requests each single piece of work, too.
    ///
    /// # Errors
    /// As [`WorldTraces::verify`].
    pub fn simulate(&self, links: &Links<'_>, spans: bool) -> Result<Timeline, WorldError> {
        let projections = check::traces(self)?;
        check::groups(self, &projections)?;
        let classes = symmetry::classes(self, &projections, links.node);
        run::run(self, &projections, &classes, links, spans)
    }

    fn steps(&self, trace: TraceId) -> &[Step] {
        &self.traces[trace.0 as usize]
    }

    fn members(&self, group: GroupId) -> &[Rank] {
        &self.groups[group.0 as usize]
    }

    fn binding(&self, rank: Rank) -> &Binding {
        &self.ranks[rank.0 as usize]
    }
}

/// The same in every run: the hasher has no random keys.
fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Kind {
    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllGather => "all_gather",
            Kind::AllToAll => "all_to_all",
            Kind::Broadcast { .. } => "broadcast",
            Kind::Shift { .. } => "shift",
            Kind::Send { .. } => "send",
            Kind::Recv { .. } => "recv",
        }
    }
}

impl Post {
    /// Bytes of all whole tensors.
    pub fn size_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.n_elements * t.dtype.size_bytes() as u64).sum()
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Kind::Broadcast { root } => write!(f, " from member {root}"),
            Kind::Shift { by } => write!(f, " by {by}"),
            Kind::Send { to, channel } => write!(f, " to member {to} by channel {channel}"),
            Kind::Recv { from, channel } => write!(f, " from member {from} by channel {channel}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.kind, self.sequence)
    }
}

impl fmt::Display for Post {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of", self.collective)?;
        for (i, t) in self.tensors.iter().enumerate().take(4) {
            write!(f, "{} {} {}", if i == 0 { "" } else { "," }, t.n_elements, t.dtype)?;
        }
        if self.tensors.len() > 4 {
            write!(f, " and {} more", self.tensors.len() - 4)?;
        }
        if self.collective.unit != 1 { write!(f, " in units of {}", self.collective.unit) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
