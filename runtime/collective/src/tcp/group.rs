//! The operations of one group between machines: those that this member has started, and those that peers have
//! announced.
//!
//! One lock per group protects all state: readers deliver announcements and bytes, writers fetch bytes, and the thread
//! that fulfils the last condition of an operation advances it. So operations advance while the rank computes. Bytes are copied and
//! summed outside of the lock, behind the group's gate.
//!
//! Invariants:
//! - TCP-GROUP-1: a peer gets tensors only after it has announced the operation, so every received byte has a
//!   destination, and no bytes are buffered.
//! - TCP-GROUP-2: memory of operands is touched only behind the gate, which is entered under the lock, and only for operations in a
//!   stream. An operation leaves its stream when all incoming bytes are in their place and all outgoing bytes have been fetched, or
//!   when its group or world is aborted; then the gate is passed before the owner of the memory learns of it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard};

use super::exchange::{Arrival, Exchange};
use super::frame::{FrameKind, Header, Lane};
use super::gate::Gate;
use super::job::Job;
use super::plane::TcpPlane;
use super::sums::Sum;
use crate::engine::lock;
use crate::flat;
use phalanx_device::communicator::Behind;
use phalanx_device::descriptor::{DESCRIPTOR_WORDS, Descriptor};
use phalanx_device::operation::IN_FLIGHT_MAX;
use phalanx_device::{CollectiveError, Operand, Operation, OperationKind, RawBuffer, Stream};

/// Most announcements of a peer ahead of this member; more violate the protocol: a peer completes an operation only
/// after this member has announced it, and has at most [`IN_FLIGHT_MAX`] incomplete operations.
const ANNOUNCED_MAX: usize = 2 * IN_FLIGHT_MAX;

/// One group, as the threads of a rank share it.
#[derive(Debug)]
pub(super) struct SharedGroup {
    state: Mutex<TcpGroup>,
    pub(super) gate: Gate,
}

impl SharedGroup {
    /// Group number `group` at its member at `position`.
    pub(super) fn new(group: usize, members: &[u32], position: u32) -> SharedGroup {
        SharedGroup { state: Mutex::new(TcpGroup::new(group, members, position)), gate: Gate::default() }
    }

    /// Its state, locked.
    pub(super) fn lock(&self) -> MutexGuard<'_, TcpGroup> {
        lock(&self.state)
    }

    /// Ends all operations: no thread touches their memory after this.
    pub(super) fn fail(&self, error: CollectiveError) {
        self.lock().fail(error);
        self.gate.pass();
    }
}

/// The state of one group.
#[derive(Debug)]
pub(super) struct TcpGroup {
    group: usize,
    members: Vec<u32>,
    position: u32,
    lanes: BTreeMap<Stream, StreamState>,
    failed: Option<CollectiveError>,
    is_aborted: bool,
}

/// One stream of a group.
#[derive(Debug, Default)]
struct StreamState {
    /// Started, incomplete operations, in order.
    started: VecDeque<Exchange>,
    completed: u64,
    /// Announcements from operation `completed` on, by position of the peer.
    announced: BTreeMap<u32, VecDeque<Announced>>,
    /// Complete operations, for reuse.
    spare: Vec<Exchange>,
    spare_announced: Vec<Announced>,
}

/// An operation as a peer announced it.
#[derive(Debug)]
pub(super) struct Announced {
    pub(super) descriptor: Descriptor,
    /// The peer's contribution, if the operation is flat.
    pub(super) flat_copy: Vec<u64>,
    pub(super) flat_bytes: usize,
}

impl Announced {
    /// An empty announcement: see [`Announced::decode`].
    pub(super) fn unused() -> Announced {
        Announced { descriptor: Descriptor::decode([0; DESCRIPTOR_WORDS]), flat_copy: Vec::new(), flat_bytes: 0 }
    }

    /// Decodes the body of an announcement into this value, which keeps its memory.
    pub(super) fn decode(&mut self, body: &[u8]) -> Result<(), CollectiveError> {
        let Some((words, copy)) = body.split_at_checked(8 * DESCRIPTOR_WORDS) else {
            let (expected, found) = (8 * DESCRIPTOR_WORDS as u64, body.len() as u64);
            return Err(CollectiveError::Invalid { field: "bytes of an announcement", expected, found });
        };
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| words[8 * i + b]));
        self.flat_copy.clear();
        self.flat_copy.resize(copy.len().div_ceil(8), 0);
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.flat_copy)[..copy.len()].copy_from_slice(copy);
        (self.descriptor, self.flat_bytes) = (Descriptor::decode(std::array::from_fn(word)), copy.len());
        Ok(())
    }
}

impl TcpGroup {
    /// Group number `group` at its member at `position`.
    fn new(group: usize, members: &[u32], position: u32) -> TcpGroup {
        TcpGroup { group, members: members.to_vec(), position, lanes: BTreeMap::new(), failed: None, is_aborted: false }
    }

    /// The position of a rank in the group.
    pub(super) fn position_of(&self, rank: u32) -> Option<u32> {
        self.members.iter().position(|member| *member == rank).map(|position| position as u32)
    }

    /// The first error.
    pub(super) fn failed(&self) -> Option<&CollectiveError> {
        self.failed.as_ref()
    }

    /// Records that the group's abort has been sent to all members; returns whether this call is the first. The group
    /// may have failed here earlier.
    pub(super) fn abort(&mut self) -> bool {
        !std::mem::replace(&mut self.is_aborted, true)
    }

    /// Ends all operations: no thread begins to touch their memory after this. Threads that have begun go on; see [`SharedGroup::fail`].
    pub(super) fn fail(&mut self, error: CollectiveError) {
        self.failed.get_or_insert(error);
        // Memory of the exchanges themselves stays: a thread may be copying to it.
        self.lanes.values_mut().for_each(|lane| lane.spare.extend(lane.started.drain(..)));
    }

    /// The members that have not announced every operation that this member has started.
    pub(super) fn behind(&self) -> Vec<Behind> {
        let of = |(stream, lane): (&Stream, &StreamState)| {
            let own = lane.completed + lane.started.len() as u64;
            let announced = |peer: &u32| lane.announced.get(peer).map_or(0, VecDeque::len) as u64;
            let others = self.peers_of(*stream).map(|peer| (peer, lane.completed + announced(&peer)));
            Behind::of(*stream, own, others.collect())
        };
        self.lanes.iter().filter_map(of).collect()
    }

    /// Number of complete operations of a stream.
    pub(super) fn completed(&self, stream: Stream) -> u64 {
        self.lanes.get(&stream).map_or(0, |lane| lane.completed)
    }

    /// Number of started operations of a stream.
    pub(super) fn started(&self, stream: Stream) -> u64 {
        self.lanes.get(&stream).map_or(0, |lane| lane.completed + lane.started.len() as u64)
    }

    /// Starts a checked operation and announces it.
    ///
    /// # Errors
    /// [`CollectiveError::TooManyInFlight`]; [`CollectiveError::Mismatch`] with an earlier announcement of a peer.
    pub(super) fn start(
        &mut self,
        plane: &TcpPlane,
        operation: &Operation,
        operands: &[Operand],
        descriptor: Descriptor,
    ) -> Result<u64, CollectiveError> {
        let stream = operation.kind.stream();
        let place = (self.position, self.members.len() as u32);
        let lane = self.lanes.entry(stream).or_default();
        if lane.started.len() >= IN_FLIGHT_MAX {
            return Err(CollectiveError::TooManyInFlight { max: IN_FLIGHT_MAX });
        }
        let index = lane.completed + lane.started.len() as u64;
        let mut exchange = lane.spare.pop().unwrap_or_else(Exchange::unused);
        exchange.begin(operation, operands, descriptor, place);
        for peer in peers_of(stream, place) {
            let header = Header {
                group: self.group as u32,
                lane: Lane::of(stream),
                index,
                ..Header::bare(FrameKind::Announce, plane.world().id())
            };
            plane.announce(self.members[peer as usize], header, |body| announcement(&exchange, body));
        }
        lane.started.push_back(exchange);
        for peer in self.peers_of(stream) {
            self.matched(plane, stream, index, peer)?;
        }
        self.advance(plane, stream);
        Ok(index)
    }

    /// Handles an announcement of the member at `peer`.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if it violates the protocol; [`CollectiveError::Mismatch`].
    pub(super) fn on_announce(
        &mut self,
        plane: &TcpPlane,
        peer: u32,
        header: &Header,
        body: &[u8],
    ) -> Result<(), CollectiveError> {
        if self.failed.is_some() {
            return Ok(());
        }
        let invalid = |field, expected, found| Err(CollectiveError::Invalid { field, expected, found });
        let stream = header.lane.seen_from_other_side(peer);
        let lane = self.lanes.entry(stream).or_default();
        let announced = lane.announced.entry(peer).or_default();
        let expected = lane.completed + announced.len() as u64;
        if header.index != expected || announced.len() >= ANNOUNCED_MAX {
            return invalid("number of an announcement", expected, header.index);
        }
        let mut found = lane.spare_announced.pop().unwrap_or_else(Announced::unused);
        found.decode(body)?;
        announced.push_back(found);
        self.matched(plane, stream, header.index, peer)?;
        self.advance(plane, stream);
        Ok(())
    }

    /// Takes note of bytes that follow from the member at `peer`. Returns where they belong; None if the group has failed.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if they were not expected.
    pub(super) fn on_data(&mut self, peer: u32, header: &Header) -> Result<Option<Arrival>, CollectiveError> {
        if self.failed.is_some() {
            return Ok(None);
        }
        let stream = header.lane.seen_from_other_side(peer);
        let not_started = CollectiveError::Invalid {
            field: "operation of a frame",
            expected: self.completed(stream),
            found: header.index,
        };
        let exchange = self.exchange(stream, header.index).ok_or(not_started)?;
        let place = (peer, header.stage as usize, header.operand as usize);
        exchange.arrive(place, header.offset, header.len as usize).map(Some)
    }

    /// Whether an operation is in its stream, so that its memory may be touched behind the gate.
    pub(super) fn has(&mut self, (stream, index): (Stream, u64)) -> bool {
        self.exchange(stream, index).is_some()
    }

    /// Takes note that bytes have arrived: see [`Exchange::arrived`].
    pub(super) fn on_arrived(
        &mut self,
        plane: &TcpPlane,
        (stream, index): (Stream, u64),
        arrival: &Arrival,
        from: (u32, *const u8),
        sources: &mut Vec<*const u8>,
    ) -> Option<Sum> {
        let sum = self.exchange(stream, index)?.arrived(arrival, from, sources);
        if sum.is_none() {
            self.advance(plane, stream);
        }
        sum
    }

    /// Takes note that a sum is computed, and sends it, with its checksum, to the peers that need it.
    pub(super) fn on_summed(
        &mut self,
        plane: &TcpPlane,
        (stream, index): (Stream, u64),
        sum: &Sum,
        checksum: Option<u32>,
    ) {
        let place = (self.position, self.members.len() as u32);
        let lane = self.lanes.get_mut(&stream);
        let found = lane.and_then(|lane| lane.started.get_mut(index.checked_sub(lane.completed)? as usize));
        let Some(exchange) = found else { return };
        exchange.summed(sum);
        if sum.is_sent {
            let operand = sum.operand as u32;
            for peer in peers_of(stream, place) {
                let range = sum.range.clone();
                let job = Job { group: self.group, stream, index, peer, stage: 1, operand, range, checksum };
                exchange.jobs_left += plane.send(self.members[peer as usize], &job);
            }
        }
        self.advance(plane, stream);
    }

    /// The bytes that a job sends, if its operation is still in its stream.
    pub(super) fn source(&mut self, job: &Job) -> Option<RawBuffer> {
        let exchange = self.exchange(job.stream, job.index)?;
        Some(exchange.source(job.peer, job.stage as usize, job.operand as usize))
    }

    /// Records that a job is done.
    pub(super) fn on_sent(&mut self, plane: &TcpPlane, job: &Job) {
        if let Some(exchange) = self.exchange(job.stream, job.index) {
            exchange.jobs_left -= 1;
            self.advance(plane, job.stream);
        }
    }

    /// Whether an operation that this member has started waits for an announcement of `rank`.
    pub(super) fn waits_for(&self, rank: u32) -> bool {
        let Some(peer) = self.position_of(rank) else { return false };
        self.lanes.iter().any(|(stream, lane)| {
            let n_announced = lane.announced.get(&peer).map_or(0, VecDeque::len);
            self.peers_of(*stream).any(|other| other == peer) && n_announced < lane.started.len()
        })
    }

    /// Compares both announcements once both exist, and sends the peer its bytes.
    fn matched(&mut self, plane: &TcpPlane, stream: Stream, index: u64, peer: u32) -> Result<(), CollectiveError> {
        let (own_rank, peer_rank) = (self.members[self.position as usize], self.members[peer as usize]);
        let Some(lane) = self.lanes.get_mut(&stream) else { return Ok(()) };
        let Some(i) = index.checked_sub(lane.completed).map(|i| i as usize) else { return Ok(()) };
        let announced = lane.announced.get(&peer).and_then(|announced| announced.get(i));
        let (Some(exchange), Some(announced)) = (lane.started.get_mut(i), announced) else { return Ok(()) };
        if !announced.descriptor.agrees(&exchange.descriptor) {
            let (own, theirs) = ((own_rank, exchange.descriptor), (peer_rank, announced.descriptor));
            let [(a_rank, a), (b_rank, b)] = if own.0 < theirs.0 { [own, theirs] } else { [theirs, own] };
            let (rank_a, rank_b) = (plane.world().name_of(a_rank), plane.world().name_of(b_rank));
            return Err(CollectiveError::Mismatch { rank_a, a, rank_b, b });
        }
        let expected = match stream {
            Stream::SendTo(_) => 0,
            _ if exchange.is_flat() => flat::bytes_of(&exchange.operands),
            _ => 0,
        };
        if announced.flat_bytes != expected {
            let (field, expected) = ("bytes of a contribution", expected as u64);
            return Err(CollectiveError::Invalid { field, expected, found: announced.flat_bytes as u64 });
        }
        if !exchange.is_flat() {
            enqueue(plane, exchange, (self.group, stream, index), (peer, peer_rank));
        }
        Ok(())
    }

    /// Advances the stream: completes finished operations.
    fn advance(&mut self, plane: &TcpPlane, stream: Stream) {
        let peers = || peers_of(stream, (self.position, self.members.len() as u32));
        let Some(lane) = self.lanes.get_mut(&stream) else { return };
        // Peers announce in order, so the operations that all peers have announced come first.
        let n_announced = |peer: u32| lane.announced.get(&peer).map_or(0, VecDeque::len);
        let n_matched = peers().map(n_announced).min().unwrap_or(usize::MAX);
        let mut n_complete = 0;
        for exchange in &lane.started {
            let is_complete = n_complete < n_matched
                && exchange.is_summed()
                && exchange.has_arrived(0)
                && exchange.has_arrived(1)
                && exchange.jobs_left == 0;
            if !is_complete {
                break;
            }
            let copy_of = |peer: u32| lane.announced[&peer][n_complete].flat_copy.as_slice();
            exchange.complete(copy_of);
            n_complete += 1;
        }
        lane.spare.extend(lane.started.drain(..n_complete));
        for announced in lane.announced.values_mut() {
            lane.spare_announced.extend(announced.drain(..n_complete));
        }
        lane.completed += n_complete as u64;
        if n_complete > 0 {
            plane.wake();
        }
    }

    fn exchange(&mut self, stream: Stream, index: u64) -> Option<&mut Exchange> {
        let lane = self.lanes.get_mut(&stream)?;
        lane.started.get_mut(index.checked_sub(lane.completed)? as usize)
    }

    /// Positions of the other members that take part in a stream.
    fn peers_of(&self, stream: Stream) -> impl Iterator<Item = u32> + use<> {
        peers_of(stream, (self.position, self.members.len() as u32))
    }
}

/// Positions of the other members of a stream, for the member at `position` of `size`.
fn peers_of(stream: Stream, (position, size): (u32, u32)) -> impl Iterator<Item = u32> {
    (0..size).filter(move |peer| match stream {
        Stream::Group => *peer != position,
        Stream::SendTo(other) | Stream::RecvFrom(other) => *peer == other,
    })
}

/// Writes the body of an announcement: the descriptor, and this member's contribution if the operation is flat.
fn announcement(exchange: &Exchange, body: &mut Vec<u8>) {
    exchange.descriptor.encode().iter().for_each(|word| body.extend_from_slice(&word.to_le_bytes()));
    if !matches!(exchange.operation.kind, OperationKind::Recv { .. }) {
        body.extend_from_slice(bytemuck::cast_slice(exchange.flat_copy()));
    }
}

/// Makes the writers fetch and send the bytes that a peer needs before sums.
fn enqueue(
    plane: &TcpPlane,
    exchange: &mut Exchange,
    (group, stream, index): (usize, Stream, u64),
    (peer, rank): (u32, u32),
) {
    for operand in 0..exchange.operands.len() {
        let len = exchange.source(peer, 0, operand).bytes();
        if len > 0 {
            let operand = operand as u32;
            let job = Job { group, stream, index, peer, stage: 0, operand, range: 0..len, checksum: None };
            exchange.jobs_left += plane.send(rank, &job);
        }
    }
}
