//! Root-mean-square norm of rows. Source: Zhang and Sennrich 2019 (arXiv:1910.07467).

use super::super::grad_slot::GradSlot;
use super::{parameter, result, values};
use dfdx::prelude::{Cpu, Dim, HasShape, PutTape, Tape, Tensor};
use phalanx_cpu::kernels::rms_norm as kernel;

/// `y = x / sqrt(mean(x²) + eps) * gain` over each row.
///
/// # Shapes
/// `x: (N, C)`, `gain: (C,)`, result `(N, C)`.
///
/// # Panics
/// If the shapes do not fit.
pub fn rms_norm<N: Dim, C: Dim, T: Tape<f32, Cpu>>(
    x: Tensor<(N, C), f32, Cpu, T>,
    gain: &Tensor<(C,), f32, Cpu>,
    eps: f32,
) -> Tensor<(N, C), f32, Cpu, T> {
    assert_eq!(x.shape().1.size(), gain.shape().0.size(), "columns of x and of the gain");
    let shape = *x.shape();
    let (x_values, x, tape) = values(x);
    let (gain_values, gain, mut tape) = parameter(gain, tape);
    let mut y = vec![0.0; x_values.len()];
    let mut rstd = vec![0.0; shape.0.size()];
    kernel::rms_norm(&x_values, &gain_values, eps, &mut y, &mut rstd);
    let y = result(y, shape, &x);
    if T::OWNS_TAPE {
        let (x_slot, gain_slot, y_slot) = (GradSlot::of(&x), GradSlot::of(&gain), GradSlot::of(&y));
        tape.add_backward_op(move |grads| {
            let (dy, mut dx, mut dgain) = (y_slot.take(grads)?, x_slot.take(grads)?, gain_slot.take(grads)?);
            let mut scratch = vec![0.0; kernel::rms_norm_backward_scratch_len(gain_values.len())];
            kernel::rms_norm_backward(
                &x_values,
                &gain_values,
                &rstd,
                &dy,
                &mut dx,
                true,
                &mut dgain,
                true,
                &mut scratch,
            );
            gain_slot.put(grads, dgain)?;
            x_slot.put(grads, dx)?;
            y_slot.put(grads, dy)
        });
    }
    y.put_tape(tape)
}
