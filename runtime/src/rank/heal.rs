//! Transfers state from memory to memory, in boxes of named tensors: the same index as in checkpoints, so sender and
//! receiver may cut the tensors differently.
//!
//! First the members agree on the contents of each transfer, in small messages: all process the plan's transfers in the
//! same sequence, and each takes part in those that name it. The receiver sends its missing boxes and its share
//! (`recovery`, `RECOVERY-3`); the sender answers with the boxes it has, possibly none. Then all transfers run
//! concurrently, to and from all peers.

use crate::error::JobError;
use crate::error::peer::PeerError;
use crate::rank::missing_regions::{MissingRegions, Named, Piece, found, share_of};
use crate::train::links::{Flow, Links};
use crate::train::saving::TrainerState;
use crate::train::weights::{Tensor, updated_state};
use phalanx_device::CollectiveError;
use phalanx_device::Machine;
use phalanx_device::span::{Span, SpanMut, SpanRef};
use phalanx_device::staging::copy;
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::elastic::recovery::Share;
use phalanx_strategies::elastic::shadow::Shard;
use phalanx_strategies::program::ValueId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Held state and its location in memory.
#[derive(Clone, Copy)]
pub(crate) struct HeldState<'a> {
    pub(crate) compiled: &'a Compiled,
    pub(crate) machine: &'a dyn Machine,
}

/// Memory to fill with state.
pub(crate) struct StateToFill<'a> {
    pub(crate) compiled: &'a Compiled,
    pub(crate) machine: &'a mut dyn Machine,
}

/// A receiver's request to a sender.
#[derive(Debug, Serialize, Deserialize)]
struct Ask {
    wanted: Vec<Named>,
    share: Share,
}

/// A sender's answer: which of the requested boxes it has.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    state: TrainerState,
    pieces: Vec<Piece>,
}

/// State of a member while its world heals: held shards, missing regions, and agreed transfers.
#[derive(Default)]
pub(crate) struct Healing<'a> {
    holds: BTreeMap<Shard, (HeldState<'a>, TrainerState)>,
    missing: MissingByShard<'a>,
    /// Trainer state that belongs to the found state.
    state: Option<TrainerState>,
    gives: Vec<(u32, Shard, Vec<ElementRange>)>,
    takes: Vec<Take>,
}

type MissingByShard<'a> = BTreeMap<Shard, (StateToFill<'a>, MissingRegions)>;
/// One incoming transfer: source, shard, destination.
type Take = (From, Shard, Vec<ElementRange>);

/// Location of state that a peer has asked for.
pub(crate) struct HeldRanges {
    pub(crate) held: Shard,
    ranges: Vec<ElementRange>,
}

/// Outgoing buffers, by member.
type RunsOf = BTreeMap<u32, Vec<Span>>;

/// Source of state.
enum From {
    Member(u32),
    /// From these ranges of the member's own state.
    Itself(Shard, Vec<ElementRange>),
}

impl<'a> Healing<'a> {
    /// Registers held state, unless the shard is already registered.
    pub(crate) fn holds(&mut self, shard: Shard, held_state: HeldState<'a>, state: TrainerState) {
        self.holds.entry(shard).or_insert((held_state, state));
    }

    /// Registers a shard whose whole state is missing.
    pub(crate) fn missing(&mut self, shard: Shard, to_fill: StateToFill<'a>) {
        let missing_regions = MissingRegions::all(updated_state(to_fill.compiled));
        self.missing.insert(shard, (to_fill, missing_regions));
    }

    /// Answers a peer's request for parts of `held`. Returns their location.
    pub(crate) fn answer(&self, links: &mut Links, to: u32, held: Shard) -> Result<HeldRanges, JobError> {
        let (held_state, _) = self.held(held);
        self.answer_as_in(held_state.compiled, links, to, held)
    }

    /// The same for a transfer after healing, when the state is in the arena of the rank.
    pub(crate) fn answer_later(&self, links: &mut Links, to: u32, held: Shard) -> Result<HeldRanges, JobError> {
        let room = self.missing.get(&held).map(|(to_fill, _)| to_fill.compiled);
        self.answer_as_in(room.unwrap_or(self.held(held).0.compiled), links, to, held)
    }

    fn held(&self, shard: Shard) -> &(HeldState<'a>, TrainerState) {
        self.holds.get(&shard).expect("peers only ask for shards that were reported as held")
    }

    fn answer_as_in(
        &self,
        compiled: &Compiled,
        links: &mut Links,
        to: u32,
        held: Shard,
    ) -> Result<HeldRanges, JobError> {
        let (_, state) = self.held(held);
        let Ask { wanted, share } = links.receive_value(to)?;
        if !share.is_valid() {
            return Err(PeerError::Share { member: to, share }.into());
        }
        let tensors = updated_state(compiled);
        let found = share_of(found(&tensors, &wanted), share);
        let ranges = found.iter().flat_map(|(tensor, piece)| ranges(tensor, piece)).collect();
        let pieces = found.into_iter().map(|(_, piece)| piece).collect();
        links.send_value(to, &Answer { state: *state, pieces })?;
        Ok(HeldRanges { held, ranges })
    }

    /// Schedules a transfer that a peer asked for.
    pub(crate) fn gives(&mut self, to: u32, HeldRanges { held, ranges }: HeldRanges) {
        self.gives.push((to, held, ranges));
    }

    /// Asks holders of identical state for the missing regions of `shard`, each for its share.
    pub(crate) fn ask(&mut self, links: &mut Links, members: &[u32], shard: Shard) -> Result<(), JobError> {
        let (_, missing_regions) = self.missing.get_mut(&shard).expect("a rank has memory for its shards");
        let (wanted, n_parts) = (named(missing_regions), members.len() as u32);
        for (from, part) in members.iter().zip(0..) {
            links.send_value(*from, &Ask { wanted: wanted.clone(), share: Share { part, n_parts } })?;
            let answer: Answer = links.receive_value(*from)?;
            if !answer.pieces.iter().all(|piece| missing_regions.came(piece)) {
                return Err(PeerError::NotRequested { member: *from }.into());
            }
            let ranges =
                answer.pieces.iter().flat_map(|piece| ranges(&missing_regions.tensors[piece.tensor], piece)).collect();
            self.takes.push((From::Member(*from), shard, ranges));
            self.state = Some(answer.state);
        }
        Ok(())
    }

    /// Takes missing regions of `shard` from the member's own `held` state.
    pub(crate) fn find(&mut self, held: Shard, shard: Shard) {
        let (held_state, state) = self.holds.get(&held).expect("reported shards are kept");
        let (_, missing_regions) = self.missing.get_mut(&shard).expect("a rank has memory for its shards");
        let tensors = updated_state(held_state.compiled);
        let (mut here, mut there) = (Vec::new(), Vec::new());
        for (tensor, piece) in found(&tensors, &named(missing_regions)) {
            here.extend(ranges(tensor, &piece));
            there.extend(ranges(&missing_regions.tensors[piece.tensor], &piece));
            let was_missing = missing_regions.came(&piece);
            debug_assert!(was_missing, "found pieces are parts of the missing regions");
        }
        self.takes.push((From::Itself(held, here), shard, there));
        self.state = Some(*state);
    }

    /// Runs all transfers. Returns the trainer state that belongs to the received state, if any.
    ///
    /// # Errors
    /// When regions are still missing, after the other transfers have completed.
    pub(crate) fn carry_out(self, links: &mut Links) -> Result<Option<TrainerState>, JobError> {
        let Healing { holds, mut missing, state, gives, takes } = self;
        let missing_regions = still_missing(&missing);
        let mut flows: BTreeMap<u32, Flow<'_>> = BTreeMap::new();
        for (to, held, ranges) in &gives {
            flows.entry(*to).or_default().sends.extend(runs(&holds[held].0, ranges));
        }
        let mut copies: Vec<(Vec<SpanRef<'_>>, Vec<SpanMut<'_>>)> = Vec::new();
        for (from, rooms) in rooms_of(&mut missing, &takes)? {
            match from {
                From::Member(from) => flows.entry(*from).or_default().receives.extend(rooms),
                From::Itself(held, here) => copies.push((runs(&holds[held].0, here).collect(), rooms)),
            }
        }
        // Local copies run last, since no peer waits for them.
        let mut copied = Ok(());
        links.flow(flows, || copied = copies.iter().try_for_each(|(from, to)| copy(from, to)))?;
        copied.map_err(CollectiveError::from)?;
        missing_regions.map_or(Ok(state), |(shard, n)| Err(PeerError::NotHeld { shard, n_elements: n }.into()))
    }

    /// Prepares catch-up transfers without running them: the buffers of each sender, in the agreed sequence, and the
    /// trainer state.
    ///
    /// # Errors
    /// When regions would still be missing.
    pub(crate) fn catch_up_transfers(self) -> Result<(RunsOf, Option<TrainerState>), JobError> {
        let Healing { mut missing, state, takes, .. } = self;
        if let Some((shard, n)) = still_missing(&missing) {
            return Err(PeerError::NotHeld { shard, n_elements: n }.into());
        }
        let mut runs = RunsOf::new();
        for (from, rooms) in rooms_of(&mut missing, &takes)? {
            if let From::Member(from) = from {
                runs.entry(*from).or_default().extend(rooms.iter().map(SpanMut::span));
            }
        }
        Ok((runs, state))
    }
}

impl HeldRanges {
    /// The elements in these ranges.
    pub(crate) fn runs(&self, held_state: &HeldState<'_>) -> Vec<Span> {
        runs(held_state, &self.ranges).map(|run| run.span()).collect()
    }
}

/// Elements of this shard that no queried peer holds.
fn still_missing(missing: &MissingByShard<'_>) -> Option<(Shard, usize)> {
    missing.iter().map(|(shard, (_, missing_regions))| (*shard, missing_regions.n_elements())).find(|(_, n)| *n > 0)
}

/// The destination memory, in the agreed order of the transfers.
fn rooms_of<'r>(
    missing: &'r mut MissingByShard<'_>,
    takes: &'r [Take],
) -> Result<impl Iterator<Item = (&'r From, Vec<SpanMut<'r>>)>, JobError> {
    let mut of_shards: BTreeMap<Shard, std::vec::IntoIter<SpanMut<'r>>> = BTreeMap::new();
    for (shard, (to_fill, _)) in missing {
        let of_shard = takes.iter().filter(|(_, of, _)| of == shard);
        let ranges: Vec<ElementRange> = of_shard.flat_map(|(.., ranges)| ranges).cloned().collect();
        let rooms = to_fill.machine.spans_mut(to_fill.compiled, &ranges).ok_or(PeerError::Overlap { shard: *shard })?;
        of_shards.insert(*shard, rooms.into_iter());
    }
    Ok(takes.iter().map(move |(from, shard, ranges)| {
        let of_shard = of_shards.get_mut(shard).expect("a transfer fills missing regions of its shard");
        (from, of_shard.by_ref().take(ranges.len()).collect())
    }))
}

fn named(missing_regions: &MissingRegions) -> Vec<Named> {
    let of = |piece: &Piece| Named { name: missing_regions.tensors[piece.tensor].name.clone(), piece: piece.clone() };
    missing_regions.pieces().iter().map(of).collect()
}

/// A run of elements of a value.
type ElementRange = (ValueId, Range<usize>);

/// The location of a piece of a tensor, in row-major order.
fn ranges(tensor: &Tensor, piece: &Piece) -> impl Iterator<Item = ElementRange> + use<> {
    let value = tensor.value;
    tensor.held.runs_of(&piece.region).map(move |run| (value, run))
}

/// The elements in these ranges.
fn runs<'a>(from: &HeldState<'a>, ranges: &[ElementRange]) -> impl Iterator<Item = SpanRef<'a>> {
    let HeldState { compiled, machine } = *from;
    ranges.iter().map(move |(value, run)| machine.source(compiled, *value, run.clone()))
}

/// For fuzz targets.
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing {
    use super::{Answer, Ask, MissingRegions, Piece, found, ranges, share_of};
    use crate::train::weights::Tensor;
    use phalanx_strategies::boxes::TensorBox;
    use phalanx_strategies::program::ValueId;
    use phalanx_strategies::program::held_box::HeldBox;
    use std::ops::Range;

    /// Number of held elements.
    const N_HELD: usize = 12;

    /// The elements that a message reads or writes.
    #[derive(Debug)]
    pub struct Pieces {
        /// Number of elements that the member holds.
        pub n_held: usize,
        /// The elements that are read or written.
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
        ranges(tensor, piece).map(|(_, run)| run)
    }

    /// The elements that a member sends for this request.
    pub fn asked_for(text: &[u8]) -> Option<Pieces> {
        let Ask { wanted, share } = serde_json::from_slice(text).ok().filter(|ask: &Ask| ask.share.is_valid())?;
        let held = held();
        let found = share_of(found(&held, &wanted), share);
        Some(Pieces { n_held: N_HELD, runs: found.iter().flat_map(|(tensor, piece)| runs(tensor, piece)).collect() })
    }

    /// The elements that a member accepts from this answer.
    pub fn offered(text: &[u8]) -> Option<Pieces> {
        let (answer, held) = (serde_json::from_slice::<Answer>(text).ok()?, held());
        let mut missing_regions = MissingRegions::all(held.to_vec());
        answer.pieces.iter().all(|piece| missing_regions.came(piece)).then_some(())?;
        let taken = answer.pieces.iter().flat_map(|piece| runs(&held[piece.tensor], piece));
        Some(Pieces { n_held: N_HELD, runs: taken.collect() })
    }
}

#[cfg(test)]
pub(crate) mod tests;
