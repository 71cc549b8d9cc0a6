//! When the copies of a world's state are compared, and what a rank remembers for that.
//!
//! The automatic interval keeps the time of comparisons below [`SHARE_MAX`] of training. All ranks compute it from the same
//! sums, so that they compare after the same steps.

use super::weights::Tensor;
use crate::config::elastic::VerifySteps;
use phalanx_strategies::elastic::copies::{Class, Copies, Holder, name};
use phalanx_strategies::elastic::dispute::Repeated;
use phalanx_strategies::elastic::identity::Step;
use phalanx_strategies::mesh::MeshRank;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Largest share of the time of training that comparisons take.
const SHARE_MAX: f64 = 1e-3;
/// Longest automatic interval, in steps.
const EVERY_MAX: u64 = 1 << 16;
/// Losses that a rank remembers for a dispute, and disputes.
const LOSSES_MAX: usize = 1 << 12;
const DISPUTES_MAX: usize = 8;

/// See the [module](self).
pub(crate) struct Verification {
    steps: VerifySteps,
    /// Steps between comparisons, once known in this world.
    every: Option<u64>,
    /// What the world holds more than once, once known.
    pub(crate) copies: Option<Copies>,
    /// The boxes of each part of this rank's memory: its own state, then its shadows.
    pub(crate) parts: Vec<BTreeMap<u64, Tensor>>,
    /// The outcome of the latest comparison.
    pub(crate) compared: Compared,
    /// Time of the latest exchange.
    pub(crate) exchange_s: f64,
    /// Steps whose copies differed in an earlier world.
    pub(crate) disputed: Vec<Step>,
    /// What this process computed when they differed.
    pub(crate) remembered: BTreeMap<Step, Remembered>,
    /// This rank's part of the loss of each step of this world.
    losses: VecDeque<(u64, u64)>,
}

/// The outcome of a comparison before a save.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Compared {
    /// The fingerprints of the rank's own boxes, by name.
    pub(crate) own: BTreeMap<u64, u64>,
    /// Whether all of the state has other copies, which agree with it.
    pub(crate) is_verified: bool,
    /// The seed of a bit that a test flips in the copy of the state.
    pub(crate) planted: Option<u64>,
}

impl Compared {
    /// The fingerprint of a box, if it was compared.
    pub(crate) fn fingerprint(&self, tensor: &Tensor) -> Option<u64> {
        self.own.get(&name(&tensor.name, &tensor.held.region)).copied()
    }
}

/// What a rank computed before a difference was found.
#[derive(Clone, Debug)]
pub(crate) struct Remembered {
    mesh_rank: MeshRank,
    /// Who holds the boxes whose copies differed, and the digests of this rank's copies.
    holders: Vec<Holder>,
    digests: BTreeMap<u32, u64>,
    losses: VecDeque<(u64, u64)>,
}

impl Verification {
    pub(crate) fn new(steps: VerifySteps) -> Verification {
        Verification {
            steps,
            every: None,
            copies: None,
            parts: Vec::new(),
            compared: Compared::default(),
            exchange_s: 0.0,
            disputed: Vec::new(),
            remembered: BTreeMap::new(),
            // Never grows during a step.
            losses: VecDeque::with_capacity(LOSSES_MAX),
        }
    }

    /// Begins a world, which repeats disputed steps.
    pub(crate) fn begin(&mut self, disputed: Vec<Step>) {
        (self.every, self.copies, self.disputed) = (None, None, disputed);
        (self.parts, self.compared, self.exchange_s) = (Vec::new(), Compared::default(), 0.0);
        self.losses.clear();
    }

    /// Whether copies are ever compared.
    pub(crate) fn is_on(&self) -> bool {
        self.steps != VerifySteps::Every(0)
    }

    /// Whether copies are compared after this step; all ranks agree.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        let every = match self.steps {
            VerifySteps::Every(n) => Some(n),
            VerifySteps::Auto => self.every,
        };
        self.is_on() && (every.is_none_or(|n| step.is_multiple_of(n)) || self.disputed.contains(&Step(step)))
    }

    /// Chooses the interval from the time of a comparison and of a step, both summed over all ranks.
    pub(crate) fn choose(&mut self, compare_s: f64, step_s: f64) {
        let every = (compare_s / step_s / SHARE_MAX).max(1.0).min(EVERY_MAX as f64).ceil() as u64;
        self.every = Some(every.next_power_of_two());
    }

    /// Notes this rank's part of the loss of a step.
    pub(crate) fn note_loss(&mut self, step: u64, bits: u64) {
        if self.losses.len() == LOSSES_MAX {
            self.losses.pop_front();
        }
        self.losses.push_back((step, bits));
    }

    /// Remembers what this rank computed, for the repetition of a step after which the copies of a class differed.
    pub(crate) fn remember(&mut self, step: u64, mesh_rank: MeshRank, class: &Class, digests: &[u64]) {
        let (holders, digests) = (class.holders.clone(), class.digests_of(mesh_rank.rank as u32, digests));
        let remembered = Remembered { mesh_rank, holders, digests, losses: self.losses.clone() };
        self.remembered.insert(Step(step), remembered);
        if self.remembered.len() > DISPUTES_MAX {
            self.remembered.pop_first();
        }
    }

    /// What this rank knows about the dispute of a step that it has repeated, with the ranks that hold the disputed boxes, out
    /// of `copies` with these digests.
    pub(crate) fn repeated(
        &mut self,
        step: u64,
        mesh_rank: MeshRank,
        copies: &Copies,
        digests: &[u64],
    ) -> Option<(Repeated, Vec<u32>)> {
        self.disputed.retain(|disputed| disputed.0 != step);
        let then = self.remembered.remove(&Step(step)).filter(|then| then.mesh_rank == mesh_rank)?;
        let now = copies.class_of(&then.holders)?.digests_of(mesh_rank.rank as u32, digests);
        let differs = |(step, bits): &&(u64, u64)| {
            let again = self.losses.iter().find(|(other, _)| other == step);
            again.is_some_and(|(_, now)| now != bits)
        };
        let loss = then.losses.iter().find(differs).map(|(step, _)| Step(*step));
        let other = |part: &u32| now.get(part) != then.digests.get(part);
        let own = then.digests.contains_key(&0).then(|| other(&0));
        let mut shadows = then.digests.keys().filter(|part| **part > 0).peekable();
        let shadow = shadows.peek().is_some().then(|| shadows.any(other));
        let holders: BTreeSet<u32> = then.holders.iter().map(|holder| holder.rank).collect();
        Some((Repeated { loss, own, shadow }, holders.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn automatic_interval_keeps_comparisons_below_a_thousandth() {
        let mut verification = Verification::new(VerifySteps::Auto);
        assert!(verification.is_due(3), "the first step of a world measures the time");

        for (compare_s, step_s, every) in [(1e-6, 1.0, 1), (2e-3, 1.0, 2), (3e-3, 1.0, 4), (1.0, 1e-9, EVERY_MAX)] {
            verification.choose(compare_s, step_s);
            let due: Vec<u64> = (1..=2 * every).filter(|step| verification.is_due(*step)).collect();
            assert_eq!(due, [every, 2 * every]);
        }
    }

    #[test]
    fn disputed_step_is_compared_in_any_case() {
        let mut verification = Verification::new(VerifySteps::Every(10));

        verification.begin(vec![Step(7)]);

        assert_eq!((1..=20).filter(|step| verification.is_due(*step)).collect::<Vec<_>>(), [7, 10, 20]);
        assert!(!Verification::new(VerifySteps::Every(0)).is_due(0));
    }

    #[test]
    fn repeated_losses_and_digests_are_compared_with_the_first_ones() {
        let boxes = BTreeSet::from([7]);
        // Rank 1 has a shadow of rank 0.
        let copies = Copies::new(&[vec![boxes.clone()], vec![BTreeSet::new(), boxes]]);
        let first = [5, 6];
        let repeat = |rank, losses: [u64; 4], digests| {
            let mesh_rank = MeshRank { rank, ..MeshRank::default() };
            let mut verification = Verification::new(VerifySteps::Auto);
            (1..).zip([1, 2, 3, 4]).for_each(|(step, bits)| verification.note_loss(step, bits));
            verification.remember(4, mesh_rank, copies.differing(&first)[0], &first);
            verification.begin(vec![Step(4)]);
            (1..).zip(losses).for_each(|(step, bits)| verification.note_loss(step, bits));
            verification.repeated(4, mesh_rank, &copies, digests).unwrap()
        };

        let agrees = Repeated { loss: None, own: Some(false), shadow: None };
        assert_eq!(repeat(0, [1, 2, 3, 4], &[5, 5]), (agrees, vec![0, 1]));
        assert_eq!(repeat(0, [1, 2, 8, 9], &[6, 6]).0, Repeated { loss: Some(Step(3)), own: Some(true), shadow: None });
        assert_eq!(repeat(1, [1, 2, 3, 4], &[6, 6]).0, Repeated { loss: None, own: None, shadow: Some(false) });
    }
}
