//! State from memory to memory, in boxes of the tensors of the model file: the same index as in checkpoints, so it does not
//! matter how sender and receiver cut them.
//!
//! All members of a world go through the formation's transfers in the same order; each takes part in those that name it.
//! The receiver says which boxes it wants, the sender answers with what it has of them.

use crate::cpu::CpuMachine;
use crate::train::JobError;
use crate::train::links::Links;
use crate::train::saving::TrainerState;
use crate::train::weights::{Tensor, updated_state};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::ValueId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

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

/// Sends a member what it asks for of `from`.
pub(super) fn give(links: &mut Links, to: u32, from: Holding<'_>, state: TrainerState) -> Result<(), JobError> {
    let wanted: Vec<Box> = links.receive_value(to)?;
    let held = updated_state(from.compiled);
    let found = pieces(&held, &wanted);
    let pieces = found.iter().map(|(i, _, offset, extent)| (*i, offset.clone(), extent.clone())).collect();
    links.send_value(to, &Answer { state, pieces })?;
    let places = found.iter().flat_map(|(_, tensor, offset, extent)| places(tensor, offset, extent));
    let runs: Vec<&[f32]> = places.map(|(value, run)| &from.machine.read(from.compiled, value)[run]).collect();
    Ok(links.send(to, &runs)?)
}

/// Asks a member for what it has of `to`; returns the position of the run there, and how many elements came.
pub(super) fn take(links: &mut Links, from: u32, to: &mut Wanting<'_>) -> Result<(TrainerState, usize), JobError> {
    let tensors = updated_state(to.compiled);
    links.send_value(from, &boxes(&tensors))?;
    let answer: Answer = links.receive_value(from)?;
    let unasked = || JobError::Unusable(format!("member {from} sent a box that it was not asked for"));
    let mut all = Vec::new();
    for (index, offset, extent) in &answer.pieces {
        let tensor = tensors
            .get(*index)
            .filter(|t| t.held.meet(offset, extent).is_some_and(|b| b.0 == *offset && b.1 == *extent));
        all.extend(places(tensor.ok_or_else(unasked)?, offset, extent));
    }
    let rooms = rooms(to, &all).ok_or_else(unasked)?;
    let n_taken = rooms.iter().map(|room| room.len()).sum();
    links.receive(from, rooms)?;
    Ok((answer.state, n_taken))
}

/// Copies what one memory has of another; returns how many elements that were.
pub(super) fn copy(from: Holding<'_>, to: &mut Wanting<'_>) -> usize {
    let (held, tensors) = (updated_state(from.compiled), updated_state(to.compiled));
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for (index, tensor, offset, extent) in pieces(&held, &boxes(&tensors)) {
        here.extend(places(tensor, &offset, &extent));
        there.extend(places(&tensors[index], &offset, &extent));
    }
    let mut runs = here.into_iter().map(|(value, run)| &from.machine.read::<f32>(from.compiled, value)[run]);
    let rooms = rooms(to, &there).expect("one memory gives no element twice");
    let (mut rest, mut n_copied) = (&[][..], 0);
    for mut room in rooms {
        n_copied += room.len();
        while !room.is_empty() {
            if rest.is_empty() {
                rest = runs.next().expect("both sides of a piece have as many elements");
            }
            let n = rest.len().min(room.len());
            let (now, later) = std::mem::take(&mut room).split_at_mut(n);
            now.copy_from_slice(&rest[..n]);
            (room, rest) = (later, &rest[n..]);
        }
    }
    n_copied
}

/// A run of elements of a value.
type Place = (ValueId, Range<usize>);

/// Where the elements of a box of a tensor lie, in row-major order.
fn places(tensor: &Tensor, offset: &[usize], extent: &[usize]) -> impl Iterator<Item = Place> + use<> {
    let value = tensor.value;
    tensor.held.runs_of(offset, extent).into_iter().map(move |run| (value, run))
}

/// The memory of these places, in their order; none if two of them have an element in common.
fn rooms<'a>(to: &'a mut Wanting<'_>, places: &[Place]) -> Option<Vec<&'a mut [f32]>> {
    let mut sorted: Vec<usize> = (0..places.len()).collect();
    sorted.sort_unstable_by_key(|i| (places[*i].0, places[*i].1.start));
    let mut values: Vec<ValueId> = sorted.iter().map(|i| places[*i].0).collect();
    values.dedup();
    let mut memory = values.iter().zip(to.machine.write_all::<f32>(to.compiled, &values));
    let (mut value, mut rest, mut at) = (None, &mut [][..], 0);
    let mut found: Vec<(usize, &mut [f32])> = Vec::with_capacity(places.len());
    for i in sorted {
        let (of, run) = &places[i];
        if value != Some(*of) {
            let (next, elements) = memory.next()?;
            (value, rest, at) = (Some(*next), elements, 0);
        }
        let (_, behind) = std::mem::take(&mut rest).split_at_mut_checked(run.start.checked_sub(at)?)?;
        let (room, behind) = behind.split_at_mut_checked(run.len())?;
        found.push((i, room));
        (rest, at) = (behind, run.end);
    }
    found.sort_unstable_by_key(|(i, _)| *i);
    Some(found.into_iter().map(|(_, room)| room).collect())
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
    let mut found: Vec<(usize, &Tensor, Vec<usize>, Vec<usize>)> = Vec::new();
    for (index, wanted) in wanted.iter().enumerate() {
        let first = found.len();
        for tensor in by_name.get(wanted.name.as_str()).into_iter().flatten() {
            if wanted.offset.len() != tensor.shape.len() || wanted.extent.len() != tensor.shape.len() {
                continue;
            }
            let Some((offset, extent)) = tensor.held.meet(&wanted.offset, &wanted.extent) else { continue };
            if found[first..].iter().all(|(_, _, o, e)| (o, e) != (&offset, &extent)) {
                found.push((index, *tensor, offset, extent));
            }
        }
    }
    found
}
