//! The geometry against plain indexing, element by element.

use super::*;
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::{BTreeMap, BTreeSet};

fn tensor_box(offset: &[usize], extent: &[usize]) -> TensorBox {
    TensorBox { offset: offset.to_vec(), extent: extent.to_vec() }
}

/// Positions of the elements of a box, in row-major order.
fn positions(of: &TensorBox) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for (offset, extent) in of.offset.iter().zip(&of.extent) {
        let along = *offset..offset + extent;
        all = all.iter().flat_map(|outer| along.clone().map(move |at| [&outer[..], &[at]].concat())).collect();
    }
    all
}

/// Index of each position among the elements of a box.
fn places(of: &TensorBox) -> BTreeMap<Vec<usize>, usize> {
    positions(of).into_iter().zip(0..).collect()
}

/// A box with `n_dims` dims.
fn any_box(n_dims: usize) -> impl Strategy<Value = TensorBox> {
    prop::collection::vec((0usize..4, 1usize..4), n_dims).prop_map(|dims| {
        let (offset, extent) = dims.into_iter().unzip();
        TensorBox { offset, extent }
    })
}

fn two_boxes() -> impl Strategy<Value = (TensorBox, TensorBox)> {
    (0usize..4).prop_flat_map(|n_dims| (any_box(n_dims), any_box(n_dims)))
}

/// A box that contains `inner`, with up to `more` positions added on each side of each dim.
fn around(inner: &TensorBox, more: &[(usize, usize)]) -> TensorBox {
    let mut outer = inner.clone();
    for (dim, (before, behind)) in more.iter().enumerate().take(inner.offset.len()) {
        let before = before.min(&inner.offset[dim]);
        outer.offset[dim] -= before;
        outer.extent[dim] += before + behind;
    }
    outer
}

#[test]
fn whole_rows_form_one_run_and_columns_form_one_run_per_row() {
    let (stored, rows, columns) =
        (tensor_box(&[2, 0], &[4, 8]), tensor_box(&[3, 0], &[3, 8]), tensor_box(&[4, 6], &[2, 2]));

    let of_rows: Vec<Run> = rows.runs(&stored, &tensor_box(&[3, 0], &[9, 8])).collect();
    let of_columns: Vec<Run> = columns.runs(&stored, &columns).collect();

    assert_eq!(of_rows, [Run { from: 8, to: 0, len: 24 }]);
    assert_eq!(of_columns, [Run { from: 22, to: 0, len: 2 }, Run { from: 30, to: 2, len: 2 }]);
}

#[test]
fn intersection_is_empty_for_mismatched_dims_and_clipped_for_oversized_boxes() {
    let held = tensor_box(&[1, 0], &[2, 6]);
    let (large, far) = (tensor_box(&[2, 1], &[usize::MAX; 2]), tensor_box(&[2, usize::MAX], &[1, 7]));

    for other in [tensor_box(&[1], &[2]), tensor_box(&[1, 0, 0], &[2, 6, 1]), tensor_box(&[1, 0], &[2]), far] {
        assert_eq!(held.intersection(&other), None);
        assert_eq!(held.without(&other), std::slice::from_ref(&held));
    }
    assert_eq!(held.intersection(&large), Some(tensor_box(&[2, 1], &[1, 5])));
    assert_eq!(large.without(&held).iter().filter(|part| part.intersection(&held).is_some()).count(), 0);
    assert_eq!((large.n_elements_checked(), large.fits_in(&[usize::MAX; 2])), (None, false));
    assert!(held.fits_in(&[3, 6]) && !held.fits_in(&[3, 5]) && !held.fits_in(&[3]));
}

#[test]

fn run_over_rows_splits_into_a_partial_row_full_rows_and_a_partial_row() {
    let boxes = TensorBox::whole(&[4, 6]).boxes_of_run(3..20);

    assert_eq!(boxes, [tensor_box(&[0, 3], &[1, 3]), tensor_box(&[1, 0], &[2, 6]), tensor_box(&[3, 0], &[1, 2])]);
}

#[test]
fn runs_of_scalars_empty_tensors_and_huge_tensors_become_boxes() {
    assert_eq!(TensorBox::whole(&[]).boxes_of_run(0..1), [TensorBox::whole(&[])]);
    assert_eq!(TensorBox::whole(&[]).boxes_of_run(1..1), []);
    assert_eq!(TensorBox::whole(&[0, 3]).boxes_of_run(0..0), []);
    assert_eq!(TensorBox::whole(&[1 << 40, 1 << 20]).boxes_of_run(1 << 59..1 << 60).len(), 1);
}

/// Whether the elements `run` of a box form a box, by comparison with their bounding box.
fn is_box(whole: &TensorBox, run: Range<usize>) -> bool {
    let all = positions(whole);
    let wanted: BTreeSet<&Vec<usize>> = all[run].iter().collect();
    let (Some(first), Some(last)) = (wanted.first(), wanted.last()) else { return false };
    let extent = first.iter().zip(*last).map(|(a, b)| (b + 1).checked_sub(*a));
    let Some(extent) = extent.collect::<Option<Vec<usize>>>() else { return false };
    extent.iter().product::<usize>() == wanted.len()
        && positions(&tensor_box(first, &extent)).iter().all(|position| wanted.contains(position))
}

proptest! {
    #[test]
    fn intersection_and_difference_partition_a_box((a, b) in two_boxes()) {
        let (in_a, in_b) = (positions(&a), places(&b));

        let common = a.intersection(&b);
        let rest = a.without(&b);

        let (shared, alone): (Vec<_>, Vec<_>) = in_a.into_iter().partition(|position| in_b.contains_key(position));
        prop_assert_eq!(common.iter().flat_map(positions).collect::<Vec<_>>(), shared);
        let mut left: Vec<Vec<usize>> = rest.iter().flat_map(positions).collect();
        left.sort();
        prop_assert_eq!(left, alone);
        prop_assert!(rest.len() <= (2 * a.offset.len()).max(1));
        prop_assert_eq!(b.intersection(&a), common);
    }

    #[test]
    fn runs_copy_each_element_of_a_box_in_the_fewest_pieces(
        inner in (0usize..4).prop_flat_map(any_box),
        more in prop::collection::vec((0usize..2, 0usize..2), 3),
        more_to in prop::collection::vec((0usize..2, 0usize..2), 3),
    ) {
        let (from, to) = (around(&inner, &more), around(&inner, &more_to));

        let runs: Vec<Run> = inner.runs(&from, &to).collect();

        let (in_from, in_to) = (places(&from), places(&to));
        let expected: Vec<(usize, usize)> = positions(&inner).iter().map(|at| (in_from[at], in_to[at])).collect();
        let copied: Vec<(usize, usize)> = runs.iter().flat_map(|run| run.in_from().zip(run.in_to())).collect();
        prop_assert_eq!(copied, expected);
        let joined = |pair: &[Run]| pair[0].in_from().end == pair[1].from && pair[0].in_to().end == pair[1].to;
        prop_assert!(!runs.windows(2).any(joined), "{:?}", runs);
    }

    #[test]
    fn boxes_of_a_run_cover_its_elements_in_order_and_are_the_fewest(
        whole in (0usize..4).prop_flat_map(any_box), a: Index, b: Index,
    ) {
        let all = positions(&whole);
        let (a, b) = (a.index(all.len() + 1), b.index(all.len() + 1));
        let run = a.min(b)..a.max(b);

        let boxes = whole.boxes_of_run(run.clone());

        prop_assert_eq!(&boxes.iter().flat_map(positions).collect::<Vec<_>>()[..], &all[run.clone()]);
        // The fewest boxes up to each element, over all ways to cut the run into boxes.
        let mut fewest = vec![0usize; run.len() + 1];
        for end in 1..fewest.len() {
            let last = |start: &usize| is_box(&whole, run.start + *start..run.start + end);
            fewest[end] = 1 + (0..end).filter(last).map(|start| fewest[start]).min().unwrap();
        }
        prop_assert_eq!(boxes.len(), fewest[run.len()]);
    }

    #[test]
    fn boxes_of_consecutive_runs_tile_the_tensor(
        shape in prop::collection::vec(1usize..5, 0..4), ends in prop::collection::vec(any::<Index>(), 0..4),
    ) {
        let whole = TensorBox::whole(&shape);
        let mut ends: Vec<usize> = ends.iter().map(|end| end.index(whole.n_elements() + 1)).collect();
        ends.sort_unstable();
        ends.push(whole.n_elements());
        let starts = std::iter::once(0).chain(ends.clone());

        let boxes: Vec<TensorBox> = starts.zip(ends).flat_map(|(start, end)| whole.boxes_of_run(start..end)).collect();

        prop_assert!(tiling::tiles_exactly(&shape, &boxes));
    }
}
