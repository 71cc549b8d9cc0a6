//! A box of a tensor of which a rank holds the elements.

use crate::boxes::TensorBox;
use std::ops::Range;

/// A box of a tensor of the model file, and its elements in a value that holds a run of a parameter's elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBox {
    /// Name of the tensor.
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The box of the tensor; not empty.
    pub region: TensorBox,
    /// The box that is stored row-major in the value: `region`, or a larger box where other ranges of the cut dim are
    /// stored next to this one (GPT-2's `c_attn`, cut by columns). Only the elements of `region` belong to this box.
    pub stored: TensorBox,
    /// First element of `stored` in the value.
    pub start: usize,
    /// Whether this rank saves it, among tensor-parallel ranks.
    pub owned: bool,
}

impl HeldBox {
    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.region.n_elements()
    }

    /// Elements of the value from its first one to its last one; elements of other boxes may lie between them.
    pub fn span(&self) -> Range<usize> {
        let last: Vec<usize> = self.region.offset.iter().zip(&self.region.extent).map(|(o, n)| o + n - 1).collect();
        let [first, last] = [&self.region.offset, &last].map(|position| self.start + self.stored.index_of(position));
        first..last + 1
    }

    /// Its elements in row-major order, as runs that are contiguous in both the whole tensor and the value: index of the
    /// first element in the whole tensor, and range in the value.
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let start = self.start;
        let runs = self.region.runs(&TensorBox::whole(&self.shape), &self.stored);
        runs.map(move |run| (run.from, start + run.to..start + run.to + run.len))
    }

    /// Contiguous ranges in the value of the elements of a box inside this one, in row-major order.
    pub fn runs_of(&self, part: &TensorBox) -> impl Iterator<Item = Range<usize>> + use<> {
        let start = self.start;
        part.runs(part, &self.stored).map(move |run| start + run.to..start + run.to + run.len)
    }
}
