//! Our fused kernels as differentiable operations on dfdx's tape; they mix freely with dfdx's own.
//!
//! Each takes and returns row-major matrices whose dims are known at compile time (`Const<N>`) or run time (`usize`), as
//! everywhere in dfdx, and any tape; without a tape nothing is kept for a backward pass. Like dfdx's own operations
//! they panic if shapes do not fit. Products are f32.
//!
//! Legend of shapes: `N` tokens, `I` and `O` widths in and out, `C` width, `F` feed-forward width, `V` vocabulary.

mod attention;
mod cross_entropy;
mod embedding;
mod linear;
mod rms_norm;
mod swiglu;
#[cfg(test)]
mod tests;

pub use attention::CausalAttention;
pub use cross_entropy::cross_entropy;
pub use embedding::embedding;
pub use linear::linear;
pub use rms_norm::rms_norm;
pub use swiglu::swiglu;

use dfdx::prelude::{Cpu, HasShape, ReshapeTo, Shape, SplitTape, Tape, Tensor, TensorFromVec};

/// A tensor's row-major values, and the tensor without its tape; the conversion to row-major is recorded on the tape.
fn values<S: Shape, T: Tape<f32, Cpu>>(x: Tensor<S, f32, Cpu, T>) -> (Vec<f32>, Tensor<S, f32, Cpu>, T) {
    let (x, tape) = x.contiguous().split_tape();
    let mut values = vec![0.0; x.shape().num_elements()];
    x.copy_into(&mut values);
    (values, x, tape)
}

/// [`values`] of a parameter, whose gradient is then recorded on `tape`, too.
fn parameter<S: Shape, T: Tape<f32, Cpu>>(w: &Tensor<S, f32, Cpu>, tape: T) -> (Vec<f32>, Tensor<S, f32, Cpu>, T) {
    let (values, w, own) = values(w.retaped::<T>());
    (values, w, tape.merge(own))
}

/// A result of this shape on the device of `like`.
fn result<S: Shape, L: Shape>(values: Vec<f32>, shape: S, like: &Tensor<L, f32, Cpu>) -> Tensor<S, f32, Cpu> {
    like.device().tensor_from_vec(values, shape)
}
