//! Messages between two members of a world: state on its way to who needs it, gradients on their way to shadows.
#![allow(unsafe_code)] // Starting an operation is unsafe by the trait's contract; every one is finished before its borrows end.

use super::error::JobError;
use crate::collective::operation::OPERANDS_MAX;
use crate::collective::{
    Collective, CollectiveError, ElementType, Operand, Operation, OperationKind, RawBuffer, SliceOperations, Ticket,
};
use crate::pulse::Pulse;
use phalanx_strategies::elastic::progress::{At, Wait};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// Elements of one operation on memory that is not shared.
const CHUNK: usize = 64 << 10;
/// Bytes of the longest description of state.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// The members with whom one member shares a group of two, by their position in the world.
#[derive(Default)]
pub(crate) struct Links {
    peers: BTreeMap<u32, Box<dyn Collective>>,
    pulse: Pulse,
}

/// Tensors to or from a peer.
type Tensors<T> = (u32, Vec<T>);

impl Links {
    pub(crate) fn new(peers: BTreeMap<u32, Box<dyn Collective>>) -> Links {
        Links { peers, pulse: Pulse::default() }
    }

    /// The same for a device with this pulse.
    pub(crate) fn with_pulse(self, pulse: Pulse) -> Links {
        Links { pulse, ..self }
    }

    fn peer(&mut self, peer: u32) -> &mut dyn Collective {
        self.peers.get_mut(&peer).expect("a world has a group for each two members that exchange anything").as_mut()
    }

    /// Sends a value to a peer that receives it.
    pub(crate) fn send_value(&mut self, to: u32, value: &impl Serialize) -> Result<(), JobError> {
        let text = serde_json::to_vec(value).map_err(|e| JobError::Unusable(format!("a message is no JSON: {e}")))?;
        let mut words = vec![0i32; text.len().div_ceil(size_of::<i32>())];
        bytemuck::cast_slice_mut(&mut words)[..text.len()].copy_from_slice(&text);
        let there = 1 - self.peer(to).position();
        self.peer(to).send(&[text.len() as f64], there)?;
        Ok(words.chunks(CHUNK).try_for_each(|chunk| self.peer(to).send(chunk, there))?)
    }

    /// Receives a value that a peer sends.
    pub(crate) fn receive_value<T: DeserializeOwned>(&mut self, from: u32) -> Result<T, JobError> {
        let there = 1 - self.peer(from).position();
        let mut len = [0.0f64];
        self.peer(from).recv(&mut len, there)?;
        let n_bytes = len[0] as u64;
        if n_bytes > TEXT_BYTES_MAX {
            let (field, expected) = ("bytes of a message between members", TEXT_BYTES_MAX);
            return Err(CollectiveError::Invalid { field, expected, found: n_bytes }.into());
        }
        let mut words = vec![0i32; (n_bytes as usize).div_ceil(size_of::<i32>())];
        words.chunks_mut(CHUNK).try_for_each(|chunk| self.peer(from).recv(chunk, there))?;
        let text = &bytemuck::cast_slice::<i32, u8>(&words)[..n_bytes as usize];
        serde_json::from_slice(text)
            .map_err(|e| JobError::Unusable(format!("member {from} sent what is no message: {e}")))
    }

    /// Sends the elements of these slices, one after the other, to a peer that receives as many.
    pub(crate) fn send(&mut self, to: u32, slices: &[&[f32]]) -> Result<(), CollectiveError> {
        let there = 1 - self.peer(to).position();
        let all = slices.iter().map(|slice| RawBuffer::of(slice)).collect();
        self.stream(to, OperationKind::Send { to: there }, all)
    }

    /// Receives elements that a peer sends into these slices, one after the other.
    pub(crate) fn receive(&mut self, from: u32, mut slices: Vec<&mut [f32]>) -> Result<(), CollectiveError> {
        let there = 1 - self.peer(from).position();
        let all = slices.iter_mut().map(|slice| RawBuffer::of_mut(slice)).collect();
        self.stream(from, OperationKind::Recv { from: there }, all)
    }

    /// An operation for each [`CHUNK`] of elements, of which two are under way: memory that is not shared passes through
    /// little that is. Both sides cut the stream at the same elements, however these lie in their memory; those of a chunk
    /// that lie together are not copied for it.
    fn stream(&mut self, peer: u32, kind: OperationKind, runs: Vec<RawBuffer>) -> Result<(), CollectiveError> {
        let pulse = self.pulse.clone();
        let group = self.peer(peer);
        let sends = matches!(kind, OperationKind::Send { .. });
        let chunks = chunks(runs);
        let mut together = [Vec::new(), Vec::new()];
        let mut before: Option<Ticket> = None;
        for i in 0..=chunks.len() {
            let ticket = chunks.get(i).map(|chunk| {
                let buffer = match chunk[..] {
                    [alone] => alone,
                    _ => gathered(chunk, &mut together[i % 2], sends),
                };
                let (send, recv) = if sends { (buffer, RawBuffer::EMPTY) } else { (RawBuffer::EMPTY, buffer) };
                let n_elements = buffer.bytes() / size_of::<f32>();
                let operand = Operand { send, recv, dtype: ElementType::F32, n_elements };
                // SAFETY: callers have borrowed what the runs stand for until this returns, and `together` lives as long;
                // before that everything started is finished, or a finish has failed: then the world is aborted, and no
                // communicator touches operands after that. Two operations are under way and have a buffer each.
                unsafe { group.start(&Operation { kind, sequence: 0, unit: 1 }, &[operand]) }
            });
            if let Some(before) = before.take() {
                group.finish(before)?;
                if !sends && chunks[i - 1].len() > 1 {
                    scatter(&together[(i - 1) % 2], &chunks[i - 1]);
                }
            }
            before = ticket.transpose()?;
            pulse.tick();
        }
        Ok(())
    }

    /// Sends and receives all of these at once; peers do the same the other way round. Whole tensors need room: they lie in
    /// the memory that members share.
    pub(crate) fn exchange(
        &mut self,
        sends: &[Tensors<&[f32]>],
        receives: &mut [Tensors<&mut [f32]>],
    ) -> Result<(), CollectiveError> {
        let pulse = self.pulse.clone();
        let _waits = pulse.during(At::Waits(Wait::default()));
        let mut all: Vec<(u32, bool, Vec<Operand>)> = Vec::new();
        let operand = |send, recv, n_elements| Operand { send, recv, dtype: ElementType::F32, n_elements };
        for (to, tensors) in sends {
            let of = |t: &&[f32]| operand(RawBuffer::of(t), RawBuffer::EMPTY, t.len());
            all.push((*to, true, tensors.iter().map(of).collect()));
        }
        for (from, tensors) in receives {
            let of = |t: &mut &mut [f32]| operand(RawBuffer::EMPTY, RawBuffer::of_mut(t), t.len());
            all.push((*from, false, tensors.iter_mut().map(of).collect()));
        }
        let mut under_way: Vec<(u32, Ticket)> = Vec::new();
        for (peer, sends, operands) in &all {
            for operands in operands.chunks(OPERANDS_MAX) {
                let group = self.peer(*peer);
                let there = 1 - group.position();
                let kind = if *sends { OperationKind::Send { to: there } } else { OperationKind::Recv { from: there } };
                // SAFETY: the slices are borrowed until this returns; before that everything started is finished, or a
                // finish has failed: then the world is aborted, and no communicator touches operands after that.
                let ticket = unsafe { group.start(&Operation { kind, sequence: 0, unit: 1 }, operands) }?;
                under_way.push((*peer, ticket));
            }
        }
        under_way.into_iter().try_for_each(|(peer, ticket)| self.peer(peer).finish(ticket))
    }
}

/// Runs of memory, cut so that each list of them has [`CHUNK`] elements; the last one may have fewer.
fn chunks(runs: Vec<RawBuffer>) -> Vec<Vec<RawBuffer>> {
    const BYTES: usize = CHUNK * size_of::<f32>();
    let mut chunks: Vec<Vec<RawBuffer>> = Vec::new();
    let mut room = 0;
    for run in runs {
        let mut at = 0;
        while at < run.bytes() {
            if room == 0 {
                chunks.push(Vec::new());
                room = BYTES;
            }
            let n = room.min(run.bytes() - at);
            chunks.last_mut().expect("there is room in one").push(RawBuffer::new(run.start().wrapping_add(at), n));
            (at, room) = (at + n, room - n);
        }
    }
    chunks
}

/// A buffer as long as all of these runs; with their elements, if these are to be sent.
fn gathered(runs: &[RawBuffer], buffer: &mut Vec<f32>, sends: bool) -> RawBuffer {
    buffer.clear();
    buffer.resize(runs.iter().map(|run| run.bytes()).sum::<usize>() / size_of::<f32>(), 0.0);
    if sends {
        let mut at = 0;
        for run in runs {
            let to = buffer[at..].as_mut_ptr().cast::<u8>();
            // SAFETY: `Links::send` has borrowed the run, and the buffer has room for all runs.
            unsafe { std::ptr::copy_nonoverlapping(run.start(), to, run.bytes()) };
            at += run.bytes() / size_of::<f32>();
        }
    }
    RawBuffer::of_mut(buffer)
}

/// Puts what has come where it belongs.
fn scatter(buffer: &[f32], runs: &[RawBuffer]) {
    let mut at = 0;
    for run in runs {
        let from = buffer[at..].as_ptr().cast::<u8>();
        // SAFETY: `Links::receive` has borrowed the run, and the buffer was made as long as all runs.
        unsafe { std::ptr::copy_nonoverlapping(from, run.start(), run.bytes()) };
        at += run.bytes() / size_of::<f32>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::shm::world::ShmWorld;
    use crate::collective::world::{World, WorldId};
    use proptest::prelude::*;

    /// Elements of runs of these lengths.
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
        fn what_is_sent_arrives_however_each_side_has_cut_it(
            n in prop::sample::select(vec![0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]),
            sent in prop::collection::vec(0usize..2 * CHUNK, 0..9), received in prop::collection::vec(0usize..900, 0..40),
        ) {
            let id = WorldId { job: 1, generation: 2, incarnation: 3 };
            let world = ShmWorld::create(&World::of_one_group(id, 2).unwrap(), &[0; 2], 1 << 20).unwrap();
            let links = |rank: u32| {
                let group: Box<dyn Collective> = Box::new(world.join(rank).unwrap().communicator(0).unwrap());
                Links::new([(1 - rank, group)].into())
            };
            let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let (mut here, mut there) = (values.clone(), vec![-1.0; n]);
            std::thread::scope(|scope| {
                let sends = scope.spawn(|| {
                    let runs = cut(&mut here, &sent);
                    let runs: Vec<&[f32]> = runs.iter().map(|run| &**run).collect();
                    links(0).send(1, &runs)
                });
                links(1).receive(0, cut(&mut there, &received)).unwrap();
                sends.join().unwrap().unwrap();
            });
            prop_assert_eq!(there, values);
        }
    }
}
