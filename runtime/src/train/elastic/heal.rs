//! State from memory to memory, in boxes of the tensors of the model file: the same index as in checkpoints, so it does not
//! matter how sender and receiver cut them.
//!
//! All members of a world go through the formation's transfers in the same order; each takes part in those that name it.
//! The receiver says which boxes it wants, the sender answers with what it has of them.

use crate::cpu::CpuMachine;
use crate::train::JobError;
use crate::train::links::Links;
use crate::train::saving::TrainerState;
use crate::train::weights::{Tensor, pack_box, unpack_box, updated_state};
use phalanx_strategies::compile::Compiled;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// State in memory, and where it lies.
#[derive(Clone, Copy)]
pub(super) struct Holding<'a> {
    pub(super) compiled: &'a Compiled,
    pub(super) machine: &'a CpuMachine,
}

/// State in memory that is to be filled.
pub(super) struct Wanting<'a> {
    pub(super) compiled: &'a Compiled,
    pub(super) machine: &'a mut CpuMachine,
}

/// A box of a tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Box {
    name: String,
    offset: Vec<usize>,
    extent: Vec<usize>,
}

/// What a sender has of the boxes that it was asked for.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    state: TrainerState,
    /// Index of a box that was asked for; offset and extent of a part of it.
    pieces: Vec<(usize, Vec<usize>, Vec<usize>)>,
}

/// Elements that travel in one message.
const CHUNK: usize = 4 << 20;

/// Sends a member what it asks for of `from`.
pub(super) fn give(links: &mut Links, to: u32, from: Holding<'_>, state: TrainerState) -> Result<(), JobError> {
    let wanted: Vec<Box> = links.receive_value(to)?;
    let held = updated_state(from.compiled);
    let found = pieces(&held, &wanted);
    let pieces = found.iter().map(|(i, _, offset, extent)| (*i, offset.clone(), extent.clone())).collect();
    links.send_value(to, &Answer { state, pieces })?;
    let mut values = Vec::new();
    for (_, tensor, offset, extent) in &found {
        pack_box(from.machine, from.compiled, tensor, (offset, extent), &mut values);
        if values.len() >= CHUNK {
            links.send(to, &values)?;
            values.clear();
        }
    }
    Ok(if values.is_empty() { Ok(()) } else { links.send(to, &values) }?)
}

/// Asks a member for what it has of `to`; returns the position of the run there, and how many elements came.
pub(super) fn take(links: &mut Links, from: u32, to: &mut Wanting<'_>) -> Result<(TrainerState, usize), JobError> {
    let tensors = updated_state(to.compiled);
    links.send_value(from, &boxes(&tensors))?;
    let answer: Answer = links.receive_value(from)?;
    for (index, offset, extent) in &answer.pieces {
        let fits =
            tensors.get(*index).is_some_and(|t| t.held.meet(offset, extent) == Some((offset.clone(), extent.clone())));
        if !fits {
            return Err(JobError::Unusable(format!("member {from} sent a box that it was not asked for")));
        }
    }
    let mut pieces = answer.pieces.iter().peekable();
    let mut n_taken = 0;
    while pieces.peek().is_some() {
        // Messages end where the sender's do.
        let (mut batch, mut n) = (Vec::new(), 0);
        while n < CHUNK
            && let Some(piece) = pieces.next()
        {
            n += piece.2.iter().product::<usize>();
            batch.push(piece);
        }
        let mut values = vec![0.0; n];
        links.receive(from, &mut values)?;
        let mut rest = &values[..];
        for (index, offset, extent) in batch {
            rest = unpack_box(to.machine, to.compiled, &tensors[*index], (offset, extent), rest);
        }
        n_taken += n;
    }
    Ok((answer.state, n_taken))
}

/// Copies what one memory has of another; returns how many elements that were.
pub(super) fn copy(from: Holding<'_>, to: &mut Wanting<'_>) -> usize {
    let (held, tensors) = (updated_state(from.compiled), updated_state(to.compiled));
    let mut values = Vec::new();
    let mut n_copied = 0;
    for (index, tensor, offset, extent) in pieces(&held, &boxes(&tensors)) {
        values.clear();
        pack_box(from.machine, from.compiled, tensor, (&offset, &extent), &mut values);
        unpack_box(to.machine, to.compiled, &tensors[index], (&offset, &extent), &values);
        n_copied += values.len();
    }
    n_copied
}

/// Elements of all that updates change.
pub(super) fn n_elements(c: &Compiled) -> usize {
    updated_state(c).iter().map(|t| t.held.n_elements()).sum()
}

fn boxes(tensors: &[Tensor]) -> Vec<Box> {
    let of = |t: &Tensor| Box { name: t.name.clone(), offset: t.held.offset.clone(), extent: t.held.extent.clone() };
    tensors.iter().map(of).collect()
}

/// What tensors have of the boxes: index of the box, the tensor, offset and extent. Of two tensors that have the same
/// elements (copies of one head, a weight of two stages) the first one gives them.
fn pieces<'a>(held: &'a [Tensor], wanted: &[Box]) -> Vec<(usize, &'a Tensor, Vec<usize>, Vec<usize>)> {
    let mut by_name: BTreeMap<&str, Vec<&Tensor>> = BTreeMap::new();
    for tensor in held {
        by_name.entry(&tensor.name).or_default().push(tensor);
    }
    let mut found = Vec::new();
    for (index, wanted) in wanted.iter().enumerate() {
        for tensor in by_name.get(wanted.name.as_str()).into_iter().flatten() {
            if wanted.offset.len() != tensor.shape.len() || wanted.extent.len() != tensor.shape.len() {
                continue;
            }
            if let Some((offset, extent)) = tensor.held.meet(&wanted.offset, &wanted.extent) {
                found.push((index, *tensor, offset, extent));
            }
        }
    }
    found
}
