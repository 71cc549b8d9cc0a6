//! Messages from one member of a group to another: a stream at each side.
//!
//! The sender announces the offsets of its tensors, the receiver announces that it is ready; each checks the other's
//! announcement. The receiver copies and publishes `done`, which releases the sender's tensors. The invariants are
//! those of `group`, applied to the two rings.

use std::sync::Arc;

use super::group::copy;
use super::plane::Plane;
use super::queue::Queue;
use super::ring::Ring;
use phalanx_device::{CollectiveError, Operand, Operation, Stream};

/// One side of a stream of messages.
#[derive(Debug)]
pub(super) struct PairStream {
    plane: Arc<Plane>,
    stream: Stream,
    /// Rank of the other side.
    peer: u32,
    peer_ring: Ring,
    queue: Queue,
    worked: u64,
}

impl PairStream {
    /// The side of the member at `position` of group number `group`.
    pub(super) fn new(plane: Arc<Plane>, group: usize, members: &[u32], position: u32, stream: Stream) -> PairStream {
        let (from, to, peer) = match stream {
            Stream::SendTo(to) => (position, to, to),
            Stream::RecvFrom(from) => (from, position, from),
            Stream::Group => unreachable!("operations of the group have a stream of their own"),
        };
        let is_sender = from == position;
        let ring = |is_sender| {
            Ring::new(plane.control.clone(), plane.control.layout().pair_ring_at(group, from, to, is_sender))
        };
        let (peer_ring, queue) = (ring(!is_sender), Queue::new(ring(is_sender)));
        PairStream { plane, stream, peer: members[peer as usize], peer_ring, queue, worked: 0 }
    }

    /// The peer and the direction of the messages.
    pub(super) fn stream(&self) -> Stream {
        self.stream
    }

    /// The operations.
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Starts a checked send or receive.
    ///
    /// # Errors
    /// As [`Queue::push`].
    pub(super) fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<u64, CollectiveError> {
        let is_shared = matches!(self.stream, Stream::SendTo(_));
        // Messages are not divided into parts, so position and size do not matter.
        let index = self.queue.push(&self.plane, operation, operands, (0, 1), is_shared)?;
        self.queue.announce(index);
        self.plane.control.wakeup(self.peer).wake();
        Ok(index)
    }

    /// Makes all progress that is possible without waiting.
    ///
    /// # Errors
    /// [`CollectiveError::Mismatch`], [`CollectiveError::Invalid`].
    pub(super) fn advance(&mut self) -> Result<(), CollectiveError> {
        while self.worked < self.queue.started() {
            let Some(offsets_at) = self.compare()? else { break };
            if let Stream::RecvFrom(_) = self.stream {
                self.receive(offsets_at)?;
                self.queue.ring().set_done(self.worked + 1);
                self.plane.control.wakeup(self.peer).wake();
            }
            self.worked += 1;
        }
        let released = match self.stream {
            Stream::SendTo(_) => self.worked.min(self.peer_ring.done()),
            _ => self.worked,
        };
        while self.queue.completed() < released {
            self.queue.complete(&self.plane);
        }
        Ok(())
    }

    /// The number of the peer's first operand of operation `worked`, if it has announced the same operation.
    ///
    /// # Errors
    /// [`CollectiveError::Mismatch`].
    pub(super) fn compare(&self) -> Result<Option<u64>, CollectiveError> {
        if self.worked == self.queue.started() {
            return Ok(None);
        }
        let Some((theirs, offsets_at)) = self.peer_ring.announced(self.worked) else { return Ok(None) };
        let own = self.queue.get(self.worked).descriptor;
        if theirs.agrees(&own) {
            return Ok(Some(offsets_at));
        }
        let name = |rank| self.plane.control.world().name_of(rank);
        let (own, theirs) = ((name(self.plane.rank), own), (name(self.peer), theirs));
        let [(rank_a, a), (rank_b, b)] = if own.0 < theirs.0 { [own, theirs] } else { [theirs, own] };
        Err(CollectiveError::Mismatch { rank_a, a, rank_b, b })
    }

    /// Copies the tensors of operation `worked` from the sender's memory.
    fn receive(&self, offsets_at: u64) -> Result<(), CollectiveError> {
        for (i, operand) in self.queue.get(self.worked).operands.iter().enumerate() {
            let at = self.peer_ring.read_offsets(offsets_at.wrapping_add(i as u64)).send;
            copy(self.plane.peer(self.peer, at, operand.recv.bytes(), operand.dtype.bytes())?, operand.recv);
        }
        Ok(())
    }
}
