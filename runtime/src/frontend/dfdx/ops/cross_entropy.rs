//! Softmax cross-entropy, the end of a model's tape.

use super::super::grad_slot::GradSlot;
use super::{result, values};
use dfdx::prelude::{Cpu, Dim, HasShape, PutTape, Rank0, Tape, Tensor};
use phalanx_cpu::kernels::cross_entropy as kernel;

/// Sum over rows with `label >= 0` of `ln Σ e^logits - logits[label]`, in nats; other rows are ignored.
///
/// # Shapes
/// `logits: (N, V)`, `labels: [N]`, result a scalar.
///
/// # Panics
/// If a label is not below `V`, or the number of labels is not `N`.
pub fn cross_entropy<N: Dim, V: Dim, T: Tape<f32, Cpu>>(
    logits: Tensor<(N, V), f32, Cpu, T>,
    labels: &[i32],
) -> Tensor<Rank0, f32, Cpu, T> {
    let n_columns = logits.shape().1.size();
    let (mut gradient, logits, mut tape) = values(logits);
    if !T::OWNS_TAPE {
        let loss = kernel::cross_entropy(&gradient, labels, n_columns);
        return result(vec![loss as f32], (), &logits).put_tape(tape);
    }
    // The kernel computes the gradient with the sum; the backward pass only scales it by the incoming gradient.
    let loss = kernel::cross_entropy_with_gradient(&mut gradient, labels, n_columns, 1.0);
    let loss = result(vec![loss as f32], (), &logits);
    let (logits_slot, loss_slot) = (GradSlot::of(&logits), GradSlot::of(&loss));
    tape.add_backward_op(move |grads| {
        let (dloss, mut dlogits) = (loss_slot.take(grads)?, logits_slot.take(grads)?);
        scaled_add(&mut dlogits, &gradient, dloss[0]);
        logits_slot.put(grads, dlogits)?;
        loss_slot.put(grads, dloss)
    });
    loss.put_tape(tape)
}

/// `a += factor b`.
fn scaled_add(a: &mut [f32], b: &[f32], factor: f32) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += factor * b);
}
