//! The boxes that a contiguous run of a tensor's elements consists of.
//!
//! ZeRO cuts a tensor, or a bucket of them, without regard to its shape: a rank holds elements `a..b` in row-major order.
//! Source: Rajbhandari et al. 2020, ZeRO, §5 (arXiv:1910.02054). On disk everything is a box, so such a run is saved as the
//! end of a row, some full rows, and the beginning of a row: at most `2 n - 1` boxes for `n` dims.

use std::ops::Range;

use super::region::Region;

/// The fewest boxes that make up the elements `run` of a row-major tensor of this shape, each with the part of the run that
/// it is, counted from the start of the run. In order, without a gap: the boxes' elements, one box after the other, are the
/// elements of the run.
///
/// # Panics
/// When the run does not lie in the tensor.
pub fn boxes_of_flat_run(shape: &[u64], run: Range<u64>) -> Vec<(Region, Range<u64>)> {
    let total = Region::whole(shape).volume();
    assert!(total.is_some_and(|total| run.end <= total), "elements {run:?} do not lie in a tensor of shape {shape:?}");
    let mut boxes = Vec::new();
    let mut at = run.start;
    while at < run.end {
        let region = longest_box(shape, at, run.end);
        let n = region.shape.iter().product::<u64>();
        boxes.push((region, at - run.start..at + n - run.start));
        at += n;
    }
    boxes
}

/// The box that starts at element `at`, ends before `end` and is a run of elements as long as possible.
fn longest_box(shape: &[u64], at: u64, end: u64) -> Region {
    let mut region = Region { offset: vec![0; shape.len()], shape: vec![1; shape.len()] };
    let mut rest = at;
    for dim in (0..shape.len()).rev() {
        region.offset[dim] = rest % shape[dim];
        rest /= shape[dim];
    }
    // The outermost dim of which a whole position fits gives the longest box.
    let mut inner: u64 = shape.iter().product();
    for dim in 0..shape.len() {
        inner /= shape[dim];
        if at.is_multiple_of(inner) && at + inner <= end {
            region.shape[dim] = ((end - at) / inner).min(shape[dim] - region.offset[dim]);
            region.shape[dim + 1..].copy_from_slice(&shape[dim + 1..]);
            break;
        }
    }
    region
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Row-major numbers of a box's elements.
    fn elements(shape: &[u64], region: &Region) -> Vec<u64> {
        let mut all = vec![0];
        for dim in 0..shape.len() {
            let positions = region.offset[dim]..region.offset[dim] + region.shape[dim];
            all = all.iter().flat_map(|outer| positions.clone().map(move |at| outer * shape[dim] + at)).collect();
        }
        all
    }

    /// Whether the elements `run` are one box, by plain search over all boxes.
    fn is_box(shape: &[u64], run: Range<u64>) -> bool {
        let wanted: Vec<u64> = run.collect();
        let mut boxes = vec![Region { offset: vec![], shape: vec![] }];
        for &n in shape {
            let ranges: Vec<(u64, u64)> = (0..n).flat_map(|a| (1..=n - a).map(move |len| (a, len))).collect();
            boxes = boxes
                .iter()
                .flat_map(|outer| {
                    ranges.iter().map(|&(offset, len)| {
                        let mut region = outer.clone();
                        region.offset.push(offset);
                        region.shape.push(len);
                        region
                    })
                })
                .collect();
        }
        boxes.iter().any(|region| elements(shape, region) == wanted)
    }

    #[test]
    fn a_run_over_rows_is_an_end_some_rows_and_a_beginning() {
        let boxes = boxes_of_flat_run(&[4, 6], 3..20);

        let region = |offset: [u64; 2], shape: [u64; 2]| Region { offset: offset.to_vec(), shape: shape.to_vec() };
        let expected =
            [(region([0, 3], [1, 3]), 0..3), (region([1, 0], [2, 6]), 3..15), (region([3, 0], [1, 2]), 15..17)];
        assert_eq!(boxes, expected);
    }

    #[test]
    fn scalars_and_nothing_are_runs_too() {
        assert_eq!(boxes_of_flat_run(&[], 0..1), [(Region::whole(&[]), 0..1)]);
        assert_eq!(boxes_of_flat_run(&[], 1..1), []);
        assert_eq!(boxes_of_flat_run(&[0, 3], 0..0), []);
        assert_eq!(boxes_of_flat_run(&[1 << 40, 1 << 20], 1 << 59..1 << 60).len(), 1);
    }

    proptest! {
        #[test]
        fn the_boxes_are_the_run_in_order_and_as_few_as_possible(
            shape in proptest::collection::vec(1u64..4, 0..4),
            a: prop::sample::Index,
            b: prop::sample::Index,
        ) {
            let total: u64 = shape.iter().product();
            let (a, b) = (a.index(total as usize + 1) as u64, b.index(total as usize + 1) as u64);
            let run = a.min(b)..a.max(b);

            let boxes = boxes_of_flat_run(&shape, run.clone());

            let mut found = Vec::new();
            for (region, part) in &boxes {
                prop_assert_eq!(part.start, found.len() as u64);
                found.extend(elements(&shape, region));
                prop_assert_eq!(part.end, found.len() as u64);
            }
            prop_assert_eq!(found, run.clone().collect::<Vec<_>>());
            // The fewest boxes up to each element, over all ways to cut the run into boxes.
            let mut fewest = vec![0usize; (run.end - run.start) as usize + 1];
            for end in 1..fewest.len() {
                let last = |start: &usize| is_box(&shape, run.start + *start as u64..run.start + end as u64);
                fewest[end] = 1 + (0..end).filter(last).map(|start| fewest[start]).min().unwrap();
            }
            prop_assert_eq!(boxes.len(), fewest[fewest.len() - 1]);
        }
    }
}
