//! Which pieces of state exist more than once in a world, and whether their copies agree.
//!
//! A piece is a box of a tensor: a parameter, or a tensor of the optimizer's state. Whoever holds the same box must have the
//! same bits: replicas along `dp_replicate`, shadows, copies of norms on tensor-parallel ranks, a tied embedding on two
//! stages. One rule covers all of them, because it looks only at the names of the boxes.
//!
//! The ranks exchange the names of their boxes once per world. From then on, a comparison takes one number per holder and
//! *class*, the boxes that have the same holders: the sum of their named fingerprints. Only if a class differs do the ranks
//! exchange the fingerprints of its boxes.
//!
//! Invariants:
//! - `COPIES-1` Every rank computes the same classes, the same outcome and the same difference from the same exchange.
//! - `COPIES-2` A rank is suspected only if more than half of all copies contradict it, and more than half of the independent
//!   ones. State that came from another rank and has not been compared since is not independent: it may have brought a wrong
//!   bit with it, so it proves nothing, and nothing is proven against it.

use super::fingerprint::named;
use super::identity::Step;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A holder of copies: a rank with its own state, or with one of its shadows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// The rank.
    pub rank: u32,
    /// 0 for its own state, then the number of the shadow.
    pub part: u32,
}

/// The boxes that have the same holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    /// Who holds them, in order.
    pub holders: Vec<Holder>,
    /// Their names.
    pub boxes: BTreeSet<u64>,
    /// The place of the first holder's digest among all digests.
    first: usize,
}

/// All pieces that a world holds more than once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    classes: Vec<Class>,
    is_complete: bool,
}

impl Copies {
    /// The copies in a world whose ranks hold these boxes, by rank and part; a box is named by [`name`].
    pub fn new(held: &[Vec<BTreeSet<u64>>]) -> Copies {
        let mut holders_of: BTreeMap<u64, Vec<Holder>> = BTreeMap::new();
        for (rank, parts) in (0..).zip(held) {
            for (part, boxes) in (0..).zip(parts) {
                boxes.iter().for_each(|name| holders_of.entry(*name).or_default().push(Holder { rank, part }));
            }
        }
        let is_complete = holders_of.values().all(|holders| holders.len() > 1);
        let mut boxes_of: BTreeMap<Vec<Holder>, BTreeSet<u64>> = BTreeMap::new();
        for (name, holders) in holders_of.into_iter().filter(|(_, holders)| holders.len() > 1) {
            boxes_of.entry(holders).or_default().insert(name);
        }
        let mut first = 0;
        let class = |(holders, boxes): (Vec<Holder>, _)| {
            let class = Class { first, boxes, holders };
            first += class.holders.len();
            class
        };
        Copies { classes: boxes_of.into_iter().map(class).collect(), is_complete }
    }

    /// Number of digests in a comparison, those of all ranks together; 0 if nothing is held twice.
    pub fn n_digests(&self) -> usize {
        self.classes.last().map_or(0, |class| class.first + class.holders.len())
    }

    /// Whether every piece of the state is held more than once, so that agreement verifies all of it.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// The boxes of a part that have other copies.
    pub fn boxes(&self, holder: Holder) -> impl Iterator<Item = u64> {
        let own = self.classes.iter().filter(move |class| class.holders.contains(&holder));
        own.flat_map(|class| class.boxes.iter().copied())
    }

    /// The digests of one rank, with their places; `fingerprint` returns the fingerprint of a box in a part of its memory.
    pub fn digests(&self, rank: u32, fingerprint: impl Fn(u32, u64) -> u64) -> Vec<(usize, u64)> {
        let mut digests = Vec::new();
        for class in &self.classes {
            for (i, holder) in class.holders.iter().enumerate().filter(|(_, holder)| holder.rank == rank) {
                let of_box = |name: &u64| named(*name, fingerprint(holder.part, *name));
                let sum = class.boxes.iter().map(of_box).fold(0, u64::wrapping_add);
                digests.push((class.first + i, sum));
            }
        }
        digests
    }

    /// The classes whose digests differ, out of [`Copies::n_digests`].
    pub fn differing(&self, digests: &[u64]) -> Vec<&Class> {
        let differs = |class: &&Class| {
            let own = &digests[class.first..class.first + class.holders.len()];
            own.iter().any(|digest| *digest != own[0])
        };
        self.classes.iter().filter(differs).collect()
    }

    /// The class with these holders.
    pub fn class_of(&self, holders: &[Holder]) -> Option<&Class> {
        self.classes.iter().find(|class| class.holders == holders)
    }
}

impl Class {
    /// The digests of a rank's parts, out of [`Copies::n_digests`].
    pub fn digests_of(&self, rank: u32, digests: &[u64]) -> BTreeMap<u32, u64> {
        let here = self.holders.iter().zip(&digests[self.first..]);
        here.filter(|(holder, _)| holder.rank == rank).map(|(holder, digest)| (holder.part, *digest)).collect()
    }
}

/// The name of a box of a tensor.
pub fn name(tensor: &str, region: &crate::boxes::TensorBox) -> u64 {
    let numbers = region.offset.iter().chain(&region.extent).map(|n| *n as u64);
    let of_text = crate::rng::CounterRng::new(0).fork_named(tensor).bits(0);
    numbers.fold(of_text, named)
}

/// The fingerprint of a copy of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Claim {
    /// The holder of the copy.
    pub holder: Holder,
    /// Its fingerprint.
    pub value: u64,
}

/// Copies of one box that differ: what every rank of the world reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The step after which the copies were compared.
    pub step: Step,
    /// The tensor; at most [`TENSOR_LEN_MAX`] bytes.
    pub tensor: String,
    /// The name of the box.
    pub name: u64,
    /// Ranks that more than half of all copies contradict (`COPIES-2`), at most [`CLAIMS_MAX`]; none if there is no majority.
    pub suspects: Vec<u32>,
    /// The fingerprints, those with the fewest copies first, at most [`CLAIMS_MAX`].
    pub claims: Vec<Claim>,
}

/// Longest name of a tensor in a report, in bytes.
pub const TENSOR_LEN_MAX: usize = 256;
/// Most fingerprints and suspects in a report.
pub const CLAIMS_MAX: usize = 64;

/// A copy of a box, as exchanged after a difference was found.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Copy {
    /// The name of the box.
    pub name: u64,
    /// The tensor.
    pub tensor: String,
    /// The holder and its fingerprint.
    pub claim: Claim,
    /// Whether the holder's state came from another rank, and no comparison has agreed with it since.
    pub is_received: bool,
}

impl Difference {
    /// The difference to report, from all copies of all boxes in doubt: a box with a majority if there is one, because it names
    /// the rank that deviates.
    pub fn among(step: Step, copies: Vec<Copy>) -> Option<Difference> {
        let mut boxes: BTreeMap<u64, Vec<Copy>> = BTreeMap::new();
        for copy in copies {
            boxes.entry(copy.name).or_default().push(copy);
        }
        let differs = |copies: &Vec<Copy>| copies.iter().any(|copy| copy.claim.value != copies[0].claim.value);
        let found: Vec<Difference> = boxes.into_values().filter(differs).map(|copies| of_box(step, &copies)).collect();
        let named = found.iter().position(|difference| !difference.suspects.is_empty());
        found.into_iter().nth(named.unwrap_or(0))
    }

    /// Whether the report keeps its limits.
    pub fn is_bounded(&self) -> bool {
        self.tensor.len() <= TENSOR_LEN_MAX && self.suspects.len() <= CLAIMS_MAX && self.claims.len() <= CLAIMS_MAX
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "copies of `{}` differ after {}: ", self.tensor, self.step)?;
        let list = |ranks: &[u32]| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        if !self.suspects.is_empty() {
            return write!(f, "most of them contradict rank {}", list(&self.suspects));
        }
        let holders: BTreeSet<u32> = self.claims.iter().map(|claim| claim.holder.rank).collect();
        let holders: Vec<u32> = holders.into_iter().collect();
        write!(f, "ranks {} hold one each, and none has a majority", list(&holders))
    }
}

/// The difference between copies of one box, of which there is at least one.
fn of_box(step: Step, copies: &[Copy]) -> Difference {
    let mut claims: Vec<Claim> = copies.iter().map(|copy| copy.claim).collect();
    let independent: Vec<Claim> = copies.iter().filter(|copy| !copy.is_received).map(|copy| copy.claim).collect();
    let majority = majority(&claims).filter(|value| majority(&independent) == Some(*value));
    let deviates = |claim: &&Claim| majority.is_some_and(|value| value != claim.value);
    let suspects: BTreeSet<u32> = independent.iter().filter(deviates).map(|claim| claim.holder.rank).collect();
    let counts = counts(&claims);
    claims.sort_by_key(|claim| (counts[&claim.value], claim.value, claim.holder));
    claims.truncate(CLAIMS_MAX);
    let mut tensor = copies[0].tensor.clone();
    tensor.truncate(tensor.floor_char_boundary(TENSOR_LEN_MAX));
    let suspects = suspects.into_iter().take(CLAIMS_MAX).collect();
    Difference { step, tensor, name: copies[0].name, suspects, claims }
}

/// How many claims there are for each value.
fn counts(claims: &[Claim]) -> BTreeMap<u64, usize> {
    let mut counts = BTreeMap::new();
    claims.iter().for_each(|claim| *counts.entry(claim.value).or_default() += 1);
    counts
}

/// The value of more than half of the claims.
fn majority(claims: &[Claim]) -> Option<u64> {
    counts(claims).into_iter().find(|(_, n)| n * 2 > claims.len()).map(|(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boxes::TensorBox;

    fn held(parts: &[&[&[u64]]]) -> Vec<Vec<BTreeSet<u64>>> {
        parts.iter().map(|parts| parts.iter().map(|boxes| boxes.iter().copied().collect()).collect()).collect()
    }

    fn compare(copies: &Copies, n_ranks: u32, fingerprint: impl Fn(Holder, u64) -> u64) -> BTreeSet<u64> {
        let mut all = vec![0; copies.n_digests()];
        for rank in 0..n_ranks {
            for (at, digest) in copies.digests(rank, |part, name| fingerprint(Holder { rank, part }, name)) {
                all[at] = digest;
            }
        }
        copies.differing(&all).into_iter().flat_map(|class| class.boxes.iter().copied()).collect()
    }

    fn claims(values: &[u64]) -> Vec<Copy> {
        let holder = |rank| Holder { rank, part: 0 };
        let copy = |(rank, value): (u32, &u64)| {
            let claim = Claim { holder: holder(rank), value: *value };
            Copy { name: 7, tensor: "w".into(), claim, is_received: false }
        };
        (0..).zip(values).map(copy).collect()
    }

    #[test]
    fn replica_shadow_and_copied_norm_are_compared_by_one_rule() {
        // Box 1 is on both ranks; 2 and 3 are the ranks' own, each with a shadow on the other; 4 has one copy.
        let copies = Copies::new(&held(&[&[&[1, 2, 4], &[3]], &[&[1, 3], &[2]]]));

        assert_eq!(copies.n_digests(), 6);
        assert!(!copies.is_complete());
        assert_eq!(copies.boxes(Holder { rank: 0, part: 1 }).collect::<Vec<_>>(), [3]);
        assert_eq!(compare(&copies, 2, |_, name| name * 10), BTreeSet::new());
        for (flipped, name) in [((0, 0), 1), ((1, 0), 1), ((0, 0), 2), ((1, 1), 2), ((0, 1), 3)] {
            let is_it = |holder: Holder, of| (holder.rank, holder.part) == flipped && of == name;
            let found = compare(&copies, 2, |holder, of| of * 10 + u64::from(is_it(holder, of)));
            assert_eq!(found, BTreeSet::from([name]));
        }
    }

    #[test]
    fn difference_in_a_box_with_a_single_copy_is_never_found() {
        let copies = Copies::new(&held(&[&[&[1]], &[&[2]]]));

        assert_eq!((copies.n_digests(), copies.is_complete()), (0, false));
        assert!(copies.differing(&[]).is_empty());
        assert!(Copies::new(&held(&[&[&[1]], &[&[1]]])).is_complete());
    }

    // COPIES-2
    #[test]
    fn rank_is_suspected_only_by_a_majority_of_the_copies() {
        let suspects = |values: &[u64]| Difference::among(Step(3), claims(values)).map(|found| found.suspects);

        assert_eq!(suspects(&[5, 5, 5]), None);
        assert_eq!(suspects(&[5, 6]), Some(vec![]));
        assert_eq!(suspects(&[5, 6, 5]), Some(vec![1]));
        assert_eq!(suspects(&[5, 6, 6, 5]), Some(vec![]));
        assert_eq!(suspects(&[4, 6, 6, 6, 5]), Some(vec![0, 4]));
    }

    // COPIES-2
    #[test]
    fn state_that_came_from_another_rank_neither_names_a_rank_nor_is_named() {
        let suspects = |values: &[u64], received: &[usize]| {
            let mut copies = claims(values);
            received.iter().for_each(|at| copies[*at].is_received = true);
            Difference::among(Step(3), copies).map(|found| found.suspects)
        };

        // The wrong rank 2 has passed its state on to rank 0.
        assert_eq!(suspects(&[6, 5, 6], &[0]), Some(vec![]));
        assert_eq!(suspects(&[6, 5, 5, 5, 6], &[0]), Some(vec![4]));
        // It has died since.
        assert_eq!(suspects(&[6, 5, 5], &[0]), Some(vec![]));
        assert_eq!(suspects(&[5, 5, 6], &[0]), Some(vec![]));
        assert_eq!(suspects(&[5, 5, 5, 6], &[0]), Some(vec![3]));
        assert_eq!(suspects(&[5, 5, 6], &[0, 1]), Some(vec![]));
    }

    #[test]
    fn report_is_bounded_and_keeps_the_rare_values() {
        let mut values = vec![8; 3 * CLAIMS_MAX];
        values[100] = 9;

        let found = Difference::among(Step(3), claims(&values)).unwrap();

        assert!(found.is_bounded());
        assert_eq!((found.claims[0].holder.rank, found.suspects), (100, vec![100]));
    }

    #[test]
    fn boxes_of_a_tensor_have_their_own_names() {
        let region = |from, n| TensorBox { offset: vec![from], extent: vec![n] };
        let names = [("w", region(0, 4)), ("w", region(4, 4)), ("w", region(4, 0)), ("v", region(0, 4))];

        let distinct: BTreeSet<u64> = names.iter().map(|(tensor, region)| name(tensor, region)).collect();

        assert_eq!(distinct.len(), names.len());
    }
}
