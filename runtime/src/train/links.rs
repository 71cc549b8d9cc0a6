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

    /// Sends elements to a peer that receives as many.
    pub(crate) fn send(&mut self, to: u32, values: &[f32]) -> Result<(), CollectiveError> {
        let there = 1 - self.peer(to).position();
        let chunks = values.chunks(CHUNK).map(|chunk| (chunk.len(), RawBuffer::of(chunk), RawBuffer::EMPTY));
        self.in_chunks(to, OperationKind::Send { to: there }, chunks)
    }

    /// Receives elements that a peer sends.
    pub(crate) fn receive(&mut self, from: u32, values: &mut [f32]) -> Result<(), CollectiveError> {
        let there = 1 - self.peer(from).position();
        let chunks = values.chunks_mut(CHUNK).map(|chunk| (chunk.len(), RawBuffer::EMPTY, RawBuffer::of_mut(chunk)));
        self.in_chunks(from, OperationKind::Recv { from: there }, chunks)
    }

    /// An operation for each chunk, of which two are under way: memory that is not shared passes through little that is.
    fn in_chunks(
        &mut self,
        peer: u32,
        kind: OperationKind,
        chunks: impl Iterator<Item = (usize, RawBuffer, RawBuffer)>,
    ) -> Result<(), CollectiveError> {
        let pulse = self.pulse.clone();
        let group = self.peer(peer);
        let mut before: Option<Ticket> = None;
        for (n_elements, send, recv) in chunks {
            let operand = Operand { send, recv, dtype: ElementType::F32, n_elements };
            // SAFETY: callers have borrowed the chunks until this returns; before that everything started is finished, or a
            // finish has failed: then the world is aborted, and no communicator touches operands after that.
            let ticket = unsafe { group.start(&Operation { kind, sequence: 0, unit: 1 }, &[operand]) };
            if let Some(before) = before.take() {
                group.finish(before)?;
            }
            before = Some(ticket?);
            pulse.tick();
        }
        before.map_or(Ok(()), |last| group.finish(last))
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
