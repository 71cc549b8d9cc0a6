//! The missing regions of a member's state: boxes of tensors, removed as they arrive.
//!
//! Senders may hold the same elements (norms in all tensor shards, copied key/value heads, an embedding of two stages).
//! Each sender is asked only for elements that no earlier sender had, so every element is counted once. Senders with
//! identical state are asked for equal amounts, to within one element.

use crate::train::weights::Tensor;
use phalanx_device::parts::part;
use phalanx_strategies::boxes::TensorBox;
use phalanx_strategies::elastic::recovery::Share;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A box of a tensor. The tensor is identified by its index in a list that both sides have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Piece {
    pub(crate) tensor: usize,
    pub(crate) region: TensorBox,
}

#[derive(Clone, Debug)]
pub(crate) struct MissingRegions {
    /// The tensors that the pieces belong to.
    pub(crate) tensors: Vec<Tensor>,
    pieces: Vec<Piece>,
}

impl MissingRegions {
    /// All of these tensors.
    pub(crate) fn all(tensors: Vec<Tensor>) -> MissingRegions {
        let whole = |(tensor, t): (usize, &Tensor)| Piece { tensor, region: t.held.region.clone() };
        let pieces = tensors.iter().enumerate().map(whole).collect();
        MissingRegions { tensors, pieces }
    }

    /// The missing boxes; no two overlap, unless their tensors do.
    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Number of missing elements.
    pub(crate) fn n_elements(&self) -> usize {
        self.pieces.iter().map(Piece::n_elements).sum()
    }

    /// Removes a received box. Returns whether all of it was missing; otherwise nothing has changed.
    #[must_use]
    pub(crate) fn came(&mut self, piece: &Piece) -> bool {
        let of_tensor =
            self.pieces.iter().enumerate().filter(|(_, missing_regions)| missing_regions.tensor == piece.tensor);
        let common =
            |(at, missing_regions): (usize, &Piece)| Some((at, missing_regions.region.intersection(&piece.region)?));
        let common: Vec<(usize, TensorBox)> = of_tensor.filter_map(common).collect();
        let n_missing: usize = common.iter().map(|(_, common)| common.n_elements()).sum();
        // Missing boxes are disjoint, so their intersections with the piece add up.
        if n_missing == 0 || piece.region.n_elements_checked() != Some(n_missing) {
            return false;
        }
        for (at, common) in common.into_iter().rev() {
            let Piece { tensor, region } = self.pieces.swap_remove(at);
            self.pieces.extend(region.without(&common).into_iter().map(|region| Piece { tensor, region }));
        }
        true
    }
}

impl Piece {
    pub(crate) fn n_elements(&self) -> usize {
        self.region.n_elements()
    }
}

/// A tensor name and a box of that tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) piece: Piece,
}

/// Intersects held tensors with the wanted boxes. If two tensors have the same elements, the first one provides them.
pub(crate) fn found<'a>(held: &'a [Tensor], wanted: &[Named]) -> Vec<(&'a Tensor, Piece)> {
    let mut by_name: BTreeMap<&str, Vec<&Tensor>> = BTreeMap::new();
    for tensor in held {
        by_name.entry(&tensor.name).or_default().push(tensor);
    }
    let mut found = Vec::new();
    for Named { name, piece } in wanted {
        let mut left = vec![piece.region.clone()];
        for tensor in by_name.get(name.as_str()).into_iter().flatten() {
            let parts = left.iter().filter_map(|part| tensor.held.region.intersection(part));
            found.extend(parts.map(|region| (*tensor, Piece { tensor: piece.tensor, region })));
            left = left.iter().flat_map(|part| part.without(&tensor.held.region)).collect();
        }
    }
    found
}

/// One sender's share of the found boxes, as if they formed one row. The share must be valid.
pub(crate) fn share_of(found: Vec<(&Tensor, Piece)>, share: Share) -> Vec<(&Tensor, Piece)> {
    let n_elements = found.iter().map(|(_, piece)| piece.n_elements()).sum();
    let own = part(n_elements, 1, share.n_parts, share.part);
    let mut before = 0;
    let mut given = Vec::new();
    for (tensor, piece) in found {
        let here = before..before + piece.n_elements();
        before = here.end;
        let run = own.start.clamp(here.start, here.end) - here.start..own.end.clamp(here.start, here.end) - here.start;
        let boxes = piece.region.boxes_of_run(run);
        given.extend(boxes.into_iter().map(|region| (tensor, Piece { tensor: piece.tensor, region })));
    }
    given
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_strategies::program::ValueId;
    use phalanx_strategies::program::held_box::HeldBox;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn tensor(name: &str, shape: &[usize], offset: &[usize], extent: &[usize]) -> Tensor {
        let region = TensorBox { offset: offset.to_vec(), extent: extent.to_vec() };
        let (name_there, stored) = (name.into(), region.clone());
        let held = HeldBox { name: name_there, shape: shape.to_vec(), region, stored, start: 0, owned: true };
        let elements = 0..held.n_elements();
        Tensor { name: name.into(), shape: shape.to_vec(), value: ValueId(0), elements, trainable: true, held }
    }

    fn named(missing_regions: &MissingRegions) -> Vec<Named> {
        let of =
            |piece: &Piece| Named { name: missing_regions.tensors[piece.tensor].name.clone(), piece: piece.clone() };
        missing_regions.pieces().iter().map(of).collect()
    }

    fn positions(piece: &Piece) -> Vec<(usize, usize)> {
        let along = |dim: usize| piece.region.offset[dim]..piece.region.offset[dim] + piece.region.extent[dim];
        along(0).flat_map(|r| along(1).map(move |c| (r, c))).collect()
    }

    proptest! {
        #[test]
        fn each_element_arrives_once_and_elements_without_a_holder_stay_missing(
            senders in prop::collection::vec(prop::collection::vec((0usize..6, 0usize..6, 1usize..7, 1usize..7), 0..3), 0..5),
        ) {
            let shape = [6, 6];
            let mut missing_regions = MissingRegions::all(vec![tensor("w", &shape, &[1, 0], &[5, 6])]);
            let mut came: Vec<(usize, usize)> = Vec::new();
            let mut had: BTreeSet<(usize, usize)> = BTreeSet::new();

            for sender in &senders {
                let cut = |(r, c, h, w): &(usize, usize, usize, usize)| {
                    tensor("w", &shape, &[*r, *c], &[(*h).min(6 - r), (*w).min(6 - c)])
                };
                let held: Vec<Tensor> = sender.iter().map(cut).collect();
                for t in &held {
                    had.extend(positions(&Piece { tensor: 0, region: t.held.region.clone() }));
                }
                for (_, piece) in found(&held, &named(&missing_regions)) {
                    prop_assert!(missing_regions.came(&piece));
                    came.extend(positions(&piece));
                }
            }

            had.retain(|(row, _)| *row >= 1);
            prop_assert_eq!(came.len(), had.len(), "{:?}", came);
            prop_assert_eq!(came.into_iter().collect::<BTreeSet<_>>(), had.clone());
            prop_assert_eq!(missing_regions.n_elements(), 30 - had.len());
        }
    }

    proptest! {
        #[test]
        fn shares_are_equal_in_size_and_cover_all_found_elements(
            boxes in prop::collection::vec((0usize..6, 0usize..6, 1usize..7, 1usize..7), 1..4), n_parts in 1u32..5,
        ) {
            let shape = [6, 6];
            let cut = |(r, c, h, w): &(usize, usize, usize, usize)| {
                tensor("w", &shape, &[*r, *c], &[(*h).min(6 - r), (*w).min(6 - c)])
            };
            let held: Vec<Tensor> = boxes.iter().map(cut).collect();
            let mut missing_regions = MissingRegions::all(vec![tensor("w", &shape, &[0, 0], &[6, 6])]);
            let wanted = named(&missing_regions);
            let all: BTreeSet<_> = found(&held, &wanted).iter().flat_map(|(_, piece)| positions(piece)).collect();

            let mut came: BTreeSet<(usize, usize)> = BTreeSet::new();
            for part in 0..n_parts {
                let given = share_of(found(&held, &wanted), Share { part, n_parts });

                let n = given.iter().map(|(_, piece)| piece.n_elements()).sum::<usize>();
                prop_assert!([0, 1].contains(&(n - all.len() / n_parts as usize)), "{} of {}", n, all.len());
                for (tensor, piece) in given {
                    let held = positions(&Piece { tensor: 0, region: tensor.held.region.clone() });
                    prop_assert!(positions(&piece).iter().all(|position| held.contains(position)));
                    prop_assert!(missing_regions.came(&piece), "{:?} comes twice", piece);
                    came.extend(positions(&piece));
                }
            }
            prop_assert_eq!(came, all);
        }
    }

    #[test]
    fn regions_that_were_not_missing_are_rejected() {
        let mut missing_regions =
            MissingRegions::all(vec![tensor("w", &[4, 4], &[0, 0], &[2, 4]), tensor("b", &[], &[], &[])]);
        let row = |r, n| Piece { tensor: 0, region: TensorBox { offset: vec![r, 0], extent: vec![n, 4] } };
        let scalar = Piece { tensor: 1, region: TensorBox::whole(&[]) };

        assert!(missing_regions.came(&row(0, 1)) && missing_regions.came(&scalar));
        let again = [row(0, 1), row(1, 2), row(usize::MAX, 2), scalar.clone(), Piece { tensor: 2, ..scalar }];
        assert!(again.iter().all(|piece| !missing_regions.came(piece)));

        assert_eq!(missing_regions.pieces(), [row(1, 1)]);
    }
}
