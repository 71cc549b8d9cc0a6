//! State from memory to memory, in boxes of the tensors of the model file: the same index as in checkpoints, so it does not
//! matter how sender and receiver cut them.
//!
//! All members of a world go through the formation's transfers in the same order; each takes part in those that name it.
//! The receiver says which boxes it lacks, the sender answers with what it has of them; that may be nothing.

use super::lacking::{Lacking, Named, Piece, found};
use crate::cpu::CpuMachine;
use crate::train::JobError;
use crate::train::links::Links;
use crate::train::saving::TrainerState;
use crate::train::weights::{Tensor, updated_state};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::program::ValueId;
use serde::{Deserialize, Serialize};
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

/// What a sender has of the boxes that it was asked for.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    state: TrainerState,
    pieces: Vec<Piece>,
}

/// Sends a member what it asks for of `from`.
pub(super) fn give(links: &mut Links, to: u32, from: Holding<'_>, state: TrainerState) -> Result<(), JobError> {
    let wanted: Vec<Named> = links.receive_value(to)?;
    let held = updated_state(from.compiled);
    let found = found(&held, &wanted);
    links.send_value(to, &Answer { state, pieces: found.iter().map(|(_, piece)| piece.clone()).collect() })?;
    let places = found.iter().flat_map(|(tensor, piece)| places(tensor, piece));
    let runs: Vec<&[f32]> = places.map(|(value, run)| &from.machine.read(from.compiled, value)[run]).collect();
    Ok(links.send(to, &runs)?)
}

/// What of `to` is to be found.
pub(super) fn lacking(to: &Wanting<'_>) -> Lacking {
    Lacking::all(updated_state(to.compiled))
}

/// Asks a member for what it has of what `to` lacks; returns the position of the run there.
pub(super) fn take(
    links: &mut Links,
    from: u32,
    to: &mut Wanting<'_>,
    lacking: &mut Lacking,
) -> Result<TrainerState, JobError> {
    links.send_value(from, &named(lacking))?;
    let answer: Answer = links.receive_value(from)?;
    let unasked = || JobError::Unusable(format!("member {from} sent a box that it was not asked for"));
    if !answer.pieces.iter().all(|piece| lacking.came(piece)) {
        return Err(unasked());
    }
    let places: Vec<Place> =
        answer.pieces.iter().flat_map(|piece| places(&lacking.tensors[piece.tensor], piece)).collect();
    links.receive(from, rooms(to, &places).ok_or_else(unasked)?)?;
    Ok(answer.state)
}

/// Copies what one memory has of what another lacks.
pub(super) fn copy(from: Holding<'_>, to: &mut Wanting<'_>, lacking: &mut Lacking) {
    let held = updated_state(from.compiled);
    let (mut here, mut there) = (Vec::new(), Vec::new());
    for (tensor, piece) in found(&held, &named(lacking)) {
        here.extend(places(tensor, &piece));
        there.extend(places(&lacking.tensors[piece.tensor], &piece));
        let was_lacking = lacking.came(&piece);
        debug_assert!(was_lacking, "what is found is a part of what is asked for");
    }
    let mut runs = here.into_iter().map(|(value, run)| &from.machine.read::<f32>(from.compiled, value)[run]);
    let rooms = rooms(to, &there).expect("nothing that has come is asked for again");
    let mut rest = &[][..];
    for mut room in rooms {
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
}

fn named(lacking: &Lacking) -> Vec<Named> {
    let of = |piece: &Piece| Named { name: lacking.tensors[piece.tensor].name.clone(), piece: piece.clone() };
    lacking.pieces().iter().map(of).collect()
}

/// A run of elements of a value.
type Place = (ValueId, Range<usize>);

/// Where the elements of a piece of a tensor lie, in row-major order.
fn places(tensor: &Tensor, piece: &Piece) -> impl Iterator<Item = Place> + use<> {
    let value = tensor.value;
    tensor.held.runs_of(&piece.offset, &piece.extent).into_iter().map(move |run| (value, run))
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

/// For fuzz targets.
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::{Answer, Lacking, Named, Piece, found, places};
    use crate::train::weights::Tensor;
    use phalanx_strategies::program::ValueId;
    use phalanx_strategies::program::held::HeldBox;
    use std::ops::Range;

    /// Elements of what is held.
    const N_HELD: usize = 12;

    /// What is read or written for a message.
    #[derive(Debug)]
    pub struct Pieces {
        /// Elements that the member holds.
        pub n_held: usize,
        /// Which of them.
        pub runs: Vec<Range<usize>>,
    }

    /// A member's part of a matrix.
    fn held() -> [Tensor; 1] {
        let (name, shape, offset, extent) = ("w".to_owned(), vec![4, 6], vec![1, 0], vec![2, 6]);
        let (held_name, held_shape) = (name.clone(), shape.clone());
        let held = HeldBox { name: held_name, shape: held_shape, offset, extent, start: 0, row_stride: 6, owned: true };
        [Tensor { name, shape, value: ValueId(0), elements: 0..N_HELD, trainable: true, held }]
    }

    fn runs(tensor: &Tensor, piece: &Piece) -> impl Iterator<Item = Range<usize>> + use<> {
        places(tensor, piece).map(|(_, run)| run)
    }

    /// What a member sends that is asked for what this text says.
    pub fn asked_for(text: &[u8]) -> Option<Pieces> {
        let wanted: Vec<Named> = serde_json::from_slice(text).ok()?;
        let held = held();
        let found = found(&held, &wanted);
        Some(Pieces { n_held: N_HELD, runs: found.iter().flat_map(|(tensor, piece)| runs(tensor, piece)).collect() })
    }

    /// What a member takes that is offered what this text says.
    pub fn offered(text: &[u8]) -> Option<Pieces> {
        let (answer, held) = (serde_json::from_slice::<Answer>(text).ok()?, held());
        let mut lacking = Lacking::all(held.to_vec());
        answer.pieces.iter().all(|piece| lacking.came(piece)).then_some(())?;
        let taken = answer.pieces.iter().flat_map(|piece| runs(&held[piece.tensor], piece));
        Some(Pieces { n_held: N_HELD, runs: taken.collect() })
    }
}
