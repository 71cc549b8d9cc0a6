//! Whether boxes cover a tensor exactly once.
//!
//! Boxes that do not overlap and whose volumes add up to the tensor's volume leave no hole. A sweep checks very many boxes
//! for overlap: along one dim, boxes fall into groups whose intervals do not touch, and only boxes of one group can
//! overlap; each group is then swept along the next dim, and so on. Two or three sweeps separate rows, columns, grids and
//! flat runs of elements; a group that no dim separates is compared pair by pair.

use super::TensorBox;

/// Maximum number of box visits; beyond it the answer is no. Each box of a real save takes some tens of visits, and a
/// maliciously slow file must not delay a start.
const VISITS_MAX: u64 = 1 << 30;

/// Whether the boxes cover a tensor of this shape exactly, without hole or overlap. An empty tensor needs no box.
pub fn tiles_exactly(shape: &[usize], boxes: &[TensorBox]) -> bool {
    let Some(total) = TensorBox::whole(shape).n_elements_checked() else { return false };
    let covered = boxes.iter().try_fold(0usize, |n, region| n.checked_add(region.n_elements_checked()?));
    covered == Some(total) && are_disjoint(shape, boxes)
}

/// Whether all boxes lie in a tensor of this shape, are not empty and do not overlap.
pub fn are_disjoint(shape: &[usize], boxes: &[TensorBox]) -> bool {
    let usable = |region: &TensorBox| region.fits_in(shape) && region.n_elements_checked().is_some_and(|n| n > 0);
    boxes.iter().all(usable) && have_no_overlap(boxes.iter().collect(), shape.len())
}

/// Boxes that touch along every dim swept since they were last separated.
struct Group<'a> {
    boxes: Vec<&'a TensorBox>,
    /// The dim to sweep next.
    dim: usize,
    /// Number of consecutive dims before `dim` along which the boxes touch.
    n_stuck: usize,
}

fn have_no_overlap(boxes: Vec<&TensorBox>, n_dims: usize) -> bool {
    let mut visits = 0u64;
    let mut groups = vec![Group { boxes, dim: 0, n_stuck: 0 }];
    while let Some(mut group) = groups.pop() {
        let n = group.boxes.len();
        if n < 2 {
            continue;
        }
        let is_stuck = group.n_stuck == n_dims;
        visits = visits.saturating_add(if is_stuck { (n as u64).saturating_mul(n as u64) } else { n as u64 });
        if visits > VISITS_MAX || (is_stuck && has_overlap(&group.boxes)) {
            return false;
        }
        if !is_stuck {
            sweep(&mut group, n_dims, &mut groups);
        }
    }
    true
}

/// Splits a group wherever no box crosses a plane.
fn sweep<'a>(group: &mut Group<'a>, n_dims: usize, groups: &mut Vec<Group<'a>>) {
    let dim = group.dim;
    group.boxes.sort_unstable_by_key(|region| region.offset[dim]);
    let n = group.boxes.len();
    let mut start = 0;
    let mut end = 0;
    for i in 0..=n {
        let is_cut = i == n || (i > start && group.boxes[i].offset[dim] >= end);
        if is_cut {
            let n_stuck = if i - start == n { group.n_stuck + 1 } else { 1 };
            groups.push(Group { boxes: group.boxes[start..i].to_vec(), dim: (dim + 1) % n_dims, n_stuck });
            start = i;
        }
        if i < n {
            let region = group.boxes[i];
            end = end.max(region.offset[dim] + region.extent[dim]);
        }
    }
}

fn has_overlap(boxes: &[&TensorBox]) -> bool {
    boxes.iter().enumerate().any(|(i, a)| boxes[i + 1..].iter().any(|b| a.intersection(b).is_some()))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;

    fn region(offset: &[usize], extent: &[usize]) -> TensorBox {
        TensorBox { offset: offset.to_vec(), extent: extent.to_vec() }
    }

    #[test]
    fn boxes_with_a_hole_or_an_overlap_do_not_tile() {
        let shape = [4, 2];
        let (top, bottom) = (region(&[0, 0], &[2, 2]), region(&[2, 0], &[2, 2]));
        assert!(tiles_exactly(&shape, &[bottom.clone(), top.clone()]));
        assert!(!tiles_exactly(&shape, std::slice::from_ref(&top)));
        assert!(!tiles_exactly(&shape, &[top.clone(), top.clone()]));
        assert!(!tiles_exactly(&shape, &[top.clone(), region(&[1, 0], &[2, 2])]));
        assert!(!tiles_exactly(&shape, &[top.clone(), region(&[2, 0], &[2, 3])]));
        assert!(!tiles_exactly(&shape, &[top, region(&[usize::MAX, 0], &[2, 2])]));
        assert!(!tiles_exactly(&shape, &[region(&[0], &[8])]));
    }

    #[test]
    fn scalars_and_empty_tensors_tile() {
        assert!(tiles_exactly(&[], &[region(&[], &[])]));
        assert!(!tiles_exactly(&[], &[region(&[], &[]), region(&[], &[])]));
        assert!(tiles_exactly(&[0, 3], &[]));
        assert!(!tiles_exactly(&[0, 3], &[region(&[0, 0], &[0, 3])]));
        assert!(!tiles_exactly(&[usize::MAX, 2], &[]));
    }

    #[test]
    fn boxes_that_no_plane_separates_still_tile() {
        let pinwheel = [
            region(&[0, 0], &[1, 2]),
            region(&[0, 2], &[2, 1]),
            region(&[2, 1], &[1, 2]),
            region(&[1, 0], &[2, 1]),
            region(&[1, 1], &[1, 1]),
        ];
        let mut shifted = pinwheel.clone();
        shifted[4].offset = vec![1, 2];

        assert!(tiles_exactly(&[3, 3], &pinwheel));
        assert!(!tiles_exactly(&[3, 3], &shifted));
    }

    #[test]
    fn quarter_of_a_million_columns_are_not_compared_pair_by_pair() {
        let n = 1 << 18;
        let columns: Vec<TensorBox> = (0..n).map(|i| region(&[0, i], &[3, 1])).collect();
        let started = Instant::now();

        assert!(tiles_exactly(&[3, n], &columns));

        // Comparing all pairs takes 34 billion comparisons, at least a minute.
        assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    }

    proptest! {
        #[test]
        fn boxes_are_disjoint_exactly_when_no_element_is_counted_twice(
            shape in proptest::collection::vec(1usize..5, 0..4),
            corners in proptest::collection::vec(any::<[(prop::sample::Index, prop::sample::Index); 3]>(), 0..6),
        ) {
            let boxes: Vec<TensorBox> = corners.iter().map(|corner| {
                let mut region = TensorBox::whole(&shape);
                for (dim, &n) in shape.iter().enumerate() {
                    region.offset[dim] = corner[dim].0.index(n);
                    region.extent[dim] = 1 + corner[dim].1.index(n - region.offset[dim]);
                }
                region
            }).collect();
            let total: usize = shape.iter().product();
            let element_in = |flat: usize, region: &TensorBox| {
                let mut rest = flat;
                (0..shape.len()).rev().all(|dim| {
                    let at = rest % shape[dim];
                    rest /= shape[dim];
                    (region.offset[dim]..region.offset[dim] + region.extent[dim]).contains(&at)
                })
            };
            let counts: Vec<usize> = (0..total).map(|e| boxes.iter().filter(|b| element_in(e, b)).count()).collect();

            prop_assert_eq!(are_disjoint(&shape, &boxes), counts.iter().all(|&n| n <= 1));
            prop_assert_eq!(tiles_exactly(&shape, &boxes), counts.iter().all(|&n| n == 1));
        }
    }
}
