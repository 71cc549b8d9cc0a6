//! Whose copy was wrong, found by repeating the steps: copies differed, and there was no majority.
//!
//! A flipped bit in a weight changes the loss of its own replica in the next step, and through the summed gradients that of
//! all other replicas one step later. The state of a shadow takes part in no loss. The repeated steps are those of an
//! undisturbed run, so the copy that deviates from them first is the wrong one.
//!
//! Invariant:
//! - `DISPUTE-1` A rank is named only if every holder of the disputed box still knows what it computed first, and this rank's
//!   copy alone deviates first.
//! - `DISPUTE-2` Nobody is named if a rank had state that came from another rank and had not been compared since, the first time or
//!   when the step was repeated: the corruption may have come with it. Nor is anybody if a loss deviates in the first step that its rank remembers: the corruption may be
//!   older than this world.

use super::copies::{Class, Copies, Holder};
use super::identity::Step;
use crate::mesh::{Axis, Mesh, MeshRank};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Losses that a rank remembers for a dispute, and disputes.
const LOSSES_MAX: usize = 1 << 12;
const DISPUTES_MAX: usize = 8;

/// What a rank process computed, for the repetition of steps after which copies differed.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Whether some of the state came from another rank, and no comparison has agreed with it since.
    is_received: bool,
    /// Steps of this world whose copies differed in an earlier one.
    disputed: Vec<Step>,
    /// This rank's part of the loss of each step of this world, as bits.
    losses: VecDeque<(Step, u64)>,
    /// What it computed when copies differed.
    then: BTreeMap<Step, Then>,
}

/// What a rank had computed when copies differed.
#[derive(Clone, Debug)]
struct Then {
    mesh_rank: MeshRank,
    /// Who holds the boxes whose copies differed, and the digests of this rank's copies.
    holders: Vec<Holder>,
    digests: BTreeMap<u32, u64>,
    losses: VecDeque<(Step, u64)>,
    is_received: bool,
}

impl Memory {
    /// Begins a world, which repeats disputed steps.
    pub fn begin(&mut self, disputed: Vec<Step>) {
        self.disputed = disputed;
        self.losses.clear();
        // Never grows during a step.
        self.losses.reserve(LOSSES_MAX);
    }

    /// Notes that state came from another rank.
    pub fn note_received(&mut self) {
        self.is_received = true;
    }

    /// Notes that all copies of the state agree.
    pub fn note_agreement(&mut self) {
        self.is_received = false;
    }

    /// Whether some of the state came from another rank, and no comparison has agreed with it since.
    pub fn is_received(&self) -> bool {
        self.is_received
    }

    /// Whether copies differed after this step in an earlier world.
    pub fn is_disputed(&self, step: Step) -> bool {
        self.disputed.contains(&step)
    }

    /// Notes this rank's part of the loss of a step.
    pub fn note_loss(&mut self, step: Step, bits: u64) {
        if self.losses.len() == LOSSES_MAX {
            self.losses.pop_front();
        }
        self.losses.push_back((step, bits));
    }

    /// Remembers what this rank computed, for the repetition of a step after which the copies of a class differed.
    pub fn remember(&mut self, step: Step, mesh_rank: MeshRank, class: &Class, digests: &[u64]) {
        let (holders, digests) = (class.holders.clone(), class.digests_of(mesh_rank.rank as u32, digests));
        self.then.insert(
            step,
            Then { mesh_rank, holders, digests, losses: self.losses.clone(), is_received: self.is_received },
        );
        if self.then.len() > DISPUTES_MAX {
            self.then.pop_first();
        }
    }

    /// What this rank knows about the dispute of a step that it has repeated, before [`Memory::note_agreement`], with the ranks that
    /// hold the disputed boxes, out of `copies` with these digests; it knows of no holders if it had another rank then.
    pub fn repeated(
        &mut self,
        step: Step,
        mesh_rank: MeshRank,
        copies: &Copies,
        digests: &[u64],
    ) -> (Repeated, Vec<u32>) {
        self.disputed.retain(|disputed| *disputed != step);
        let unknown = Repeated { is_received: self.is_received, ..Repeated::default() };
        self.against_the_first_time(step, mesh_rank, copies, digests).unwrap_or((unknown, Vec::new()))
    }

    fn against_the_first_time(
        &mut self,
        step: Step,
        mesh_rank: MeshRank,
        copies: &Copies,
        digests: &[u64],
    ) -> Option<(Repeated, Vec<u32>)> {
        let then = self.then.remove(&step).filter(|then| then.mesh_rank == mesh_rank)?;
        let now = copies.class_of(&then.holders)?.digests_of(mesh_rank.rank as u32, digests);
        let differs = |(step, bits): &&(Step, u64)| {
            let again = self.losses.iter().find(|(other, _)| other == step);
            again.is_some_and(|(_, now)| now != bits)
        };
        let loss = then.losses.iter().find(differs).map(|(step, _)| *step);
        let is_first = loss.is_some() && loss == then.losses.front().map(|(step, _)| *step);
        let other = |part: &u32| now.get(part) != then.digests.get(part);
        let own = then.digests.contains_key(&0).then(|| other(&0));
        let mut shadows = then.digests.keys().filter(|part| **part > 0).peekable();
        let shadow = shadows.peek().is_some().then(|| shadows.any(other));
        let holders: BTreeSet<u32> = then.holders.iter().map(|holder| holder.rank).collect();
        let is_received = then.is_received || self.is_received;
        Some((Repeated { loss, is_first, is_received, own, shadow }, holders.into_iter().collect()))
    }
}

/// What a rank knows about a dispute once its step is repeated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeated {
    /// The first step whose loss on this rank differs from the first time.
    pub loss: Option<Step>,
    /// Whether this is the first step that the rank remembers.
    pub is_first: bool,
    /// Whether some of its state had come from another rank, the first time or now, and no comparison had agreed with it since.
    pub is_received: bool,
    /// Whether its own copy of the box is other than the first time, if it had one.
    pub own: Option<bool>,
    /// The same for the copies in its shadows.
    pub shadow: Option<bool>,
}

impl Repeated {
    /// Whole numbers below 2^53 that say the same, for an exchange between ranks.
    pub fn encode(self) -> [u64; 3] {
        let flag = |flag: Option<bool>| flag.map_or(0, |differs| 1 + u64::from(differs));
        let loss = self.loss.map_or(0, |step| 2 * step.0 + u64::from(self.is_first));
        [loss, flag(self.own), 2 * flag(self.shadow) + u64::from(self.is_received)]
    }

    /// The inverse of [`Repeated::encode`].
    pub fn decode([loss, own, shadow]: [u64; 3]) -> Repeated {
        let flag = |flag: u64| (flag > 0).then_some(flag > 1);
        let (step, is_first) = (Step(loss / 2), loss % 2 == 1);
        let (loss, is_received) = ((loss > 0).then_some(step), shadow % 2 == 1);
        Repeated { loss, is_first, is_received, own: flag(own), shadow: flag(shadow / 2) }
    }
}

/// The rank whose copy was wrong (`DISPUTE-1`, `DISPUTE-2`): `holders` are the ranks that hold the box, `repeated` what each rank of the
/// mesh knows.
pub fn settle(mesh: &Mesh, step: Step, holders: &[u32], repeated: &[Repeated]) -> Option<u32> {
    if repeated.iter().any(|repeated| repeated.is_received || repeated.is_first) {
        return None;
    }
    let replica = |rank: usize| mesh.coord(rank).on(Axis::DpReplicate);
    let of_replica = |at: usize| {
        let own = repeated.iter().enumerate().filter(|(rank, _)| replica(*rank) == at);
        own.filter_map(|(_, repeated)| repeated.loss).min()
    };
    // A loss of the step comes before the state after it.
    let deviates = |rank: u32| -> Option<Option<(Step, bool)>> {
        let of_rank = repeated.get(rank as usize)?;
        let state = |differs: bool| differs.then_some((step, true));
        let own =
            of_rank.own.map(|differs| of_replica(replica(rank as usize)).map(|at| (at, false)).or(state(differs)));
        let shadow = of_rank.shadow.map(state);
        match (own, shadow) {
            (None, None) => None,
            (own, shadow) => Some(own.flatten().into_iter().chain(shadow.flatten()).min()),
        }
    };
    let all: Vec<(u32, Option<(Step, bool)>)> =
        holders.iter().map(|rank| deviates(*rank).map(|at| (*rank, at))).collect::<Option<_>>()?;
    let first = all.iter().filter_map(|(_, at)| *at).min()?;
    let mut earliest = all.iter().filter(|(_, at)| *at == Some(first));
    match (earliest.next(), earliest.next()) {
        (Some((rank, _)), None) => Some(*rank),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGREES: Repeated =
        Repeated { loss: None, is_first: false, is_received: false, own: Some(false), shadow: None };
    const DIFFERS: Repeated =
        Repeated { loss: None, is_first: false, is_received: false, own: Some(true), shadow: None };

    fn since(step: u64) -> Repeated {
        Repeated { loss: Some(Step(step)), ..DIFFERS }
    }

    fn replicas(repeated: [Repeated; 2]) -> Option<u32> {
        settle(&Mesh { dp_replicate: 2, ..Mesh::ONE }, Step(8), &[0, 1], &repeated)
    }

    #[test]
    fn replica_whose_copy_differs_alone_is_named() {
        assert_eq!(replicas([AGREES, DIFFERS]), Some(1));
        assert_eq!(replicas([DIFFERS, AGREES]), Some(0));
        assert_eq!(replicas([DIFFERS, DIFFERS]), None);
        assert_eq!(replicas([AGREES, AGREES]), None);
    }

    #[test]
    fn replica_whose_loss_differs_first_is_named() {
        assert_eq!(replicas([since(6), since(5)]), Some(1));
        assert_eq!(replicas([since(8), DIFFERS]), Some(0));
        assert_eq!(replicas([since(5), since(5)]), None);
    }

    #[test]
    fn owner_is_named_if_the_loss_differs_and_the_shadow_holder_otherwise() {
        let mesh = Mesh { dp_shard: 2, ..Mesh::ONE };
        let shadow = |differs| Repeated { shadow: Some(differs), ..Repeated::default() };

        // The loss of both ranks deviates, because both compute with the weights of rank 0.
        let polluted = Repeated { loss: Some(Step(5)), ..shadow(true) };
        assert_eq!(settle(&mesh, Step(8), &[0, 1], &[since(5), polluted]), Some(0));
        assert_eq!(settle(&mesh, Step(8), &[0, 1], &[AGREES, shadow(true)]), Some(1));
        assert_eq!(settle(&mesh, Step(8), &[0, 1], &[DIFFERS, shadow(false)]), Some(0));
    }

    #[test]
    fn loss_on_another_rank_of_the_replica_counts() {
        let mesh = Mesh { dp_replicate: 2, tp: 2, ..Mesh::ONE };
        let other = |loss| Repeated { loss, ..Repeated::default() };

        let repeated = [other(Some(Step(6))), DIFFERS, other(Some(Step(5))), DIFFERS];

        assert_eq!(settle(&mesh, Step(8), &[1, 3], &repeated), Some(3));
    }

    #[test]
    fn repeated_losses_and_digests_are_compared_with_the_first_ones() {
        let boxes = BTreeSet::from([7]);
        // Rank 1 has a shadow of rank 0.
        let copies = Copies::new(&[vec![boxes.clone()], vec![BTreeSet::new(), boxes]]);
        let first = [5, 6];
        let repeat = |rank, is_received: bool, losses: [u64; 4], digests| {
            let mesh_rank = MeshRank { rank, ..MeshRank::default() };
            let mut memory = Memory::default();
            if is_received {
                memory.note_received();
            }
            (1..).zip([1, 2, 3, 4]).for_each(|(step, bits)| memory.note_loss(Step(step), bits));
            memory.remember(Step(4), mesh_rank, copies.differing(&first)[0], &first);
            memory.begin(vec![Step(4)]);
            memory.note_agreement();
            (1..).zip(losses).for_each(|(step, bits)| memory.note_loss(Step(step), bits));
            memory.repeated(Step(4), mesh_rank, &copies, digests)
        };

        assert_eq!(repeat(0, false, [1, 2, 3, 4], &[5, 5]), (AGREES, vec![0, 1]));
        assert_eq!(repeat(0, false, [1, 2, 8, 9], &[6, 6]).0, since(3));
        assert_eq!(
            repeat(0, true, [7, 2, 8, 9], &[6, 6]).0,
            Repeated { is_first: true, is_received: true, ..since(1) }
        );
        assert_eq!(repeat(1, false, [1, 2, 3, 4], &[6, 6]).0, Repeated { shadow: Some(false), ..Repeated::default() });
    }

    // DISPUTE-2
    #[test]
    fn rank_that_was_replaced_still_tells_that_its_state_came_from_another_one() {
        let copies = Copies::new(&[vec![BTreeSet::from([7])], vec![BTreeSet::from([7])]]);
        let mut memory = Memory::default();
        memory.note_received();

        let (repeated, holders) = memory.repeated(Step(4), MeshRank::default(), &copies, &[5, 5]);

        assert_eq!((repeated, holders), (Repeated { is_received: true, ..Repeated::default() }, vec![]));
    }

    // DISPUTE-1
    #[test]
    fn nobody_is_named_if_a_holder_was_replaced() {
        assert_eq!(replicas([since(6), Repeated::default()]), None);
    }

    // DISPUTE-2
    #[test]
    fn nobody_is_named_if_a_rank_had_state_from_another_one_that_was_never_compared() {
        assert_eq!(replicas([AGREES, since(5)]), Some(1));
        assert_eq!(replicas([AGREES, Repeated { is_received: true, ..since(5) }]), None);
        assert_eq!(replicas([AGREES, Repeated { is_first: true, ..since(5) }]), None);
    }

    #[test]
    fn exchange_keeps_all_that_a_rank_knows() {
        for repeated in [
            AGREES,
            DIFFERS,
            since(5),
            Repeated { is_received: true, ..since(5) },
            Repeated { is_first: true, ..since(5) },
            Repeated { shadow: Some(false), ..Repeated::default() },
        ] {
            assert_eq!(Repeated::decode(repeated.encode()), repeated);
        }
    }
}
