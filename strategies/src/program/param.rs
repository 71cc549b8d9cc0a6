//! The parameter table: how the program's weights relate to the tensors of a model file.

use super::{Hyper, Packing, ValueId};
use crate::mesh::Group;
use std::ops::Range;

/// How a parameter is filled when a model starts from scratch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Independent normal variates with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    /// All zeros: biases, LoRA's B.
    Zeros,
    /// All ones: gains of norms.
    Ones,
    /// Lengths of the rows of the weight that an adapter adapts, as they are at the start: DoRA's magnitudes.
    RowLengths(Measured),
}

/// The weight whose rows are measured. It need not be in the same program: a rank may keep a copy of another one's magnitudes alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// It is stored `[in, out]`: lengths of its columns.
    pub of_columns: bool,
    /// Its inputs: the numbers of each length.
    pub n_in: usize,
    /// Standard deviation, if it is drawn.
    pub std: f32,
    /// How it is stored.
    pub packing: Option<Packing>,
}

impl Measured {
    /// Shape of the whole weight with `n_out` outputs, as stored in a file.
    pub const fn shape(self, n_out: usize) -> [usize; 2] {
        if self.of_columns { [self.n_in, n_out] } else { [n_out, self.n_in] }
    }
}

/// A tensor of a model file, or a rank's part of it, as a slice of a parameter along its first dim.
///
/// Projections that read the same input (q, k and v; gate and up) are one parameter, so that they run as one matrix
/// product; each keeps its own name here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamPart {
    /// Name in the model file, e.g. `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Dim that tensor parallelism cuts.
    pub dim: usize,
    /// This rank's ranges of that dim, ascending and adjacent in the parameter; the whole dim if it is not cut. A packed
    /// tensor (GPT-2's `c_attn`, Phi-3's `qkv_proj`) has a range each for queries, keys and values, or a part each where
    /// this rank does not own all of them.
    pub ranges: Vec<Range<usize>>,
    /// Whether this rank owns it: one of the tensor-parallel ranks that hold the same key/value head does.
    pub owned: bool,
}

impl ParamPart {
    /// A whole tensor.
    pub fn whole(name: impl Into<String>, shape: &[usize]) -> ParamPart {
        let all = 0..shape.first().copied().unwrap_or(1);
        ParamPart { name: name.into(), shape: shape.to_vec(), dim: 0, ranges: vec![all], owned: true }
    }

    /// Extent of this rank's part along each dim.
    pub fn local_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(extent) = shape.get_mut(self.dim) {
            *extent = self.ranges.iter().map(Range::len).sum();
        }
        shape
    }

    /// Rows that it takes in the parameter.
    pub fn rows(&self) -> usize {
        self.local_shape().first().copied().unwrap_or(1)
    }

    /// Elements that it takes in the parameter.
    pub fn n_elements(&self) -> usize {
        self.local_shape().iter().product()
    }
}

/// A sum that completes the gradient of a parameter, in addition to the sum over the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradSum {
    /// Ranks that have a part of it.
    pub group: Group,
    /// Elements of the parameter that it covers; `None` covers all.
    pub elements: Option<Range<usize>>,
}

/// A weight of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// The value of kind [`super::Kind::Parameter`] that holds it.
    pub value: ValueId,
    /// Tensors of the model file that it consists of, in order along the first dim.
    pub parts: Vec<ParamPart>,
    /// Initial values when training from scratch.
    pub init: Init,
    /// Whether it is updated; the base of a LoRA run is not.
    pub trainable: bool,
    /// Position of its learning rate in [`super::Hyper`].
    pub rate: usize,
    /// How it is stored, if packed: then all shapes and ranges here count words, not weights.
    pub packing: Option<Packing>,
    /// Whether products multiply it in FP8, which has no numbers beyond [`super::packing::E4M3_WEIGHT_MAX`].
    pub in_fp8: bool,
    /// Whether weight decay applies: by convention to tensors with two or more dims, and to adapters.
    pub decay: bool,
    /// Whether it is the table of an embedding, whose optimizer state is never rounded.
    pub is_table: bool,
    /// Shape of the parameter on this tensor-parallel rank; `value` may hold only some of its elements.
    pub shape: Vec<usize>,
    /// Elements that `value` holds, in row-major order.
    pub held: Range<usize>,
    /// Elements that this rank updates and whose optimizer state it has.
    pub updated: Range<usize>,
    /// Whether this rank saves its elements; one of the ranks that hold the same elements does.
    pub owned: bool,
    /// Pipeline stages that hold it, if there are several: each has a part of its gradient.
    pub stages: Vec<usize>,
    /// Sums that complete its gradient.
    pub sums: Vec<GradSum>,
}

impl Param {
    /// A whole parameter that only this rank has.
    pub fn whole(value: ValueId, shape: &[usize], parts: Vec<ParamPart>, init: Init) -> Param {
        let all = 0..shape.iter().product();
        Param {
            value,
            parts,
            init,
            trainable: true,
            packing: None,
            in_fp8: false,
            rate: Hyper::LEARNING_RATE,
            decay: shape.len() >= 2,
            is_table: false,
            shape: shape.to_vec(),
            held: all.clone(),
            updated: all,
            owned: true,
            stages: Vec::new(),
            sums: Vec::new(),
        }
    }

    /// Keeps only `ranges` of dim `dim`, in this order.
    pub fn cut(&mut self, dim: usize, ranges: &[Range<usize>]) {
        let mut first = 0;
        for part in &mut self.parts {
            part.dim = dim;
            // Parts are stacked along the first dim; along others they all have the same extent.
            let (start, end) = (first, first + part.shape[dim]);
            first = if dim == 0 { end } else { 0 };
            let inside = |r: &Range<usize>| r.start.clamp(start, end) - start..r.end.clamp(start, end) - start;
            part.ranges = ranges.iter().map(inside).filter(|r| !r.is_empty()).collect();
        }
        self.shape[dim] = ranges.iter().map(Range::len).sum();
        let all = 0..self.shape.iter().product();
        (self.held, self.updated) = (all.clone(), all);
    }
}
