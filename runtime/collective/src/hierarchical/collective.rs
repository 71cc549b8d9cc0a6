//! One rank of a world over several machines, and its communicators.
#![allow(unsafe_code)] // Starting an operation is unsafe by the trait's contract.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use super::placement::Placement;
use super::staged::{Levels, SUMS_MAX, StagedSum};
use crate::engine::{Advance, Engine, lock};
use crate::flat;
use crate::shm::collective::ShmCollectiveControl;
use crate::shm::world::{ShmRank, ShmWorld};
use crate::tcp::collective::{TcpCollective, TcpCollectiveControl, TcpRank};
use crate::tcp::connect::TcpConfig;
use crate::tcp::listener::Listener;
use phalanx_device::communicator::Behind;
use phalanx_device::descriptor::Descriptor;
use phalanx_device::operation_check::check_on_host;
use phalanx_device::shared_memory::Arena;
use phalanx_device::{
    Collective, CollectiveControl, CollectiveError, Operand, Operation, OperationKind, Stream, Ticket,
};

/// Sums of up to this many bytes go over TCP in one step, in order of position.
const DIRECT_BYTES: usize = 4096;

/// One rank: it shares memory with the ranks of its machine and has connections to other ranks.
#[derive(Debug)]
pub struct HierarchicalRank {
    placement: Placement,
    rank: u32,
    machine: u32,
    shm: ShmRank,
    tcp: TcpRank,
}

impl HierarchicalRank {
    /// Joins as `rank`. `shm` is the world of its machine ([`Placement::machine_world`]); `listener` and `addresses`,
    /// by rank, are as for [`TcpRank::join`].
    ///
    /// # Errors
    /// As [`ShmWorld::join`] and [`TcpRank::join`]; [`CollectiveError::Invalid`] if `shm` is another machine's world.
    pub fn join(
        placement: &Placement,
        rank: u32,
        shm: &ShmWorld,
        listener: &Listener,
        addresses: &[SocketAddr],
        config: &TcpConfig,
    ) -> Result<HierarchicalRank, CollectiveError> {
        let (machine, local) = placement.local(rank)?;
        let (expected, found) = (placement.machine_world(machine)?.digest(), shm.control().world().digest());
        if expected != found || shm.control().world().name_of(local) != rank {
            return Err(CollectiveError::Invalid { field: "digest of the machine's world", expected, found });
        }
        let shm = shm.join(local)?;
        let waiting = (shm.engine().clone(), shm.wakeup(), Some(shm.control().clone()));
        let tcp = TcpRank::join_with(&placement.tcp_world()?, rank, listener, addresses, config, waiting)?;
        Ok(HierarchicalRank { placement: placement.clone(), rank, machine, shm, tcp })
    }

    /// The communicator of group number `group`: shared memory if all its members run on this machine; TCP if every
    /// machine has one member, or machines have different numbers of members; both otherwise.
    ///
    /// # Errors
    /// [`CollectiveError::NotAMember`].
    pub fn communicator(&self, group: usize) -> Result<Box<dyn Collective>, CollectiveError> {
        self.placement.world().membership(group, self.rank)?;
        let inner = self.placement.machine_group(group, self.machine);
        Ok(match self.placement.tcp_groups(group, self.rank) {
            (None, _) => Box::new(self.shm.communicator(inner)?),
            (Some(all), None) => Box::new(self.tcp.communicator(all)?),
            (Some(all), Some(same_position)) => {
                let levels =
                    Levels { inner: self.shm.communicator(inner)?, outer: self.tcp.communicator(same_position)? };
                let engine = self.shm.engine().clone();
                Box::new(HierarchicalCollective::new(self.rank, engine, levels, self.tcp.communicator(all)?))
            }
        })
    }

    /// This rank's arena.
    ///
    /// # Safety
    /// As [`ShmRank::arena`].
    #[allow(unsafe_code)] // Clones of an arena name the same memory.
    pub unsafe fn arena(&self) -> Arena {
        // SAFETY: the caller's contract.
        unsafe { self.shm.arena() }
    }
}

/// A group with equally many members on each of several machines, seen from one member.
///
/// Large sums are computed within each machine first (see `staged` for their order); all other operations use
/// TCP, even between members of one machine. Sums run one after the other, in the order of their starts.
#[derive(Debug)]
pub struct HierarchicalCollective {
    rank: u32,
    engine: Arc<Engine>,
    state: Arc<Mutex<State>>,
    position: u32,
    size: u32,
}

#[derive(Debug)]
struct State {
    levels: Levels,
    all: TcpCollective,
    sums: VecDeque<StagedSum>,
    /// Numbers of sums with unfinished tickets.
    tickets: BTreeSet<u64>,
    failed: Option<CollectiveError>,
}

impl HierarchicalCollective {
    fn new(rank: u32, engine: Arc<Engine>, levels: Levels, all: TcpCollective) -> HierarchicalCollective {
        let (position, size) = (all.position(), all.size());
        let state = State { levels, all, sums: VecDeque::new(), tickets: BTreeSet::new(), failed: None };
        let state = Arc::new(Mutex::new(state));
        engine.add(state.clone());
        HierarchicalCollective { rank, engine, state, position, size }
    }
}

impl State {
    /// Starts a sum and announces it to all members, so that every member detects a mismatch.
    fn start_sum(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        if self.sums.len() >= SUMS_MAX {
            return Err(CollectiveError::TooManyInFlight { max: SUMS_MAX });
        }
        let ticket = self.all.announce(Descriptor::of(operation, operands))?;
        self.sums.push_back(StagedSum::new(ticket.index, operation, operands));
        self.tickets.insert(ticket.index);
        Ok(ticket)
    }

    /// Whether an operation is complete. A sum is complete when all members have announced it and its steps are done.
    fn is_complete(&mut self, ticket: &Ticket) -> Result<bool, CollectiveError> {
        if ticket.stream == Stream::Group && self.tickets.contains(&ticket.index) {
            self.advance()?;
            if self.sums.iter().any(|sum| sum.index == ticket.index) || !self.all.try_finish(ticket)? {
                return Ok(false);
            }
            self.tickets.remove(&ticket.index);
            return Ok(true);
        }
        self.all.try_finish(ticket)
    }

    fn advance_sums(&mut self) -> Result<(), CollectiveError> {
        while let Some(sum) = self.sums.front_mut() {
            // Wait until all members have announced the same sum: parts of different sums must not mix.
            let announced = Ticket { stream: Stream::Group, index: sum.index };
            if !self.all.try_finish(&announced)? || !sum.advance(&mut self.levels)? {
                break;
            }
            self.sums.pop_front();
        }
        Ok(())
    }
}

impl Advance for State {
    fn advance(&mut self) -> Result<(), CollectiveError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let outcome = self.advance_sums();
        if let Err(error) = &outcome {
            // Steps in flight belong to communicators that release all memory when the world is aborted.
            self.failed = Some(error.clone());
            match error {
                // The abort reaches all members, and each aborts the groups of its own steps.
                CollectiveError::Aborted { reason, .. } => self.levels.abort(reason),
                _ => self.all.abort(&error.to_string()),
            }
        }
        outcome
    }
}

impl Collective for HierarchicalCollective {
    fn position(&self) -> u32 {
        self.position
    }

    fn size(&self) -> u32 {
        self.size
    }

    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        let is_staged = operation.kind == OperationKind::AllReduce && flat::bytes_of(operands) > DIRECT_BYTES;
        let mut state = lock(&self.state);
        let started = if is_staged {
            check_on_host(operation, operands, self.position, self.size)
                .and_then(|()| state.start_sum(operation, operands))
        } else {
            // SAFETY: the caller's promise.
            unsafe { state.all.start(operation, operands) }
        };
        match &started {
            Ok(_) => {
                // Errors are returned by `finish`.
                let _ = state.advance();
            }
            Err(error) if error.is_refusal() => {}
            Err(CollectiveError::Aborted { .. }) => {}
            Err(error) => state.all.abort(&format!("rank {}: {error}", self.rank)),
        }
        started
    }

    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        let outcome = self.engine.wait(|| lock(&self.state).is_complete(&ticket), || {});
        match &outcome {
            Ok(()) | Err(CollectiveError::Aborted { .. }) => {}
            Err(error) => self.abort(&format!("rank {}: {error}", self.rank)),
        }
        outcome
    }

    fn abort(&self, reason: &str) {
        lock(&self.state).all.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        let state = lock(&self.state);
        let [all, outer] = [&state.all, &state.levels.outer].map(TcpCollective::control_end);
        Arc::new(HierarchicalControl { all, inner: state.levels.inner.control_end(), outer })
    }
}

/// The control end of a communicator.
struct HierarchicalControl {
    all: TcpCollectiveControl,
    inner: ShmCollectiveControl,
    outer: TcpCollectiveControl,
}

impl CollectiveControl for HierarchicalControl {
    fn behind(&self) -> Vec<Behind> {
        // In this group all members announce all operations, sums included.
        self.all.behind()
    }

    fn abort(&self, reason: &str) {
        self.all.abort(reason);
        self.inner.abort(reason);
        self.outer.abort(reason);
    }
}

impl Drop for HierarchicalCollective {
    /// A panicking rank aborts its world, which releases its waiting peers.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort(&format!("rank {} panicked", self.rank));
        }
    }
}
