//! Splits a run of elements into boxes.
//!
//! ZeRO cuts a tensor or a bucket of tensors without regard to shape: a rank holds elements `a..b` in row-major order.
//! Source: Rajbhandari et al. 2020, ZeRO, §5 (arXiv:1910.02054). Storage uses boxes, so such a run becomes the end of a
//! row, some full rows, and the beginning of a row: at most `2 n - 1` boxes for `n` dims.

use super::TensorBox;
use std::ops::Range;

impl TensorBox {
    /// The fewest boxes that make up the elements `run` of this box, counted in row-major order. The elements of the boxes,
    /// one box after the other, are the elements of the run.
    ///
    /// # Panics
    /// When the run does not lie in the box.
    pub fn boxes_of_run(&self, run: Range<usize>) -> Vec<TensorBox> {
        let n_elements = self.n_elements_checked();
        assert!(n_elements.is_some_and(|n| run.end <= n), "elements {run:?} do not lie in {self:?}");
        let mut boxes = Vec::new();
        let mut start = run.start;
        while start < run.end {
            let longest = self.longest_box(start, run.end);
            start += longest.n_elements();
            boxes.push(longest);
        }
        boxes
    }

    /// The box that begins with element `start`, ends before element `end` and is a run of elements as long as possible.
    fn longest_box(&self, start: usize, end: usize) -> TensorBox {
        let n_dims = self.extent.len();
        let mut longest = TensorBox { offset: self.offset.clone(), extent: vec![1; n_dims] };
        let mut rest = start;
        for dim in (0..n_dims).rev() {
            longest.offset[dim] += rest % self.extent[dim];
            rest /= self.extent[dim];
        }
        // The longest box extends along the outermost dim where a whole position fits.
        let mut inner = self.n_elements();
        for dim in 0..n_dims {
            inner /= self.extent[dim];
            if start.is_multiple_of(inner) && start + inner <= end {
                let left = self.end(dim) - longest.offset[dim];
                longest.extent[dim] = ((end - start) / inner).min(left);
                longest.extent[dim + 1..].copy_from_slice(&self.extent[dim + 1..]);
                break;
            }
        }
        longest
    }
}
