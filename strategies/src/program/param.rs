//! The parameter table: how the program's weights relate to the tensors of a model file.

use super::ValueId;

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
}

/// A named slice of a parameter along its first dim: one tensor of a model file.
///
/// Projections that read the same input (q, k and v; gate and up) are one parameter, so that they run as one matrix
/// product; each keeps its own name here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamPart {
    /// Name in the model file, e.g. `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Extent along the first dim; parts follow each other and fill the parameter.
    pub rows: usize,
}

/// A weight of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// The value of kind [`super::Kind::Parameter`] that holds it.
    pub value: ValueId,
    /// Tensors of the model file that it consists of, in order along the first dim.
    pub parts: Vec<ParamPart>,
    /// Filling when starting from scratch.
    pub init: Init,
    /// Whether it is updated; the base of a LoRA run is not.
    pub trainable: bool,
    /// Whether weight decay applies: by convention to tensors with two or more dims.
    pub decay: bool,
}
