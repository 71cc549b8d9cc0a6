//! Boxes of tensors: the geometry of files, memory and transfers between ranks.
//!
//! All stored data of a tensor is an n-dimensional box of it, with elements in row-major order in a file or a buffer:
//! a whole tensor of a model file, a piece of a checkpoint, a shard in a rank's memory. [`TensorBox`] has the operations on
//! positions: the intersection of two boxes ([`TensorBox::intersection`]), their difference ([`TensorBox::without`]), the
//! boxes of a flat run of elements ([`TensorBox::boxes_of_run`]), and whether boxes cover a tensor exactly once
//! ([`tiling`]). [`TensorBox::runs`] turns positions into copies between two stored boxes.
//!
//! Source: the chunks of `torch.distributed.checkpoint` (`ChunkStorageMetadata`: offsets and sizes).

mod flat_run;
pub mod tiling;

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A box of a tensor: along every dim the positions `offset .. offset + extent`.
///
/// A box may come from a file or a peer. [`TensorBox::fits_in`], [`TensorBox::n_elements_checked`],
/// [`TensorBox::intersection`] and [`TensorBox::without`] accept any numbers; the other functions need a box that lies in a
/// tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorBox {
    /// First position along every dim.
    pub offset: Vec<usize>,
    /// Number of positions along every dim.
    // Checkpoint indexes use this name.
    #[serde(rename = "shape")]
    pub extent: Vec<usize>,
}

/// Elements that are contiguous in both of two stored boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first element in the source box.
    pub from: usize,
    /// Index of the first element in the destination box.
    pub to: usize,
    /// Number of elements.
    pub len: usize,
}

impl TensorBox {
    /// The box that is the whole tensor of this shape.
    pub fn whole(shape: &[usize]) -> TensorBox {
        TensorBox { offset: vec![0; shape.len()], extent: shape.to_vec() }
    }

    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.extent.iter().product()
    }

    /// Number of elements of a box that may have any extents; `None` where it exceeds the address space.
    pub fn n_elements_checked(&self) -> Option<usize> {
        self.extent.iter().try_fold(1, |n: usize, extent| n.checked_mul(*extent))
    }

    /// Whether the box lies in a tensor of this shape.
    pub fn fits_in(&self, shape: &[usize]) -> bool {
        let inside = |dim: usize| self.offset[dim].checked_add(self.extent[dim]).is_some_and(|end| end <= shape[dim]);
        (self.offset.len(), self.extent.len()) == (shape.len(), shape.len()) && (0..shape.len()).all(inside)
    }

    /// The intersection of both boxes; `None` if it is empty or the numbers of dims differ.
    pub fn intersection(&self, other: &TensorBox) -> Option<TensorBox> {
        let n_dims = self.offset.len();
        if [self.extent.len(), other.offset.len(), other.extent.len()] != [n_dims; 3] {
            return None;
        }
        let offset: Vec<usize> = self.offset.iter().zip(&other.offset).map(|(a, b)| *a.max(b)).collect();
        let end = |dim: usize| self.end(dim).min(other.end(dim));
        let extent =
            (0..n_dims).map(|dim| end(dim).checked_sub(offset[dim]).filter(|n| *n > 0)).collect::<Option<_>>()?;
        Some(TensorBox { offset, extent })
    }

    /// This box without its intersection with `other`: at most two boxes for each dim.
    pub fn without(&self, other: &TensorBox) -> Vec<TensorBox> {
        let Some(inner) = self.intersection(other) else { return vec![self.clone()] };
        let mut core = self.clone();
        let mut rest = Vec::new();
        for dim in 0..core.offset.len() {
            for (start, end) in [(core.offset[dim], inner.offset[dim]), (inner.end(dim), core.end(dim))] {
                if start < end {
                    let mut side = core.clone();
                    (side.offset[dim], side.extent[dim]) = (start, end - start);
                    rest.push(side);
                }
            }
            // Sides along later dims lie within the bounds of the inner box along this one.
            (core.offset[dim], core.extent[dim]) = (inner.offset[dim], inner.extent[dim]);
        }
        rest
    }

    /// Index, in row-major order, of the element of the box at this position of the tensor.
    pub fn index_of(&self, position: &[usize]) -> usize {
        let positions = position.iter().zip(&self.offset).zip(&self.extent);
        positions.fold(0, |index, ((at, offset), extent)| index * extent + (at - offset))
    }

    /// The elements of this box in row-major order, as runs that are contiguous in both `from` and `to`, two row-major
    /// boxes that contain it. No two consecutive runs could be merged.
    ///
    /// # Panics
    /// When `from` or `to` does not contain this box.
    pub fn runs(&self, from: &TensorBox, to: &TensorBox) -> impl Iterator<Item = Run> + use<> {
        assert!(from.contains(self) && to.contains(self), "{self:?} does not lie in {from:?} and {to:?}");
        // Inner dims that all three boxes cover in full form one run, together with the first dim that they do not.
        let mut n_outer = self.extent.len();
        let mut len = 1;
        while n_outer > 0 {
            n_outer -= 1;
            len *= self.extent[n_outer];
            if [from.extent[n_outer], to.extent[n_outer]] != [self.extent[n_outer]; 2] {
                break;
            }
        }
        let step = |stored: &TensorBox, dim: usize| stored.extent[dim + 1..].iter().product::<usize>();
        let outer: Vec<[usize; 3]> =
            (0..n_outer).map(|dim| [self.extent[dim], step(from, dim), step(to, dim)]).collect();
        let n_runs = if len == 0 { 0 } else { outer.iter().map(|[extent, ..]| extent).product() };
        let first = Run { from: from.index_of(&self.offset), to: to.index_of(&self.offset), len };
        (0..n_runs).map(move |mut number: usize| {
            let mut run = first;
            for [extent, from, to] in outer.iter().rev() {
                let at = number % extent;
                number /= extent;
                (run.from, run.to) = (run.from + at * from, run.to + at * to);
            }
            run
        })
    }

    fn contains(&self, inner: &TensorBox) -> bool {
        let n_dims = self.offset.len();
        let inside = |dim: usize| self.offset[dim] <= inner.offset[dim] && inner.end(dim) <= self.end(dim);
        inner.offset.len() == n_dims && (0..n_dims).all(inside)
    }

    /// One past the last position along a dim.
    fn end(&self, dim: usize) -> usize {
        self.offset[dim].saturating_add(self.extent[dim])
    }
}

impl Run {
    /// Its elements in the source box.
    pub fn in_from(&self) -> Range<usize> {
        self.from..self.from + self.len
    }

    /// Its elements in the destination box.
    pub fn in_to(&self) -> Range<usize> {
        self.to..self.to + self.len
    }
}

#[cfg(test)]
mod tests;
