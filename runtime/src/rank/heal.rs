//! State from memory to memory, in boxes of the tensors of the model file: the same index as in checkpoints, so it does not
//! matter how sender and receiver cut them.
//!
//! First members agree on what passes between them, in few bytes: all go through the formation's transfers in the same
//! order, and each takes part in those that name it. The receiver says which boxes it lacks and which share of them it asks
//! this sender for (`recovery`, `R-3`); the sender answers with what it has of that, which may be nothing. Then everything
//! passes at once, to and from all peers.

use crate::error::JobError;
use crate::rank::lacking::{Lacking, Named, Piece, found, share_of};
use crate::train::links::{Flow, Links};
use crate::train::saving::TrainerState;
use crate::train::weights::{Tensor, updated_state};
use phalanx_device::Machine;
use phalanx_device::span::{Room, Source, Stretch, copy};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::recovery::Share;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::program::ValueId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// State in memory, and where it lies.
#[derive(Clone, Copy)]
pub(crate) struct Holding<'a> {
    pub(crate) compiled: &'a Compiled,
    pub(crate) machine: &'a dyn Machine,
}

/// State in memory that is to be filled.
pub(crate) struct Wanting<'a> {
    pub(crate) compiled: &'a Compiled,
    pub(crate) machine: &'a mut dyn Machine,
}

/// What a receiver asks a sender for.
#[derive(Debug, Serialize, Deserialize)]
struct Ask {
    wanted: Vec<Named>,
    share: Share,
}

/// What a sender has of the boxes that it was asked for.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    state: TrainerState,
    pieces: Vec<Piece>,
}

/// What a member does while its world heals: what it has, what it lacks, and what it has agreed on with others so far.
#[derive(Default)]
pub(crate) struct Healing<'a> {
    holds: BTreeMap<Shard, (Holding<'a>, TrainerState)>,
    lacks: Lacks<'a>,
    /// Where the run is to which the state belongs that was found.
    state: Option<TrainerState>,
    gives: Vec<(u32, Shard, Vec<Place>)>,
    takes: Vec<Take>,
}

type Lacks<'a> = BTreeMap<Shard, (Wanting<'a>, Lacking)>;
/// What comes of a shard, from where, to which places.
type Take = (From, Shard, Vec<Place>);

/// Where a member has what another one has asked it for.
pub(crate) struct Places {
    pub(crate) held: Shard,
    places: Vec<Place>,
}

/// By member, what it is to send.
type RunsOf = BTreeMap<u32, Vec<Stretch>>;

/// Whence state comes.
enum From {
    Member(u32),
    /// From these places of what the member itself holds.
    Itself(Shard, Vec<Place>),
}

impl<'a> Healing<'a> {
    /// The member holds this here, unless it has said so of another place before.
    pub(crate) fn holds(&mut self, shard: Shard, holding: Holding<'a>, state: TrainerState) {
        self.holds.entry(shard).or_insert((holding, state));
    }

    /// The member lacks all of this.
    pub(crate) fn lacks(&mut self, shard: Shard, wanting: Wanting<'a>) {
        let lacking = Lacking::all(updated_state(wanting.compiled));
        self.lacks.insert(shard, (wanting, lacking));
    }

    /// Answers what a member asks for of `held`. Returns where that lies.
    pub(crate) fn answer(&self, links: &mut Links, to: u32, held: Shard) -> Result<Places, JobError> {
        let (holding, _) = self.held(held);
        self.answer_as_in(holding.compiled, links, to, held)
    }

    /// The same where it passes when all of this has been carried out: it lies in the seat then, wherever it lies now.
    pub(crate) fn promise(&self, links: &mut Links, to: u32, held: Shard) -> Result<Places, JobError> {
        let room = self.lacks.get(&held).map(|(wanting, _)| wanting.compiled);
        self.answer_as_in(room.unwrap_or(self.held(held).0.compiled), links, to, held)
    }

    fn held(&self, shard: Shard) -> &(Holding<'a>, TrainerState) {
        self.holds.get(&shard).expect("one is asked for what one reported to hold")
    }

    fn answer_as_in(&self, compiled: &Compiled, links: &mut Links, to: u32, held: Shard) -> Result<Places, JobError> {
        let (_, state) = self.held(held);
        let Ask { wanted, share } = links.receive_value(to)?;
        if !share.is_sound() {
            return Err(JobError::Unusable(format!("member {to} asked for {share:?}, which cannot be")));
        }
        let tensors = updated_state(compiled);
        let found = share_of(found(&tensors, &wanted), share);
        let places = found.iter().flat_map(|(tensor, piece)| places(tensor, piece)).collect();
        let pieces = found.into_iter().map(|(_, piece)| piece).collect();
        links.send_value(to, &Answer { state: *state, pieces })?;
        Ok(Places { held, places })
    }

    /// What a member has asked for passes with all else.
    pub(crate) fn gives(&mut self, to: u32, Places { held, places }: Places) {
        self.gives.push((to, held, places));
    }

    /// Asks members that have the same for what they have of what is lacking of `shard`, each for its share.
    pub(crate) fn ask(&mut self, links: &mut Links, members: &[u32], shard: Shard) -> Result<(), JobError> {
        let (_, lacking) = self.lacks.get_mut(&shard).expect("a seat has room for its shards");
        let (wanted, n_parts) = (named(lacking), members.len() as u32);
        for (from, part) in members.iter().zip(0..) {
            links.send_value(*from, &Ask { wanted: wanted.clone(), share: Share { part, n_parts } })?;
            let answer: Answer = links.receive_value(*from)?;
            if !answer.pieces.iter().all(|piece| lacking.came(piece)) {
                return Err(unasked(*from));
            }
            let places = answer.pieces.iter().flat_map(|piece| places(&lacking.tensors[piece.tensor], piece)).collect();
            self.takes.push((From::Member(*from), shard, places));
            self.state = Some(answer.state);
        }
        Ok(())
    }

    /// Finds what the member itself has in `held` of what is lacking of `shard`.
    pub(crate) fn find(&mut self, held: Shard, shard: Shard) {
        let (holding, state) = self.holds.get(&held).expect("one keeps what one reported to hold");
        let (_, lacking) = self.lacks.get_mut(&shard).expect("a seat has room for its shards");
        let tensors = updated_state(holding.compiled);
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for (tensor, piece) in found(&tensors, &named(lacking)) {
            here.extend(places(tensor, &piece));
            there.extend(places(&lacking.tensors[piece.tensor], &piece));
            let was_lacking = lacking.came(&piece);
            debug_assert!(was_lacking, "what is found is a part of what is asked for");
        }
        self.takes.push((From::Itself(held, here), shard, there));
        self.state = Some(*state);
    }

    /// Lets everything pass. Returns where the run is to which the state belongs, if any came.
    ///
    /// # Errors
    /// When something is lacking still, after others have got what they were promised.
    pub(crate) fn carry_out(self, links: &mut Links) -> Result<Option<TrainerState>, JobError> {
        let Healing { holds, mut lacks, state, gives, takes } = self;
        let lacking = still_lacking(&lacks);
        let mut flows: BTreeMap<u32, Flow<'_>> = BTreeMap::new();
        for (to, held, places) in &gives {
            flows.entry(*to).or_default().sends.extend(runs(&holds[held].0, places));
        }
        let mut copies: Vec<(Vec<Source<'_>>, Vec<Room<'_>>)> = Vec::new();
        for (from, rooms) in rooms_of(&mut lacks, &takes)? {
            match from {
                From::Member(from) => flows.entry(*from).or_default().receives.extend(rooms),
                From::Itself(held, here) => copies.push((runs(&holds[held].0, here).collect(), rooms)),
            }
        }
        // Last, since nobody waits for it.
        links.flow(flows, || copies.iter().for_each(|(from, to)| copy(from, to)))?;
        lacking.map_or(Ok(state), |(shard, n)| Err(in_no_memory(shard, n)))
    }

    /// Lets nothing pass yet: of each member what it is to send, in the order in which it was agreed on, and where the run
    /// is now.
    ///
    /// # Errors
    /// When something would be lacking still.
    pub(crate) fn lessons(self) -> Result<(RunsOf, Option<TrainerState>), JobError> {
        let Healing { mut lacks, state, takes, .. } = self;
        if let Some((shard, n)) = still_lacking(&lacks) {
            return Err(in_no_memory(shard, n));
        }
        let mut runs = RunsOf::new();
        for (from, rooms) in rooms_of(&mut lacks, &takes)? {
            if let From::Member(from) = from {
                runs.entry(*from).or_default().extend(rooms.iter().map(Room::stretch));
            }
        }
        Ok((runs, state))
    }
}

impl Places {
    /// The elements there.
    pub(crate) fn runs(&self, holding: &Holding<'_>) -> Vec<Stretch> {
        runs(holding, &self.places).map(|run| run.stretch()).collect()
    }
}

/// Of which shard so many elements are in no memory that was asked.
fn still_lacking(lacks: &Lacks<'_>) -> Option<(Shard, usize)> {
    lacks.iter().map(|(shard, (_, lacking))| (*shard, lacking.n_elements())).find(|(_, n)| *n > 0)
}

/// The memory for what comes, in the order in which it was agreed on: that in which its sender sends it.
fn rooms_of<'r>(
    lacks: &'r mut Lacks<'_>,
    takes: &'r [Take],
) -> Result<impl Iterator<Item = (&'r From, Vec<Room<'r>>)>, JobError> {
    let mut of_shards: BTreeMap<Shard, std::vec::IntoIter<Room<'r>>> = BTreeMap::new();
    for (shard, (wanting, _)) in lacks {
        let of_shard = takes.iter().filter(|(_, of, _)| of == shard);
        let places: Vec<Place> = of_shard.flat_map(|(.., places)| places).cloned().collect();
        let rooms = wanting.machine.rooms(wanting.compiled, &places).ok_or_else(|| overlap(*shard))?;
        of_shards.insert(*shard, rooms.into_iter());
    }
    Ok(takes.iter().map(move |(from, shard, places)| {
        let of_shard = of_shards.get_mut(shard).expect("who takes something lacks it");
        (from, of_shard.by_ref().take(places.len()).collect())
    }))
}

fn in_no_memory(shard: Shard, n: usize) -> JobError {
    JobError::Unusable(format!("{n} elements of {shard:?} are in no memory that was asked"))
}

fn overlap(shard: Shard) -> JobError {
    JobError::Unusable(format!("two boxes of {shard:?} have elements in common"))
}

fn unasked(from: u32) -> JobError {
    JobError::Unusable(format!("member {from} sent a box that it was not asked for"))
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
    tensor.held.runs_of(&piece.region).map(move |run| (value, run))
}

/// The elements at these places.
fn runs<'a>(from: &Holding<'a>, places: &[Place]) -> impl Iterator<Item = Source<'a>> {
    let Holding { compiled, machine } = *from;
    places.iter().map(move |(value, run)| machine.source(compiled, *value, run.clone()))
}

/// For fuzz targets.
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::{Answer, Ask, Lacking, Piece, found, places, share_of};
    use crate::train::weights::Tensor;
    use phalanx_strategies::boxes::TensorBox;
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
        let (name, shape) = ("w".to_owned(), vec![4, 6]);
        let region = TensorBox { offset: vec![1, 0], extent: vec![2, 6] };
        let (name_there, whole, stored) = (name.clone(), shape.clone(), region.clone());
        let held = HeldBox { name: name_there, shape: whole, region, stored, start: 0, owned: true };
        [Tensor { name, shape, value: ValueId(0), elements: 0..N_HELD, trainable: true, held }]
    }

    fn runs(tensor: &Tensor, piece: &Piece) -> impl Iterator<Item = Range<usize>> + use<> {
        places(tensor, piece).map(|(_, run)| run)
    }

    /// What a member sends that is asked for what this text says.
    pub fn asked_for(text: &[u8]) -> Option<Pieces> {
        let Ask { wanted, share } = serde_json::from_slice(text).ok().filter(|ask: &Ask| ask.share.is_sound())?;
        let held = held();
        let found = share_of(found(&held, &wanted), share);
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

#[cfg(test)]
pub(crate) mod tests;
