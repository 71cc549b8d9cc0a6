//! Collectives between threads of one process: plain copies under one lock.
//!
//! The reference for the other implementations: a start deposits copies of the member's contribution; a finish waits
//! for the deposits of all members and computes its own result from them. Simple, not fast.
#![allow(unsafe_code)] // Operands are raw memory by contract.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::reduce;
use phalanx_device::communicator::{Behind, Collective, CollectiveControl, Ticket};
use phalanx_device::descriptor::Descriptor;
use phalanx_device::error::CollectiveError;
use phalanx_device::operation::{IN_FLIGHT_MAX, Operand, Operation, OperationKind, RawBuffer, Stream};
use phalanx_device::operation_check::check_on_host;
use phalanx_device::parts::part;
use phalanx_device::world::World;

/// A world whose ranks are threads.
#[derive(Debug)]
pub struct LocalWorld {
    world: World,
    shared: Mutex<Shared>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Shared {
    aborted: Option<String>,
    aborted_groups: BTreeMap<usize, String>,
    taken: Vec<(usize, u32)>,
    rendezvous: BTreeMap<OperationKey, PendingOperation>,
}

/// Identifies an operation: group, sender and receiver of a transfer (none for group operations), number in the stream.
type OperationKey = (usize, Option<(u32, u32)>, u64);

/// Deposits for one operation: by position, or by sender and receiver.
#[derive(Debug)]
struct PendingOperation {
    deposits: Vec<Option<Deposit>>,
    n_left: usize,
}

#[derive(Debug)]
struct Deposit {
    rank: u32,
    descriptor: Descriptor,
    payloads: Vec<Vec<u8>>,
}

impl Shared {
    fn aborted_in(&self, group: usize) -> Option<CollectiveError> {
        let reason = self.aborted.as_ref().or(self.aborted_groups.get(&group));
        reason.map(|reason| CollectiveError::aborted(reason.clone()))
    }
}

impl LocalWorld {
    /// The ranks of `world` as threads of this process.
    pub fn new(world: World) -> Arc<LocalWorld> {
        Arc::new(LocalWorld { world, shared: Mutex::default(), changed: Condvar::new() })
    }

    /// The only communicator of group `group` for `rank`.
    ///
    /// # Errors
    /// [`CollectiveError::NotAMember`], [`CollectiveError::RankTaken`].
    pub fn communicator(self: &Arc<LocalWorld>, group: usize, rank: u32) -> Result<LocalCollective, CollectiveError> {
        let (members, position) = self.world.membership(group, rank)?;
        let members = members.to_vec();
        let mut shared = self.lock();
        if shared.taken.contains(&(group, rank)) {
            return Err(CollectiveError::RankTaken { rank });
        }
        shared.taken.push((group, rank));
        drop(shared);
        Ok(LocalCollective {
            world: self.clone(),
            group,
            members,
            position,
            started: BTreeMap::new(),
            in_flight: Vec::new(),
        })
    }

    /// Aborts the world: every waiter returns at once, every later call fails with `reason`. The first reason stands.
    pub fn abort(&self, reason: &str) {
        self.lock().aborted.get_or_insert_with(|| reason.to_owned());
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // Single assignments change the state, so it stays consistent if another thread panics.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One member of a group of threads.
#[derive(Debug)]
pub struct LocalCollective {
    world: Arc<LocalWorld>,
    group: usize,
    members: Vec<u32>,
    position: u32,
    /// Operations started, by stream.
    started: BTreeMap<OperationKey, u64>,
    in_flight: Vec<InFlight>,
}

#[derive(Debug)]
struct InFlight {
    stream: Stream,
    index: u64,
    operation: Operation,
    operands: Vec<Operand>,
}

impl LocalCollective {
    /// The key of an operation, the index of this member's deposit, and the number of deposits.
    fn operation_key(&self, stream: Stream, index: u64) -> (OperationKey, usize, usize) {
        match stream {
            Stream::Group => ((self.group, None, index), self.position as usize, self.members.len()),
            Stream::SendTo(to) => ((self.group, Some((self.position, to)), index), 0, 2),
            Stream::RecvFrom(from) => ((self.group, Some((from, self.position)), index), 1, 2),
        }
    }

    /// Waits for all deposits and computes this member's results from them.
    fn complete(&self, work: &InFlight) -> Result<(), CollectiveError> {
        let (operation_key, _, _) = self.operation_key(work.stream, work.index);
        let mut shared = self.world.lock();
        loop {
            let rendezvous = shared.rendezvous.get_mut(&operation_key).expect("kept until all members finish it");
            compare(&rendezvous.deposits)?;
            if let Some(deposits) = rendezvous.deposits.iter().map(Option::as_ref).collect::<Option<Vec<&Deposit>>>() {
                for (i, operand) in work.operands.iter().enumerate() {
                    let payloads: Vec<&[u8]> = deposits.iter().map(|d| d.payloads[i].as_slice()).collect();
                    self.write_result(&work.operation, operand, &payloads);
                }
                rendezvous.n_left -= 1;
                if rendezvous.n_left == 0 {
                    shared.rendezvous.remove(&operation_key);
                }
                return Ok(());
            }
            if let Some(aborted) = shared.aborted_in(self.group) {
                return Err(aborted);
            }
            shared = self.world.changed.wait(shared).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Writes the result of one operand from the bytes that every member sent.
    fn write_result(&self, operation: &Operation, operand: &Operand, payloads: &[&[u8]]) {
        let (dtype, n) = (operand.dtype, operand.n_elements);
        let width = dtype.bytes();
        let own = part(n, operation.unit, self.size(), self.position);
        let own_bytes = own.start * width..own.end * width;
        match operation.kind {
            OperationKind::AllReduce => write(operand.recv, &sum(operand, payloads)),
            OperationKind::ReduceScatter => write(operand.recv, &sum(operand, payloads)[own_bytes]),
            OperationKind::AllGather => write(operand.recv, &payloads.concat()),
            OperationKind::AllToAll => {
                let blocks: Vec<&[u8]> = payloads.iter().map(|payload| &payload[own_bytes.clone()]).collect();
                write(operand.recv, &blocks.concat());
            }
            OperationKind::Broadcast { root } if operand.recv.bytes() > 0 => {
                write(operand.recv, payloads[root as usize]);
            }
            OperationKind::Recv { .. } => write(operand.recv, payloads[0]),
            OperationKind::Shift { by } => {
                write(operand.recv, payloads[OperationKind::shift_source(by, self.position, self.size()) as usize]);
            }
            OperationKind::Broadcast { .. } | OperationKind::Send { .. } | OperationKind::Barrier => {}
        }
    }

    fn start_checked(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        let stream = operation.kind.stream();
        if self.in_flight.iter().filter(|work| work.stream == stream).count() == IN_FLIGHT_MAX {
            return Err(CollectiveError::TooManyInFlight { max: IN_FLIGHT_MAX });
        }
        let started = self.started.entry(self.operation_key(stream, 0).0).or_insert(0);
        let index = *started;
        *started += 1;
        let sent = operands.iter().map(|o| read(o.sent(operation, self.position, self.members.len() as u32)));
        let rank = self.members[self.position as usize];
        let deposit = Deposit { rank, descriptor: Descriptor::of(operation, operands), payloads: sent.collect() };
        let (operation_key, slot, n_members) = self.operation_key(stream, index);
        let mut shared = self.world.lock();
        let rendezvous = shared.rendezvous.entry(operation_key).or_insert_with(|| PendingOperation {
            deposits: (0..n_members).map(|_| None).collect(),
            n_left: n_members,
        });
        rendezvous.deposits[slot] = Some(deposit);
        drop(shared);
        self.world.changed.notify_all();
        self.in_flight.push(InFlight { stream, index, operation: *operation, operands: operands.to_vec() });
        Ok(Ticket { stream, index })
    }
}

impl Collective for LocalCollective {
    fn position(&self) -> u32 {
        self.position
    }

    fn size(&self) -> u32 {
        self.members.len() as u32
    }

    unsafe fn start(&mut self, operation: &Operation, operands: &[Operand]) -> Result<Ticket, CollectiveError> {
        if let Some(aborted) = self.world.lock().aborted_in(self.group) {
            return Err(aborted);
        }
        if let Err(error) = check_on_host(operation, operands, self.position, self.size()) {
            self.abort(&format!("rank {}: {error}", self.members[self.position as usize]));
            return Err(error);
        }
        self.start_checked(operation, operands)
    }

    fn finish(&mut self, ticket: Ticket) -> Result<(), CollectiveError> {
        let Ticket { stream, index } = ticket;
        let found = self.in_flight.iter().position(|work| (work.stream, work.index) == (stream, index));
        let work = self.in_flight.swap_remove(found.ok_or(CollectiveError::UnknownTicket { stream, index })?);
        let outcome = self.complete(&work);
        match &outcome {
            Ok(()) | Err(CollectiveError::Aborted { .. }) => {}
            Err(error) => self.abort(&format!("rank {}: {error}", self.members[self.position as usize])),
        }
        outcome
    }

    fn abort(&self, reason: &str) {
        self.world.abort(reason);
    }

    fn control(&self) -> Arc<dyn CollectiveControl> {
        Arc::new(LocalControl { world: self.world.clone(), group: self.group, position: self.position })
    }
}

/// The control end of a communicator.
struct LocalControl {
    world: Arc<LocalWorld>,
    group: usize,
    position: u32,
}

impl CollectiveControl for LocalControl {
    fn behind(&self) -> Vec<Behind> {
        let shared = self.world.lock();
        let mut last: BTreeMap<Stream, Behind> = BTreeMap::new();
        for ((group, pair, index), rendezvous) in
            shared.rendezvous.iter().filter(|((group, ..), _)| *group == self.group)
        {
            let n_members = self.world.world.groups()[*group].len() as u32;
            let (stream, positions) = match pair {
                None => (Stream::Group, (0..n_members).collect()),
                Some((from, to)) if *from == self.position => (Stream::SendTo(*to), vec![*from, *to]),
                Some((from, to)) if *to == self.position => (Stream::RecvFrom(*from), vec![*from, *to]),
                Some(_) => continue,
            };
            let has = |(position, deposit): (u32, &Option<Deposit>)| (position, deposit.is_some());
            let started: Vec<(u32, bool)> = positions.into_iter().zip(&rendezvous.deposits).map(has).collect();
            let positions: Vec<u32> = started.iter().filter(|(_, has)| !has).map(|(position, _)| *position).collect();
            if started.contains(&(self.position, true)) && !positions.is_empty() {
                last.insert(stream, Behind { stream, index: *index, positions });
            }
        }
        last.into_values().collect()
    }

    fn abort(&self, reason: &str) {
        self.world.lock().aborted_groups.entry(self.group).or_insert_with(|| reason.to_owned());
        self.world.changed.notify_all();
    }
}

impl Drop for LocalCollective {
    /// A panicking rank aborts its world, which releases its waiting peers.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.abort(&format!("rank {} panicked", self.members[self.position as usize]));
        }
    }
}

/// Compares all deposits with the first.
fn compare(deposits: &[Option<Deposit>]) -> Result<(), CollectiveError> {
    let mut present = deposits.iter().flatten();
    let Some(first) = present.next() else { return Ok(()) };
    match present.find(|other| !other.descriptor.agrees(&first.descriptor)) {
        None => Ok(()),
        Some(other) => {
            let (a, b) = (first.descriptor, other.descriptor);
            Err(CollectiveError::Mismatch { rank_a: first.rank, a, rank_b: other.rank, b })
        }
    }
}

/// A copy of a buffer's bytes.
fn read(buffer: RawBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.bytes()];
    // SAFETY: the caller of `start` promised that the buffer is readable until the operation is finished.
    unsafe { std::ptr::copy_nonoverlapping(buffer.start(), bytes.as_mut_ptr(), bytes.len()) };
    bytes
}

fn write(buffer: RawBuffer, bytes: &[u8]) {
    assert_eq!(buffer.bytes(), bytes.len(), "the operand was checked");
    // SAFETY: the caller of `start` promised exclusive access to the buffer until the operation is finished.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.start(), bytes.len()) };
}

/// The sum of the payloads, in order.
fn sum(operand: &Operand, payloads: &[&[u8]]) -> Vec<u8> {
    // 64-bit words align copies and total for every element type.
    let n_words = (operand.n_elements * operand.dtype.bytes()).div_ceil(8);
    let aligned: Vec<Vec<u64>> = payloads
        .iter()
        .map(|payload| {
            let mut words = vec![0u64; n_words];
            bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..payload.len()].copy_from_slice(payload);
            words
        })
        .collect();
    let mut total = vec![0u64; n_words];
    let sources: Vec<*const u8> = aligned.iter().map(|words| words.as_ptr().cast()).collect();
    // SAFETY: all are private copies of the operand's length, aligned to eight bytes and separate from the total.
    unsafe { reduce::sum(operand.dtype, &sources, &[total.as_mut_ptr().cast()], operand.n_elements) };
    bytemuck::cast_slice::<u64, u8>(&total)[..operand.n_elements * operand.dtype.bytes()].to_vec()
}
