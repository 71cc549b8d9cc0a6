//! One rank of a world over TCP, and its communicators.
#![allow(unsafe_code)] // Starting an operation is unsafe by the trait's contract.

use std::net::SocketAddr;
use std::sync::Arc;

use super::connect::{TcpConfig, connect_all};
use super::group::SharedGroup;
use super::listener::Listener;
use super::plane::TcpPlane;
use crate::engine::{Engine, HasWakeup};
use crate::shm::control::Control;
use crate::wakeup::Wakeup;
use phalanx_device::communicator::Behind;
use phalanx_device::descriptor::Descriptor;
use phalanx_device::operation_check::check_on_host;
use phalanx_device::world::World;
use phalanx_device::{
    Collective, CollectiveControl, CollectiveError, Operand, Operation, OperationKind, Stream, Ticket,
};

/// One rank, connected with all ranks that share a group with it. It leaves when it and its communicators are dropped.
#[derive(Clone, Debug)]
pub struct TcpRank {
    member: Arc<Member>,
}

/// Leaves the world when dropped.
#[derive(Debug)]
struct Member {
    plane: Arc<TcpPlane>,
    engine: Arc<Engine>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.plane.leave();
    }
}

/// A wake-up in ordinary memory.
struct OwnWakeup(Wakeup);

impl HasWakeup for OwnWakeup {
    fn wakeup(&self) -> &Wakeup {
        &self.0
    }
}

impl TcpRank {
    /// Joins `world` as `rank`: connects to lower ranks at their `addresses` and accepts connections of higher ranks
    /// from `listener`, which listens at the rank's own address.
    ///
    /// # Errors
    /// [`CollectiveError::Unreachable`], [`CollectiveError::Unauthenticated`], [`CollectiveError::NoSuchRank`],
    /// [`CollectiveError::Shape`], [`CollectiveError::System`].
    pub fn join(
        world: &World,
        rank: u32,
        listener: &Listener,
        addresses: &[SocketAddr],
        config: &TcpConfig,
    ) -> Result<TcpRank, CollectiveError> {
        let wakeup: Arc<dyn HasWakeup> = Arc::new(OwnWakeup(Wakeup::default()));
        let engine = Arc::new(Engine::new(wakeup.clone(), 1));
        TcpRank::join_with(world, rank, listener, addresses, config, (engine, wakeup, None))
    }

    /// As [`TcpRank::join`], for a rank that also waits for ranks of its machine and is aborted together with them.
    pub(crate) fn join_with(
        world: &World,
        rank: u32,
        listener: &Listener,
        addresses: &[SocketAddr],
        config: &TcpConfig,
        (engine, wakeup, control): (Arc<Engine>, Arc<dyn HasWakeup>, Option<Arc<Control>>),
    ) -> Result<TcpRank, CollectiveError> {
        if rank >= world.n_ranks() {
            return Err(CollectiveError::NoSuchRank { rank, size: world.n_ranks() });
        }
        let sockets = connect_all(world, rank, listener, addresses, config, control.as_deref())?;
        let plane = TcpPlane::start(world.clone(), rank, sockets, wakeup, control, config.damages_next.clone())?;
        Ok(TcpRank { member: Arc::new(Member { plane, engine }) })
    }

    /// The communicator of group number `group`.
    ///
    /// # Errors
    /// [`CollectiveError::NotAMember`].
    pub fn communicator(&self, group: usize) -> Result<TcpCollective, CollectiveError> {
        let state = self.member.plane.group(group)?.clone();
        let (members, position) = self.member.plane.membership(group)?;
        Ok(TcpCollective { member: self.member.clone(), group, state, position, members })
    }

    /// Aborts the world, here and at all peers.
    pub fn abort(&self, reason: &str) {
        self.member.plane.abort(reason);
    }
}

/// One group of ranks of any machines, seen from one member.
#[derive(Debug)]
pub struct TcpCollective {
    member: Arc<Member>,
    group: usize,
    state: Arc<SharedGroup>,
    position: u32,
    members: Vec<u32>,
}

impl TcpCollective {
    /// Whether an operation is complete. The ticket of a complete operation needs no `finish`.
    ///
    /// # Errors
    /// As [`Collective::finish`].
    pub(crate) fn try_finish(&mut self, ticket: &Ticket) -> Result<bool, CollectiveError> {
        let outcome = self.is_complete(ticket.stream, ticket.index);
        outcome.inspect_err(|error| self.release_operands(error))
    }

    /// Its control end.
    pub(crate) fn control_end(&self) -> TcpCollectiveControl {
        TcpCollectiveControl { plane: self.member.plane.clone(), group: self.group }
    }

    /// Releases the memory of all groups after a failure, unless only this group is aborted.
    fn release_operands(&self, error: &CollectiveError) {
        let of_group = matches!(error, CollectiveError::Aborted { .. }) && self.member.plane.aborted().is_none();
        match of_group {
            // Whoever aborted it has ended its operations.
            true => self.state.gate.pass(),
            false => self.member.plane.release_operands(error),
        }
    }

    /// Starts an operation without data that compares the members' descriptors of an operation run elsewhere.
    ///
    /// # Errors
    /// As [`Collective::start`].
    pub(crate) fn announce(&mut self, descriptor: Descriptor) -> Result<Ticket, CollectiveError> {
        if let Some(aborted) = self.member.plane.aborted() {
            return Err(aborted);
        }
        let barrier = Operation { kind: OperationKind::Barrier, sequence: 0, unit: 1 };
        self.start_checked(&barrier, &[], descriptor)
    }

    fn start_checked(
        &self,
        operation: &Operation,
        operands: &[Operand],
        descriptor: Descriptor,
    ) -> Result<Ticket, CollectiveError> {
        let plane = &self.member.plane;
        let stream = operation.kind.stream();
        let mut state = self.state.lock();
        if let Some(failed) = state.failed() {
            return Err(failed.clone());
        }
        match state.start(plane, operation, operands, descriptor) {
            Ok(index) => {
                let left = self.members.iter().find(|rank| {
                    **rank != self.members[self.position as usize] && plane.has_left(**rank) && state.waits_for(**rank)
                });
                if let Some(rank) = left {
                    plane.abort(&plane.left(*rank));
                }
                Ok(Ticket { stream, index })
            }
            Err(error) => {
                drop(state);
                if !error.is_refusal() {
                    self.state.fail(error.clone());
                }
                Err(error)
            }
        }
    }

    /// Whether an operation is complete.
    fn is_complete(&self, stream: Stream, index: u64) -> Result<bool, CollectiveError> {
        let state = self.state.lock();
        if let Some(failed) = state.failed() {
            return Err(failed.clone());
        }
        if index >= state.started(stream) {
            return Err(CollectiveError::UnknownTicket { stream, index });
        }
        if index < state.completed(stream) {
            return Ok(true);
        }
        self.member.plane.aborted().map_or(Ok(false), Err)
    }
}

impl Collective for TcpCollective {
    fn position(&self) -> u32 {
        self.position
    }

    fn size(&self) -> u32 {
        self.members.len() as u32
    }

    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        if let Some(aborted) = self.member.plane.aborted() {
            self.member.plane.release_operands(&aborted);
            return Err(aborted);
        }
        let started = check_on_host(operation, operands, self.position, self.size())
            .and_then(|()| self.start_checked(operation, operands, Descriptor::of(operation, operands)));
        match &started {
            Ok(_) => {}
            Err(error) if error.is_refusal() => {}
            // The abort of this group alone; an abort of the world returned above.
            Err(CollectiveError::Aborted { .. }) => {}
            Err(error) => {
                self.abort(&format!("rank {}: {error}", self.member.plane.name()));
                self.release_operands(error);
            }
        }
        started
    }

    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        let Ticket { stream, index } = ticket;
        let outcome = self.member.engine.wait(|| self.is_complete(stream, index), || {});
        match &outcome {
            Ok(()) | Err(CollectiveError::Aborted { .. }) => {}
            Err(error) => self.abort(&format!("rank {}: {error}", self.member.plane.name())),
        }
        outcome.inspect_err(|error| self.release_operands(error))
    }

    fn abort(&self, reason: &str) {
        self.member.plane.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        Arc::new(self.control_end())
    }
}

/// The control end of a communicator.
pub(crate) struct TcpCollectiveControl {
    plane: Arc<TcpPlane>,
    group: usize,
}

impl CollectiveControl for TcpCollectiveControl {
    fn behind(&self) -> Vec<Behind> {
        self.plane.group(self.group).map(|group| group.lock().behind()).unwrap_or_default()
    }

    fn abort(&self, reason: &str) {
        self.plane.abort_group(self.group, reason);
    }
}

impl Drop for TcpCollective {
    /// A panicking rank aborts its world, which releases its waiting peers.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort(&format!("rank {} panicked", self.member.plane.name()));
        }
        // Operands of unfinished operations must not be touched once their owner is gone.
        let reason = "the communicator was dropped".to_owned();
        self.state.fail(CollectiveError::aborted(reason));
    }
}
