//! The communicator of a group on one machine.
#![allow(unsafe_code)] // Starting an operation is unsafe by the trait's contract.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use super::control::Control;
use super::group::GroupStream;
use super::pair::PairStream;
use super::plane::Plane;
use super::queue::Queue;
use super::ring::Ring;
use crate::engine::{Advance, Engine, lock};
use phalanx_device::communicator::{Behind, Waiting};
use phalanx_device::operation_check::check_on_host;
use phalanx_device::{Collective, CollectiveControl, CollectiveError, Operand, Operation, Stream, Ticket};

/// One group of ranks of one machine, seen from one member.
#[derive(Debug)]
pub struct ShmCollective {
    engine: Arc<Engine>,
    plane: Arc<Plane>,
    group: usize,
    position: u32,
    size: u32,
    streams: Arc<Mutex<Streams>>,
}

/// All streams of one communicator.
#[derive(Debug)]
struct Streams {
    plane: Arc<Plane>,
    number: usize,
    group: GroupStream,
    /// Pairs used so far.
    pairs: Vec<PairStream>,
    /// The first error.
    failed: Option<CollectiveError>,
}

impl ShmCollective {
    /// The communicator of group number `group` for the rank of `plane`, driven by `engine`.
    ///
    /// # Errors
    /// [`CollectiveError::NotAMember`].
    pub(super) fn new(plane: Arc<Plane>, engine: Arc<Engine>, group: usize) -> Result<ShmCollective, CollectiveError> {
        let world = plane.control.world();
        let (members, position) = world.membership(group, plane.rank)?;
        let size = members.len() as u32;
        let stream = GroupStream::new(plane.clone(), group, members, position);
        let streams = Streams { plane: plane.clone(), number: group, group: stream, pairs: Vec::new(), failed: None };
        let streams = Arc::new(Mutex::new(streams));
        engine.add(streams.clone());
        Ok(ShmCollective { engine, plane, group, position, size, streams })
    }

    /// Starts a checked operation.
    fn start_checked(&self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        let mut streams = lock(&self.streams);
        let stream = operation.kind.stream();
        let index = match stream {
            Stream::Group => streams.group.start(operation, operands),
            pair => {
                let members = &self.plane.control.world().groups()[self.group];
                streams.pair(pair, self.group, members, self.position).start(operation, operands)
            }
        }?;
        Ok(Ticket { stream, index })
    }

    /// Whether an operation is complete, after all progress that is possible without waiting. The ticket of a complete
    /// operation needs no `finish`.
    ///
    /// # Errors
    /// As [`Collective::finish`].
    pub(crate) fn try_finish(&mut self, ticket: &Ticket) -> Result<bool, CollectiveError> {
        let mut streams = lock(&self.streams);
        streams.advance()?;
        streams.is_complete(ticket)
    }

    /// Its control end.
    pub(crate) fn control_end(&self) -> ShmCollectiveControl {
        let (control, group) = (self.plane.control.clone(), self.group);
        ShmCollectiveControl { control, group, position: self.position, size: self.size }
    }

    fn show_waiting(&self, ticket: &Ticket) {
        let streams = lock(&self.streams);
        let Some(queue) = streams.queue(ticket.stream) else { return };
        if ticket.index < queue.completed() {
            return;
        }
        let descriptor = queue.get(ticket.index).descriptor;
        let waiting = Waiting { group: self.group, stream: ticket.stream, index: ticket.index, descriptor };
        if let Ok(slot) = self.plane.control.slot(self.plane.rank) {
            slot.waiting.show(&waiting);
        }
    }
}

impl Streams {
    /// The stream of messages to or from one member, made on first use.
    fn pair(&mut self, stream: Stream, group: usize, members: &[u32], position: u32) -> &mut PairStream {
        let found = self.pairs.iter().position(|pair| pair.stream() == stream);
        let i = found.unwrap_or_else(|| {
            self.pairs.push(PairStream::new(self.plane.clone(), group, members, position, stream));
            self.pairs.len() - 1
        });
        &mut self.pairs[i]
    }

    fn queue(&self, stream: Stream) -> Option<&Queue> {
        match stream {
            Stream::Group => Some(self.group.queue()),
            pair => self.pairs.iter().find(|other| other.stream() == pair).map(PairStream::queue),
        }
    }

    /// Whether an operation is complete.
    fn is_complete(&self, ticket: &Ticket) -> Result<bool, CollectiveError> {
        let &Ticket { stream, index } = ticket;
        match self.queue(stream).filter(|queue| index < queue.started()) {
            Some(queue) => Ok(index < queue.completed()),
            None => Err(CollectiveError::UnknownTicket { stream, index }),
        }
    }

    fn advance_streams(&mut self) -> Result<(), CollectiveError> {
        self.group.advance()?;
        self.pairs.iter_mut().try_for_each(PairStream::advance)
    }

    /// Looks for a mismatch that explains an abort: the peer that detects a mismatch first aborts the world while this
    /// rank may still be waiting for others.
    fn compare_all(&self) -> Result<(), CollectiveError> {
        self.group.compare_all()?;
        self.pairs.iter().try_for_each(|pair| pair.compare().map(|_| ()))
    }
}

impl Advance for Streams {
    fn advance(&mut self) -> Result<(), CollectiveError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let aborted = self.plane.control.aborted_in(self.number);
        let outcome = match aborted {
            None => self.advance_streams(),
            Some(aborted) => {
                let decided = self.group.advance_decided();
                Err(decided.and_then(|()| self.compare_all()).err().unwrap_or(aborted))
            }
        };
        if let Err(error) = &outcome {
            self.failed = Some(error.clone());
            // An abort has already reached all affected ranks.
            if !matches!(error, CollectiveError::Aborted { .. }) {
                let name = self.plane.control.world().name_of(self.plane.rank);
                self.plane.control.abort(&format!("rank {name}: {error}"));
            }
        }
        outcome
    }
}

impl Collective for ShmCollective {
    fn position(&self) -> u32 {
        self.position
    }

    fn size(&self) -> u32 {
        self.size
    }

    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        if let Some(aborted) = self.plane.control.aborted_in(self.group) {
            return Err(aborted);
        }
        let started = check_on_host(operation, operands, self.position, self.size)
            .and_then(|()| self.start_checked(operation, operands));
        match &started {
            Ok(_) => {
                self.plane.control.slot(self.plane.rank)?.entered.fetch_add(1, Ordering::Release);
            }
            Err(error) if error.is_refusal() => {}
            Err(error) => {
                self.abort(&format!("rank {}: {error}", self.plane.control.world().name_of(self.plane.rank)));
            }
        }
        started
    }

    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        let is_done = || {
            let mut streams = lock(&self.streams);
            if streams.is_complete(&ticket)? {
                return Ok(true);
            }
            let advanced = streams.advance();
            let is_complete = streams.is_complete(&ticket)?;
            if is_complete { Ok(true) } else { advanced.map(|()| false) }
        };
        let outcome = self.engine.wait(is_done, || self.show_waiting(&ticket));
        let slot = self.plane.control.slot(self.plane.rank)?;
        slot.waiting.clear();
        if outcome.is_ok() {
            slot.finished.fetch_add(1, Ordering::Release);
        }
        outcome
    }

    fn abort(&self, reason: &str) {
        self.plane.control.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        Arc::new(self.control_end())
    }
}

/// The control end of a communicator. It accesses control memory only.
pub(crate) struct ShmCollectiveControl {
    control: Arc<Control>,
    group: usize,
    position: u32,
    size: u32,
}

impl CollectiveControl for ShmCollectiveControl {
    fn behind(&self) -> Vec<Behind> {
        let others = || (0..self.size).filter(|position| *position != self.position);
        let layout = self.control.layout();
        let announced = |at: usize| Ring::new(self.control.clone(), at).n_announced();
        // Counts of this member, and of the other members of the stream.
        let group = |position: u32| announced(layout.group_ring_at(self.group, position));
        let sent = |from: u32, to: u32| announced(layout.pair_ring_at(self.group, from, to, true));
        let received = |from: u32, to: u32| announced(layout.pair_ring_at(self.group, from, to, false));
        let of_group = (Stream::Group, group(self.position), others().map(|other| (other, group(other))).collect());
        let of_pairs = others().flat_map(|other| {
            let (to, from) = (sent(self.position, other), received(other, self.position));
            [
                (Stream::SendTo(other), to, vec![(other, received(self.position, other))]),
                (Stream::RecvFrom(other), from, vec![(other, sent(other, self.position))]),
            ]
        });
        let streams = std::iter::once(of_group).chain(of_pairs);
        streams.filter_map(|(stream, own, others)| Behind::of(stream, own, others)).collect()
    }

    fn abort(&self, reason: &str) {
        self.control.abort_group(self.group, reason);
    }
}

impl Drop for ShmCollective {
    /// A panicking rank aborts its world, which releases its waiting peers.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort(&format!("rank {} panicked", self.plane.control.world().name_of(self.plane.rank)));
        }
    }
}
