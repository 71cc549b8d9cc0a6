//! The groups of one rank: a communicator for each, and the collectives in flight.
//!
//! The groups of a world follow from its mesh and the programs of its ranks; every rank derives the same list, in the
//! same order, without communication. Messages of different channels between two ranks may overtake each other, so each
//! channel is a group of its own.

use crate::progress_counter::ProgressCounter;
use crate::{Collective as Communicator, CollectiveError, Operand, Operation, OperationKind, Ticket};
use phalanx_strategies::elastic::progress::{At, Wait};
use phalanx_strategies::mesh::{Group, Mesh, MeshRank};
use phalanx_strategies::program::{Collective, CollectiveKind, Op, Program, Stream, op};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A collective that could not be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The communicator failed.
    #[error("{collective}: {source}")]
    Failed {
        /// The collective.
        collective: String,
        /// Why.
        #[source]
        source: CollectiveError,
    },
    /// This rank has no such group.
    #[error("{collective}: this rank has no such group")]
    NoGroup {
        /// The collective.
        collective: String,
    },
}

/// A kind of group, and the channel of point-to-point messages; none for collectives of the whole group.
pub type GroupKey = (Group, Option<u32>);

/// The groups that a program or another rank of its stage uses: heads that several tensor-parallel ranks hold are
/// summed by the ranks whose shard has elements of them.
pub fn group_keys(program: &Program) -> BTreeSet<GroupKey> {
    let of = |c: &Collective| (c.group, channel(c.kind));
    let used =
        program.instrs.iter().filter_map(|i| if let Op::Start(op::Start(c)) = &i.op { Some(of(c)) } else { None });
    let sums = program.params.iter().flat_map(|p| &p.sums).map(|sum| (sum.group, None));
    used.chain(sums).collect()
}

const fn channel(kind: CollectiveKind) -> Option<u32> {
    match kind {
        CollectiveKind::Send { channel, .. } | CollectiveKind::Recv { channel, .. } => Some(channel),
        _ => None,
    }
}

/// All groups of a world: each key with each of its lists of ranks, in the same order at every rank.
pub fn groups_of_world(mesh: &Mesh, group_keys: &BTreeSet<GroupKey>) -> Vec<(GroupKey, Vec<u32>)> {
    let mut groups = Vec::new();
    for group_key in group_keys {
        for rank in 0..mesh.size() {
            let members = mesh.members(group_key.0, rank);
            if members[0] == rank {
                groups.push((*group_key, members.into_iter().map(|m| m as u32).collect()));
            }
        }
    }
    groups
}

/// The groups that one rank belongs to.
#[derive(Default)]
pub struct Groups {
    members: BTreeMap<GroupKey, Box<dyn Communicator>>,
    /// A few at a time, so a search beats a map, and the step does not allocate.
    in_flight: Vec<((Stream, u32), Ticket)>,
    /// Kept between calls, so that the step does not allocate.
    operands: Vec<Operand>,
    waited: Duration,
    progress_counter: ProgressCounter,
}

impl std::fmt::Debug for Groups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Groups").field("members", &self.members.keys()).field("in_flight", &self.in_flight).finish()
    }
}

impl Groups {
    /// No groups: a rank alone.
    pub fn none() -> Groups {
        Groups::default()
    }

    /// The groups of the rank at `mesh_rank`; `connect` makes the communicator of a group, by its index in the world's
    /// list.
    ///
    /// # Errors
    /// What `connect` reports.
    pub fn connect(
        mesh_rank: &MeshRank,
        world: &[(GroupKey, Vec<u32>)],
        mut connect: impl FnMut(usize) -> Result<Box<dyn Communicator>, CollectiveError>,
    ) -> Result<Groups, CollectiveError> {
        let mut members: BTreeMap<GroupKey, Box<dyn Communicator>> = BTreeMap::new();
        for (i, (group_key, ranks)) in world.iter().enumerate() {
            if ranks.contains(&(mesh_rank.rank as u32)) {
                members.insert(*group_key, connect(i)?);
            }
        }
        Ok(Groups { members, ..Groups::default() })
    }

    /// Begins a collective.
    ///
    /// # Safety
    /// As [`Communicator::start`]: until [`Groups::finish`], operands are not written and results not touched.
    ///
    /// # Errors
    /// See [`GroupError`].
    #[allow(unsafe_code)] // Borrows buffers beyond the call; the executor keeps the contract.
    pub unsafe fn start(&mut self, c: &Collective, operands: impl Iterator<Item = Operand>) -> Result<(), GroupError> {
        self.operands.clear();
        self.operands.extend(operands);
        let operation = Operation { kind: operation(c.kind), sequence: c.sequence, unit: c.unit };
        let Some(member) = self.members.get_mut(&(c.group, channel(c.kind))) else {
            return Err(GroupError::NoGroup { collective: c.to_string() });
        };
        // SAFETY: the caller's contract.
        let ticket = unsafe { member.start(&operation, &self.operands) };
        let ticket = ticket.map_err(|source| GroupError::Failed { collective: c.to_string(), source })?;
        self.in_flight.push(((c.stream(), c.sequence), ticket));
        Ok(())
    }

    /// Waits for a collective.
    ///
    /// # Errors
    /// See [`GroupError`].
    pub fn finish(&mut self, c: &Collective) -> Result<(), GroupError> {
        let start = Instant::now();
        let _waits = self.progress_counter.during(At::Waits(Wait { axes: c.group.axes, number: c.sequence }));
        let key = (c.stream(), c.sequence);
        let ticket = self.in_flight.iter().position(|(k, _)| *k == key).map(|i| self.in_flight.swap_remove(i).1);
        let member = self.members.get_mut(&(c.group, channel(c.kind)));
        let (Some(ticket), Some(member)) = (ticket, member) else {
            return Err(GroupError::NoGroup { collective: c.to_string() });
        };
        let outcome = member.finish(ticket);
        self.waited += start.elapsed();
        outcome.map_err(|source| GroupError::Failed { collective: c.to_string(), source })
    }

    /// Time spent in [`Groups::finish`] since the last call: waiting for peers, and doing this rank's share.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// The same groups, with the device's progress counter.
    #[must_use]
    pub fn with_progress_counter(self, progress_counter: ProgressCounter) -> Groups {
        Groups { progress_counter, ..self }
    }

    /// The device's progress counter.
    pub fn progress_counter(&self) -> &ProgressCounter {
        &self.progress_counter
    }

    /// Aborts the world through every group of this rank.
    pub fn abort(&self, reason: &str) {
        self.members.values().for_each(|m| m.abort(reason));
    }
}

const fn operation(kind: CollectiveKind) -> OperationKind {
    match kind {
        CollectiveKind::AllReduce => OperationKind::AllReduce,
        CollectiveKind::ReduceScatter => OperationKind::ReduceScatter,
        CollectiveKind::AllGather => OperationKind::AllGather,
        CollectiveKind::AllToAll => OperationKind::AllToAll,
        CollectiveKind::Broadcast { root } => OperationKind::Broadcast { root },
        CollectiveKind::Send { to, .. } => OperationKind::Send { to },
        CollectiveKind::Recv { from, .. } => OperationKind::Recv { from },
        CollectiveKind::Shift { by } => OperationKind::Shift { by },
    }
}
