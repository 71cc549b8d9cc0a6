//! Messages between two members of a world: state transfers, and gradients for shadows.
//!
//! Invariant `LINKS-1`: members that exchange messages never wait for each other in a cycle. Each member serves its peers
//! in the order of their numbers, so the first unfinished pair (by the lower number, then by the higher) is served at
//! both ends, however few threads the members have.
#![allow(unsafe_code)] // Starting an operation is unsafe by the trait's contract; each is finished before its borrows end.

use super::catch_up_transfer::CatchUpTransfer;
use super::lane::{CHUNK, Lane, SLOTS, UNDER_WAY, pass, staging};
use crate::error::JobError;
use crate::error::peer::PeerError;
use phalanx_device::operation::OPERANDS_MAX;
use phalanx_device::progress_counter::ProgressCounter;
use phalanx_device::span::{Span, SpanMut, SpanRef};
use phalanx_device::staging::Staging;
use phalanx_device::{
    Collective, CollectiveError, ElementType, Operand, Operation, OperationKind, RawBuffer, SliceOperations, Ticket,
};
use phalanx_strategies::elastic::progress::{At, Wait};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Bytes of the longest description of state.
const TEXT_BYTES_MAX: u64 = 256 << 20;
/// Peers served at once, each by one thread.
const FLOWS_MAX: usize = 8;
/// Bytes of one operation of an exchange of tensors in shared memory: no limit.
pub(crate) const WHOLE: usize = usize::MAX;
/// The same for tensors that the host cannot access: their staging fits the room for flows, which is unused meanwhile.
pub(crate) const STAGED: usize = CHUNK * size_of::<f32>();
/// Room for operands outside the shared regions: chunks of flows in flight, votes, messages, gradients for shadows.
pub(crate) const STAGING_BYTES: u64 = (1 << 20) + (FLOWS_MAX * UNDER_WAY * CHUNK * size_of::<f32>()) as u64;

/// One member's groups of two, by the peer's position in the world.
#[derive(Default)]
pub(crate) struct Links {
    pub(super) peers: BTreeMap<u32, Box<dyn Collective>>,
    progress_counter: ProgressCounter,
}

/// Elements that a member and a peer exchange, run by run in each direction. The peer receives and sends as many
/// elements.
#[derive(Default)]
pub(crate) struct Flow<'a> {
    pub(crate) sends: Vec<SpanRef<'a>>,
    pub(crate) receives: Vec<SpanMut<'a>>,
}

/// Tensors to or from a peer.
type Tensors<T> = (u32, Vec<T>);

impl Links {
    pub(crate) fn new(peers: BTreeMap<u32, Box<dyn Collective>>) -> Links {
        Links { peers, progress_counter: ProgressCounter::default() }
    }

    /// The same for a device with this progress counter.
    pub(crate) fn with_progress_counter(self, progress_counter: ProgressCounter) -> Links {
        Links { progress_counter, ..self }
    }

    fn peer(&mut self, peer: u32) -> &mut dyn Collective {
        self.peers.get_mut(&peer).expect("a world has a group for each two members that exchange anything").as_mut()
    }

    /// Sends a value to a peer that receives it.
    pub(crate) fn send_value(&mut self, to: u32, value: &impl Serialize) -> Result<(), JobError> {
        let text = serde_json::to_vec(value).map_err(PeerError::Encode)?;
        let mut words = vec![0i32; text.len().div_ceil(size_of::<i32>())];
        bytemuck::cast_slice_mut(&mut words)[..text.len()].copy_from_slice(&text);
        let there = 1 - self.peer(to).position();
        self.send_number(to, text.len() as f64)?;
        Ok(words.chunks(CHUNK).try_for_each(|chunk| self.peer(to).send(chunk, there))?)
    }

    /// Receives a value that a peer sends.
    pub(crate) fn receive_value<T: DeserializeOwned>(&mut self, from: u32) -> Result<T, JobError> {
        let n_bytes = self.receive_number(from)? as u64;
        if n_bytes > TEXT_BYTES_MAX {
            let (field, expected) = ("bytes of a message between members", TEXT_BYTES_MAX);
            return Err(CollectiveError::Invalid { field, expected, found: n_bytes }.into());
        }
        let there = 1 - self.peer(from).position();
        let mut words = vec![0i32; (n_bytes as usize).div_ceil(size_of::<i32>())];
        words.chunks_mut(CHUNK).try_for_each(|chunk| self.peer(from).recv(chunk, there))?;
        let text = &bytemuck::cast_slice::<i32, u8>(&words)[..n_bytes as usize];
        Ok(serde_json::from_slice(text).map_err(|source| PeerError::Decode { member: from, source })?)
    }

    /// Carries out the flows with these peers, several peers at once and each in both directions at once (`LINKS-1`), and
    /// runs `meanwhile` on the calling thread when that thread has no peer left to serve.
    pub(crate) fn flow(
        &mut self,
        flows: BTreeMap<u32, Flow<'_>>,
        meanwhile: impl FnOnce(),
    ) -> Result<(), CollectiveError> {
        self.flow_on(FLOWS_MAX, flows, meanwhile)
    }

    fn flow_on(
        &mut self,
        n_threads_max: usize,
        mut flows: BTreeMap<u32, Flow<'_>>,
        meanwhile: impl FnOnce(),
    ) -> Result<(), CollectiveError> {
        let progress_counter = &self.progress_counter;
        let peers = self.peers.iter_mut();
        let all: Vec<(&mut Box<dyn Collective>, Flow<'_>)> =
            peers.filter_map(|(peer, group)| Some((group, flows.remove(peer)?))).collect();
        assert!(flows.is_empty(), "a world has a group for each two members that exchange anything");
        let n_threads = all.len().min(n_threads_max);
        let queue = Mutex::new(all.into_iter());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let serve = || {
            while let Some((group, flow)) = next() {
                both_ways(group.as_mut(), flow, progress_counter)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let spawn = |_| std::thread::Builder::new().name("state".to_owned()).spawn_scoped(scope, serve);
            // If the system refuses threads, the existing ones serve the peers one after the other.
            let others: Vec<_> = (1..n_threads).map_while(|i| spawn(i).ok()).collect();
            let served = serve();
            meanwhile();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            others.into_iter().map(join).fold(served, Result::and)
        })
    }

    /// A transfer of the elements of `runs` to or from a peer over many steps. The peer creates the opposite transfer, with
    /// runs of as many elements.
    ///
    /// # Safety
    /// The memory of the runs stays valid as long as the transfer exists. It is not written during
    /// [`Links::send_pages`], nor read or written during [`Links::receive_catch_up`].
    pub(crate) unsafe fn catch_up_transfer(&mut self, peer: u32, sends: bool, runs: Vec<Span>) -> CatchUpTransfer {
        let there = 1 - self.peer(peer).position();
        let kind = if sends { OperationKind::Send { to: there } } else { OperationKind::Recv { from: there } };
        CatchUpTransfer::new(peer, Lane::new(kind, runs))
    }

    /// Sends pages of these catch-up transfers while `work` runs; at least one page of each unfinished transfer.
    pub(crate) fn send_pages<T>(
        &mut self,
        catch_up_transfers: &mut [CatchUpTransfer],
        work: impl FnOnce() -> T,
    ) -> (T, Result<(), CollectiveError>) {
        super::catch_up_transfer::send_pages(&mut self.peers, catch_up_transfers, work)
    }

    /// Receives the pages of these catch-up transfers that peers send in this step.
    pub(crate) fn receive_catch_up(
        &mut self,
        catch_up_transfers: &mut [CatchUpTransfer],
    ) -> Result<(), CollectiveError> {
        let _waits = self.progress_counter.during(At::Waits(Wait::default()));
        super::catch_up_transfer::receive_catch_up(&mut self.peers, catch_up_transfers, &self.progress_counter)
    }

    /// Sends a number to a peer that receives it.
    pub(crate) fn send_number(&mut self, to: u32, number: f64) -> Result<(), CollectiveError> {
        let there = 1 - self.peer(to).position();
        self.peer(to).send(&[number], there)
    }

    /// Receives a number that a peer sends.
    pub(crate) fn receive_number(&mut self, from: u32) -> Result<f64, CollectiveError> {
        let progress_counter = self.progress_counter.clone();
        let _waits = progress_counter.during(At::Waits(Wait::default()));
        let there = 1 - self.peer(from).position();
        let mut number = [0.0f64];
        self.peer(from).recv(&mut number, there)?;
        Ok(number[0])
    }

    /// Sends and receives all of these at once, in operations of at most `bytes_max`; peers make the opposite call with the
    /// same `bytes_max`. [`WHOLE`] tensors outside shared memory need staging room for all their bytes.
    pub(crate) fn exchange(
        &mut self,
        sends: &[Tensors<SpanRef<'_>>],
        receives: &[Tensors<SpanMut<'_>>],
        bytes_max: usize,
    ) -> Result<(), CollectiveError> {
        // SAFETY: the tensors are borrowed until this returns.
        unsafe { self.repeat(&mut Exchange::new(sends, receives, bytes_max)) }
    }

    /// Carries out an exchange, possibly again, with the current values of its tensors.
    ///
    /// # Safety
    /// The tensors of the exchange have not moved, and are borrowed until this returns.
    pub(crate) unsafe fn repeat(&mut self, exchange: &mut Exchange) -> Result<(), CollectiveError> {
        let progress_counter = self.progress_counter.clone();
        let _waits = progress_counter.during(At::Waits(Wait::default()));
        let Exchange { all, under_way, operands } = exchange;
        // SAFETY: the tensors are borrowed until this returns. Every started operation is finished before: after a failure
        // by the lines below, which abort the world first; in an aborted world no communicator touches operands.
        let outcome = unsafe { self.pass_all(all, under_way, operands) };
        if let Err(error) = &outcome {
            // Otherwise a peer would wait for the failed operation.
            all.iter().for_each(|direction| self.peer(direction.peer).abort(&error.to_string()));
            under_way.drain(..).for_each(|Started { at, ticket, .. }| drop(self.peer(all[at].peer).finish(ticket)));
            // Dropping it ends its copies.
            all.iter_mut().for_each(|direction| direction.staging = None);
        }
        outcome
    }

    /// Starts and finishes all operations. Each direction has two operations in flight at a time, so that no number of
    /// tensors is too large for a communicator.
    ///
    /// # Safety
    /// The tensors are borrowed until every ticket in `under_way` is finished.
    unsafe fn pass_all(
        &mut self,
        all: &mut [Direction],
        under_way: &mut VecDeque<Started>,
        operands: &mut Vec<Operand>,
    ) -> Result<(), CollectiveError> {
        let n_rounds = all.iter().map(|direction| direction.operations.len()).max().unwrap_or(0);
        all.iter_mut().for_each(|direction| direction.begun = 0);
        for round in 0..n_rounds {
            let n_before = under_way.len();
            for (at, direction) in all.iter_mut().enumerate().filter(|(_, d)| round < d.operations.len()) {
                let group = self.peer(direction.peer);
                let there = 1 - group.position();
                let kind = if direction.sends {
                    OperationKind::Send { to: there }
                } else {
                    OperationKind::Recv { from: there }
                };
                // SAFETY: the caller's contract; the operation staged two rounds before is finished.
                let ticket = unsafe {
                    direction.operands(round, operands)?;
                    group.start(&Operation { kind, sequence: 0, unit: 1 }, operands)
                }?;
                under_way.push_back(Started { at, round, ticket });
                // SAFETY: as above.
                unsafe { direction.copy_ahead(round + 1) }?;
            }
            self.finish_first(n_before, all, under_way)?;
        }
        self.finish_first(under_way.len(), all, under_way)
    }

    fn finish_first(
        &mut self,
        n: usize,
        all: &mut [Direction],
        under_way: &mut VecDeque<Started>,
    ) -> Result<(), CollectiveError> {
        for _ in 0..n {
            let Some(Started { at, round, ticket }) = under_way.pop_front() else { break };
            self.peer(all[at].peer).finish(ticket)?;
            // SAFETY: the caller of `pass_all` borrows the tensors.
            unsafe { all[at].unstage(round) }?;
        }
        Ok(())
    }
}

/// An exchange of tensors between a member and its peers that can be repeated.
#[derive(Default)]
pub(crate) struct Exchange {
    all: Vec<Direction>,
    under_way: VecDeque<Started>,
    operands: Vec<Operand>,
}

impl Exchange {
    /// Arguments as for [`Links::exchange`].
    pub(crate) fn new(sends: &[Tensors<SpanRef<'_>>], receives: &[Tensors<SpanMut<'_>>], bytes_max: usize) -> Exchange {
        let to = |(peer, tensors): &Tensors<SpanRef<'_>>| {
            Direction::new(*peer, true, tensors.iter().map(SpanRef::span).collect(), bytes_max)
        };
        let from = |(peer, tensors): &Tensors<SpanMut<'_>>| {
            Direction::new(*peer, false, tensors.iter().map(SpanMut::span).collect(), bytes_max)
        };
        Exchange { all: sends.iter().map(to).chain(receives.iter().map(from)).collect(), ..Exchange::default() }
    }
}

/// A started operation of an exchange: its direction and its round.
struct Started {
    at: usize,
    round: usize,
    ticket: Ticket,
}

/// One direction of an exchange: the peer, whether this member sends, and the tensors of each operation. Both ends split
/// tensors of the same lengths into the same operations, wherever the tensors are.
struct Direction {
    peer: u32,
    sends: bool,
    operations: Vec<Vec<Span>>,
    /// The tensors of each operation that the host cannot access.
    staged: Vec<Vec<Span>>,
    staging: Option<Staging>,
    /// Rounds before this one are sent, or their copies have begun.
    begun: usize,
}

impl Direction {
    fn new(peer: u32, sends: bool, tensors: Vec<Span>, bytes_max: usize) -> Direction {
        let mut operations: Vec<Vec<Span>> = Vec::new();
        let mut room = 0;
        for tensor in tensors {
            let mut at = 0;
            loop {
                let is_full = |operation: &Vec<Span>| room == 0 || operation.len() == OPERANDS_MAX;
                if operations.last().is_none_or(is_full) {
                    operations.push(Vec::new());
                    room = bytes_max;
                }
                let n = room.min(tensor.bytes() - at);
                operations.last_mut().expect("an operation with room is last").push(tensor.slice(at..at + n));
                (at, room) = (at + n, room - n);
                if at == tensor.bytes() {
                    break;
                }
            }
        }
        let of_device =
            |operation: &Vec<Span>| operation.iter().filter(|tensor| !tensor.is_on_host()).cloned().collect();
        let staged = operations.iter().map(of_device).collect();
        Direction { peer, sends, operations, staged, staging: None, begun: 0 }
    }

    /// Begins to copy what the operation of a round sends, if there is one.
    ///
    /// # Safety
    /// The tensors are borrowed, and the operation of two rounds before is finished.
    unsafe fn copy_ahead(&mut self, round: usize) -> Result<(), CollectiveError> {
        if !self.sends || round < self.begun || self.staged.get(round).is_none_or(Vec::is_empty) {
            return Ok(());
        }
        self.begun = round + 1;
        let staging = staging(&mut self.staging, &self.staged)?;
        // SAFETY: the caller's contract.
        Ok(unsafe { staging.gather(round % SLOTS, &self.staged[round]) }?)
    }

    /// The operands of an operation. Tensors that the host cannot access are staged.
    ///
    /// # Safety
    /// The tensors are borrowed, and the operation two rounds before is finished.
    unsafe fn operands(&mut self, round: usize, operands: &mut Vec<Operand>) -> Result<(), CollectiveError> {
        // SAFETY: the caller's contract.
        unsafe { self.copy_ahead(round) }?;
        let mut staged = RawBuffer::EMPTY;
        if !self.staged[round].is_empty() {
            let bytes = staging(&mut self.staging, &self.staged)?.bytes(round % SLOTS)?;
            staged = RawBuffer::new(bytes.as_mut_ptr(), bytes.len());
        }
        operands.clear();
        let mut at = 0;
        for tensor in &self.operations[round] {
            let buffer = if tensor.is_on_host() {
                tensor.buffer()
            } else {
                let start = at;
                at += tensor.bytes();
                staged.slice(start..at)
            };
            let (send, recv) = if self.sends { (buffer, RawBuffer::EMPTY) } else { (RawBuffer::EMPTY, buffer) };
            operands.push(Operand {
                send,
                recv,
                dtype: ElementType::F32,
                n_elements: buffer.bytes() / size_of::<f32>(),
            });
        }
        Ok(())
    }

    /// Begins to copy what a finished operation received in staging to its tensors.
    ///
    /// # Safety
    /// The tensors are borrowed until the machine's later work.
    unsafe fn unstage(&mut self, round: usize) -> Result<(), CollectiveError> {
        if self.sends || self.staged[round].is_empty() {
            return Ok(());
        }
        let staging = staging(&mut self.staging, &self.staged)?;
        // SAFETY: the caller's contract.
        Ok(unsafe { staging.scatter(round % SLOTS, &self.staged[round]) }?)
    }
}

/// Carries out the flow with one peer. Neither direction waits for the other: waiting for one advances both.
fn both_ways(
    group: &mut dyn Collective,
    flow: Flow<'_>,
    progress_counter: &ProgressCounter,
) -> Result<(), CollectiveError> {
    let Flow { sends, receives } = flow;
    let there = 1 - group.position();
    let sent = sends.iter().map(SpanRef::span).collect();
    let received = receives.iter().map(SpanMut::span).collect();
    let mut sent = Lane::new(OperationKind::Send { to: there }, sent);
    let mut received = Lane::new(OperationKind::Recv { from: there }, received);
    let n_chunks = sent.n_chunks().max(received.n_chunks());
    let mut lanes = [&mut sent, &mut received];
    // SAFETY: the flow borrows the memory of the runs until every started operation is finished or a finish has failed: then
    // the world is aborted, and no communicator touches operands any more.
    let outcome = unsafe { pass(group, &mut lanes, 0..n_chunks, || progress_counter.tick()) };
    if let Err(error) = &outcome {
        lanes.iter_mut().for_each(|lane| lane.give_up(group, error));
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_collective::shm::world::ShmWorld;
    use phalanx_device::world::World;
    use phalanx_device::world_id::WorldId;
    use proptest::prelude::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const ID: WorldId = WorldId { job: 1, generation: 2, incarnation: 3 };

    // LINKS-1
    #[test]
    fn flows_between_all_members_finish_with_any_number_of_threads() {
        const N: u32 = 6;
        let pairs: Vec<Vec<u32>> = (0..N).flat_map(|a| (a + 1..N).map(move |b| vec![a, b])).collect();
        let world = World::new(ID, N, pairs.clone()).unwrap();
        let world = ShmWorld::create(&world, &[0; N as usize], STAGING_BYTES).unwrap();
        // Values from one member to another; the two directions of a pair often differ in length.
        let values = |from: u32, to: u32| -> Vec<f32> {
            let n = CHUNK * ((from * 5 + to * 3) % 4) as usize + to as usize;
            (0..n).map(|i| (i + (from * N + to) as usize) as f32).collect()
        };
        let flow = |me: u32, n_threads: usize| {
            let rank = world.join(me).unwrap();
            let of_pair = |(i, pair): (usize, &Vec<u32>)| {
                let peer = *pair.iter().find(|member| **member != me).filter(|_| pair.contains(&me))?;
                Some((peer, Box::new(rank.communicator(i).unwrap()) as Box<dyn Collective>))
            };
            let mut links = Links::new(pairs.iter().enumerate().filter_map(of_pair).collect());
            let peers = || (0..N).filter(|peer| *peer != me);
            let sent: BTreeMap<u32, Vec<f32>> = peers().map(|peer| (peer, values(me, peer))).collect();
            let mut came: BTreeMap<u32, Vec<f32>> =
                peers().map(|peer| (peer, vec![-1.0; values(peer, me).len()])).collect();
            let mut served = false;
            let flows = came.iter_mut().map(|(peer, to)| {
                (
                    *peer,
                    Flow { sends: vec![SpanRef::from(&sent[peer][..])], receives: vec![SpanMut::from(&mut to[..])] },
                )
            });
            links.flow_on(n_threads, flows.collect(), || served = true).unwrap();
            assert!(served && came.into_iter().all(|(peer, came)| came == values(peer, me)), "member {me}");
        };

        let (done, all_done) = channel();
        std::thread::scope(|scope| {
            let members: Vec<_> = (0..N).map(|me| scope.spawn(move || flow(me, 1 + me as usize / 4))).collect();
            let (all_done, world) = (all_done, &world);
            scope.spawn(move || {
                if all_done.recv_timeout(Duration::from_secs(30)).is_err() {
                    world.control().abort("members wait for each other");
                }
            });
            members.into_iter().for_each(|member| member.join().unwrap());
            done.send(()).unwrap();
        });
    }

    #[test]
    fn operation_refused_at_one_end_fails_at_the_other() {
        let world = World::new(ID, 2, vec![vec![0, 1]]).unwrap();
        // Too little staging room for the sender.
        let world = ShmWorld::create(&world, &[0; 2], 64).unwrap();
        let links = |me: u32| {
            let group: Box<dyn Collective> = Box::new(world.join(me).unwrap().communicator(0).unwrap());
            Links::new([(1 - me, group)].into())
        };
        let (values, mut room) = (vec![1.0; 3 * CHUNK], vec![0.0; 3 * CHUNK]);

        std::thread::scope(|scope| {
            let receives = scope.spawn(|| {
                links(1)
                    .flow([(0, Flow { receives: vec![SpanMut::from(&mut room[..])], ..Flow::default() })].into(), || ())
            });
            let sent =
                links(0).flow([(1, Flow { sends: vec![SpanRef::from(&values[..])], ..Flow::default() })].into(), || ());
            assert!(matches!(sent, Err(CollectiveError::StagingFull { .. })), "{sent:?}");
            assert!(matches!(receives.join().unwrap(), Err(CollectiveError::Aborted { .. })));
        });
    }

    fn link(world: &ShmWorld, me: u32) -> Links {
        let group: Box<dyn Collective> = Box::new(world.join(me).unwrap().communicator(0).unwrap());
        Links::new([(1 - me, group)].into())
    }

    #[test]
    fn exchange_of_more_tensors_than_a_communicator_holds_arrives_whole() {
        // As many tensors as LoRA on all linears of 80 layers, which exceeded `PLACES` of a ring.
        const N: usize = 80 * 7 * 2 + 5 * OPERANDS_MAX;
        let world = ShmWorld::create(&World::of_one_group(ID, 2).unwrap(), &[0; 2], STAGING_BYTES).unwrap();
        let exchange = |me: u32| {
            let sent: Vec<[f32; 3]> = (0..N).map(|i| [me as f32, i as f32, 7.0]).collect();
            let mut came = vec![[-1.0f32; 3]; N];
            // One side receives fewer tensors, since the other one sends fewer.
            let (n_here, n_there) = if me == 0 { (N, 3) } else { (3, N) };
            let sends = [(1 - me, sent[..n_there].iter().map(|tensor| SpanRef::from(&tensor[..])).collect())];
            let receives = [(1 - me, came[..n_here].iter_mut().map(|tensor| SpanMut::from(&mut tensor[..])).collect())];
            link(&world, me).exchange(&sends, &receives, WHOLE).unwrap();
            assert!(
                came[..n_here].iter().enumerate().all(|(i, t)| *t == [(1 - me) as f32, i as f32, 7.0]),
                "member {me}"
            );
        };

        std::thread::scope(|scope| {
            scope.spawn(|| exchange(1));
            exchange(0);
        });
    }

    #[test]
    fn refused_exchange_aborts_the_world_before_it_returns() {
        // Staging room for the small tensor, but not for the large one.
        let world = ShmWorld::create(&World::of_one_group(ID, 2).unwrap(), &[0; 2], 64).unwrap();
        let (small, large, mut room) = ([1.0f32; 8], [2.0f32; 1000], [0.0f32; 8]);
        let (aborted, is_aborted) = channel::<()>();
        std::thread::scope(|scope| {
            let (world, room) = (&world, &mut room);
            let peer =
                scope.spawn(move || link(world, 0).exchange(&[], &[(1, vec![SpanMut::from(&mut room[..])])], WHOLE));
            scope.spawn(move || {
                if is_aborted.recv_timeout(Duration::from_secs(20)).is_err() {
                    world.control().abort("the peer waits although its tensor was refused");
                }
            });

            let mut link = link(world, 1);
            let refused = link.exchange(&[(0, vec![SpanRef::from(&large[..])])], &[], WHOLE);

            assert!(matches!(refused, Err(CollectiveError::StagingFull { .. })), "{refused:?}");
            let received = peer.join().unwrap().unwrap_err().to_string();
            assert!(received.contains("staging"), "the peer gets the reason: {received}");
            let after = link.exchange(&[(0, vec![SpanRef::from(&small[..])])], &[], WHOLE);
            assert!(matches!(after, Err(CollectiveError::Aborted { .. })), "{after:?}");
            let progress = world.control().progress(1).unwrap();
            assert_eq!(progress.entered, progress.finished, "no operation is left in flight");
            drop(aborted);
        });
    }

    proptest! {
        #[test]
        fn exchange_splits_its_tensors_in_order_into_operations_within_the_limits(
            lengths in prop::collection::vec(prop::sample::select(vec![0, 4, 1 << 10, STAGED, 3 * STAGED + 4]), 0..1200),
        ) {
            // SAFETY: the test never accesses the memory.
            let source = |bytes: usize| unsafe { SpanRef::new(RawBuffer::on_device(1 << 40, bytes, 0), None) };
            let tensors: Vec<Span> = lengths.iter().map(|n| source(*n).span()).collect();

            let Direction { operations, .. } = Direction::new(1, true, tensors, STAGED);

            let bytes = |operation: &Vec<Span>| operation.iter().map(Span::bytes).sum::<usize>();
            prop_assert!(operations.iter().all(|o| o.len() <= OPERANDS_MAX && bytes(o) <= STAGED));
            // Pieces of a tensor follow each other; all tensors begin at the same address.
            let mut pieces = operations.iter().flatten();
            for n in lengths {
                let mut at = 0;
                while at < n || n == 0 {
                    let piece = pieces.next().unwrap();
                    prop_assert_eq!(piece.buffer().address(), (1 << 40) + at);
                    at += piece.bytes();
                    if n == 0 {
                        break;
                    }
                }
                prop_assert_eq!(at, n);
            }
            prop_assert!(pieces.next().is_none());
        }
    }

    /// Splits the elements into runs of these lengths.
    fn cut<'a>(mut all: &'a mut [f32], lengths: &[usize]) -> Vec<&'a mut [f32]> {
        let mut runs = Vec::new();
        for n in lengths {
            let (run, rest) = all.split_at_mut(*n.min(&all.len()));
            runs.push(run);
            all = rest;
        }
        runs.push(all);
        runs
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30))]
        #[test]
        fn flow_arrives_however_each_side_splits_it(
            n in prop::sample::select(vec![0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]),
            sent in prop::collection::vec(0usize..2 * CHUNK, 0..9), received in prop::collection::vec(0usize..900, 0..40),
        ) {
            let world = ShmWorld::create(&World::of_one_group(ID, 2).unwrap(), &[0; 2], 1 << 20).unwrap();
            let links = |rank: u32| {
                let group: Box<dyn Collective> = Box::new(world.join(rank).unwrap().communicator(0).unwrap());
                Links::new([(1 - rank, group)].into())
            };
            let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let (mut here, mut there) = (values.clone(), vec![-1.0; n]);
            std::thread::scope(|scope| {
                let sends = scope.spawn(|| {
                    let sends = cut(&mut here, &sent).into_iter().map(|run| SpanRef::from(&*run)).collect();
                    links(0).flow([(1, Flow { sends, ..Flow::default() })].into(), || ())
                });
                let receives = cut(&mut there, &received).into_iter().map(SpanMut::from).collect();
                links(1).flow([(0, Flow { receives, ..Flow::default() })].into(), || ()).unwrap();
                sends.join().unwrap().unwrap();
            });
            prop_assert_eq!(there, values);
        }
    }
}
