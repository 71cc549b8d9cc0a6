//! What a rank holds of the tensors of a model file: boxes of them, and where their elements lie.
//!
//! Every rank can compute this for every other one, so saving, loading and resharding need no messages.

use super::{Param, ParamPart};
use std::ops::Range;

/// A box of a tensor of the model file, and its elements in a value that holds a run of a parameter's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBox {
    /// Name of the tensor.
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Where the box begins in the tensor.
    pub offset: Vec<usize>,
    /// Extent of the box.
    pub extent: Vec<usize>,
    /// First element in the value.
    pub start: usize,
    /// From one row of the box to the next in the value, where rows are runs along the last dim of at least two; a box
    /// whose elements lie without a gap has this equal to its last extent.
    pub row_stride: usize,
    /// Whether this rank saves it, as far as tensor parallelism goes.
    pub owned: bool,
}

impl HeldBox {
    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.extent.iter().product()
    }

    /// Elements of a row: the last extent.
    pub fn row_len(&self) -> usize {
        self.extent.last().copied().unwrap_or(1)
    }

    /// Rows, in row-major order: index in the whole tensor of each one's first element, and its place in the value.
    pub fn rows(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let n_rows = self.n_elements() / self.row_len().max(1);
        (0..n_rows).map(move |row| {
            let (mut rest, mut index, mut stride) = (row, 0, 1);
            for dim in (0..self.shape.len()).rev() {
                let last = dim + 1 == self.shape.len();
                let at = if last { 0 } else { rest % self.extent[dim] };
                rest = if last { rest } else { rest / self.extent[dim] };
                index += (self.offset[dim] + at) * stride;
                stride *= self.shape[dim];
            }
            let start = self.start + row * self.row_stride;
            (index, start..start + self.row_len())
        })
    }
}

impl HeldBox {
    /// What it has in common with another box of the tensor: offset and extent, if there is any element. The other one may
    /// be what a peer says: one of other dims, or beyond the tensor, has nothing in common with it, or less than it says.
    pub fn meet(&self, offset: &[usize], extent: &[usize]) -> Option<(Vec<usize>, Vec<usize>)> {
        let dims = 0..self.shape.len();
        if offset.len() != dims.len() || extent.len() != dims.len() {
            return None;
        }
        let first: Vec<usize> = dims.clone().map(|d| self.offset[d].max(offset[d])).collect();
        let end = |d: usize| (self.offset[d] + self.extent[d]).min(offset[d].saturating_add(extent[d]));
        let common: Option<Vec<usize>> = dims.map(|d| end(d).checked_sub(first[d]).filter(|n| *n > 0)).collect();
        Some((first, common?))
    }

    /// Where the elements of a box inside this one lie in the value, in row-major order, as runs without a gap.
    pub fn runs_of(&self, offset: &[usize], extent: &[usize]) -> Vec<Range<usize>> {
        let Some(last) = self.shape.len().checked_sub(1) else {
            let scalar = self.start..self.start + 1;
            return vec![scalar];
        };
        let n_rows: usize = extent[..last].iter().product();
        let mut runs: Vec<Range<usize>> = Vec::new();
        for number in 0..n_rows {
            let (mut rest, mut row, mut stride) = (number, 0, 1);
            for dim in (0..last).rev() {
                row += (offset[dim] - self.offset[dim] + rest % extent[dim]) * stride;
                rest /= extent[dim];
                stride *= self.extent[dim];
            }
            let start = self.start + row * self.row_stride + offset[last] - self.offset[last];
            match runs.last_mut().filter(|run| run.end == start) {
                Some(run) => run.end += extent[last],
                None => runs.push(start..start + extent[last]),
            }
        }
        runs
    }
}

impl Param {
    /// Boxes of the model file's tensors that `elements` of this parameter are; the value holds them from its start.
    pub fn boxes(&self, elements: &Range<usize>) -> Vec<HeldBox> {
        let mut first = 0;
        let mut boxes = Vec::new();
        for part in &self.parts {
            let here = first..first + part.n_elements();
            first = here.end;
            let run = elements.start.max(here.start)..elements.end.min(here.end);
            if run.start < run.end {
                let in_part = run.start - here.start..run.end - here.start;
                part_boxes(part, &in_part, run.start - elements.start, &mut boxes);
            }
        }
        boxes
    }
}

fn part_boxes(part: &ParamPart, run: &Range<usize>, start: usize, out: &mut Vec<HeldBox>) {
    let local = part.local_shape();
    let mut at = start;
    for (offset, extent) in boxes_of_run(&local, run.clone()) {
        let n: usize = extent.iter().product();
        restrict(part, &offset, &extent, at, out);
        at += n;
    }
}

/// A box of what is here of a tensor, as boxes of the tensor: one for each range of the cut dim that it meets.
fn restrict(part: &ParamPart, offset: &[usize], extent: &[usize], start: usize, out: &mut Vec<HeldBox>) {
    let (dim, rank) = (part.dim, part.shape.len());
    if rank == 0 {
        let (offset, extent) = (vec![], vec![]);
        return out.push(HeldBox {
            name: part.name.clone(),
            shape: vec![],
            offset,
            extent,
            start,
            row_stride: 1,
            owned: part.owned,
        });
    }
    let inner: usize = extent[dim + 1..].iter().product();
    let mut first = 0;
    for range in &part.ranges {
        let here = first..first + range.len();
        first = here.end;
        let (a, b) = (offset[dim].max(here.start), (offset[dim] + extent[dim]).min(here.end));
        if a >= b {
            continue;
        }
        let (mut o, mut e) = (offset.to_vec(), extent.to_vec());
        (o[dim], e[dim]) = (range.start + a - here.start, b - a);
        let gap_free = b - a == extent[dim] || dim == 0;
        debug_assert!(gap_free || dim + 1 == rank, "tensors are cut along their first or last dim");
        let row_stride = if gap_free { e[rank - 1] } else { extent[dim] * inner };
        let start = start + (a - offset[dim]) * inner;
        out.push(HeldBox {
            name: part.name.clone(),
            shape: part.shape.clone(),
            offset: o,
            extent: e,
            start,
            row_stride,
            owned: part.owned,
        });
    }
}

/// The fewest boxes `(offset, extent)` that make up a run of elements of a row-major tensor, in order.
pub fn boxes_of_run(shape: &[usize], run: Range<usize>) -> Vec<(Vec<usize>, Vec<usize>)> {
    if run.start >= run.end {
        return Vec::new();
    }
    let Some((rows, rest)) = shape.split_first() else { return vec![(vec![], vec![])] };
    let row: usize = rest.iter().product();
    let mut boxes = Vec::new();
    let mut at = run.start;
    while at < run.end {
        let (index, within) = (at / row, at % row);
        let whole = (run.end - at) / row;
        if within == 0 && whole > 0 {
            let offset = [&[index], &vec![0; rest.len()][..]].concat();
            boxes.push((offset, [&[whole], rest].concat()));
            at += whole * row;
            continue;
        }
        let end = (run.end - index * row).min(row);
        for (offset, extent) in boxes_of_run(rest, within..end) {
            boxes.push(([&[index][..], &offset].concat(), [&[1][..], &extent].concat()));
        }
        at = index * row + end;
    }
    debug_assert!(run.end <= rows * row, "a run lies in its tensor");
    boxes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Init, ValueId};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn index_of(shape: &[usize], at: &[usize]) -> usize {
        shape.iter().zip(at).fold(0, |i, (n, x)| i * n + x)
    }

    #[test]
    fn a_box_of_a_peer_that_cannot_be_has_nothing_in_common_or_less_than_it_says() {
        let (shape, offset, extent) = (vec![4, 6], vec![1, 0], vec![2, 6]);
        let held = HeldBox { name: "w".into(), shape, offset, extent, start: 0, row_stride: 6, owned: true };

        assert_eq!(held.meet(&[1], &[2]), None);
        assert_eq!(held.meet(&[1, 0, 0], &[2, 6, 1]), None);
        assert_eq!(held.meet(&[2, usize::MAX], &[1, 7]), None);
        assert_eq!(held.meet(&[2, 1], &[usize::MAX, usize::MAX]), Some((vec![2, 1], vec![1, 5])));
    }

    proptest! {
        #[test]
        fn boxes_of_a_run_are_its_elements_in_order(
            shape in prop::collection::vec(1usize..5, 1..4), a in 0usize..64, b in 0usize..64,
        ) {
            let n: usize = shape.iter().product();
            let run = a.min(n)..b.clamp(a.min(n), n);

            let mut elements = Vec::new();
            for (offset, extent) in boxes_of_run(&shape, run.clone()) {
                let len: usize = extent.iter().product();
                for i in 0..len {
                    let mut rest = i;
                    let mut at = offset.clone();
                    for dim in (0..shape.len()).rev() {
                        at[dim] += rest % extent[dim];
                        rest /= extent[dim];
                    }
                    elements.push(index_of(&shape, &at));
                }
            }

            prop_assert_eq!(elements, run.collect::<Vec<_>>());
        }

        #[test]
        fn boxes_of_all_shards_of_all_cuts_cover_every_element_once(
            rows in 2usize..7, columns in 2usize..9, dim in 0usize..2, cuts in 1usize..3, shards in 1usize..4,
        ) {
            let shape = [rows, columns];
            let mut seen = vec![0; rows * columns];
            for cut in 0..cuts {
                // Two ranges each, as of a packed tensor.
                let half = shape[dim] / 2;
                let in_half = |first: usize, n: usize| first + n * cut / cuts..first + n * (cut + 1) / cuts;
                let ranges = [in_half(0, half), in_half(half, shape[dim] - half)];
                let mut param = Param::whole(ValueId(0), &shape, vec![ParamPart::whole("w", &shape)], Init::Zeros);
                param.cut(dim, &ranges);
                let local: Vec<usize> = local_elements(&shape, dim, &ranges);
                for shard in 0..shards {
                    let held = local.len() * shard / shards..local.len() * (shard + 1) / shards;
                    for held_box in param.boxes(&held) {
                        for (index, place) in held_box.rows() {
                            for (i, at) in place.enumerate() {
                                prop_assert_eq!(local[held.start + at], index + i);
                                seen[index + i] += 1;
                            }
                        }
                    }
                }
            }

            prop_assert!(seen.iter().all(|n| *n == 1), "{:?}", seen);
        }
    }

    proptest! {
        #[test]
        fn runs_of_a_part_of_a_box_are_the_places_of_its_elements(
            shape in prop::collection::vec(1usize..5, 1..4), outer: [usize; 6], inner: [usize; 6], gap in 0usize..3,
        ) {
            let within = |bounds: &[(usize, usize)], dice: [usize; 6]| -> Vec<(usize, usize)> {
                let cut = |(d, (first, n)): (usize, &(usize, usize))| {
                    let skip = dice[2 * d] % n;
                    (first + skip, 1 + dice[2 * d + 1] % (n - skip))
                };
                bounds.iter().enumerate().map(cut).collect()
            };
            let whole: Vec<(usize, usize)> = shape.iter().map(|n| (0, *n)).collect();
            let (of_box, of_part) = { let b = within(&whole, outer); let p = within(&b, inner); (b, p) };
            let (offset, extent): (Vec<usize>, Vec<usize>) = of_box.into_iter().unzip();
            let row_stride = extent[extent.len() - 1] + gap;
            let held = HeldBox { name: "w".into(), shape: shape.clone(), offset, extent, start: 7, row_stride, owned: true };
            let (offset, extent): (Vec<usize>, Vec<usize>) = of_part.into_iter().unzip();

            let places: Vec<usize> = held.runs_of(&offset, &extent).into_iter().flatten().collect();

            let place_of: BTreeMap<usize, usize> =
                held.rows().flat_map(|(index, at)| at.enumerate().map(move |(i, place)| (index + i, place))).collect();
            let part = HeldBox { offset: offset.clone(), extent: extent.clone(), ..held.clone() };
            let expected: Vec<usize> =
                part.rows().flat_map(|(index, at)| (0..at.len()).map(move |i| index + i)).map(|i| place_of[&i]).collect();
            prop_assert_eq!(places, expected);
            prop_assert_eq!(held.meet(&offset, &extent), Some((offset, extent)));
        }
    }

    /// Index in the whole tensor of each element of the cut one.
    fn local_elements(shape: &[usize; 2], dim: usize, ranges: &[Range<usize>; 2]) -> Vec<usize> {
        let inside = |r: usize, c: usize| ranges.iter().any(|range| range.contains(&[r, c][dim]));
        let all = (0..shape[0]).flat_map(|r| (0..shape[1]).map(move |c| (r, c)));
        all.filter(|(r, c)| inside(*r, *c)).map(|(r, c)| r * shape[1] + c).collect()
    }
}
