//! Where a rank's local tensor lies in the tensor of the model file.
//!
//! Tensor parallelism gives a rank some ranges along one dim: usually one, three where query, key and value are stored side
//! by side in one tensor (GPT-2's `c_attn`). ZeRO then gives it a run of the elements of that local tensor. On disk are boxes
//! of the whole tensor; this file says which, and copies between them and the run.

use std::ops::Range;

use super::flat_run::boxes_of_flat_run;
use super::region::{Region, Run};

/// A local tensor: ranges along one dim of a whole one, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    whole: Vec<u64>,
    dim: usize,
    ranges: Vec<Range<u64>>,
}

/// A box of the whole tensor, all of whose elements lie in one run of the local tensor's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedBox {
    /// The box in the whole tensor.
    pub region: Region,
    /// Elements that are next to each other both in the run (`stored`) and in the box (`wanted`).
    runs: Vec<Run>,
}

impl Placement {
    /// The tensor that is not cut.
    pub fn whole(shape: &[u64]) -> Self {
        Self { whole: shape.to_vec(), dim: 0, ranges: shape.first().map(|&n| 0..n).into_iter().collect() }
    }

    /// The ranges of `dim` of a tensor of this shape, in the order in which the local tensor has them.
    ///
    /// # Panics
    /// When there is no such dim, or a range does not lie in it. A position that is in two ranges has two local copies.
    pub fn cut(shape: &[u64], dim: usize, ranges: Vec<Range<u64>>) -> Self {
        let inside = ranges.iter().all(|range| range.start <= range.end && range.end <= shape[dim]);
        assert!(inside, "ranges {ranges:?} do not lie in dim {dim} of {shape:?}");
        Self { whole: shape.to_vec(), dim, ranges }
    }

    /// The shape of the local tensor.
    pub fn local_shape(&self) -> Vec<u64> {
        let mut shape = self.whole.clone();
        if let Some(n) = shape.get_mut(self.dim) {
            *n = self.ranges.iter().map(|range| range.end - range.start).sum();
        }
        shape
    }

    /// The boxes of the whole tensor that hold the elements `run` of the local one, each element in one box.
    ///
    /// # Panics
    /// When the run does not lie in the local tensor.
    pub fn boxes_of_run(&self, run: Range<u64>) -> Vec<PlacedBox> {
        let mut boxes = Vec::new();
        for (block, part) in boxes_of_flat_run(&self.local_shape(), run) {
            if self.whole.is_empty() {
                boxes.push(PlacedBox { runs: block.shared_runs(&block, 1), region: block });
                continue;
            }
            let mut local_start = 0;
            for range in &self.ranges {
                let n = range.end - range.start;
                let mut slab = block.clone();
                (slab.offset[self.dim], slab.shape[self.dim]) = (local_start, n);
                if let Some(local) = block.intersection(&slab) {
                    let mut runs = block.shared_runs(&local, 1);
                    runs.iter_mut().for_each(|run| run.stored += part.start);
                    let mut region = local;
                    region.offset[self.dim] = region.offset[self.dim] - local_start + range.start;
                    boxes.push(PlacedBox { region, runs });
                }
                local_start += n;
            }
        }
        boxes
    }
}

impl PlacedBox {
    /// The elements of the run that are the box as it is, where no copy is needed.
    pub fn as_run(&self) -> Option<Range<u64>> {
        let [run] = self.runs.as_slice() else { return None };
        Some(run.stored..run.stored + run.len)
    }

    /// Copies the box out of the bytes of the run.
    ///
    /// # Panics
    /// When `run` or `out` has not the bytes of the run or the box.
    pub fn gather(&self, element_bytes: usize, run: &[u8], out: &mut [u8]) {
        for (ours, boxed) in self.byte_ranges(element_bytes) {
            out[boxed].copy_from_slice(&run[ours]);
        }
    }

    /// Copies the box into the bytes of the run.
    ///
    /// # Panics
    /// When `run` or `content` has not the bytes of the run or the box.
    pub fn scatter(&self, element_bytes: usize, content: &[u8], run: &mut [u8]) {
        for (ours, boxed) in self.byte_ranges(element_bytes) {
            run[ours].copy_from_slice(&content[boxed]);
        }
    }

    fn byte_ranges(&self, element_bytes: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        self.runs.iter().map(move |run| {
            let [ours, boxed, len] = [run.stored, run.wanted, run.len].map(|n| n as usize * element_bytes);
            (ours..ours + len, boxed..boxed + len)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;

    #[test]
    fn columns_of_three_ranges_are_three_boxes_for_each_block_of_a_run() {
        let placement = Placement::cut(&[4, 12], 1, vec![0..2, 4..6, 8..10]);
        assert_eq!(placement.local_shape(), [4, 6]);

        let boxes = placement.boxes_of_run(3..18);

        let regions: Vec<([u64; 2], [u64; 2])> = boxes
            .iter()
            .map(|b| (b.region.offset.clone().try_into().unwrap(), b.region.shape.clone().try_into().unwrap()))
            .collect();
        let end_of_row = [([0, 5], [1, 1]), ([0, 8], [1, 2])];
        let rows = [([1, 0], [2, 2]), ([1, 4], [2, 2]), ([1, 8], [2, 2])];
        assert_eq!(regions, [&end_of_row[..], &rows].concat());
        assert_eq!(boxes[0].as_run(), Some(0..1));
        assert_eq!(boxes[2].as_run(), None);
    }

    #[test]
    fn whole_tensors_and_scalars_need_no_copy() {
        for shape in [vec![], vec![5], vec![2, 3]] {
            let n: u64 = shape.iter().product();

            let boxes = Placement::whole(&shape).boxes_of_run(0..n);

            assert_eq!(boxes.len(), 1);
            assert_eq!((&boxes[0].region, boxes[0].as_run()), (&Region::whole(&shape), Some(0..n)));
        }
    }

    proptest! {
        #[test]
        fn a_run_gathered_into_boxes_and_scattered_again_is_the_run_and_each_box_is_where_it_says(
            shape in proptest::collection::vec(1u64..6, 1..4),
            dim: Index,
            places in proptest::collection::vec(any::<Index>(), 6),
            ends: (Index, Index),
        ) {
            let dim = dim.index(shape.len());
            let mut cuts: Vec<u64> = places.iter().map(|at| at.index(shape[dim] as usize + 1) as u64).collect();
            cuts.sort_unstable();
            let ranges: Vec<Range<u64>> = cuts.chunks_exact(2).map(|pair| pair[0]..pair[1]).collect();
            let placement = Placement::cut(&shape, dim, ranges.clone());
            // Every element of the whole is its own row-major number; the local tensor is filled by plain indexing.
            let positions: Vec<u64> = ranges.into_iter().flatten().collect();
            let outer: u64 = shape[..dim].iter().product();
            let inner: u64 = shape[dim + 1..].iter().product();
            let number = |o: u64, at: u64, i: u64| ((o * shape[dim] + at) * inner + i) as u16;
            let rows = (0..outer).flat_map(|o| positions.iter().map(move |&at| (o, at)));
            let local: Vec<u16> = rows.flat_map(|(o, at)| (0..inner).map(move |i| number(o, at, i))).collect();
            let (a, b) = (ends.0.index(local.len() + 1), ends.1.index(local.len() + 1));
            let run = &local[a.min(b)..a.max(b)];

            let boxes = placement.boxes_of_run(a.min(b) as u64..a.max(b) as u64);

            let mut again = vec![u16::MAX; run.len()];
            let mut n_elements = 0;
            for placed in &boxes {
                let mut content = vec![0u16; placed.region.volume().unwrap() as usize];
                placed.gather(2, bytemuck::cast_slice(run), bytemuck::cast_slice_mut(&mut content));
                n_elements += content.len();
                let expected: Vec<u16> = (0..content.len() as u64).map(|mut flat| {
                    let mut stride = 1;
                    let mut index = 0;
                    for d in (0..shape.len()).rev() {
                        index += (placed.region.offset[d] + flat % placed.region.shape[d]) * stride;
                        flat /= placed.region.shape[d];
                        stride *= shape[d];
                    }
                    index as u16
                }).collect();
                prop_assert_eq!(&content, &expected);
                placed.scatter(2, bytemuck::cast_slice(&content), bytemuck::cast_slice_mut(&mut again));
                if let Some(range) = placed.as_run() {
                    prop_assert_eq!(&run[range.start as usize..range.end as usize], content);
                }
            }
            prop_assert_eq!(n_elements, run.len());
            prop_assert_eq!(again, run);
        }
    }
}
