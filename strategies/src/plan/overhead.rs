//! Memory of a device that a rank takes besides the buffers of its programs: CUDA's context and libraries, and the buffers of
//! NCCL. An estimate from published figures, since neither is known before a job runs: a plan that leaves no room for them does
//! not fit.
//!
//! NCCL connects two ranks when an operation first needs it (since release 2.22). Each channel of a connection has a buffer for each
//! of three protocols: 4 MiB, 4.69 MiB and 0.5 MiB (`NCCL_BUFFSIZE` and its siblings), in allocations of 10 MiB, and two allocations of
//! 2 MiB, one for each direction. On eight H100, the first all-to-all of a communicator takes 3.28 GB (NVIDIA/nccl, issue 1685):
//! 7 peers x 32 channels x 14 MiB.
//!
//! Which operations connect whom: a ring has one neighbour before and one behind, which share the 14 MiB, and a tree one above and one
//! below beside that (`src/graph/connect.cc`). Messages connect their two ranks. Networks between nodes and NVLS have other buffers,
//! of the same order.

use super::hardware::Hardware;
use crate::mesh::Group;
use crate::program::{CollectiveKind, Op, Program, op};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of one channel of a connection.
const CHANNEL_BYTES: u64 = 14 << 20;

/// Bytes besides the buffers of programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overhead {
    /// The context and libraries.
    pub context_bytes: u64,
    /// Buffers of communicators.
    pub communicator_bytes: u64,
    /// Communicators of this rank.
    pub n_communicators: usize,
}

impl Overhead {
    /// That of the rank of a program.
    pub fn of(hardware: &Hardware, program: &Program) -> Overhead {
        // Messages of a channel have a communicator of their own.
        let mut made: BTreeMap<(Group, Option<u32>), BTreeSet<Connections>> = BTreeMap::new();
        for instr in &program.instrs {
            let Op::Start(op::Start(collective)) = &instr.op else { continue };
            let n_ranks = program.mesh_rank.group_size(collective.group) as u64;
            if n_ranks > 1 {
                let (channel, connections) = connections(collective.kind, n_ranks);
                made.entry((collective.group, channel)).or_default().extend(connections);
            }
        }
        let n_connections: u64 = made.values().flatten().map(|connections| connections.n()).sum();
        let communicator_bytes = n_connections * u64::from(hardware.channels) * CHANNEL_BYTES;
        Overhead { context_bytes: hardware.context_bytes, communicator_bytes, n_communicators: made.len() }
    }

    /// The least of a rank among `n_ranks`: with peers it has a connection.
    pub fn least(hardware: &Hardware, n_ranks: usize) -> Overhead {
        let n_communicators = usize::from(n_ranks > 1);
        let communicator_bytes = n_communicators as u64 * u64::from(hardware.channels) * CHANNEL_BYTES;
        Overhead { context_bytes: hardware.context_bytes, communicator_bytes, n_communicators }
    }

    /// All of it.
    pub const fn bytes(&self) -> u64 {
        self.context_bytes + self.communicator_bytes
    }
}

/// Connections of a rank that a communicator makes once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Connections {
    Ring,
    Tree,
    /// To all others.
    Others(u64),
    /// To the neighbours of a shift, which are one rank if there are two in all.
    Neighbours(u64),
    /// To the partner of messages.
    Partner(u32),
}

impl Connections {
    const fn n(self) -> u64 {
        match self {
            Connections::Ring | Connections::Partner(_) => 1,
            Connections::Tree => 2,
            Connections::Others(n) | Connections::Neighbours(n) => n,
        }
    }
}

/// The channel of a kind of collective, and the connections that it needs.
fn connections(kind: CollectiveKind, n_ranks: u64) -> (Option<u32>, Vec<Connections>) {
    match kind {
        CollectiveKind::AllReduce => (None, vec![Connections::Ring, Connections::Tree]),
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather | CollectiveKind::Broadcast { .. } => {
            (None, vec![Connections::Ring])
        }
        CollectiveKind::AllToAll => (None, vec![Connections::Others(n_ranks - 1)]),
        CollectiveKind::Shift { .. } => (None, vec![Connections::Neighbours(2.min(n_ranks - 1))]),
        CollectiveKind::Send { to: partner, channel } | CollectiveKind::Recv { from: partner, channel } => {
            (Some(channel), vec![Connections::Partner(partner)])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn n(kinds: &[CollectiveKind], n_ranks: u64) -> u64 {
        let made: BTreeSet<Connections> = kinds.iter().flat_map(|kind| connections(*kind, n_ranks).1).collect();
        made.into_iter().map(Connections::n).sum()
    }

    #[test]
    fn first_all_to_all_of_eight_gpus_takes_what_was_published() {
        let h100 = Hardware::named("h100").unwrap();

        let bytes = n(&[CollectiveKind::AllToAll], 8) * u64::from(h100.channels) * CHANNEL_BYTES;

        // 4.34 GB after it, 1.06 GB before.
        assert!((bytes as f64 / 3.28e9 - 1.0).abs() < 0.01, "{bytes}");
    }

    #[test]
    fn connection_counts_once_for_all_operations_that_use_it() {
        use CollectiveKind::{AllGather, AllReduce, Recv, ReduceScatter, Send, Shift};
        let (send, recv) = (|to| Send { to, channel: 0 }, |from| Recv { from, channel: 0 });

        assert_eq!((n(&[AllGather], 4), n(&[AllGather, ReduceScatter], 4), n(&[AllGather, AllReduce], 4)), (1, 1, 3));
        assert_eq!((n(&[send(1), recv(1)], 4), n(&[send(1), recv(2)], 4)), (1, 2));
        assert_eq!((n(&[Shift { by: 1 }], 2), n(&[Shift { by: 1 }, Shift { by: -1 }], 4)), (1, 2));
    }
}
